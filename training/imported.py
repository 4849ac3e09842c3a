"""A Hugging Face model as a checkpoint."""

from pathlib import Path

from parallel.precision import settle as settle_precision
from parallel.values import WrongValues
from training.build import describe_run, spread_model
from training.check import settle
from training.checkpoint.contents import model_state
from training.checkpoint.store import Store
from training.compose import compose
from training.huggingface import load_folder
from training.keys import quoted
from training.place import connect, disconnect, find_place
from training.refusal import Problem, Refusal, refuse
from training.tokenizers import build


def save_as_checkpoint(source: Path, words: list[str]) -> Path:
    """Loads the weights of a folder on the layout of the words and saves them as step 0 of a run of their name, which
    is the folder's where none is given. Returns the run's folder. Raises Refusal."""
    named = [] if any(word.startswith("name=") for word in words) else [f"name={quoted(source.resolve().name)}"]
    config, chosen = compose([f"model.init_from={quoted(str(source))}", *named, *words])
    world = settle(config, chosen)
    for key in ("check_only", "eval_only"):
        if getattr(config, key):
            refuse([Problem(key, True, "is for train.py; a model is imported here", f"{key}=false")])
    place = find_place(config, world)
    if place.folder.checkpoints.exists():
        reason = f"{place.folder.checkpoints} has checkpoints already"
        raise Refusal([Problem("name", config.name, reason, "name=<another>")])
    tokenizer = build(config.tokenizer)
    connect(config, place)
    spread = spread_model(config, place, settle_precision(config.precision, place.device, place.ranks.all))
    try:
        load_folder(spread, source)
    except WrongValues as error:
        raise Refusal([Problem("source", source, str(error), "the folder of a whole model")]) from error
    about = {"tokens": 0, "skipped_steps": 0, "kind": "imported", "permanent": True}
    info = about | {"step": 0} | describe_run(config, chosen, place, tokenizer, "")
    Store(place.folder.checkpoints, place.ranks).save(0, model_state(spread.model), info)
    disconnect()
    return place.folder.path
