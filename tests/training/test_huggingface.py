"""Folders of Hugging Face models, with transformers as the oracle: read on every layout, written from checkpoints."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config import FeedForward, ModelConfig, MoE, Norm, Position
from models.decoder import Decoder
from models.huggingface import config_to_huggingface, read_state, state_to_huggingface
from parallel.apply import parallelize
from parallel.config import ActivationsConfig, CompileConfig, Dtype, ParallelConfig, Strategy
from parallel.mesh import build_mesh
from tests.models.build import largest_difference, random_decoder, random_tokens, tiny
from tests.ranks import run_ranks
from tests.runs.drive import REFUSED, Runs
from training import huggingface
from training.check import settle
from training.checkpoint.contents import model_state
from training.checkpoint.store import Store
from training.compose import compose
from training.config import Config, TokenizerKind, leaves
from training.files import write_text
from training.huggingface import INDEX, Weights, export, export_problem, load_folder
from training.ranks import Ranks
from training.refusal import Refusal
from training.tokenizers import Bytes, HuggingFace, _gpt2, tokenizer_json

CPU = torch.device("cpu")
MODELS: dict[str, ModelConfig] = {
    "gpt2": tiny(heads=4, dim=32),
    "llama": tiny(
        heads=4,
        dim=32,
        kv_heads=2,
        layers=3,
        bias=False,
        norm=Norm.rmsnorm,
        position=Position.rotary,
        ffn=FeedForward.swiglu,
        ffn_dim=50,
        fused_qkv=False,
        tied_head=False,
    ),
}
OF_ANOTHER_TYPE: list[tuple[str, Any, str]] = [
    ("model_type", ["llama"], "model_type=..llama"),
    ("hidden_size", None, "model.dim=None"),
    ("num_hidden_layers", "3", "model.layers='3'"),
    ("num_hidden_layers", True, "model.layers=True"),
    ("num_hidden_layers", 2.5, "model.layers=2.5"),
    ("rms_norm_eps", "1e-5", "model.norm_eps='1e-5'"),
    ("max_position_embeddings", None, "model.context=None"),
    ("tie_word_embeddings", "false", "model.tied_head='false'"),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": "a"}, "another type"),
]
LAYOUTS = {
    "single": ParallelConfig(Strategy.single),
    "fsdp2": ParallelConfig(Strategy.fsdp2, dp_shard=2),
    "tp": ParallelConfig(Strategy.single, tp=2),
    "pp": ParallelConfig(Strategy.single, pp=2),
    "fsdp2 x tp": ParallelConfig(Strategy.fsdp2, dp_shard=2, tp=2),
}


def save_theirs(config: ModelConfig, folder: Path) -> Any:
    """A model of transformers with random weights, saved by it in several files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    about = config_to_huggingface(config)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**about), attn_implementation="eager")
    ours = random_decoder(config)
    model.load_state_dict(state_to_huggingface(config, ours.state_dict()))
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model.eval()


