"""What only a GPU can show: that what is compiled, recomputed, offloaded or in bf16 trains there as the plain model
does, and how fast and in how much memory:

python -m scripts.gpu_check [dense | moe | models] [--minutes 8] [--device cuda] [--small]

dense: the first table has each variant's largest difference in loss and gradient norm over a few steps from eager
float32 on one device. The second has tokens per second, MFU and peak memory of GPT-2 124M and of a billion parameters.

moe: the first table has the difference of torch's grouped product of experts to a loop over them, with an expert
without tokens, and its time over the loop's, forward and backward. The second has the speed of a model of 3.1 billion
parameters, 1.1 of which a token meets; it needs 70 GB.

models: the table of scripts.check_kernels, which compares each kernel of attention that there is with the formula.

A variant that would begin after the minutes are over is left out, and named. Exit code 1 where a variant differs, 2
where there is no such device.
"""

import argparse
import gc
import sys
from dataclasses import dataclass
from time import perf_counter

import torch

from models.flops import flops_per_token
from parallel.precision import settle as settle_precision
from scripts import check_kernels, grouped_products
from training.build import speed_of, spread_model
from training.check import settle
from training.compose import compose, refusing
from training.memory import used_bytes
from training.metrics.console import table
from training.metrics.throughput import mfu
from training.optimizers.build import build_optimizer
from training.place import connect, disconnect, find_place
from training.step import Step, StepResult

REFERENCE = "precision=fp32 compile=none activations=none"
# Relative, over the steps: float32 sums in another order; products rounded to bf16 (2^-8 each).
CLOSE, ROUNDED = (1e-4, 1e-3), (2e-2, 1e-1)
VARIANTS: list[tuple[str, tuple[float, float]]] = [
    ("precision=fp32 compile=block", CLOSE),
    ("precision=fp32 compile=model", CLOSE),
    *[
        (f"precision=fp32 compile=none activations={mode}", CLOSE)
        for mode in ("full", "selective", "segments", "every_n", "offload")
    ],
    *[(f"precision=fp32 compile=block activations={mode}", CLOSE) for mode in ("full", "selective", "budget")],
    ("precision=tf32 compile=none", (5e-3, 5e-2)),
    ("precision=bf16 compile=none", ROUNDED),
    ("precision=bf16 compile=none parallel=fsdp2", ROUNDED),
    ("precision=bf16 compile=block parallel=fsdp2", ROUNDED),
    ("precision=bf16 compile=block parallel=fsdp2 activations=selective", ROUNDED),
]
SPEEDS = [
    "compile=none activations=none",
    *[f"compile=block activations={mode}" for mode in ("none", "selective", "full", "segments", "budget", "offload")],
    "compile=block activations=none parallel=fsdp2",
    "compile=model activations=none",
]
MOE_SPEEDS = [
    "compile=none activations=full",
    "compile=none activations=full model.moe.forced_balance=true",
    "compile=block activations=full",
]
PARITY_STEPS, WARMUP, MEASURED = 5, 3, 10
MINUTES = {"dense": 8.0, "moe": 4.0, "models": 5.0}


@dataclass(frozen=True)
class Sizes:
    """The words of the models and batches; products: of the experts' matrices."""

    parity: str
    speed: dict[str, str]
    moe_speed: dict[str, str]
    products: list[grouped_products.Sizes]
    attention: check_kernels.Sizes


