"""From a command line to a Config. No torch here.

The words are checked before Hydra composes (training/command.py). Hydra then lays the presets and the words over the
schema's defaults, as one tree without types; every value of it, from whichever file or word it came, is held against
the schema (training/reading.py). Hydra's own check of types is not used: it stops at the first problem, takes 1.5 for a
whole number, and lets + add any key."""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from itertools import islice, product
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from training.check import settle
from training.command import CONFIGS, Presets, jobs_of, open_presets, override_problems, parse_flags, sweeps
from training.config import Config, nested
from training.keys import keys, open_key
from training.reading import Reader, typed_keys
from training.refusal import Problem, Refusal
from training.resolve import Chosen

JOBS_AT_MOST = 50  # jobs of a sweep that are composed and checked before the first starts
FIRST_RANK_PATIENCE = 10.0  # seconds in which the first rank of a host should have told why a run is refused
# Ways to say one thing: the command line's wins over a file's, and any other over what config.yaml itself says.
ALTERNATIVES = (("steps", "tokens", "epochs"), ("batch_sequences", "batch_tokens"))
# What Hydra says of + and of its absence before a key of an open dictionary, with the word to write.
OPEN = re.compile(
    r"Could not (append to config|override).*?(?:prefix: '|config use )([^\n]+?)'?$", re.DOTALL | re.MULTILINE
)
UNREADABLE = (HydraException, OmegaConfBaseException, yaml.YAMLError)


def _defaults() -> dict[str, Any]:
    """The schema's defaults as a tree of plain values, enums as their names."""
    defaults = {name: key.default for name, key in keys().items()}
    return nested({name: value.name if isinstance(value, Enum) else value for name, value in defaults.items()})


ConfigStore.instance().store(name="espalier_schema", node=_defaults())


