"""What is computed again, counted without torch, against torch's own counter."""

import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch

from models.config import Attention as Kernel
from models.config import FeedForward, ModelConfig, NormPlace, QKNorm
from models.flops import flops_per_token
from parallel.activations import keep_activations
from parallel.config import ActivationsConfig, Recompute
from parallel.recomputation import recomputed_flops_per_token, segment_borders, settled, told
from tests.models.build import random_decoder, random_tokens, tiny
from tests.ranks import ROOT, run_ranks

GPT2 = ModelConfig(layers=12, heads=12, dim=768, context=1024, vocab_size=50257)
BATCH, SEQ = 2, 16


def asked(mode: str, **keys: Any) -> ActivationsConfig:
    return ActivationsConfig(mode=Recompute[mode], **keys)


MODES = [
    asked("none"),
    asked("full"),
    asked("selective"),
    asked("segments"),
    asked("segments", segments=3),
    asked("every_n"),
    asked("every_n", every_n=3),
    asked("offload"),
]
MODELS = {
    "fused": tiny(layers=5, vocab_multiple=1),
    "math": tiny(layers=5, vocab_multiple=1, attention=Kernel.math),
    "dropout": tiny(layers=4, vocab_multiple=1, attention=Kernel.math, dropout=0.1),
    "grouped": tiny(layers=4, vocab_multiple=1, heads=4, kv_heads=2, fused_qkv=False, bias=False, ffn_dim=50),
    "gated": tiny(
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn=FeedForward.swiglu,
        norm_place=NormPlace.after,
        qk_norm=QKNorm.all,
        vocab_multiple=1,
    ),
    "soft-capped": tiny(
        layers=4, ffn=FeedForward.geglu, attention_softcap=2.0, norm_place=NormPlace.both, vocab_multiple=1
    ),
}


def counted(configs: list[tuple[ModelConfig, ActivationsConfig]]) -> list[float]:
    """Operations of forward and backward, by torch's counter."""
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for config, activations in configs:
        model = random_decoder(config)
        keep_activations(model, activations, torch.device("cpu"), apart=False)
        tokens = random_tokens(config, BATCH, SEQ)
        with FlopCounterMode(display=False) as counter:
            model(tokens=tokens, labels=tokens).backward()
        found.append(counter.get_total_flops())
    return found


@pytest.fixture(scope="module")
def extra() -> dict[str, list[float]]:
    """For each model and mode: operations a token beyond those without recomputation."""
    cases = [(config, mode) for config in MODELS.values() for mode in MODES]
    [flops] = run_ranks(1, counted, cases)
    found = {}
    for place, name in enumerate(MODELS):
        none, *others = flops[place * len(MODES) : (place + 1) * len(MODES)]
        found[name] = [(count - none) / (BATCH * SEQ) for count in (none, *others)]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_of_torchs_counter(name: str, extra: dict[str, list[float]]) -> None:
    assert [recomputed_flops_per_token(mode, MODELS[name], SEQ) for mode in MODES] == extra[name]


def test_full_costs_at_most_a_third() -> None:
    for config in (GPT2, *MODELS.values()):
        again = recomputed_flops_per_token(asked("full"), config, config.context)
        assert again is not None
        assert 0 < again <= flops_per_token(config, config.context) / 3


def test_of_gpt2_124m_by_hand() -> None:
    """12 blocks of 12 x 768^2 weights, the last product 4 of the 12; 854 million operations a token in all."""
    weights = 12 * 768**2
    assert recomputed_flops_per_token(asked("full"), GPT2, 1024) == 12 * 2 * weights * 8 / 12
    attention = 4 * 768 * 1024
    assert recomputed_flops_per_token(asked("segments", segments=2), GPT2, 1024) == (
        12 * (2 * weights + attention) - 2 * 2 * weights * 4 / 12
    )
    assert told(asked("full"), GPT2, 1024) == "full, 13 % more operations"
    assert told(asked("selective"), GPT2, 1024) == "selective, 0 % more operations"
    assert told(asked("auto"), GPT2, 1024) == "none"
    assert told(asked("budget", budget=0.3), GPT2, 1024) == "budget 0.3, more operations as torch chooses"


def test_auto_keeps_all_of_a_model_below_a_billion() -> None:
    gpt2_774m = ModelConfig(layers=36, heads=20, dim=1280, context=1024, vocab_size=50257)
    gpt2_1558m = ModelConfig(layers=48, heads=25, dim=1600, context=1024, vocab_size=50257)
    assert settled(asked("auto"), gpt2_774m) is Recompute.none
    assert settled(asked("auto"), gpt2_1558m) is Recompute.selective
    assert settled(asked("full"), gpt2_774m) is Recompute.full


@pytest.mark.parametrize(
    ("layers", "segments", "sizes"),
    [
        (12, None, [4, 4, 4]),
        (12, 5, [2, 2, 3, 2, 3]),
        (3, None, [1, 2]),
        (1, None, [1]),
        (4, 4, [1, 1, 1, 1]),
        (4, 9, [1, 1, 1, 1]),
    ],
)
def test_segments_hold_all_blocks_once(layers: int, segments: int | None, sizes: list[int]) -> None:
    borders = segment_borders(asked("segments", segments=segments), layers)
    assert [end - first for first, end in pairwise(borders)] == sizes


def test_counts_need_no_torch() -> None:
    command = "import sys, parallel.recomputation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT).returncode == 0
