"""Whether what a config names is there: files of text, a checkpoint, a tokenizer. No torch here."""

from collections.abc import Callable

from training.adopt import load_problems
from training.checkpoint import folders
from training.config import Config, DataKind, TokenizerKind
from training.data import corpus
from training.folder import RunFolder
from training.refusal import Problem, Refusal


def input_problems(config: Config) -> list[Problem]:
    """What would be refused when it is opened. With check_only the tokenizer is built too, which may download it."""
    problems: list[Problem] = []
    if config.checkpoint.load is not None and (config.eval_only or not _goes_on(config)):
        found = _found(config.checkpoint.load)
        if isinstance(found, Problem):
            problems.append(found)
        elif not config.eval_only:
            problems += load_problems(config, found)
    if config.eval_only:
        return problems  # text and tokenizer are the checkpoint's
    if config.data.kind is DataKind.files and config.data.files:
        problems += _refused(lambda: corpus.sources(config.data))
    if config.check_only and config.tokenizer.kind is not TokenizerKind.auto:
        from training.tokenizers import build  # takes a moment

        problems += _refused(lambda: build(config.tokenizer))
    return problems


def _found(load: str) -> folders.Saved | Problem:
    try:
        return folders.find(load)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        return Problem("checkpoint.load", load, reason, "a folder or URL that can be read")


def _goes_on(config: Config) -> bool:
    """Whether the run has a checkpoint of its own, so that it no longer needs the one it started from."""
    assert config.name is not None
    try:
        return bool(folders.whole(RunFolder(config.out, config.name, config.checkpoint.dir).checkpoints))
    except OSError:
        return True  # the run that cannot read it says why


def _refused(action: Callable[[], object]) -> list[Problem]:
    try:
        action()
    except Refusal as refusal:
        return refusal.problems
    return []
