"""Folders of Hugging Face models: read into a model on any layout, and written from a checkpoint. Both go through the
weights one after the other, so that no model is held twice."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.families.family import TRAINING, flat
from models.huggingface import Piece, config_from_huggingface, config_to_huggingface, pieces, read_state
from models.shapes import parameter_shapes
from parallel.apply import Spread
from parallel.local import fill
from parallel.values import check_values
from training.adopt import set_key
from training.checkpoint import tensors
from training.checkpoint.folders import Saved
from training.config import Config, TokenizerKind
from training.files import write_json, write_text
from training.keys import show
from training.ranks import Ranks
from training.refusal import Problem, Refusal
from training.tokenizers import Tokenizer, build, tokenizer_json
from training.unresolved import to_write

SHARD_BYTES = 5 * 10**9  # of one file, as transformers has it
INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def weight_files(folder: Path) -> list[Path]:
    """Those of the index, else the one of that name, else all there are: a release may have others beside."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise ValueError(f"{INDEX} has no weight_map")
        names = {str(name) for name in index["weight_map"].values()}
        if outside := sorted(name for name in names if Path(name).name != name):
            raise ValueError(f"{INDEX} names {outside[0]}, and its files lie beside it")
        return sorted(folder / name for name in names)
    single = folder / "model.safetensors"
    found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"{folder} has no *.safetensors")
    return found


class Weights:
    """The safetensors of a folder. Raises FileNotFoundError where there are none, ValueError where one is damaged."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.files: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path.name} is damaged, or no safetensors: {error}") from error
            names = list(file.keys())
            if twice := sorted(self.files.keys() & set(names)):
                raise ValueError(f"{path.name} has {twice[0]}, which another file has too")
            self.files |= dict.fromkeys(names, file)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self.files[name].get_tensor(name)
        return tensor


def adopt_folder(config: Config, given: frozenset[str]) -> list[Problem]:
    """Sets the model's shape and the tokenizer to those of model.init_from. Keys and presets that were given stay, and
    are a problem where they are another model."""
    assert config.model.init_from is not None
    folder = Path(config.model.init_from)
    try:
        theirs = config_from_huggingface(read_json(folder / "config.json"))
    except (FileNotFoundError, NotADirectoryError):
        instead = "a folder with config.json and *.safetensors; python -m scripts.import_hf fetches one from the hub"
        return [Problem("model.init_from", folder, "has no config.json", instead)]
    except (ValueError, OSError) as error:
        return [Problem("model.init_from", folder, str(error), "a model of a family that docs/models.md lists")]
    problems = []
    now = flat(config.model)
    for key, value in flat(theirs).items():
        name = f"model.{key}"
        if key in TRAINING or now[key] == value:
            continue
        if given & {"model", name}:
            reason = f"the model of {folder} has {show(value)}"
            problems.append(Problem(name, show(now[key]), reason, to_write(name, getattr(value, "name", value))))
        else:
            _set(config.model, key, value)
    if any(name.startswith("tokenizer") for name in given):
        return problems
    if not (folder / "tokenizer.json").is_file():
        if config.tokenizer.kind is not TokenizerKind.auto:
            return problems
        instead = "tokenizer=huggingface tokenizer.file=path/to/tokenizer.json, or tokenizer=bytes for ids of its own"
        return [*problems, Problem("tokenizer", "", f"{folder} has no tokenizer.json, and none is given", instead)]
    config.tokenizer.kind, config.tokenizer.file = TokenizerKind.huggingface, str(folder / "tokenizer.json")
    config.tokenizer.end_of_text = _end_of_text(folder)
    return problems


def _set(owner: Any, key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        owner = getattr(owner, section)
    setattr(owner, last, value)


def _end_of_text(folder: Path) -> str | None:
    path = folder / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    return token["content"] if isinstance(token, dict) else token


def load_folder(spread: Spread, folder: Path) -> None:
    """Fills a model with the weights of a folder, each rank its part. A collective; raises Refusal where they do not
    fit, WrongValues where they cannot be."""
    model = spread.model
    left = {model.copies.get(name, name): parameter for name, parameter in model.named_parameters()}
    try:
        weights = Weights(folder)
        for name, value in read_state(model.config, weights.files, weights.read, wanted=set(left)):
            fill(left.pop(name), value)
        if left:
            raise ValueError(f"it has nothing for {', '.join(left)}")
    except (ValueError, OSError) as error:
        instead = "the folder of a whole model in safetensors, with the config.json it was saved with"
        raise Refusal([Problem("model.init_from", folder, str(error), instead)]) from error
    check_values(model, spread.mesh, str(folder))


# ---- from a checkpoint


def model_of(saved: Saved) -> ModelConfig:
    """The shape of a checkpoint's model."""
    config = Config()
    for key, value in saved.info["config"].items():
        if key.startswith("model."):
            set_key(config, key, value)
    return config.model