def logits_on(parallel: ParallelConfig, config: ModelConfig, folder: Path, tokens: Tensor) -> Tensor:
    mesh = None if parallel.strategy is Strategy.single and not parallel.on_mesh else build_mesh(parallel, CPU)
    options = CompileConfig(), ActivationsConfig()
    spread = parallelize(config, mesh, parallel, Dtype.fp32, Dtype.fp32, *options, seed=0, device=CPU)
    load_folder(spread, folder)
    spread.model.eval()
    with torch.no_grad():
        return spread.forward(tokens=tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", MODELS)
def test_a_folder_is_read_on_every_layout(family: str, layout: str, tmp_path: Path) -> None:
    config, parallel = MODELS[family], LAYOUTS[layout]
    theirs = save_theirs(config, tmp_path)
    tokens = random_tokens(config, 4, 16)
    with torch.no_grad():
        expected = theirs(tokens).logits
    ranks = parallel.dp_shard * parallel.tp * parallel.pp
    for found in run_ranks(ranks, logits_on, parallel, config, tmp_path, tokens, group=ranks > 1):
        assert largest_difference(found, expected) <= 1e-4


def saved(model: Decoder, folder: Path) -> Any:
    """A checkpoint of a run with this model."""
    config = Config(model=model.config)
    about = {"config": leaves(config), "tokenizer": {"name": "bytes", "fingerprint": Bytes.fingerprint}}
    return Store(folder, Ranks.alone()).save(3, model_state(model), about)


@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 10_000])
@pytest.mark.parametrize("family", MODELS)
def test_an_export_is_our_model_in_transformers(
    family: str, shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    monkeypatch.setattr(huggingface, "SHARD_BYTES", shard_bytes)
    config, folder = MODELS[family], tmp_path / "exported"
    model = random_decoder(config).eval()
    export(saved(model, tmp_path / "checkpoints"), Bytes(), folder)
    assert (folder / "model.safetensors.index.json").exists() == (shard_bytes < 10**6)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = random_tokens(config, 2, 16)
    with torch.no_grad():
        ours: Any = model(tokens=tokens)
        assert largest_difference(theirs(tokens).logits, ours) <= 1e-4
    assert theirs.config.vocab_size == 67
    assert AutoTokenizer.from_pretrained(folder).encode("sea ☕") == list("sea ☕".encode())
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 256

    (again,) = run_ranks(1, logits_on, LAYOUTS["single"], config, folder, tokens)
    assert torch.equal(again, ours)


def test_biases_that_their_routers_lack_are_not_lost(tmp_path: Path) -> None:
    model = random_decoder(replace(MODELS["llama"], moe=MoE(experts=4)))
    with pytest.raises(ValueError, match=r"feedforward\.router\.bias"):
        export(saved(model, tmp_path / "checkpoints"), Bytes(), tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_an_export_in_bf16(tmp_path: Path) -> None:
    export(saved(random_decoder(MODELS["gpt2"]), tmp_path / "c"), Bytes(), tmp_path / "exported", torch.bfloat16)
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("tokenizer", [Bytes(), _gpt2("tokenizer.kind")], ids=lambda of: of.name)
def test_a_tokenizer_keeps_its_ids(tokenizer: Any) -> None:
    from tokenizers import Tokenizer as Rust

    content, end = tokenizer_json(tokenizer)
    theirs = Rust.from_str(content)
    for text in ("Hello, I'm a language model,", "naïve café ☕ 漢字 \n\n\t tab", "x" * 70 + "   y 1234567 don't"):
        assert theirs.encode(text).ids == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.token_to_id(end) == tokenizer.end_of_text
    assert tokenizer_json(HuggingFace(content, tokenizer.end_of_text)) == (content, end)


def test_the_shape_is_the_folders(tmp_path: Path) -> None:
    save_theirs(MODELS["llama"], tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(Bytes())[0])
    config, chosen = compose([f"model.init_from={tmp_path}", "model.vocab_multiple=1"])
    settle(config, chosen)
    assert config.tokenizer.kind is TokenizerKind.huggingface
    assert config.tokenizer.file == str(tmp_path / "tokenizer.json")
    model, wanted = config.model, MODELS["llama"]
    for name in ("layers", "dim", "heads", "kv_heads", "ffn_dim", "context", "vocab_size", "norm", "ffn", "position"):
        assert getattr(model, name) == getattr(wanted, name), name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("model.dim=64", "model.dim=64: the model of"),
        ("model=gpt2_124m", "model.layers=12"),
        ("sequence_length=64", "instead: sequence_length=16"),
        ("seed=1", "instead: the tokenizer of"),
    ],
)
def test_what_is_given_must_be_the_folders(tmp_path: Path, words: str, told: str) -> None:
    save_theirs(MODELS["gpt2"], tmp_path)
    config, chosen = compose([f"model.init_from={tmp_path}", "tokenizer=bytes", *words.split()])
    with pytest.raises(Refusal) as refusal:
        settle(config, chosen)
    assert told in str(refusal.value) and "or model.context" not in str(refusal.value)


def test_folders_that_are_none(tmp_path: Path) -> None:
    theirs = config_to_huggingface(MODELS["llama"])
    for content, told in [
        (None, "has no config.json"),
        ('{"model_type": "bert"}', "model_type=bert"),
        ('["llama"]', "is no dictionary"),
        *((json.dumps(theirs | {name: value}), told) for name, value, told in OF_ANOTHER_TYPE),
        (json.dumps({"model_type": "gemma2", "num_attention_heads": 4}), "lacks num_hidden_layers"),
    ]:
        if content is not None:
            (tmp_path / "config.json").write_text(content)
            (tmp_path / "tokenizer.json").touch()
        config, chosen = compose([f"model.init_from={tmp_path}"])
        with pytest.raises(Refusal, match=told):
            settle(config, chosen)


