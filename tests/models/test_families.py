"""Every family to and from transformers, whose models in float32 are the oracle."""

import json
import math
import tempfile
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config import (
    Balance,
    FeedForward,
    Latent,
    ModelConfig,
    MoE,
    Norm,
    NormPlace,
    Position,
    QKNorm,
    Residual,
    Rotary,
    RotaryScaling,
    Score,
)
from models.decoder import Decoder
from models.flops import parameters
from models.huggingface import (
    FAMILIES,
    config_from_huggingface,
    config_to_huggingface,
    pieces,
    state_from_huggingface,
    state_to_huggingface,
)
from models.moe import routers
from models.shapes import parameter_shapes
from tests.models.build import largest_difference, logits_of, random_decoder, random_tokens, tiny
from tests.models.published import CONFIGS, PARAMETERS
from tests.ranks import run_ranks

SEQ = 45  # past all windows and original contexts here

# Pairs of all kinds: some keep their speed, some are slowed by a part of the factor, some by all of it.
LLAMA3 = Rotary(
    theta=100.0,
    scaling=RotaryScaling.llama3,
    factor=8.0,
    original_context=24,
    low_frequency=0.5,
    high_frequency=2.5,
)
YARN = Rotary(
    theta=100.0,
    scaling=RotaryScaling.yarn,
    factor=4.0,
    original_context=24,
    beta_fast=3.0,
    beta_slow=0.3,
    windows=False,
)
LINEAR = Rotary(theta=5000.0, scaling=RotaryScaling.linear, factor=3.0)


def modern(**changes: Any) -> ModelConfig:
    """Six heads in two groups, of another width than dim / heads; a vocabulary of 67 rows padded to 96."""
    own: dict[str, Any] = {
        "layers": 3,
        "dim": 36,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "ffn": FeedForward.swiglu,
        "ffn_dim": 52,
        "context": 96,
        "vocab_size": 67,
        "vocab_multiple": 32,
        "norm": Norm.rmsnorm,
        "norm_eps": 1e-4,
        "position": Position.rotary,
        "bias": False,
        "fused_qkv": False,
        "tied_head": False,
        "init_residual": Residual.same,
    }
    return ModelConfig(**(own | changes))


def olmo(**changes: Any) -> ModelConfig:
    return modern(**({"norm_place": NormPlace.after, "qk_norm": QKNorm.all} | changes))


def gemma(**changes: Any) -> ModelConfig:
    own: dict[str, Any] = {
        "norm_place": NormPlace.both,
        "ffn": FeedForward.geglu,
        "embedding_scale": 6.0,
        "attention_scale": 13**-0.5,
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
        "window": 7,
        "full_every": 2,
        "tied_head": True,
    }
    return modern(**(own | changes))


def deepseek(**changes: Any) -> ModelConfig:
    """With yarn as DeepSeek has it: cosines and sines as they are, scores multiplied."""
    moe: dict[str, Any] = {
        "experts": 8,
        "top_k": 3,
        "groups": 4,
        "top_groups": 2,
        "dim": 20,
        "shared": 2,
        "dense_layers": 1,
    }
    own: dict[str, Any] = {
        "heads": 3,
        "kv_heads": None,
        "head_dim": None,
        "norm_eps": 1e-6,
        "latent": Latent(kv_rank=14, q_rank=18, nope_dim=10, rope_dim=8, value_dim=12),
        "rotary": replace(YARN, magnitude=1.0, windows=True),
        "attention_scale": (0.07 * math.log(4) + 1) ** 2 / 18**0.5,
        "moe": MoE(**moe, score=Score.sigmoid, scale=2.5),
    }
    return modern(**(own | changes))


