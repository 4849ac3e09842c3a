"""What is kept for backward: the same gradients to the bit, the right operations again, and memory that is saved."""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import parallel.offload
from models.config import FeedForward, ModelConfig, MoE, NormPlace
from models.decoder import Decoder
from parallel.activations import keep_activations
from parallel.config import ActivationsConfig, Dtype, ParallelConfig, Recompute
from parallel.mesh import build_mesh, start_process_group
from parallel.offload import Memory
from parallel.planning.activations import How, kept_bytes
from parallel.precision import LowPrecision
from tests.models.build import random_decoder, random_tokens, tiny
from tests.ranks import run_ranks

pytestmark = pytest.mark.torch211

CPU = torch.device("cpu")
MODES = ["none", "full", "selective", "segments", "every_n", "offload"]
BATCH, SEQ, DIM, HEADS, LAYERS = 2, 64, 96, 3, 4


def small(**changes: Any) -> ModelConfig:
    return tiny(**({"layers": LAYERS, "dim": DIM, "heads": HEADS, "context": SEQ} | changes))


def kept_as(mode: str, config: ModelConfig) -> Decoder:
    model = random_decoder(config)
    keep_activations(model, ActivationsConfig(mode=Recompute[mode]), CPU, apart=False)
    return model


# ---- the same numbers


def after_backward(mode: str, dropout: float, low: bool) -> list[Tensor]:
    """Gradients, and the state of the random numbers."""
    model = kept_as(mode, small(dropout=dropout))
    tokens = random_tokens(model.config, BATCH, SEQ)
    torch.manual_seed(3)
    call: nn.Module = LowPrecision(model, torch.bfloat16) if low else model
    call(tokens=tokens, labels=tokens).backward()
    return [torch.get_rng_state(), *(p.grad for p in model.parameters() if p.grad is not None)]


def differing() -> list[tuple[str, float, bool]]:
    found = []
    for dropout, low in product((0.0, 0.2), (False, True)):
        expected = after_backward("none", dropout, low)
        for mode in MODES[1:]:
            pairs = zip(after_backward(mode, dropout, low), expected, strict=True)
            if not all(torch.equal(*pair) for pair in pairs):
                found.append((mode, dropout, low))
    return found


def test_the_same_bits_with_dropout_and_in_low_precision() -> None:
    [different] = run_ranks(1, differing)
    assert different == []


def slopes() -> dict[tuple[bool, str], float]:
    """Along a direction, by backward, relative to the difference of two losses; compiled blocks and others."""
    found = {}
    for compiled, mode in product((False, True), MODES):
        torch.compiler.reset()
        config = small(layers=2, dropout=0.2)
        model = random_decoder(config, dtype=torch.float64)
        keep_activations(model, ActivationsConfig(mode=Recompute[mode]), CPU, apart=False)
        for block in model.blocks.values() if compiled else ():
            block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        tokens = random_tokens(config, BATCH, 16)

        def loss(model: Decoder = model, tokens: Tensor = tokens) -> Tensor:
            torch.manual_seed(7)
            found = model(tokens=tokens, labels=tokens)
            assert isinstance(found, Tensor)
            return found

        loss().backward()
        torch.manual_seed(1)
        along = {p: torch.randn_like(p) for p in model.parameters()}
        slope = sum(float((p.grad * d).sum()) for p, d in along.items() if p.grad is not None)
        values = []
        with torch.no_grad():
            for move in (1e-6, -2e-6):
                for parameter, direction in along.items():
                    parameter.add_(direction, alpha=move)
                values.append(float(loss()))
        found[compiled, mode] = slope / ((values[0] - values[1]) / 2e-6)
    return found


def test_dropout_is_computed_again_with_the_same_mask() -> None:
    [found] = run_ranks(1, slopes)
    assert found == {case: pytest.approx(1, abs=1e-6) for case in product((False, True), MODES)}


