"""The coordinate check: with mup the numbers in a model stay as large as they are however wide it is."""

from dataclasses import replace

import pytest

from models.config import FeedForward, ModelConfig, MoE, Norm, Parametrization, Position, QKNorm
from models.decoder import Decoder
from scripts.coordinates import coordinates, main, widened
from training.config import OptimizerConfig
from training.optimizers.groups import decay_groups

BASE = ModelConfig(layers=2, dim=64, heads=4, context=32, vocab_size=256)
ADAMW = OptimizerConfig(lr=0.003)
MODELS: dict[str, ModelConfig] = {
    "tied": BASE,
    "untied, no biases": replace(BASE, tied_head=False, bias=False),
    "rotary, three matrices": replace(
        BASE,
        position=Position.rotary,
        norm=Norm.rmsnorm,
        ffn=FeedForward.swiglu,
        ffn_dim=128,
        kv_heads=2,
        fused_qkv=False,
        qk_norm=QKNorm.head,
    ),
    "experts": replace(BASE, moe=MoE(experts=4, top_k=2, dim=64, shared=1)),
}


def growth(model: ModelConfig, kind: Parametrization, wider_heads: bool) -> dict[str, float]:
    """From width 64 to 512, by part."""
    narrow, *_, wide = (coordinates(widened(model, times, kind, wider_heads), ADAMW, steps=4) for times in (1, 2, 4, 8))
    return {part: wide[part] / size for part, size in narrow.items()}


@pytest.mark.parametrize("wider_heads", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_with_mup_no_part_grows_with_the_width(name: str, wider_heads: bool) -> None:
    found = growth(MODELS[name], Parametrization.mup, wider_heads)
    assert found.keys() == {"embedding", "attention", "feedforward", "stream", "logits"}
    assert max(found.values()) < 1.5, found


@pytest.mark.parametrize("name", MODELS)
def test_without_it_all_but_the_embedding_do(name: str) -> None:
    found = growth(MODELS[name], Parametrization.standard, False)
    del found["embedding"]
    assert min(found.values()) > 3, found


@pytest.mark.parametrize("name", MODELS)
def test_at_the_base_width_nothing_changes(name: str) -> None:
    """Weights after steps, bit by bit."""
    base = MODELS[name]
    mup = widened(base, 1, Parametrization.mup, wider_heads=True)
    assert mup.mup_base_dim == 64 and mup.mup_base_head_dim == 16
    first, second = (coordinates(model, ADAMW, steps=3) for model in (base, mup))
    assert first == second


def test_rates_and_decay_by_role() -> None:
    """Twice the base's width, so half the rate for matrices and routers; rate x decay is 0.1 for all that decays."""
    model = replace(BASE, tied_head=False, moe=MoE(experts=4), parametrization=Parametrization.mup, mup_base_dim=32)
    kept, slower, rest = decay_groups(Decoder(model), 0.1)
    assert set(kept.parameters) == {"embed.tokens.weight", "embed.positions.weight", "head.weight"}
    assert {name.rpartition(".")[0].partition(".")[2].partition(".")[2] for name in slower.parameters} == {
        "attention.qkv",
        "attention.out",
        "feedforward.router",
        "feedforward.experts",
    }
    shares = [(group.lr_share, group.weight_decay) for group in (kept, slower, rest)]
    assert shares == [(1.0, 0.1), (0.5, 0.2), (1.0, 0.0)]
    assert str(slower).endswith("weight decay 0.2, learning rate x 0.5")


def test_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--times", "1", "2", "--steps", "1", "model.layers=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model.dim", "embedding", "attention", "feedforward", "stream", "logits"]
    assert [line.split()[:2] for line in lines[2:]] == [[k, w] for k in ("standard", "mup") for w in ("64", "128")]
    assert lines[2].split()[2:] == lines[4].split()[2:]  # at the base
