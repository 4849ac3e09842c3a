"""What plans know of parts of the user's own is what they know of ours, for parts that are as ours."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import parts
from models.attention import Attention
from models.config import FeedForward as Kind
from models.config import ModelConfig, MoE, Position
from models.decoder import Decoder
from models.feedforward import FeedForward
from models.flops import block_flops_per_token, parameters
from models.roles import Role, Spec, specify
from models.shapes import parameter_shapes
from parallel.tensor import without_row
from tests.models.build import logits_of, random_decoder, random_tokens, tiny


class Own(FeedForward):
    """Ours by another name."""


class OwnAttention(Attention):
    pass


class Doubled(FeedForward):
    def __init__(self, config: ModelConfig, width: int, times: float) -> None:
        super().__init__(config, width)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return self.times * super().forward(x)


class LooksAtValues(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


class Deeper(FeedForward):
    """With a child and a parameter that the row of FeedForward does not know."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__(config, width)
        self.more = nn.Sequential(nn.Linear(config.dim, config.dim))
        self.scale = nn.Parameter(torch.empty(1))
        specify(self, scale=Spec(Role.scalar))


def with_parts(config: ModelConfig, **names: Any) -> ModelConfig:
    """attention, feedforward: the name of a class here, or with keywords."""
    chosen = {part: of if isinstance(of, dict) else {"_target_": of} for part, of in names.items()}
    return replace(
        config, parts={part: of | {"_target_": f"{__name__}.{of['_target_']}"} for part, of in chosen.items()}
    )


SHAPES = [
    tiny(),
    tiny(kv_heads=1, ffn=Kind.swiglu, bias=False, position=Position.rotary, heads=2),
    tiny(layers=4, value_embeddings=1, fused_qkv=False, head_dim=10),
    tiny(layers=3, moe=MoE(experts=4, dense_layers=2)),
]


@pytest.mark.torch211
@pytest.mark.parametrize("config", SHAPES, ids=range(len(SHAPES)))
def test_plans_know_them_as_they_know_ours(config: ModelConfig) -> None:
    own = with_parts(config, attention="OwnAttention", feedforward="Own")
    assert list(parameter_shapes(own).items()) == list(parameter_shapes(config).items())
    assert parameters(own) == parameters(config)
    for layer in range(config.layers):
        products, scores, _ = block_flops_per_token(config, 16, layer)
        assert block_flops_per_token(own, 16, layer)[:2] == pytest.approx((products, scores), rel=1e-12)
    assert parts.uncounted(own, 16) == []


def test_keywords_reach_the_part() -> None:
    config = tiny()
    own = with_parts(config, feedforward={"_target_": "Doubled", "times": 1.0})
    tokens, plain = random_tokens(config, 2, 7), logits_of(random_decoder(config), random_tokens(config, 2, 7))
    assert torch.equal(logits_of(random_decoder(own), tokens), plain)
    other = replace(own, parts={"feedforward": own.parts["feedforward"] | {"times": 2.0}})
    assert not torch.allclose(logits_of(random_decoder(other), tokens), plain)


def test_only_blocks_without_experts_have_it() -> None:
    with torch.device("meta"):
        model = Decoder(with_parts(SHAPES[3], feedforward="Own"))
    assert [type(block.get_submodule("feedforward")).__name__ for block in model.blocks.values()] == [
        "Own",
        "Own",
        "MoE",
    ]


def test_a_forward_that_cannot_be_counted_is_named() -> None:
    own = with_parts(tiny(), feedforward="LooksAtValues")
    assert parts.uncounted(own, 16) == [f"{__name__}.LooksAtValues"]
    assert block_flops_per_token(own, 16, 0)[0] < block_flops_per_token(tiny(), 16, 0)[0]
    assert parameters(own) == parameters(tiny())


def test_what_a_row_leaves_out_is_named() -> None:
    with torch.device("meta"):
        assert without_row(Deeper(tiny(), 8)) == [
            "scale (Deeper)",
            "more.0.weight (Deeper)",
            "more.0.bias (Deeper)",
        ]
        model = Decoder(with_parts(tiny(layers=1), feedforward="Deeper"))
        assert without_row(model)[0] == "blocks.0.feedforward.scale (Deeper)"
        assert without_row(Decoder(tiny(layers=3, x0=True, moe=MoE(experts=4, shared=1)))) == []


def test_a_module_that_fails_is_told(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text("import models.config\nimport no_such_module_here\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(parts.WrongPart, match="fails cannot be imported: No module named 'no_such_module_here'"):
        parts.class_of("fails.Part")