def test_names_do_not_change() -> None:
    names = list(random_decoder(small()).state_dict())
    for mode in MODES:
        assert list(kept_as(mode, small()).state_dict()) == names


# ---- what is computed again, and what is kept


class Counted(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Pass:
    """Through the blocks. again: operations in backward that are forward's; kept_bytes: what forward leaves
    allocated."""

    again: dict[str, int]
    kept_bytes: int


AGAIN = {
    "addmm": "linear",
    "native_layer_norm": "norm",
    "gelu": "gelu",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
}


def passes() -> dict[str, Pass]:
    from torch.autograd.profiler import profile

    def one(mode: str) -> Pass:
        model = kept_as(mode, small())
        x = torch.randn(BATCH, SEQ, DIM)
        with profile(profile_memory=True, use_kineto=False) as profiled:
            (y,) = model.walk(tuple(model.blocks.values()), (x,), [None] * LAYERS, positions=None, documents=None)
        events = profiled.function_events
        assert events is not None
        with Counted() as counted:
            y.sum().backward()
        again = {name: counted.counts[op] for op, name in AGAIN.items()}
        return Pass(again, sum(event.cpu_memory_usage for event in events if event.cpu_parent is None))

    return {mode: one(mode) for mode in MODES}


@pytest.fixture(scope="module")
def passed() -> dict[str, Pass]:
    [found] = run_ranks(1, passes)
    return found


def test_what_is_computed_again(passed: dict[str, Pass]) -> None:
    """A block has four linear layers, the last of which needs no second time, two norms, GELU and attention."""
    nothing = {"linear": 0, "norm": 0, "gelu": 0, "attention": 0}
    expected = {
        "none": nothing,
        "full": {"linear": 3 * 4, "norm": 2 * 4, "gelu": 4, "attention": 0},
        "selective": {"linear": 0, "norm": 2 * 4, "gelu": 4, "attention": 0},
        "segments": {"linear": 4 * 4 - 2, "norm": 2 * 4, "gelu": 4, "attention": 4},  # two segments of two
        "every_n": {"linear": 3 * 2, "norm": 2 * 2, "gelu": 2, "attention": 0},
        "offload": nothing,
    }
    assert {mode: found.again for mode, found in passed.items()} == expected


def test_what_is_kept(passed: dict[str, Pass]) -> None:
    """Values a token and block in units of dim, each block's input counted as the output of the one before.

    All: input, norm, q, k, v, attention, sum, norm, 4 of up, 4 of GELU, and numbers a token: mean and deviation of
    two norms, log-sum-exp of each head. Selective: input, q, k, v, attention, out, 4 of up, down. Full: input and
    attention. Segments: input, of every second block."""
    statistics, log_sum = 4 / DIM, HEADS / DIM
    values = {
        "none": 16 + statistics + log_sum,
        "full": 2 + log_sum,
        "selective": 11 + log_sum,
        "segments": 0.5,
        "every_n": (16 + statistics + 2 + 2 * log_sum) / 2,
    }
    tokens = BATCH * SEQ * LAYERS
    found = {mode: passed[mode].kept_bytes / (tokens * DIM * 4) for mode in values}
    assert found == pytest.approx(values, rel=1e-3)


# ---- offload


def offloaded() -> dict[str, Any]:
    """Moved bytes; what of it was on the device after forward and, as share of each block, when backward reached block
    1 of 4."""
    moved: list[Memory] = []

    class Recorded(Memory):
        def __init__(self, here: Tensor, host: Tensor) -> None:
            super().__init__(here, host)
            moved.append(self)

    setattr(parallel.offload, "Memory", Recorded)  # noqa: B010 (mypy knows it as a class)
    model = kept_as("offload", small())
    outputs: list[Tensor] = []
    for block in model.blocks.values():
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    x = torch.randn(BATCH, SEQ, DIM)
    (y,) = model.walk(tuple(model.blocks.values()), (x,), [None] * LAYERS, positions=None, documents=None)

    def on_device() -> list[float]:
        each = len(moved) // 3
        return [sum(m.here is not None for m in moved[n * each : (n + 1) * each]) / each for n in range(3)]

    found = {"bytes": sum(memory.host.numel() for memory in moved), "after forward": on_device()}

    def look(gradient: Tensor) -> None:
        found["before the backward of block 1"] = on_device()

    outputs[1].register_hook(look)
    y.sum().backward()
    return found


def test_offload_moves_what_blocks_but_the_last_keep_and_fetches_one_block_ahead() -> None:
    """As in test_what_is_kept, without parameters and numbers a token; the input of the first block is moved too, and
    the last block's stays."""
    [found] = run_ranks(1, offloaded)
    assert found["bytes"] == 3 * 16 * BATCH * SEQ * DIM * 4
    assert found["after forward"] == [0, 0, 0]
    assert found["before the backward of block 1"] == [0, 1, 1]


# ---- with other layouts


def collectives_in_backward(mode: str) -> Counter[str]:
    from parallel.tensor import cut_tensors

    start_process_group(CPU, 60)
    mesh = build_mesh(ParallelConfig(tp=2), CPU)
    with torch.device("meta"):
        model = Decoder(small(heads=4))
    cut_tensors(model, mesh["tp"])
    model.to_empty(device="cpu")
    keep_activations(model, ActivationsConfig(mode=Recompute[mode]), CPU, apart=False)
    share = torch.randn(BATCH, SEQ // 2, DIM, requires_grad=True)
    (y,) = model.walk(tuple(model.blocks.values()), (share,), [None] * LAYERS, positions=None, documents=None)
    with Counted() as counted:
        y.sum().backward()
    dist.destroy_process_group()
    return Counter({name: count for name, count in counted.counts.items() if name.endswith(("_tensor", "reduce"))})


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_sums_of_tensor_parallelism_are_not_made_again(mode: str) -> None:
    """A block gathers the sequence twice and sums over the ranks twice, in forward and, mirrored, in backward."""
    plain, again = (run_ranks(2, collectives_in_backward, name)[0] for name in ("none", mode))
    assert plain["reduce_scatter_tensor"] == again["reduce_scatter_tensor"] == 2 * LAYERS
    assert plain["all_gather_into_tensor"] == 2 * LAYERS
    assert again["all_gather_into_tensor"] == 4 * LAYERS


EXPERTS = MoE(experts=4, top_k=2, dim=48, shared=1, forced_balance=True)


def apart(mode: str, sent: bool, keys: dict[str, Any] | None = None) -> tuple[Counter[str], float]:
    """Blocks whose experts are apart: operations in their backward pass, each a block, and what their forward pass
    leaves allocated, in values a token and block and units of dim. sent: whether rows are, which frees some memory in
    other threads."""
    from torch.autograd.profiler import profile

    from parallel.expert import Exchange, cut_experts

    if not sent:
        setattr(Exchange, "_exchange", lambda exchange, rows, *sizes: rows.clone())  # noqa: B010 (mypy: a method)

    start_process_group(CPU, 60)
    with torch.device("meta"):
        model = Decoder(small(moe=EXPERTS, **(keys or {})))
    cut_experts(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    keep_activations(model, ActivationsConfig(mode=Recompute[mode]), CPU, apart=True)
    x = torch.randn(BATCH, SEQ, DIM, requires_grad=True)
    with profile(profile_memory=True, use_kineto=False) as profiled:
        (y,) = model.walk(tuple(model.blocks.values()), (x,), [None] * LAYERS, positions=None, documents=None)
    events = profiled.function_events
    assert events is not None
    kept = sum(event.cpu_memory_usage for event in events if event.cpu_parent is None)
    with Counted() as counted:
        y.sum().backward()
    dist.destroy_process_group()
    counts = Counter({name: count / LAYERS for name, count in counted.counts.items()})
    return counts, kept / (BATCH * SEQ * LAYERS * DIM * 4)


def test_rows_are_sent_to_experts_once() -> None:
    """Forward sends counts, rows and results, backward two gradients; each of two products has two in backward. What is
    selective computes norms and GELU again, that of experts and that of the shared one."""
    counts = {mode: run_ranks(2, apart, mode, True)[0][0] for mode in ("none", "selective", "full")}
    names = ("all_to_all_single", "_grouped_mm", "gelu", "native_layer_norm")
    found = {mode: tuple(of_mode[name] for name in names) for mode, of_mode in counts.items()}
    assert found == {"none": (2, 4, 0, 0), "selective": (2, 4, 2, 2), "full": (2 + 3, 4 + 2, 2, 2)}
    assert counts["selective"]["mm"] == counts["none"]["mm"]


def test_what_is_kept_of_experts_apart() -> None:
    """Values a token and block in units of dim. A token has two rows, and experts are half as wide as dim.

    All: input, norm, q, k, v, attention, sum, norm; of the rows what experts got, GELU's input and output, and results;
    of the shared one GELU's input and output. Selective: input, q, k, v, attention, out, norm; of the rows what experts
    got, GELU's input, and results; of the shared one up and down. Full: input. And numbers a token: two int64 places of
    each row here and where it went, log-sum-exp of each head, the weights of two experts; with all the deviations and
    means of two norms and what the router has (scores, chosen experts in int64, weights before and after their sum, the
    sum); with selective logits."""
    both = 4 * 2 * 2 + HEADS + 2
    values = {
        "none": 8 + 2 * (1 + 0.5 + 0.5 + 1) + 1 + (both + 4 + EXPERTS.experts + 2 * 2 + 2 + 1) / DIM,
        "selective": 7 + 2 * (1 + 0.5 + 1) + 0.5 + 1 + (both + EXPERTS.experts) / DIM,
        "full": 1,
    }
    found = {mode: run_ranks(1, apart, mode, False)[0][1] for mode in values}
    assert found == pytest.approx(values, rel=1e-3)
    planned = {mode: planned_apart(mode) for mode in values}
    assert planned == pytest.approx(values, rel=1e-3)


@pytest.mark.parametrize("keys", [{"ffn": FeedForward.swiglu}, {"norm_place": NormPlace.both}], ids=str)
def test_what_is_kept_of_experts_apart_is_planned(keys: dict[str, Any]) -> None:
    found = {mode: run_ranks(1, apart, mode, False, keys)[0][1] for mode in ("none", "selective", "full")}
    assert {mode: planned_apart(mode, **keys) for mode in found} == pytest.approx(found, rel=1e-3)


def planned_apart(mode: str, **keys: Any) -> float:
    """The formula for what `apart` counts."""
    model, activations = small(moe=EXPERTS, **keys), ActivationsConfig(mode=Recompute[mode])
    return kept_bytes(model, How(activations, Dtype.fp32, ParallelConfig(ep=2)))[0] / (LAYERS * DIM * 4)


def graphs() -> dict[str, int]:
    """Graphs that ten blocks are compiled to, each in one piece."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    found = {}
    for mode in MODES:
        reset()
        counters.clear()
        model = kept_as(mode, small(layers=10))
        for block in model.blocks.values():
            block.compile(fullgraph=True, backend="aot_eager")
        tokens = random_tokens(model.config, BATCH, SEQ)
        model(tokens=tokens, labels=tokens).backward()
        found[mode] = counters["stats"]["unique_graphs"]
    return found


def test_blocks_are_compiled_whole_and_once() -> None:
    """With every_n the blocks that are computed again have a graph of their own."""
    [found] = run_ranks(1, graphs)
    assert found == {mode: 2 if mode == "every_n" else 1 for mode in MODES}