@contextmanager
def refusing() -> Iterator[None]:
    """Ends the process with 2 and a message, without a traceback, where a run is refused or Hydra cannot compose its
    config. Under torchrun the first rank of a host speaks for the others, which speak only if it has not."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us as they are; else Hydra prints them and exits with 1
    try:
        yield
    except (Refusal, *UNREADABLE) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(FIRST_RANK_PATIENCE)  # torchrun ends all ranks when one ends: let it be the one that speaks
        print(error if isinstance(error, Refusal) else Refusal([_unreadable(error)]), file=sys.stderr, flush=True)
        sys.exit(2)


def check_command(argv: list[str]) -> None:
    """Looks at the command line (without the program's name) before Hydra does. Raises Refusal with all its problems;
    for a sweep also with those of its jobs, before the first of them has run for hours."""
    flags, problems = parse_flags(argv)
    if not problems and not flags.experimental_rerun:
        with open_presets(flags) as presets:
            problems = override_problems(flags.overrides, presets, sweeps(flags))
            if sweeps(flags):
                problems = problems or _sweep_problems(flags, presets)
            elif problems:
                problems = [_narrowed(problem, flags, presets) for problem in problems]
                problems += _problems_behind(problems, flags, presets)
    if problems:
        raise Refusal(problems)


def compose(argv: list[str]) -> tuple[Config, Chosen]:
    """The config of a command line, as train.py gets it from Hydra. Raises Refusal."""
    check_command(argv)
    flags, _ = parse_flags(argv)
    with open_presets(flags) as presets:
        return _compose(flags, [*presets.search, *flags.overrides])


def from_hydra(composed: DictConfig) -> tuple[Config, Chosen]:
    """The config in a function decorated by hydra.main. Raises Refusal."""
    return _read(composed, HydraConfig.get())


def _compose(flags: argparse.Namespace, words: list[str]) -> tuple[Config, Chosen]:
    try:
        tree = hydra_compose(flags.config_name or "config", words, return_hydra_config=True)
        hydra = tree.hydra
        with open_dict(tree):
            del tree["hydra"]
        return _read(tree, hydra)
    except UNREADABLE as error:
        raise Refusal([_unreadable(error)]) from error


def _read(tree: DictConfig, hydra: Any) -> tuple[Config, Chosen]:
    reader = Reader(hydra)
    config = reader.read(Config, tree)
    _let_one_win(config, typed_keys(hydra))
    groups = {group: preset for group, preset in hydra.runtime.choices.items() if not group.startswith("hydra")}
    job = int(hydra.job.num) if hydra.mode is not None and hydra.mode.name == "MULTIRUN" else None
    chosen = Chosen(groups, job, reader.unresolved, frozenset(typed_keys(hydra)))
    if reader.problems:
        raise Refusal(reader.problems + _unrelated(_unsettled(config, chosen), reader.problems))
    return config, chosen


def _problems_behind(found: list[Problem], flags: argparse.Namespace, presets: Presets) -> list[Problem]:
    """What would be refused next, were the words mended as it is suggested (or left out): all is told at once."""
    words, guessed = [], []
    for word in flags.overrides:
        wrong = override_problems([word], presets, sweep=False)
        mended = wrong[0].instead.partition(" or ")[0] if wrong else word
        if not override_problems([mended], presets, sweep=False):
            words.append(mended)
            several = bool(wrong) and " or " in wrong[0].instead
            guessed += [mended.partition("=")[0]] if several else []
    return [problem for problem in _unrelated(_told(words, flags, presets), found) if problem.key not in guessed]


def _narrowed(problem: Problem, flags: argparse.Namespace, presets: Presets) -> Problem:
    """Of two whole numbers to write for one that is none, those that no rule between keys refuses; else an example."""
    name, ways = problem.key, problem.instead.split(" or ")
    if len(ways) == 1 or not all(way.startswith(f"{name}=") for way in ways):
        return problem
    others = [word for word in flags.overrides if word.partition("=")[0] != name]
    legal = [way for way in ways if all(told.key != name for told in _told([*others, way], flags, presets))]
    return replace(problem, instead=" or ".join(legal) or f"{name}={keys()[name].example()}")


def _told(words: list[str], flags: argparse.Namespace, presets: Presets) -> list[Problem]:
    """What is wrong with a config of words that can be read."""
    try:
        return _unsettled(*_compose(flags, [*presets.search, *words]))
    except Refusal as refusal:
        return refusal.problems


def _unsettled(config: Config, chosen: Chosen) -> list[Problem]:
    try:
        settle(config, chosen)
    except Refusal as refusal:
        return refusal.problems
    return []


def _unrelated(problems: list[Problem], wrong: list[Problem]) -> list[Problem]:
    """Those that do not speak of a key that is itself wrong, or of its group: they may be gone when it is mended."""
    keys = [problem.key.lstrip("+~") for problem in wrong]
    names, groups = "|".join(map(re.escape, keys)), {key.rpartition(".")[0] for key in keys}
    named = re.compile(rf"(?<![\w.])({names})(?![\w.])")
    return [problem for problem in problems if problem.key not in groups and not named.search(str(problem))]


def _let_one_win(config: Config, typed: set[str]) -> None:
    """Leaves one of two ways to say one thing. Where both are typed, or both in a file, both stay and check tells."""
    embedded = yaml.safe_load((CONFIGS / "config.yaml").read_text())
    for names in ALTERNATIVES:
        given = [name for name in names if getattr(config, name) is not None]
        elsewhere = [name for name in given if getattr(config, name) != embedded.get(name)]
        stays = [name for name in given if name in typed] or elsewhere or given
        for name in given:
            if name not in stays:
                setattr(config, name, None)


def _sweep_problems(flags: argparse.Namespace, presets: Presets) -> list[Problem]:
    """What is wrong with the jobs of a sweep. Jobs that another launcher starts elsewhere, and those that a sweeper has
    yet to choose, are checked when they start."""
    overrides = OverridesParser.create(config_loader=presets.loader).parse_overrides(flags.overrides)
    if any(override.key_or_group in ("hydra/launcher", "hydra/sweeper") for override in overrides):
        return []
    for override in overrides:
        if override.is_interval_sweep():
            name, _, typed = (override.input_line or "").partition("=")
            return [Problem(name, typed, "an interval needs a sweeper that chooses from it", f"values: {name}=1,2")]
    values = [
        jobs_of(override, presets, JOBS_AT_MOST) for override in overrides if override.key_or_group != "hydra.mode"
    ]
    problems: dict[str, Problem] = {}
    for job, words in enumerate(islice(product(*values), JOBS_AT_MOST)):
        try:
            config, chosen = _compose(flags, [*presets.search, *words])
            settle(config, replace(chosen, job=job))
        except Refusal as refusal:
            problems |= {str(problem): problem for problem in refusal.problems}
    return list(problems.values())


def _unreadable(error: Exception) -> Problem:
    """What Hydra or YAML could not read."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return Problem(f"{mark.name}:{mark.line + 1}", "", f"is not YAML: {error.problem}", "lines such as `lr: 0.001`")
    found = OPEN.match(str(error))
    name, _, typed = found[2].lstrip("+").partition("=") if found else ("", "", "")
    if found and open_key(name):
        there, word = found[1] == "append to config", found[2]
        if there:
            return Problem(f"+{name}", typed, "the key is there already; + is for new ones", word)
        reason = "no preset sets this key"
        return Problem(name, typed, reason, f"{word} if its class takes it, else a key that the preset sets")
    cause = error.__cause__ if isinstance(error.__cause__, UNREADABLE) else None
    said = " ".join(line.strip() for line in f"{error}\n{cause or ''}".splitlines() if line.strip())
    return Problem("config", "", said, "`python train.py --info defaults` shows what is read")
