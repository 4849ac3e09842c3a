"""From the tree that Hydra composes, which has no types, to the classes of the schema. No torch here."""

import os
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.keys import Key, Mismatch, convert, keys, mismatch, open_key, show, unknown
from training.refusal import Problem


def typed_keys(hydra: Any) -> set[str]:
    """The keys and groups given on the command line, by Hydra's own config; of an open dictionary the whole."""
    words = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # a word may hold an interpolation
    assert isinstance(words, list)
    names = {str(word).lstrip("+").partition("=")[0] for word in words}
    return {name if (opened := open_key(name)) is None else opened.name for name in names}


def resolved(key: Key, section: DictConfig) -> Any:
    """The value of a key in its section of a tree, with interpolations resolved; ENVIRONMENT tells whether it came from
    there. Raises OmegaConfBaseException."""
    ENVIRONMENT.was_read = False
    value = section[key.name.rpartition(".")[2]]
    if isinstance(value, ListConfig | DictConfig):
        text, value = (OmegaConf.to_container(value, resolve=resolve) for resolve in (False, True))
        if isinstance(value, dict):
            return _with_environment(text, value)
    if ENVIRONMENT.was_read and isinstance(value, str) and key.kinds != (str,):
        return _as_typed(value)  # the environment has only text
    return value


def _with_environment(text: Any, value: Any) -> Any:
    """Of an open dictionary the value, where what the environment gave is read as on the command line."""
    if isinstance(value, dict) and isinstance(text, dict):
        return {name: _with_environment(text[name], inner) for name, inner in value.items()}
    return _as_typed(value) if isinstance(value, str) and "${" in str(text) else value


def _as_typed(text: str) -> Any:
    """The value that a text stands for on the command line; YAML 1.1 reads 1e-3 as a text and 010 as 8. Itself where it
    is none."""
    try:
        override = OverridesParser.create().parse_override(f"key={text}")
    except HydraException:
        return text
    return text if override.is_sweep_override() else override.value()


class Reader:
    """Reads a composed tree. `problems`: what is wrong with it; `unresolved`: the text of each value that came from the
    environment. `hydra`: Hydra's own config, which knows where the presets lie."""

    def __init__(self, hydra: Any) -> None:
        self.hydra = hydra
        self.problems: list[Problem] = []
        self.unresolved: dict[str, Any] = {}
        self._typed = typed_keys(hydra)

    def read(self, schema: type, tree: DictConfig, prefix: str = "") -> Any:
        """An instance of the schema. A value with a problem stands as its default."""
        kinds = {field.name: field.type for field in fields(schema)}
        texts = OmegaConf.to_container(tree, resolve=False)
        assert isinstance(texts, dict)
        values: dict[str, Any] = {}
        for name, text in ((str(name), text) for name, text in texts.items()):
            full, kind = prefix + name, kinds.get(name)
            if kind is None:
                self._add(unknown(full, "{...}" if isinstance(text, dict) else show(text)))
            elif isinstance(kind, type) and is_dataclass(kind):
                values[name] = self._section(kind, tree, name, full, text)
            else:
                values[name] = self._leaf(keys()[full], tree, text)
        return schema(**values)

    def _section(self, schema: type, tree: DictConfig, name: str, full: str, text: Any) -> Any:
        try:
            section = tree[name]
        except OmegaConfBaseException as error:
            self._add(Problem(full, text, first_line(error), f"the keys of {full}"))
            return schema()
        if not isinstance(section, DictConfig):
            instead = f"`- override /{full}: {show(text)}` under defaults for a preset, or keys: `{full}: {{...}}`"
            self._add(Problem(full, show(text), "is a group of keys, not a value", instead))
            return schema()
        return self.read(schema, section, f"{full}.")

    def _leaf(self, key: Key, tree: DictConfig, text: Any) -> Any:
        shown = f"'{text}'" if isinstance(text, str) and "${" not in text else show(text)
        try:
            value = resolved(key, tree)
            if ENVIRONMENT.was_read:
                self.unresolved[key.name] = text
            return convert(key, value)
        except OmegaConfBaseException as error:
            self._add(Problem(key.name, shown, first_line(error), f"{key.name}={key.example()}"))
        except Mismatch as error:
            self._add(mismatch(key, shown, error))
        return key.default

    def _add(self, problem: Problem) -> None:
        """Keeps a problem, with the place in a file where its key is written."""
        place = None if problem.key in self._typed else self._place(problem.key)
        reason = f"{problem.reason} (in {place})" if place else problem.reason
        self.problems.append(Problem(problem.key, problem.value, reason, problem.instead))

    def _place(self, name: str) -> str | None:
        """file:line of a key in the presets that were chosen: an experiment's, its own group's, any other."""
        line = re.compile(rf"(^|[{{,])\s*{re.escape(name.rpartition('.')[2])}\s*:", re.MULTILINE)
        folders = [Path(source.path) for source in self.hydra.runtime.config_sources if source.schema == "file"]
        chosen = [f"{group}/{preset}" for group, preset in self.hydra.runtime.choices.items() if preset]
        first = ("experiment/", name.partition(".")[0] + "/")
        for path in [*sorted(chosen, key=lambda path: not path.startswith(first)), str(self.hydra.job.config_name)]:
            for file in (folder / f"{path}.yaml" for folder in folders):
                text = file.read_text() if file.is_file() else ""
                if found := line.search(text):
                    return f"{os.path.relpath(file)}:{text.count(chr(10), 0, found.end()) + 1}"
        return None


class _Environment:
    """OmegaConf's resolver oc.env, which also tells that it was used."""

    was_read = False

    def __call__(self, name: str, default: Any = ...) -> str | None:
        self.was_read = True
        if default is ... and name not in os.environ:
            raise ValueError(f"the environment has no {name}")
        return os.environ.get(name, None if default is ... or default is None else str(default))


ENVIRONMENT = _Environment()
OmegaConf.register_new_resolver("oc.env", ENVIRONMENT, replace=True)


def first_line(error: Exception) -> str:
    """What an error says, without OmegaConf's frame around the words of ENVIRONMENT."""
    return str(error).splitlines()[0].removeprefix("ValueError raised while resolving interpolation: ")