def tokenizer_of(saved: Saved) -> Tokenizer:
    """The tokenizer of a checkpoint, from the files it was made of. Raises Refusal."""
    config = Config()
    for key, value in saved.info["config"].items():
        if key.startswith("tokenizer."):
            set_key(config, key, value)
    tokenizer = build(config.tokenizer)
    if tokenizer.fingerprint != saved.info["tokenizer"]["fingerprint"]:
        reason = f"is not the one {saved.folder} was trained with"
        raise Refusal([Problem("tokenizer", tokenizer.name, reason, "the same files where they were")])
    return tokenizer


def export_problem(model: ModelConfig) -> str:
    """Why transformers has no model like this; "" where it has."""
    try:
        pieces(model)
    except ValueError as error:
        return str(error)
    return ""


def export(saved: Saved, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Writes a checkpoint's model as transformers reads it, in a folder that is there when it is whole.

    dtype: of the weights; None: as they were saved. Raises ValueError for a model that no family can express, and
    OSError."""
    model = model_of(saved)
    stored = tensors.describe(saved.folder)
    dtype = stored["model.embed.tokens.weight"].dtype if dtype is None else dtype
    _refuse_biases(saved, model)
    beside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    _write_weights(saved, model, beside, dtype)
    end = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    about = config_to_huggingface(model) | {"dtype": str(dtype).removeprefix("torch.")} | end
    write_json(beside / "config.json", about)
    write_json(beside / "generation_config.json", end)
    content, name = tokenizer_json(tokenizer)
    write_text(beside / "tokenizer.json", content)
    about_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.context}
    write_json(beside / "tokenizer_config.json", about_tokenizer | {"bos_token": name, "eos_token": name})
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


@dataclass(frozen=True)
class Exports:
    """Where a run writes its permanent checkpoints for transformers too."""

    folder: Path
    tokenizer: Tokenizer
    ranks: Ranks

    def write(self, saved: Saved) -> None:
        """Rank 0 does it; what fails is raised on every rank."""
        self.ranks.first_does(lambda: export(saved, self.tokenizer, self.folder / saved.folder.name))


def _refuse_biases(saved: Saved, model: ModelConfig) -> None:
    """Routers of most families choose without a bias."""
    made = {piece.ours for piece in pieces(model)}
    biases = [name for name in parameter_shapes(model) if name.endswith(".router.bias") and name not in made]
    if moved := [name for name, value in _read(saved, biases).items() if value.any()]:
        raise ValueError(f"transformers' routers have no bias here, and {', '.join(moved)} is not 0")


def _write_weights(saved: Saved, model: ModelConfig, folder: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    shards = list(_shards(model, dtype))
    index: dict[str, str] = {}
    total = 0
    for place, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{place:05}-of-{len(shards):05}.safetensors"
        values = _read(saved, [piece.ours for piece in shard])
        theirs: dict[str, Tensor] = {}
        for piece in shard:
            value = values.pop(piece.ours)
            if piece.ours in ("embed.tokens.weight", "head.weight"):
                value = value[: model.vocab_size]
            parts = zip(piece.theirs, piece.split(value), strict=True)
            theirs |= {part: of.to(dtype).contiguous().clone() for part, of in parts}
        save_file(theirs, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(theirs, name)
        total += sum(value.nbytes for value in theirs.values())
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _shards(model: ModelConfig, dtype: torch.dtype) -> Iterator[list[Piece]]:
    """The pieces of each file."""
    shapes, shard, size = parameter_shapes(model), list[Piece](), 0
    for piece in pieces(model):
        more = torch.Size(shapes[piece.ours]).numel() * dtype.itemsize
        if shard and size + more > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(piece)
        size += more
    yield shard


def _read(saved: Saved, names: list[str]) -> dict[str, Tensor]:
    stored = tensors.describe(saved.folder)
    state = {f"model.{name}": torch.empty(0) for name in names}
    for name in state:
        state[name] = torch.empty(stored[name].shape, dtype=stored[name].dtype)
    if state:
        tensors.read(saved.folder, state, Ranks.alone())
    return {name.removeprefix("model."): value for name, value in state.items()}