CASES = {
    "llama": modern(),
    "llama_tied": modern(tied_head=True, kv_heads=6, head_dim=None),
    "llama_biases": modern(bias=True),
    "llama_linear": modern(rotary=LINEAR),
    "llama_llama3": modern(rotary=LLAMA3),
    "llama_yarn": modern(rotary=YARN),
    "llama_fused": modern(fused_qkv=True, bias=True),
    "mistral": modern(window=7),
    "mistral_heads": modern(heads=5, kv_heads=1),
    "qwen2": modern(qkv_bias=True),
    "qwen2_fused": modern(qkv_bias=True, fused_qkv=True, tied_head=True),
    "qwen2_windows": modern(qkv_bias=True, window=7, full_every=2),
    "qwen3": modern(qk_norm=QKNorm.head, tied_head=True),
    "qwen3_windows": modern(qk_norm=QKNorm.head, window=7),
    "qwen3_yarn": modern(qk_norm=QKNorm.head, fused_qkv=True, rotary=YARN),
    "olmo2": olmo(),
    "olmo2_fused": olmo(fused_qkv=True, kv_heads=6),
    "olmo3": olmo(window=7, full_every=2, rotary=YARN),
    "olmo3_theta": olmo(window=7, full_every=3, rotary=Rotary(theta=300.0)),
    "olmo3_everywhere": olmo(window=7, full_every=2, rotary=LINEAR),
    "gemma2": gemma(),
    "gemma2_untied": gemma(tied_head=False, attention_softcap=None, full_every=0, fused_qkv=True),
    "gemma2_full": gemma(window=None, full_every=0, attention_scale=None, logit_softcap=None),
    "mixtral": modern(moe=MoE(experts=5, top_k=2)),
    "mixtral_windows": modern(window=7, fused_qkv=True, moe=MoE(experts=5, top_k=3)),
    "qwen3_moe": modern(qk_norm=QKNorm.head, moe=MoE(experts=5, top_k=2, dim=20)),
    "qwen3_moe_dense": modern(
        qk_norm=QKNorm.head, window=7, moe=MoE(experts=5, top_k=3, dim=20, dense_layers=1, normalize=False)
    ),
    "deepseek_v3": deepseek(),
    "deepseek_v3_direct": deepseek(
        latent=Latent(kv_rank=14, nope_dim=10, rope_dim=8, value_dim=18),
        rotary=Rotary(theta=100.0),
        attention_scale=None,
        moe=MoE(experts=8, top_k=3, dim=20, shared=1, normalize=False, score=Score.sigmoid),
    ),
}


@dataclass
class Compared:
    """What transformers said about one case. Differences are the largest of any number."""

    model_type: str
    to_theirs: float  # logits of our weights in their model
    from_theirs: float  # logits of their weights in ours
    largest: float  # logit
    losses: tuple[float, float]  # a predicted token's, ours and theirs
    gradients: dict[str, float]  # over the largest number of each
    smallest: float  # largest number of the gradient of the parameter where that is smallest
    unread: list[str]  # weights of ours they did not take, or lacked
    unchanged: list[str]  # weights that theirs -> ours -> theirs changes by more than 1e-6
    bitwise: bool  # theirs -> ours -> theirs -> ours
    config: ModelConfig  # from the config.json they write


