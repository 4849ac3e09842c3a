"""Any model config is built, trained two steps and exported, or refused in words that help."""

import math
import re
from copy import deepcopy
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.config import Attention, ModelConfig
from models.decoder import Decoder
from models.huggingface import (
    config_from_huggingface,
    config_to_huggingface,
    state_from_huggingface,
    state_to_huggingface,
)
from models.moe import share_losses
from models.roles import NOT_LEARNED, parameter_roles
from parallel.materialize import materialize
from tests.models.build import random_tokens
from tests.models.test_families import CASES
from training.check import check
from training.config import Config, TokenizerKind
from training.keys import convert, keys
from training.optimizers.build import build_optimizer
from training.refusal import Problem
from training.resolve import Chosen, World, resolve

ALONE = World(1, 1)
SEQ, VOCABULARY = 8, 67

# What is drawn of each key that is not a choice or true or false; most of it is right, some is nonsense.
NUMBERS: dict[str, list[Any]] = {
    "layers": [1, 2, 3, 5, 0],
    "dim": [8, 12, 16, 24, 7, 0],
    "heads": [1, 2, 4, 3, 0],
    "head_dim": [None, 4, 6, 5, -2],
    "kv_heads": [None, 1, 2, 3, 0],
    "ffn_dim": [None, 10, 16, 0],
    "context": [8, 16],
    "window": [None, 1, 3, 100, 0],
    "full_every": [0, 1, 2, 7, -1],
    "window_stages": [1, 2, 0],
    "vocab_size": [VOCABULARY],
    "vocab_multiple": [1, 32, 0],
    "attention_scale": [None, 0.1, 1.0, 0.0],
    "attention_softcap": [None, 5.0, -1.0],
    "logit_softcap": [None, 5.0, 0.0],
    "z_loss": [0.0, 0.01, -1.0],
    "value_embeddings": [0, 1, 2, 9, -1],
    "norm_eps": [1e-5, 1e-2, 0.0],
    "embedding_scale": [None, 4.0, 0.0],
    "dropout": [0.0, 0.3, 1.0],
    "init_std": [0.02, 0.3, 0.0, -1.0, math.inf],
    "init_embedding_std": [None, 1.0, 0.0, -0.1],
    "mup_base_dim": [None, 8, 0],
    "mup_base_head_dim": [None, 2, 0],
    "attention": [Attention.auto],
    "init_from": [None],
    "parts": [{}],
    "mtp": [0, 1, 2, -1],
    "mtp_weight": [0.3, 1.0, 0.0, -1.0],
    "tokenizer": ["gpt2"],
    "rotary.theta": [10_000.0, 500.0, 1.0],
    "rotary.share": [1.0, 0.5, 0.3, 0.0],
    "rotary.factor": [1.0, 4.0, 0.5],
    "rotary.original_context": [None, 4, 0],
    "rotary.low_frequency": [1.0, 4.0, 0.0],
    "rotary.high_frequency": [4.0, 1.0],
    "rotary.beta_fast": [32.0, 1.0, 0.0],
    "rotary.beta_slow": [1.0, 32.0],
    "rotary.magnitude": [None, 1.2, 0.0],
    "latent.kv_rank": [0, 6, 1, -1],
    "latent.q_rank": [None, 6, 0],
    "latent.nope_dim": [128, 4, 0],
    "latent.rope_dim": [64, 4, 3, 0],
    "latent.value_dim": [128, 4, 0],
    "moe.experts": [0, 4, 3, 1, -1],
    "moe.top_k": [2, 1, 5, 0],
    "moe.groups": [1, 2, 3, 0],
    "moe.top_groups": [1, 2, 5, 0],
    "moe.dim": [None, 6, 0],
    "moe.shared": [0, 1, -1],
    "moe.dense_layers": [0, 1, 9, -1],
    "moe.scale": [1.0, 2.5, 0.0],
    "moe.balance_weight": [0.01, 0.1, 0.0, -1.0],
    "moe.bias_rate": [0.0, 0.1, -1.0],
    "moe.z_loss": [0.0, 0.1, -1.0],
    "moe.capacity_factor": [None, 1.0, 0.0],
}
CHOICES = {key.name.removeprefix("model."): key for key in keys().values() if key.name.startswith("model.")}


def legal_kinds(name: str, default: Any) -> list[Any]:
    """Every value of a choice, the default first; else what NUMBERS has."""
    if name in NUMBERS:
        return NUMBERS[name]
    if isinstance(default, Enum):
        return [default, *(other for other in type(default) if other is not default)]
    if isinstance(default, bool):
        return [default, not default]
    if CHOICES[name].optional and bool in CHOICES[name].kinds:
        return [None, False, True]
    raise LookupError(f"model.{name} is a new key: say in NUMBERS what of it is drawn")


def defaults(owner: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(owner):
        value = getattr(owner, field.name)
        found |= defaults(value, f"{prefix}{field.name}.") if is_dataclass(value) else {prefix + field.name: value}
    return found


VALUES = {name: legal_kinds(name, default) for name, default in defaults(ModelConfig()).items()}


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """A small model in which a few keys have other values, sometimes many."""
    model = ModelConfig(layers=2, dim=16, heads=4, context=16, vocab_size=VOCABULARY, vocab_multiple=1)
    return draw(changed(model, draw(st.sampled_from([3, 6, 12, len(VALUES)]))))


@st.composite
def changed(draw: st.DrawFn, model: ModelConfig, most: int) -> ModelConfig:
    for name in draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=most)):
        first = draw(st.booleans()) or len(VALUES[name]) < 3
        put(model, name, draw(st.sampled_from(VALUES[name][: 2 if first else None])))
    return model


