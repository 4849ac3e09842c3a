"""What is legal and poor in a config. It is said before a run, and nothing is refused for it. No torch here."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from models.flops import flops_per_token
from parallel.config import Dtype, Recompute, Scope, Strategy
from parallel.planning.layout import reshards_to
from training.check_layout import batches_around
from training.config import Config
from training.nearby import alternatives, counted
from training.plan import FITS, gib, memory_of, whole_replica
from training.resolve import World, data_ranks, filling

LONG_SECONDS = 3600.0


@dataclass(frozen=True)
class Device:
    """What is known of the devices of a run. `dtype`: of the computation, settled. `peak_flops`: of one CUDA device in
    this dtype; None on a CPU, and where it is not known."""

    dtype: Dtype
    memory_bytes: float | None
    peak_flops: float | None

    @classmethod
    def described(cls, config: Config) -> "Device":
        """As hardware describes it, where there is no device to ask."""
        hardware, dtype = config.hardware, config.precision.dtype
        cuda = hardware.device == "cuda"
        if dtype is Dtype.auto:
            dtype = Dtype.bf16 if cuda else Dtype.fp32
        peak = hardware.peak_tflops * 1e12 if cuda and hardware.peak_tflops is not None else None
        return cls(dtype, hardware.memory_bytes, peak)


def advice(config: Config, world: World, device: Device) -> list[str]:
    """Each poor choice with what would be better. Where something is not known, nothing is said of it."""
    rules = (_filled_up, _whole_replica_fits, _tensor_across_hosts, _full_recompute, _eager)
    return [told for rule in rules for told in rule(config, world, device)]


def _filled_up(config: Config, world: World, device: Device) -> Iterator[str]:
    batch, micro, ranks, more = config.batch_sequences, config.micro_batch, data_ranks(config), filling(config)
    if more > 0:
        assert batch is not None and isinstance(micro, int)
        whole = alternatives("batch_sequences", batches_around(batch, ranks * micro, config.parallel))
        yield (
            f"batch_sequences={batch}: with {ranks} data ranks and micro_batch={micro} a step computes "
            f"{counted(more, 'sequence')} more, without labels, to fill it up; nothing is wasted with {whole}"
        )


def _whole_replica_fits(config: Config, world: World, device: Device) -> Iterator[str]:
    """Tensor parallelism, pipelines and ZeRO-3 save memory and cost communication."""
    parallel = config.parallel
    whole = memory_of(config, device.dtype, whole_replica(config))
    if whole is None or device.memory_bytes is None or whole.total > FITS * device.memory_bytes:
        return
    fits = f"a whole copy of the model's state and activations fits a device: {gib(whole.total, device.memory_bytes)}"
    assert config.batch_sequences is not None
    if parallel.cp * parallel.tp * parallel.pp > 1 and config.batch_sequences >= world.ranks:
        if parallel.tp > 1:
            waits = "Tensor parallelism waits for other ranks in each layer"
            yield f"parallel.tp={parallel.tp}: {fits}. {waits}; parallel=ddp or parallel=zero1 only once a step"
        if parallel.cp > 1:
            waits = "Ranks that share sequences wait for each other in each layer"
            yield f"parallel.cp={parallel.cp}: {fits}. {waits}; parallel=ddp or parallel=zero1 only once a step"
        if parallel.pp > 1:
            waits = "Ranks of a pipeline wait while it fills and empties"
            yield f"parallel.pp={parallel.pp}: {fits}. {waits}; parallel=ddp or parallel=zero1 never do"
    elif (
        parallel.pp == 1
        and parallel.strategy is Strategy.fsdp2
        and parallel.shards > 1
        and reshards_to(parallel) is not None
    ):
        yield (
            f"parallel.reshard_after_forward={str(parallel.reshard_after_forward).lower()}: {fits}. "
            "Parameters are gathered twice in each micro-batch, by parallel=zero1 once a step, by parallel=ddp never"
        )


def _tensor_across_hosts(config: Config, world: World, device: Device) -> Iterator[str]:
    tp, per_host = config.parallel.tp, world.ranks_per_host
    if tp > 1 and world.ranks > per_host and per_host % tp != 0:
        yield (
            f"parallel.tp={tp}: lies across hosts of {per_host} ranks, and each layer waits for the link between them; "
            f"parallel.tp={gcd(tp, per_host)} stays within a host"
        )


def _full_recompute(config: Config, world: World, device: Device) -> Iterator[str]:
    if config.activations.mode is not Recompute.full or device.memory_bytes is None:
        return
    selective = replace(config, activations=replace(config.activations, mode=Recompute.selective))
    planned = memory_of(selective, device.dtype)
    if planned is not None and planned.total <= FITS * device.memory_bytes:
        yield (
            "activations=full: computes the matrix products of each block again; activations=selective keeps them, and "
            f"fits a device: {gib(planned.total, device.memory_bytes)}"
        )


def _eager(config: Config, world: World, device: Device) -> Iterator[str]:
    steps, batch, length = config.steps, config.batch_sequences, config.sequence_length
    if config.compile.scope is not Scope.none or device.peak_flops is None or config.model.vocab_size is None:
        return
    if steps is None or batch is None or length is None:
        return
    flops = steps * batch * length * flops_per_token(config.model, length)
    seconds = flops / (device.peak_flops * world.ranks)
    if seconds > LONG_SECONDS:
        yield (
            f"compile=none: the run takes {seconds / 3600:.1f} hours at least, at the devices' peak; "
            "compile=block takes a minute and makes each step faster"
        )
