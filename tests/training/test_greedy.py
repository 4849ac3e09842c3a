"""Greedy texts of every family, token for token: with transformers, which reads the folder we export, as the oracle;
of models it does not have, with the decoder of tests/oracle_model, which sees the whole text for each token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.config import FeedForward, ModelConfig, QKNorm, Residual, Rotary
from models.decoder import Decoder
from parallel.apply import parallelize
from parallel.config import ActivationsConfig, CompileConfig, Dtype, ParallelConfig, Strategy
from parallel.mesh import build_mesh
from tests.models.build import random_decoder, random_tokens
from tests.models.test_families import CASES, deepseek, modern
from tests.models.test_huggingface import CASES as GPT2
from tests.oracle_model import logits
from tests.parity.cases import shape_of
from tests.ranks import run_ranks
from training.checkpoint.contents import load_model, model_state
from training.checkpoint.folders import Saved
from training.checkpoint.store import Store
from training.config import Config, leaves
from training.huggingface import export
from training.ranks import Ranks
from training.tokenizers import Bytes
from training.writing import Sampling, write

COUNT = 52
LENGTHS = (3, 30, 11)  # the second is longer than all windows and original contexts, the others grow past them
LEAST_MARGIN = 2e-5  # of a choice, so that none hangs on rounding: a model with a closer one needs another seed
NEVER = 1000  # a token that is not in the vocabulary
CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)

EXPORTED = (
    {f"gpt2_{name}": replace(GPT2[name], context=96) for name in ("tied", "untied", "narrow_ffn", "one_head")}
    | CASES
    | {"deepseek_v3_further": deepseek(mtp=2)}
)
SPEEDRUN = modern(
    layers=5,
    ffn=FeedForward.relu2,
    norm_weight=False,
    qk_norm=QKNorm.head,
    rotary=Rotary(theta=1024.0, share=0.6),
    init_residual=Residual.zero,
    embedding_norm=True,
    logit_softcap=15.0,
    value_embeddings=2,
    x0=True,
    skips=True,
    window=7,
    full_every=4,
)
OURS = {"gpt_speedrun": SPEEDRUN, "further_tokens": modern(mtp=2), "further_tokens_tied": modern(mtp=1, tied_head=True)}


def lively(config: ModelConfig, router_bias: float = 0.0) -> Decoder:
    """What blocks give outweighs the embedding, or a tied head would say the same token again and again."""
    model = random_decoder(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".router.bias"):
                parameter.mul_(router_bias)
            elif name.startswith("blocks.") and (parameter.dim() > 1 or "post_norm" in name):
                parameter.mul_(4)
    return model


def prompts_of(config: ModelConfig) -> list[list[int]]:
    return [random_tokens(config, 1, length, seed=length)[0].tolist() for length in LENGTHS]


def written(model: Decoder) -> list[list[int]]:
    return write(model, model, prompts_of(model.config), COUNT, GREEDY, 0, NEVER, CPU)


def checkpoint_of(model: Decoder, folder: Path) -> Saved:
    about = {"config": leaves(Config(model=model.config)), "tokenizer": {"name": "bytes", "fingerprint": ""}}
    return Store(folder, Ranks.alone()).save(1, model_state(model), about)


def margin(scores: torch.Tensor) -> float:
    """scores: [.., vocabulary]. By how much the likeliest token leads, where that is least."""
    first, second = scores.topk(2).values.unbind(-1)
    return (first - second).min().item()


@pytest.mark.parametrize("name", EXPORTED)
def test_a_family_writes_what_transformers_writes(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = lively(EXPORTED[name], router_bias=0.1 if name.startswith("deepseek") else 0.0)  # others have none
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    export(checkpoint_of(model, tmp_path / "checkpoints"), Bytes(), tmp_path / "exported")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", **kinds).eval()
    prompts = prompts_of(model.config)
    missing = [max(LENGTHS) - length for length in LENGTHS]
    ids = torch.tensor([[0] * left + prompt for left, prompt in zip(missing, prompts, strict=True)])
    mask = (torch.arange(max(LENGTHS)) >= torch.tensor(missing)[:, None]).long()
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    said = theirs.generate(ids, attention_mask=mask, max_new_tokens=COUNT, **options)
    expected = said.sequences[:, max(LENGTHS) :].tolist()
    assert margin(torch.stack(said.logits)) > LEAST_MARGIN
    assert len({token for text in expected for token in text}) > 6  # or they say little
    assert written(model) == expected


@pytest.mark.parametrize("name", OURS)
def test_what_transformers_has_not_is_written_as_without_a_cache(name: str) -> None:
    config = OURS[name]
    model = lively(config)
    weights = {key: value[:67] if value.shape[:1] == (96,) else value for key, value in model.state_dict().items()}
    shape, expected, margins = shape_of(config), [], []
    for prompt in prompts_of(config):
        text = list(prompt)
        for _ in range(COUNT):
            scores = logits(weights, shape, torch.tensor([text]))[0][0, -1]
            margins.append(margin(scores))
            text.append(int(scores.argmax()))
        expected.append(text[len(prompt) :])
    assert min(margins) > LEAST_MARGIN
    assert len({token for text in expected for token in text}) > 6
    assert written(model) == expected


# Sizes that two ranks can share.
SHARED = {name: CASES[name] for name in ("llama_llama3", "qwen2_fused", "olmo3", "gemma2", "mixtral_windows")} | {
    "gpt2": replace(GPT2["tied"], heads=4, context=96),
    "qwen3_moe": CASES["qwen3_moe"],
    "deepseek_v3": deepseek(heads=4),
    "gpt_speedrun": SPEEDRUN,
}


def written_over_ranks(folder: Path) -> dict[str, list[list[int]]]:
    """By each model, whose checkpoint is in the folder."""
    parallel = ParallelConfig(Strategy.single, tp=2)
    mesh, found = build_mesh(parallel, CPU), {}
    for name, config in SHARED.items():
        options = CompileConfig(), ActivationsConfig()
        spread = parallelize(config, mesh, parallel, Dtype.fp32, Dtype.fp32, *options, seed=0, device=CPU)
        store = Store(folder / name, Ranks(dist.group.WORLD))
        saved = store.newest()
        assert saved is not None
        load_model(store, saved, spread)
        spread.model.eval()
        prompts = prompts_of(config)
        found[name] = write(spread.model, spread.forward, prompts, COUNT, GREEDY, 0, NEVER, CPU, parts=2)
    return found


@pytest.mark.slow
def test_ranks_that_share_heads_write_the_same(tmp_path: Path) -> None:
    expected = {}
    for name, config in SHARED.items():
        model = lively(config, router_bias=0.1)
        checkpoint_of(model, tmp_path / name)
        expected[name] = written(model)
    assert run_ranks(2, written_over_ranks, tmp_path, group=True, timeout=120) == [expected, expected]
