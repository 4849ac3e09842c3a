"""A checkpoint's model and tokenizer, ready to be used beside a run."""

from dataclasses import dataclass

from parallel.apply import Spread
from parallel.precision import settle as settle_precision
from training.adopt import adopt, load_problems
from training.build import spread_model
from training.check import check, settle
from training.checkpoint.contents import load_model
from training.checkpoint.folders import Saved
from training.checkpoint.store import Store, find_intact
from training.compose import compose
from training.config import Config
from training.keys import quoted
from training.place import Place, connect, find_place
from training.ranks import Ranks
from training.refusal import Problem, refuse
from training.run import tokenizer_problems
from training.tokenizers import Tokenizer, build


@dataclass
class Loaded:
    config: Config
    place: Place
    saved: Saved
    spread: Spread
    tokenizer: Tokenizer


def load(checkpoint: str, words: list[str]) -> Loaded:
    """checkpoint: a run's folder (its newest) or a checkpoint's; words: overrides of the config that it is used with.
    Connects the ranks. Raises Refusal."""
    config, chosen = compose(["eval_only=true", f"checkpoint.load={quoted(checkpoint)}", *words])
    world = settle(config, chosen)
    if config.check_only:
        refuse([Problem("check_only", True, "is for train.py; a checkpoint is used here", "check_only=false")])
    saved = find_intact(checkpoint, Ranks.alone())
    refuse(adopt(config, saved, chosen.given))
    refuse(load_problems(config, saved))
    refuse(check(config, world))
    place = find_place(config, world)
    tokenizer = build(config.tokenizer)
    refuse(tokenizer_problems(saved, tokenizer))
    if config.model.vocab_size is None:
        config.model.vocab_size = tokenizer.vocab_size
    connect(config, place)
    spread = spread_model(config, place, settle_precision(config.precision, place.device, place.ranks.all))
    load_model(Store(saved.folder.parent, place.ranks), saved, spread)
    return Loaded(config, place, saved, spread, tokenizer)