def weights_of(model: Any, folder: Path, gradients: bool = False) -> dict[str, Tensor]:
    """As a file of theirs has them."""
    if gradients:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def as_a_file(config: ModelConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = state_to_huggingface(config, state)
    if config.tied_head:
        del found["lm_head.weight"]
    return found


def compare(config: ModelConfig, folder: Path) -> Compared:
    from transformers import AutoModelForCausalLM

    def load(place: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            place,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
        )

    tokens = random_tokens(config, 2, SEQ)
    ours = random_decoder(config).eval()
    with torch.no_grad():
        for router in routers(ours):
            router.bias.mul_(0.1 if config.moe.score is Score.sigmoid else 0.0)  # others have none
    (folder / "config.json").write_text(json.dumps(config_to_huggingface(config)))
    save_file(as_a_file(config, ours.state_dict()), folder / "model.safetensors", {"format": "pt"})
    theirs, info = load(folder)
    said = theirs.eval()(tokens, labels=tokens)
    said.loss.backward()
    logits = logits_of(ours, tokens)
    loss = ours(tokens=tokens[:, :-1], labels=tokens[:, 1:])
    assert isinstance(loss, Tensor)
    loss = loss / tokens[:, 1:].numel()
    loss.backward()
    gradients = {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in ours.named_parameters()
    }
    # What is added in splitting a weight is not in its gradient.
    added = as_a_file(config, {name: torch.zeros_like(value) for name, value in gradients.items()})
    found = {name: value - added[name] for name, value in as_a_file(config, gradients).items()}
    wanted = weights_of(theirs, folder / "gradients", gradients=True)
    for bias in [name for name in wanted if name.endswith("e_score_correction_bias")]:
        del wanted[bias], found[bias]
    assert found.keys() == wanted.keys()
    sizes = {name: value.abs().max().item() for name, value in wanted.items()}

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms too are far from what they begin with.
            parameter.copy_(noise * 0.2 + 0.7 if "norm" in name else noise * 0.2)
    file = weights_of(theirs, folder / "theirs")
    config_again = config_from_huggingface(json.loads((folder / "theirs" / "config.json").read_text()))
    config_again.vocab_multiple, config_again.fused_qkv = config.vocab_multiple, config.fused_qkv
    state = state_from_huggingface(config_again, file)
    back = as_a_file(config_again, state)
    again = state_from_huggingface(config_again, back)
    model = Decoder(config_again).eval()
    model.load_state_dict(state | ({"head.weight": state["embed.tokens.weight"]} if config.tied_head else {}))
    with torch.no_grad():
        from_theirs = largest_difference(theirs(tokens).logits, logits_of(model, tokens))
    return Compared(
        model_type=theirs.config.model_type,
        to_theirs=largest_difference(said.logits, logits),
        from_theirs=from_theirs,
        largest=logits.abs().max().item(),
        losses=(loss.item(), said.loss.item()),
        gradients={name: largest_difference(value, found[name]) / sizes[name] for name, value in wanted.items()},
        smallest=min(sizes.values()),
        unread=sorted(str(name) for names in info.values() for name in names),
        unchanged=[name for name, value in file.items() if not largest_difference(value, back[name]) <= 1e-6],
        bitwise=state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state),
        config=config_again,
    )


def compare_all() -> dict[str, Compared | str]:
    found: dict[str, Compared | str] = {}
    for name, config in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = compare(config, Path(folder))
            except Exception as error:
                found[name] = f"{error}\n{traceback.format_exc()}"
    return found


@pytest.fixture(scope="module")
def compared() -> dict[str, Compared]:
    """In a rank, where what transformers imports is there already."""
    result: dict[str, Compared] = run_ranks(1, compare_all, timeout=300)[0]
    return result


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_theirs(compared: dict[str, Compared], name: str) -> None:
    case = compared[name]
    assert isinstance(case, Compared), case
    longest = max((kind for kind in (family.model_type for family in FAMILIES) if name.startswith(kind)), key=len)
    assert case.model_type == longest
    assert case.unread == []
    assert case.to_theirs < 1e-4
    assert case.from_theirs < 1e-4
    assert case.largest > 0.5
    assert case.losses[0] == pytest.approx(case.losses[1], abs=1e-5)
    assert {name: value for name, value in case.gradients.items() if not value < 1e-4} == {}
    assert case.smallest > 1e-3  # or 1e-4 says nothing
    assert case.unchanged == []
    assert case.bitwise


@pytest.mark.parametrize("name", CASES)
def test_the_config_comes_back(name: str, compared: dict[str, Compared]) -> None:
    """From our own config.json, in which both forms of rotary positions occur, and from that of transformers 5."""
    written = config_to_huggingface(CASES[name])
    back = config_from_huggingface(written)
    assert config_to_huggingface(back) == written
    assert back.fused_qkv is False
    assert parameter_shapes(replace(back, fused_qkv=CASES[name].fused_qkv, vocab_multiple=32)) == parameter_shapes(
        CASES[name]
    )
    case = compared[name]
    assert isinstance(case, Compared), case
    assert config_to_huggingface(case.config) == written