FULL = Sizes(
    "model=gpt2_124m model.layers=6 batch_sequences=8 micro_batch=4 sequence_length=512",
    {
        "gpt2_124m": "model=gpt2_124m batch_sequences=32 micro_batch=16 sequence_length=1024",
        "1B": "model=gpt2_1558m model.layers=18 model.dim=2048 model.heads=16 model.context=2048 "
        "batch_sequences=8 micro_batch=4",
    },
    {
        "3.1B, 1.1B active": "model=gpt2_1558m model.layers=20 model.dim=2048 model.heads=16 model.context=2048 "
        "model.moe.experts=32 model.moe.top_k=8 model.moe.dim=1024 model.moe.bias_rate=0.001 "
        "batch_sequences=8 micro_batch=4",
    },
    [grouped_products.Sizes(65536, 2048, 1024, 32), grouped_products.Sizes(16384, 2048, 8192, 8)],
    check_kernels.Sizes(),
)
SMALL = Sizes(
    "model.layers=2 model.dim=32 model.context=16 batch_sequences=4 micro_batch=2",
    {"small": "model.layers=2 model.dim=32 model.context=16 batch_sequences=4 micro_batch=2"},
    {
        "small": "model=moe_debug model.moe.dense_layers=0 model.layers=2 model.dim=32 model.context=16 "
        "batch_sequences=4 micro_batch=2"
    },
    [grouped_products.Sizes(64, 32, 16, 4)],
    check_kernels.Sizes(tokens=64, head_dim=16),
)


class Trained:
    """A model that takes steps on random tokens, the same for every variant of one model."""

    def __init__(self, words: str, device: str) -> None:
        composed = f"name=gpu_check hardware.device={device} steps=100 schedule=constant evals=none {words}"
        self.config, chosen = compose(composed.split())
        self.place = find_place(self.config, settle(self.config, chosen))
        self.config.model.vocab_size = self.config.model.vocab_size or 50257
        connect(self.config, self.place)
        spread = spread_model(self.config, self.place, settle_precision(self.config.precision, self.place.device))
        self.step = Step(spread, self.place.mesh, build_optimizer(self.config.optimizer, spread.model), clip_norm=1.0)
        self.generator = torch.Generator().manual_seed(0)

    @property
    def tokens(self) -> int:
        assert self.config.batch_sequences is not None and self.config.sequence_length is not None
        return self.config.batch_sequences * self.config.sequence_length

    def take(self) -> StepResult:
        config = self.config
        assert config.batch_sequences is not None and config.sequence_length is not None
        assert isinstance(config.micro_batch, int) and config.model.vocab_size is not None
        shape = (config.batch_sequences, config.sequence_length + 1)
        text = torch.randint(config.model.vocab_size, shape, generator=self.generator).to(self.place.device)
        parts = text.split(config.micro_batch)
        micro_batches = [{"tokens": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()} for part in parts]
        return self.step(micro_batches, self.tokens, config.optimizer.lr)

    def wait(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)

    def close(self) -> None:
        """Gives the memory back, and what was compiled."""
        del self.step
        disconnect()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


def losses_and_norms(words: str, device: str) -> list[tuple[float, float]]:
    trained = Trained(words, device)
    try:
        results = [trained.take() for _ in range(PARITY_STEPS)]
        return [(float(result.loss_sum) / trained.tokens, float(result.grad_norm)) for result in results]
    finally:
        trained.close()


def parity(sizes: Sizes, device: str, deadline: float) -> tuple[list[list[str]], bool, list[str]]:
    """Rows of the table, whether all are within their bounds, and the variants for which there was no time."""
    expected = losses_and_norms(f"{sizes.parity} {REFERENCE}", device)
    rows, good, left_out = [], True, []
    for words, bounds in VARIANTS:
        if device == "cpu" and "tf32" in words:
            continue
        if perf_counter() > deadline:
            left_out.append(words)
            continue
        say(f"  {words}")
        found = losses_and_norms(f"{sizes.parity} {words}", device)
        apart = [
            max(
                abs(ours[which] - theirs[which]) / abs(theirs[which])
                for ours, theirs in zip(found, expected, strict=True)
            )
            for which in range(2)
        ]
        within = apart[0] <= bounds[0] and apart[1] <= bounds[1]  # false for NaN too
        good &= within
        numbers = [f"{value:.1e} (of {bound:.0e})" for value, bound in zip(apart, bounds, strict=True)]
        rows.append([words, *numbers, "ok" if within else "DIFFERS"])
    return rows, good, left_out


