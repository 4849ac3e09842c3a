"""The words of a command line, looked at before Hydra composes: flags, keys, presets and values. No torch here."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser  # Hydra's own flags; there is no public door to them. Hydra 1.3
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString
from hydra.errors import HydraException

from models.parts import PARTS, TARGET
from training.keys import Key, Mismatch, convert, keys, mismatch, nearest, open_key, sections, show, unknown
from training.refusal import Problem

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
SWEPT_AT_MOST = 1000  # values of one key in a sweep that are looked at


def parse_flags(argv: list[str]) -> tuple[argparse.Namespace, list[Problem]]:
    """Hydra's flags and the overrides of a command line, and what is wrong with the flags."""
    flags, others = get_args_parser().parse_known_args(argv)
    problems = [_unknown_flag(word) for word in others]
    path = flags.config_path and ROOT / flags.config_path
    for flag, folder in (("--config-dir", flags.config_dir), ("--config-path", path)):
        if folder is not None and not os.path.isdir(folder):
            problems.append(Problem(flag, folder, "there is no such folder", "a folder of presets"))
    modes = [mode for mode in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(flags, mode)]
    if len(modes) > 1:
        written = [f"--{mode.replace('_', '-')}" for mode in modes]
        problems.append(Problem(" ".join(written), "", "only one of these can be given", written[0]))
    if flags.resolve and not (flags.cfg or flags.help):
        problems.append(Problem("--resolve", "", "goes with --cfg", "--cfg job --resolve"))
    if sweeps(flags) and ("TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        problems.append(_sweep_in_torchrun(flags.overrides))
    return flags, problems


def sweeps(flags: argparse.Namespace) -> bool:
    return flags.multirun or "hydra.mode=MULTIRUN" in flags.overrides


def _unknown_flag(word: str) -> Problem:
    if not word.startswith("-"):
        reason = "stands apart from the other keys"
        return Problem(word, "", reason, "all keys together, before the flags or after them")
    bare, _, value = word.lstrip("-").partition("=")
    near = nearest(bare.replace("-", "_"), [*keys(), *sections()])
    instead = f"{near[0]}={value or '...'}" if near else "--help lists the flags; keys are given as key=value"
    return Problem(word, "", "there is no such flag", instead)


def _sweep_in_torchrun(words: list[str]) -> Problem:
    """Each rank would start the whole sweep."""
    instead = f"`python train.py -m {' '.join(words)}` for runs on one rank"
    swept = next((word for word in words if "," in word and "[" not in word), None)
    if swept is not None:
        key, _, values = swept.partition("=")
        others = [word for word in words if word != swept]
        last = key.rpartition(".")[2]
        start = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', 'N')} train.py"
        command = " ".join([start, *others, f"{key}=$v", f"name={last}-$v"])
        instead += f", or one torchrun a value: `for v in {values.replace(',', ' ')}; do {command}; done`"
    return Problem("-m", "", "a sweep cannot run inside torchrun: every rank would start all of it", instead)


class Presets:
    """The config groups and what can be chosen in each, as Hydra sees them without running anything.

    `search`: the override that adds the user's own folders, if any."""

    def __init__(self, loader: ConfigLoader, search: list[str]) -> None:
        self.loader, self.search = loader, search
        self._options: dict[str, list[str]] = {}

    @cached_property
    def groups(self) -> list[str]:
        """Those of the schema and those that only have a folder, such as experiment. Listing them takes a moment."""
        found = [group for group in self.loader.list_groups("") if group != "hydra"]
        return list(dict.fromkeys([*sections(), *found]))

    def options(self, group: str) -> list[str]:
        if group not in self._options:
            self._options[group] = self.loader.get_group_options(group, config_name="config", overrides=self.search)
        return self._options[group]

    def is_group(self, name: str) -> bool:
        if name in sections() or name in keys():
            return name in sections()
        return name in self.groups or ("." not in name and bool(self.options(name)))

    def has(self, group: str, choice: str) -> bool:
        """Whether there is such a preset; it may lie in a folder of the group."""
        folder, _, last = f"{group}/{choice}".rpartition("/")
        return last in self.options(folder)

    def named(self, choice: str) -> list[str]:
        """The presets of this name, as they are chosen."""
        return [f"{group}={choice}" for group in self.groups if self.has(group, choice)]


@contextmanager
def open_presets(flags: argparse.Namespace) -> Iterator[Presets]:
    """Inside, Hydra's compose API works on the config folders of the command line."""
    search = next((word for word in flags.overrides if word.startswith("hydra.searchpath=")), None)
    if flags.config_dir is not None:  # the compose API knows no --config-dir; the user's own search path is kept
        own = search.partition("=")[2].strip("[]") if search else ""
        folders = ",".join(filter(None, [f"'file://{os.path.abspath(flags.config_dir)}'", own]))
        search = f"hydra.searchpath=[{folders}]"
    folder = ROOT / flags.config_path if flags.config_path else CONFIGS
    with initialize_config_dir(str(folder), job_name="train", version_base="1.3"):
        yield Presets(GlobalHydra.instance().config_loader(), [search] if search else [])


def override_problems(words: list[str], presets: Presets, sweep: bool) -> list[Problem]:
    """Everything that is wrong with the words, whatever Hydra would make of them. Words for Hydra itself (hydra.*) are
    left to it. `sweep`: whether a word may have several values."""
    parser = OverridesParser.create(config_loader=presets.loader)
    problems = []
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            problems.append(_unreadable(word, str(error), presets))
            continue
        if not override.key_or_group:
            problems.append(_unreadable(word, "", presets))
        elif not override.is_hydra_override():
            problems += _problems(override, word, presets, sweep)
    return problems


def jobs_of(override: Override, presets: Presets, most: int) -> list[str]:
    """The overrides of single jobs that an override stands for; itself where it is no sweep."""
    value = override.value()
    if isinstance(value, Glob):
        options = value.filter(presets.options(override.key_or_group))
        return [f"{override.key_or_group}={preset}" for preset in options]
    if override.is_discrete_sweep():
        key = override.get_key_element()
        return [f"{key}={text}" for text in islice(override.sweep_string_iterator(), most)]
    return [override.input_line or ""]


def _unreadable(word: str, message: str, presets: Presets) -> Problem:
    key, equals, value = word.partition("=")
    if key.lstrip("+~") and equals:
        reason = f"cannot be read ({message.splitlines()[0]})"
        return Problem(key, value, reason, f"quotes around a text with special characters: '{key}=\"{value}\"'")
    bare = key.lstrip("+~")
    near = [f"{name}=..." for name in nearest(bare, [*keys(), *presets.groups])] if bare else []
    instead = " or ".join(presets.named(bare) or near) or "key=value"
    return Problem(word, "", "is not of the form key=value", instead)


def _problems(override: Override, word: str, presets: Presets, sweep: bool) -> list[Problem]:
    name, typed = override.key_or_group, word.partition("=")[2]
    if override.is_sweep_override() and not sweep:
        listed = "(" not in typed
        reason = "several values are a sweep, which needs -m" if listed else "a sweep needs -m"
        return [Problem(name, typed, reason, f"-m {word}" + (f", or a list: {name}=[{typed}]" if listed else ""))]
    if presets.is_group(name):
        return _group_problems(override, typed, presets)
    if (opened := open_key(name)) is not None and name != opened.name:
        return _part_problems(override, name, typed)
    key = keys().get(name)
    if key is not None:
        return _key_problems(override, key, typed)
    if presets.named(name):
        return [Problem(name, typed, "is a preset, not a key", " or ".join(presets.named(name)))]
    prefix = word[: len(word) - len(word.lstrip("+~"))]
    return [unknown(name, typed, more=presets.groups, prefix=prefix)]


def _group_problems(override: Override, typed: str, presets: Presets) -> list[Problem]:
    """Presets that do not exist, or + before a group that has one already."""
    group = override.key_or_group
    if override.is_delete():
        return []
    if override.is_add() and (group in sections() or group == "experiment"):
        reason = "the group has a preset already; + is for new ones"
        return [Problem(f"+{group}", typed, reason, f"{group}={typed}")]
    problems = []
    for value in _values(override):
        if isinstance(value, dict):
            reason = "a group takes the name of a preset; its keys are given one by one"
            return [Problem(group, typed, reason, " ".join(f"{group}.{key}={show(v)}" for key, v in value.items()))]
        for choice in value if isinstance(value, list) else [value]:
            if isinstance(choice, str) and ("${" in choice or presets.has(group, choice)):
                continue
            options = presets.options(group)
            near = nearest(str(choice), options, most=1)
            instead = (f"{group}={near[0]}, of " if near else f"{group}= one of ") + " | ".join(options)
            problems.append(Problem(group, show(choice), f"there is no such preset of {group}", instead))
    return problems


def _key_problems(override: Override, key: Key, typed: str) -> list[Problem]:
    name = key.name
    if override.is_delete():
        return [Problem(f"~{name}", typed, "a key cannot be removed", f"{name}={key.example()}")]
    if override.is_add() and not key.is_open:
        return [Problem(f"+{name}", typed, "the key is there already; + is for new ones", f"{name}={typed}")]
    if override.package is not None:
        return _package_problems(override, name, typed)
    problems: dict[str, Problem] = {}  # each once, also where many values of a sweep have it
    for value in _values(override):
        if isinstance(value, str) and "${" in value:
            continue  # known after composition
        written = show(value) if override.is_sweep_override() else typed
        try:
            convert(key, value, written)
        except Mismatch as error:
            problem = mismatch(key, written, error)
            problems.setdefault(str(problem), problem)
    return list(problems.values())


def _part_problems(override: Override, name: str, typed: str) -> list[Problem]:
    """Of a key in model.parts, the one dictionary that is open. Its other keys are those of a class: check looks."""
    of, _, part = name.partition("parts.")
    part, _, keyword = part.partition(".")
    if part not in PARTS:
        near = nearest(part, PARTS, most=1)
        keys_of = [".".join(filter(None, [f"{of}parts", other, keyword])) for other in near or PARTS]
        instead = " or ".join(f"{key}={typed}" for key in keys_of)
        return [Problem(name, typed, f"is no part of a block, which are {' and '.join(PARTS)}", instead)]
    if not keyword and not override.is_delete() and not all(isinstance(value, dict) for value in _values(override)):
        reason = "is a class and its keywords"
        return [Problem(name, typed, reason, f"++{name}.{TARGET}=<module>.<class>")]
    return _package_problems(override, name, typed)


def _package_problems(override: Override, name: str, typed: str) -> list[Problem]:
    if override.package is None:
        return []
    reason = "only a group can be put elsewhere with @"
    return [Problem(f"{name}@{override.package}", typed, reason, f"{name}={typed}")]


def _values(override: Override) -> list[Any]:
    """The value of an override, or those it sweeps over. A glob is for groups, and matches presets that there are."""
    value = override.value()
    if isinstance(value, Glob):
        return []
    if isinstance(value, IntervalSweep):
        return [value.start, value.end]
    if not override.is_sweep_override():
        return [value]
    swept = islice(override.sweep_iterator(), SWEPT_AT_MOST)
    return [item.text if isinstance(item, QuotedString) else item for item in swept]
