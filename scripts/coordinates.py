"""How large the numbers in a model are after a few steps, over its width and with both parametrizations: the coordinate
check of Yang et al. 2022 (Tensor Programs V, appendix D.1). With mup no part's grow with the width.

python -m scripts.coordinates [--times 1 2 4 8] [--steps 4] [--wider-heads] [--plot FILE.png] [key=value ...]

The keys give the narrowest model. It is widened as mup means it: feed-forward layers and heads with model.dim, more
heads, or with --wider-heads wider ones. The plot needs matplotlib, which is not installed by default.
"""

import argparse
import sys
from dataclasses import replace
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from models.config import ModelConfig, Parametrization
from models.decoder import Decoder
from models.moe import share_losses
from parallel.materialize import materialize
from training.check import settle
from training.compose import compose, refusing
from training.config import OptimizerConfig
from training.metrics.console import table
from training.optimizers.build import build_optimizer

SMALL = """model.layers=2 model.dim=64 model.heads=4 model.context=32 model.vocab_size=512 tokenizer=bytes
optimizer.lr=0.003 steps=4"""
SEQUENCES = 8

Sizes = dict[str, float]  # by part the mean of absolute values


def widened(model: ModelConfig, times: int, parametrization: Parametrization, wider_heads: bool = False) -> ModelConfig:
    """The model, which is mup's base, so many times as wide."""
    heads = 1 if wider_heads else times

    def scaled(size: int | None, by: int) -> int | None:
        return None if size is None else size * by

    mup = parametrization is Parametrization.mup
    return replace(
        model,
        dim=model.dim * times,
        heads=model.heads * heads,
        kv_heads=scaled(model.kv_heads, heads),
        head_dim=scaled(model.head_dim, times // heads),
        ffn_dim=scaled(model.ffn_dim, times),
        moe=replace(model.moe, dim=scaled(model.moe.dim, times)),
        parametrization=parametrization,
        mup_base_dim=model.dim if mup else None,
        mup_base_head_dim=model.head_size if mup and wider_heads else None,
    )


def coordinates(model: ModelConfig, optimizer: OptimizerConfig, steps: int, seed: int = 0) -> Sizes:
    """After so many steps on one batch of random tokens."""
    with torch.device("meta"):
        decoder = Decoder(model)
    materialize(decoder, seed, torch.device("cpu"))
    updates = build_optimizer(optimizer, decoder)
    assert model.vocab_size is not None
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (SEQUENCES, model.context), generator=generator)
    inputs = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    share_losses(decoder, torch.tensor(tokens.numel()))
    for _ in range(steps):
        (decoder(**inputs).sum() / tokens.numel()).backward()
        updates.step(optimizer.lr, torch.zeros(()))
        decoder.zero_grad()
    return _sizes(decoder, tokens)


@torch.no_grad()
def _sizes(decoder: Decoder, tokens: Tensor) -> Sizes:
    """Parts that blocks have are averaged over blocks."""
    found: dict[str, list[float]] = {}

    def measure(part: str, module: nn.Module | None) -> None:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            found.setdefault(part, []).append(output.abs().mean().item())

        assert module is not None
        module.register_forward_hook(hook)

    measure("embedding", decoder.embed)
    for block in decoder.blocks.values():
        for part in ("attention", "feedforward"):
            measure(part, block.get_submodule(part))
        measure("stream", block)
    measure("logits", decoder.head)
    decoder.eval()(tokens=tokens)
    return {part: fmean(sizes) for part, sizes in found.items()}


def plot(rows: dict[tuple[str, int], Sizes], file: str) -> None:
    """rows: by parametrization and width."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(kind for kind, _ in rows))
    figure = Figure(figsize=(5 * len(kinds), 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True), kinds, strict=True):
        widths = [width for of, width in rows if of == kind]
        for part in rows[kind, widths[0]]:
            axes.plot(widths, [rows[kind, width][part] for width in widths], marker="o", label=part)
        axes.set(title=kind, xlabel="model.dim", ylabel="mean absolute value", xscale="log", yscale="log")
        axes.legend()
    figure.savefig(file)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.coordinates")
    parser.add_argument("--times", type=int, nargs="+", default=[1, 2, 4, 8], help="widths, as multiples of model.dim")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--wider-heads", action="store_true", help="instead of more")
    parser.add_argument("--plot", metavar="FILE.png")
    options, words = parser.parse_known_args(arguments)
    if options.plot and find_spec("matplotlib") is None:
        print("--plot needs matplotlib: `uv run --with matplotlib python -m scripts.coordinates ...`", file=sys.stderr)
        return 2
    with refusing():
        given = {word.partition("=")[0] for word in words}
        small = [word for word in SMALL.split() if word.partition("=")[0] not in given]
        config, chosen = compose([*small, *words])
        settle(config, chosen)
    rows = {
        (kind.name, config.model.dim * times): coordinates(
            widened(config.model, times, kind, options.wider_heads), config.optimizer, options.steps, config.seed
        )
        for kind in Parametrization
        for times in options.times
    }
    parts = list(next(iter(rows.values())))
    lines = [[kind, str(width), *(f"{sizes[part]:.3g}" for part in parts)] for (kind, width), sizes in rows.items()]
    print(table([["", "model.dim", *parts]], lines))
    if options.plot:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