@st.composite
def near_a_family(draw: st.DrawFn) -> ModelConfig:
    """A model that transformers has, but for a key or two."""
    return draw(changed(deepcopy(CASES[draw(st.sampled_from(sorted(CASES)))]), 2))


def put(model: ModelConfig, name: str, value: Any) -> None:
    section, _, last = name.rpartition(".")
    setattr(getattr(model, section) if section else model, last, value)


def configured(model: ModelConfig) -> Config:
    config = Config(steps=100, batch_sequences=4, model=model, sequence_length=SEQ)
    config.hardware.device = "cpu"
    resolve(config, ALONE, Chosen({"model": "m"}))
    return config


def problems(model: ModelConfig) -> list[Problem]:
    """Tokens are drawn here: that no tokenizer has so few is not looked at."""
    config = configured(deepcopy(model))
    config.tokenizer.kind = TokenizerKind.tiktoken
    config.tokenizer.name = "any"
    return check(config, ALONE)


def trained(model: ModelConfig) -> Decoder:
    """Two steps: the loss and every gradient are finite, and what is learned has one."""
    with torch.device("meta"):
        decoder = Decoder(model)
    materialize(decoder, 0, torch.device("cpu"))
    roles = parameter_roles(decoder)
    optimizer = build_optimizer(Config().optimizer, decoder)
    tokens = random_tokens(model, 2, SEQ)
    share_losses(decoder, torch.tensor(tokens.numel()))
    for _ in range(2):
        loss = decoder(tokens=tokens, labels=tokens.roll(-1, 1))
        assert torch.isfinite(loss).all()
        (loss.sum() / tokens.numel()).backward()
        for name, parameter in decoder.named_parameters():
            if roles[name] not in NOT_LEARNED:
                assert parameter.grad is not None, f"{name} has no gradient"
                assert torch.isfinite(parameter.grad).all(), f"the gradient of {name} is not finite"
        optimizer.step(1e-3, torch.zeros(()))
        decoder.zero_grad()
    for name, parameter in decoder.named_parameters():
        assert torch.isfinite(parameter).all(), name
    return decoder


def exported(model: ModelConfig, decoder: Decoder) -> None:
    """Config and weights, which come back as they were; or refused in a sentence."""
    roles = parameter_roles(decoder)
    state = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    refused, theirs = "", {}
    try:
        config = config_to_huggingface(model)
        theirs = state_to_huggingface(model, state)
    except ValueError as error:
        refused = str(error)
    if not theirs:
        assert len(refused.split()) > 4, refused
        return
    back = state_from_huggingface(model, theirs)
    assert {name for name in state if roles[name] not in NOT_LEARNED} <= back.keys() <= state.keys()
    assert [name for name, tensor in back.items() if not torch.equal(tensor, state[name])] == []
    imported = config_from_huggingface(config)
    again = state_to_huggingface(imported, state_from_huggingface(imported, theirs))
    assert again.keys() == theirs.keys() and all(torch.equal(again[name], theirs[name]) for name in theirs)


def helps(model: ModelConfig, problem: Problem) -> None:
    """What is written instead first removes the problem."""
    assert problem.key in keys(), problem
    assert problem.value != "" and len(problem.reason.split()) > 2, problem
    if problem.instead == "leave it out":
        other = deepcopy(model)
        put(other, problem.key.removeprefix("model."), keys()[problem.key].default)
        assert problem.key not in {found.key for found in problems(other)}, problem
        return
    written = re.match(r"model\.([\w.]+)=([^\s,]+)", problem.instead)
    if written is None:
        assert re.match(r"(optimizer|[\w.]+)=\S+", problem.instead), problem
        return
    other = deepcopy(model)
    name, text = written.groups()
    key = keys()[f"model.{name}"]
    value = float(text) if re.fullmatch(r"[\d.]+e-?\d+", text) else yaml.safe_load(text)  # YAML 1.1: 1e-05 is a text
    put(other, name, convert(key, value, text))
    left = [(found.key, found.reason) for found in problems(other)]
    assert (problem.key, problem.reason) not in left, (problem, left)


def tried(model: ModelConfig) -> bool:
    """Whether the model is legal."""
    found = problems(model)
    for problem in found:
        helps(model, problem)
    if found:
        return False
    exported(model, trained(model))
    return True


FUZZ: dict[str, Any] = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=40, **FUZZ)
@given(model=models())
def test_any_model_is_trained_or_refused(model: ModelConfig) -> None:
    tried(model)


@settings(max_examples=20, **FUZZ)
@given(model=near_a_family())
def test_a_model_near_a_family_is_exported_or_refused(model: ModelConfig) -> None:
    tried(model)


@pytest.mark.slow
@settings(max_examples=200, **FUZZ)
@given(model=near_a_family())
def test_many_models_near_a_family_are_exported_or_refused(model: ModelConfig) -> None:
    tried(model)


@pytest.mark.slow
@settings(max_examples=600, **FUZZ)
@given(model=models())
def test_many_models_are_trained_or_refused(model: ModelConfig) -> None:
    tried(model)