# Fields that are not the model's: of tokens and files, and the weight of the auxiliary loss, which training here has.
NOT_OURS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "transformers_version", "router_aux_loss_coef"),
    *("_name_or_path", "cache_implementation", "use_cache", "use_mrope", "n_ctx", "task_specific_params"),
}


def as_they_read(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of config.json, with what it derives and its defaults, and its model's parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    read = AutoConfig.for_model(**config)
    found = {field: value for field, value in read.to_dict().items() if field not in NOT_OURS}
    found["head_dim"] = getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read)
    return found | {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def read_both(written: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {name: (as_they_read(config), as_they_read(CONFIGS[name])) for name, config in written.items()}


def test_published_config_json_comes_back() -> None:
    imported = {name: config_from_huggingface(config) for name, config in CONFIGS.items()}
    written = {name: config_to_huggingface(config) for name, config in imported.items()}
    for name, (ours, theirs) in run_ranks(1, read_both, written, timeout=200)[0].items():
        differing = {field for field in ours.keys() | theirs.keys() if ours.get(field) != theirs.get(field)}
        # Gemma's is not read; hidden_activation is.
        assert differing == ({"hidden_act"} if name == "gemma2_2b" else set()), name
        assert parameters(imported[name]) == PARAMETERS[name] == theirs["parameters"]


@pytest.mark.parametrize("name", CASES)
def test_pieces_are_all_of_both(name: str) -> None:
    """Each parameter of ours that is learned, each of theirs once, and each bitwise."""
    config = CASES[name]
    state = {key: value for key, value in random_decoder(config).state_dict().items() if "router." not in key}
    kinds = ("weight", "bias") if config.moe.score is Score.sigmoid else ("weight",)
    routers = [f"blocks.{layer}.feedforward.router" for layer in range(3) if config.routed(layer)]
    routing = {f"{router}.{kind}" for router in routers for kind in kinds}
    made = pieces(config)
    assert {piece.ours for piece in made} == (state.keys() | routing) - ({"head.weight"} if config.tied_head else set())
    theirs = [name for piece in made for name in piece.theirs]
    assert len(theirs) == len(set(theirs))
    for piece in made:
        if piece.ours in state and not (config.norm_place is NormPlace.both and "norm" in piece.ours):
            assert torch.equal(piece.join(piece.split(state[piece.ours])), state[piece.ours]), piece.ours


@pytest.mark.parametrize("changes", [{"qkv_bias": True}, {"bias": True, "heads": 4, "kv_heads": 4, "head_dim": 6}])
def test_a_fused_model_is_exported_as_one_that_is_not(changes: dict[str, Any]) -> None:
    """Rows of qkv: the queries of a group's heads, its keys, its values, the next group's."""
    apart, fused = modern(**changes), modern(fused_qkv=True, **changes)
    state = random_decoder(apart).state_dict()
    together = {name: value for name, value in state.items() if name.split(".")[-2] not in ("q", "k", "v")}
    for layer in range(3):
        for kind in ("weight", "bias"):
            q, k, v = (state[f"blocks.{layer}.attention.{part}.{kind}"] for part in "qkv")
            size, groups = apart.head_size, apart.key_value_heads
            each = len(q) // groups
            rows = [
                part
                for group in range(groups)
                for part in (
                    q[group * each : (group + 1) * each],
                    k[group * size : (group + 1) * size],
                    v[group * size : (group + 1) * size],
                )
            ]
            together[f"blocks.{layer}.attention.qkv.{kind}"] = torch.cat(rows)
    expected, found = state_to_huggingface(apart, state), state_to_huggingface(fused, together)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_norms_of_gemma_in_bf16_lose_nothing() -> None:
    """bf16 has 1.0078125 above 1 and nothing between; their files have what lies above 1."""
    config = gemma()
    theirs = state_to_huggingface(config, random_decoder(config).state_dict())
    name = "model.layers.1.pre_feedforward_layernorm.weight"
    theirs = {key: value.to(torch.bfloat16) for key, value in theirs.items()}
    theirs[name] = torch.full((36,), 1e-3, dtype=torch.bfloat16)
    ours = state_from_huggingface(config, theirs)["blocks.1.feedforward_norm.weight"]
    assert ours.tolist() == pytest.approx([1.001] * 36, abs=1e-5)


def test_a_bias_that_experts_are_chosen_by_is_not_lost() -> None:
    config = CASES["mixtral"]
    state = random_decoder(config).state_dict()
    with pytest.raises(ValueError, match=r"blocks\.2\.feedforward\.router\.bias"):
        state_to_huggingface(config, state)


def test_counts_of_routers_begin_with_0() -> None:
    config = CASES["mixtral"]
    state = {name: value * ("router." not in name) for name, value in random_decoder(config).state_dict().items()}
    back = state_from_huggingface(config, state_to_huggingface(config, state))
    assert back.keys() == parameter_shapes(config).keys()
    assert not any(value.any() for name, value in back.items() if name.endswith((".bias", ".load", ".dropped")))


def test_a_head_that_is_not_the_table_is_refused() -> None:
    config = CASES["llama_tied"]
    theirs = state_to_huggingface(config, random_decoder(config).state_dict())
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        state_from_huggingface(config, theirs | {"lm_head.weight": theirs["lm_head.weight"] + 1})


def test_a_weight_of_another_size_is_refused() -> None:
    config = CASES["llama"]
    theirs = state_to_huggingface(config, random_decoder(config).state_dict())
    name = "model.layers.2.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight.*\[40, 36\].*\[52, 36\]"):
        state_from_huggingface(config, theirs | {name: torch.ones(40, 36)})


def newer(rope: dict[str, Any]) -> dict[str, Any]:
    """The fields of rotary positions in transformers 5's form."""
    return {"rope_theta": None, "rope_scaling": None, "rope_parameters": rope}


@pytest.mark.parametrize("name", ["llama", "llama_linear", "llama_llama3", "llama_yarn"])
def test_both_forms_of_rotary_positions_are_read(name: str) -> None:
    written = config_to_huggingface(CASES[name])
    expected = config_from_huggingface(written)
    scaling = written["rope_scaling"] or {"rope_type": "default"}
    assert config_from_huggingface(written | newer({**scaling, "rope_theta": written["rope_theta"]})) == expected
    if written["rope_scaling"]:
        once = {field: value for field, value in scaling.items() if field != "rope_type"}
        older = {"rope_scaling": once | {"type": scaling["rope_type"]}}
        assert config_from_huggingface(written | older) == expected


def test_what_a_yarn_leaves_out_is_derived() -> None:
    """mscale and mscale_all_dim: 0.1 m ln(factor) + 1 of the one over that of the other."""
    written = config_to_huggingface(CASES["llama_yarn"])
    rope = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": True}
    found = config_from_huggingface(written | {"rope_scaling": rope}).rotary
    assert found.original_context is None
    assert found.magnitude == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert (found.beta_fast, found.beta_slow) == (32.0, 1.0)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("llama", {"attention_bias": True}, "attention_bias=True and mlp_bias=False"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"residual_multiplier": 0.2}, "residual_multiplier=0.2"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3]}}, "mrope_section"),
        ("llama", {"rope_parameters": {"rope_theta": 7.0}}, "rope_theta=10000.0 .* 7.0"),
        ("llama", newer({"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
        ("llama_yarn", newer({"rope_type": "yarn", "factor": 2.0, "truncate": False}), "truncate=False"),
        ("qwen2_windows", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_window=None"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_theta": 3.0}}}, "rope_theta"),
        ("olmo3_theta", {"rope_theta": None, "rope_parameters": {"sliding_attention": {"rope_theta": 3.0}}}, "window"),
        ("olmo3_theta", newer({"rope_theta": 3.0}), "by kind of block"),
    ],
)
def test_what_changes_the_mathematics_is_refused(name: str, change: dict[str, Any], said: str) -> None:
    written = config_to_huggingface(CASES[name])
    with pytest.raises(ValueError, match=said):
        config_from_huggingface(written | change)