def test_without_a_tokenizer_none_is_guessed(tmp_path: Path) -> None:
    save_theirs(MODELS["llama"], tmp_path)
    config, chosen = compose([f"model.init_from={tmp_path}", "model.vocab_multiple=1"])
    with pytest.raises(Refusal, match=r"has no tokenizer\.json"):
        settle(config, chosen)


def test_the_folders_token_ends_a_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_to_huggingface(MODELS["llama"])))
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(Bytes())[0])
    for told in ("<|end|>", {"content": "<|end|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": told}))
        config, chosen = compose([f"model.init_from={tmp_path}", "model.vocab_multiple=1"])
        settle(config, chosen)
        assert config.tokenizer.end_of_text == "<|end|>"


def change(folder: Path, name: str, value: Tensor) -> None:
    """One weight of a file."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: value.contiguous()}, path, {"format": "pt"})


def cut(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut in its header": (lambda folder: cut(folder, 100), "model.safetensors is damaged"),
    "cut in its values": (lambda folder: cut(folder, 30_000), "model.safetensors is damaged"),
    "empty": (lambda folder: cut(folder, 0), "model.safetensors is damaged"),
    "of another size": (lambda folder: change(folder, Q, torch.ones(32, 31)), r"q_proj.weight \[32, 31\].*cannot be"),
    "quantized": (lambda folder: change(folder, Q, torch.ones(32, 32, dtype=torch.int8)), "torch.int8: quantized"),
    "of no index": (lambda folder: write_text(folder / INDEX, "{}"), "no weight_map"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights(damage: str, tmp_path: Path) -> None:
    """q, k and v of the file are one matrix here."""
    config = replace(MODELS["llama"], fused_qkv=True)
    state = state_to_huggingface(config, random_decoder(config).state_dict())
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    act, told = DAMAGES[damage]
    act(tmp_path)
    with pytest.raises(ValueError, match=told):
        list(read_state(config, state, Weights(tmp_path).read))


def test_files_beside_the_weights_are_not_read(tmp_path: Path) -> None:
    """Of a release in another format, or left of an older save."""
    for name, value in (("consolidated", 2.0), ("model", 1.0)):
        save_file({"a": torch.full((2,), value)}, tmp_path / f"{name}.safetensors")
    assert Weights(tmp_path).read("a").tolist() == [1.0, 1.0]
    save_file({"a": torch.full((2,), 3.0)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert Weights(tmp_path).read("a").tolist() == [3.0, 3.0]
    (tmp_path / INDEX).unlink()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has a, which another file has too"):
        Weights(tmp_path)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    save_theirs(MODELS["gpt2"], tmp_path)
    next(iter(tmp_path.glob("model-00002*"))).unlink()
    with pytest.raises(Exception, match="model-00002"):
        run_ranks(1, logits_on, LAYOUTS["single"], MODELS["gpt2"], tmp_path, random_tokens(MODELS["gpt2"], 1, 4))


def test_an_index_that_names_a_file_elsewhere_is_not_followed(tmp_path: Path) -> None:
    """Names of model.safetensors.index.json that lead out of its folder are refused."""
    save_theirs(MODELS["gpt2"], tmp_path / "theirs")
    (tmp_path / "elsewhere").mkdir()
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        file.rename(tmp_path / "elsewhere" / file.name)
    path = tmp_path / "theirs" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {name: f"../elsewhere/{file}" for name, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names \.\./elsewhere/"):
        huggingface.Weights(tmp_path / "theirs")


def test_a_model_without_a_family_is_not_exported(runs: Runs) -> None:
    assert "model.x0=true" in export_problem(tiny(x0=True))
    (outcome,) = runs.start("no-family", "checkpoint.export_hf=true model.x0=true")
    assert outcome.code == REFUSED and "model.x0=true" in outcome.said and "checkpoint.export_hf=false" in outcome.said


def test_a_run_writes_its_permanent_checkpoints(runs: Runs) -> None:
    runs.finish("exports", "checkpoint.export_hf=true steps=6 checkpoint.permanent_every=3 evals=none")
    folder = runs.folder("exports") / "huggingface"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000003", "step-000006"]
    runs.finish("goes-on", f"model.init_from={folder / 'step-000006'} steps=4 schedule.warmup_steps=1 evals=none")
    runs.finish("loads", f"checkpoint.load={runs.checkpoint('exports', 6)} steps=4 schedule.warmup_steps=1 evals=none")
    assert runs.records("goes-on") == runs.records("loads")