def speed(model: str, words: str, device: str) -> list[str]:
    """A row: tokens a second, MFU, peak memory."""
    trained = Trained(words, device)
    try:
        for _ in range(WARMUP):
            trained.take()
        trained.wait()
        began = perf_counter()
        for _ in range(MEASURED):
            trained.take()
        trained.wait()
        rate = MEASURED * trained.tokens / (perf_counter() - began)
        memory = used_bytes(trained.place.device) / 2**30
        share = mfu_of(trained, rate)
        return [f"{model} {words_of(words)}", f"{rate:,.0f}", "" if share is None else f"{share:.1%}", f"{memory:.2f}"]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return [f"{model} {words_of(words)}", str(error).splitlines()[0][:60], "", ""]
    finally:
        trained.close()


def mfu_of(trained: Trained, tokens_per_second: float) -> float | None:
    config = trained.config
    dtype = settle_precision(config.precision, trained.place.device)
    peak = speed_of(config, trained.place, dtype, trained.tokens).peak_flops
    assert config.sequence_length is not None
    return mfu(tokens_per_second, flops_per_token(config.model, config.sequence_length), peak)


def words_of(words: str) -> str:
    return " ".join(
        word for word in words.split() if word.startswith(("compile", "activations", "parallel", "model.moe.forced"))
    )


def dense(sizes: Sizes, device: str, deadline: float) -> bool:
    """Whether all variants are within their bounds."""
    rows, good, left_out = parity(sizes, device, deadline)
    say(table([["against " + REFERENCE, "loss", "norm", ""]], rows))
    speeds(sizes.speed, SPEEDS, device, deadline, left_out)
    return good


def moe(sizes: Sizes, device: str, deadline: float) -> bool:
    """Whether the grouped products are within their bounds."""
    rows, good = [], True
    for shape in sizes.products:
        for dtype, bound in grouped_products.BOUNDS.items():
            found = grouped_products.compare(shape, dtype, torch.device(device))
            within = found.difference <= bound  # false for NaN too
            good &= within
            rows.append(
                [
                    f"{shape.experts} x {shape.dim} x {shape.hidden}, {shape.rows} rows {dtype}".replace("torch.", ""),
                    f"{found.difference:.1e} (of {bound:.0e})",
                    f"{1000 * found.grouped:.2f}",
                    f"{found.grouped / found.looped:.2f}",
                    "ok" if within else "DIFFERS",
                ]
            )
    say(table([["grouped product of experts", "to the loop", "ms", "time / loop's", ""]], rows))
    speeds(sizes.moe_speed, MOE_SPEEDS, device, deadline, [])
    return good


def models(sizes: Sizes, device: str, deadline: float) -> bool:
    """Whether all kernels of attention are within their bounds."""
    rows, good, left_out = check_kernels.check(sizes.attention, torch.device(device), deadline)
    say(table([["against the formula in float64", "", "result", "gradients", "documents", ""]], rows))
    if left_out:
        say(f"no time for {len(left_out)}: " + "; ".join(left_out))
    return good


def speeds(models: dict[str, str], variants: list[str], device: str, deadline: float, left_out: list[str]) -> None:
    """left_out: what there was no time for before."""
    rows = []
    for model, shape in models.items():
        for words in variants:
            if perf_counter() > deadline:
                left_out.append(f"{model} {words}")
                continue
            say(f"  {model} {words}")
            rows.append(speed(model, f"{shape} precision=bf16 {words}", device))
    say(table([["bf16", "tokens/s", "MFU", "peak GiB"]], rows))
    if left_out:
        say(f"no time for {len(left_out)}: " + "; ".join(left_out))


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=list(MINUTES), default="dense")
    parser.add_argument("--minutes", type=float, help=f"no variant begins later than this; default: {MINUTES}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the script itself")
    parser.add_argument("--small", action="store_true", help="tiny models: to try the script itself")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; nothing was checked", file=sys.stderr)
        return 2
    sizes = SMALL if given.small else FULL
    minutes = MINUTES[given.what] if given.minutes is None else given.minutes
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    say(f"torch {torch.__version__} on {name}")
    with refusing():
        good = {"dense": dense, "moe": moe, "models": models}[given.what](
            sizes, given.device, perf_counter() + 60 * minutes
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