def test_what_changes_nothing_is_read_over() -> None:
    written = config_to_huggingface(CASES["llama"])
    idle = {"torch_dtype": "bfloat16", "pad_token_id": 5, "use_cache": True, "qk_layernorm": False, "clip_qkv": None}
    assert config_from_huggingface(written | idle) == config_from_huggingface(written)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "intermediate_size", "rms_norm_eps"])
def test_a_size_that_is_not_there_is_named(field: str) -> None:
    written = config_to_huggingface(CASES["llama"])
    del written[field]
    with pytest.raises(ValueError, match=f"lacks {field}"):
        config_from_huggingface(written)


@pytest.mark.parametrize(
    ("config", "nearest", "keys"),
    [
        (modern(x0=True), "llama", ["model.x0=true"]),
        (modern(bias=True, qkv_bias=False), "llama", ["model.qkv_bias=false"]),
        (modern(ffn=FeedForward.relu2), "llama", ["model.ffn=relu2"]),
        (modern(rotary=Rotary(share=0.8)), "llama", ["model.rotary.share=0.8"]),
        (modern(window=7, full_every=2), "mistral", ["model.full_every=2"]),
        (modern(logit_softcap=3.0, qk_norm=QKNorm.head), "qwen3", ["model.logit_softcap=3.0"]),
        (gemma(attention_scale=0.3), "gemma2", ["model.attention_scale=0.3"]),
        (gemma(heads=5, kv_heads=1), "gemma2", ["model.heads=5"]),
        (gemma(embedding_scale=None), "gemma2", ["model.embedding_scale=1.0"]),
        (
            modern(moe=MoE(experts=4, bias_rate=0.1, scale=2.5)),
            "mixtral",
            ["model.moe.scale=2.5", "model.moe.bias_rate=0.1"],
        ),
        (modern(moe=MoE(experts=4, shared=1)), "mixtral", ["model.moe.shared=1"]),
        (tiny(fused_qkv=False, norm=Norm.rmsnorm), "gpt2", ["model.fused_qkv=false", "model.norm=rmsnorm"]),
        (tiny(window=4), "gpt2", ["model.window=4"]),
    ],
)
def test_what_no_family_has_is_named(config: ModelConfig, nearest: str, keys: list[str]) -> None:
    with pytest.raises(ValueError, match=f"nearest, {nearest},") as raised:
        config_to_huggingface(config)
    assert set(str(raised.value).partition("counterpart of ")[2].split(", ")) == set(keys)


def test_steps_for_further_tokens_lie_behind_the_layers() -> None:
    """As in DeepSeek's files, which hold table and head twice, and bitwise both ways."""
    config = deepseek(mtp=2)
    state = random_decoder(config).state_dict()
    theirs = state_to_huggingface(config, state)
    further = {name.partition(".layers.4.")[2] for name in theirs if name.startswith("model.layers.4.")}
    assert further > {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert further > {"self_attn.kv_b_proj.weight", "mlp.experts.7.up_proj.weight", "mlp.gate.e_score_correction_bias"}
    copies = {
        "model.layers.3.embed_tokens.weight": theirs["model.embed_tokens.weight"],
        "model.layers.3.shared_head.head.weight": theirs["lm_head.weight"],
    }
    back = state_from_huggingface(config, theirs | copies)
    again = state_to_huggingface(config, back)
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], value) for name, value in theirs.items())
    assert config_from_huggingface(config_to_huggingface(config)).mtp == 2


def test_what_acts_in_training_alone_is_no_obstacle() -> None:
    plain = config_to_huggingface(modern(moe=MoE(experts=5)))
    moe = MoE(experts=5, balance=Balance.step, z_loss=0.1, capacity_factor=1.5)
    assert config_to_huggingface(modern(dropout=0.1, z_loss=0.1, moe=moe)) == plain
