"""What must hold for the files of the project as a whole."""

import fnmatch
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = [Requirement(pin) for pin in PYPROJECT["tool"]["uv"]["constraint-dependencies"]]

# In pieces, so that this file does not mention them either.
FORBIDDEN = {
    "a registry host": r"pypi\." + r"org|python" + r"hosted\.org|download\.pytorch\." + r"org|npmjs\." + r"org",
    "a path of one machine": r"(?<![\w.])/(?:root" + r"|work)/",
}


def files() -> Iterator[Path]:
    """All but what .gitignore leaves out; its patterns are names of files and folders."""
    ignored = [".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().split())]

    def kept(names: list[str]) -> list[str]:
        return [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)]

    for folder, folders, names in os.walk(ROOT):
        folders[:] = kept(folders)
        yield from (Path(folder, name) for name in kept(names))


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_mentions(what: str) -> None:
    found = []
    for path in files():
        text = path.read_bytes().decode(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in re.finditer(FORBIDDEN[what], text)]
    assert found == []


def test_the_patterns_find_what_they_are_for() -> None:
    hosts, paths = FORBIDDEN.values()
    assert re.search(hosts, "https://files.python" + "hosted.org/packages/x")
    assert re.search(paths, "cd /wor" + "k/main")
    assert not re.search(paths, "docs/work/notes, ./root/x, host.example/work/")


def test_no_lock_file_is_committed() -> None:
    assert "uv.lock" in (ROOT / ".gitignore").read_text().split()
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "uv.lock"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout == ""


def test_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


def test_init_files_are_empty() -> None:
    inits = [path for path in files() if path.name == "__init__.py"]
    assert inits
    assert [str(path) for path in inits if path.stat().st_size > 0] == []


def test_every_package_is_one() -> None:
    """A folder of modules without __init__.py is imported all the same, but not seen by mypy and import-linter."""
    folders = {path.parent for path in files() if path.suffix == ".py"} - {ROOT}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_pins_are_exact() -> None:
    for pin in PINS:
        assert [s.operator for s in pin.specifier] == ["=="], pin
        assert "*" not in str(pin.specifier), pin


def test_every_dependency_is_pinned_to_a_version_it_allows() -> None:
    project = PYPROJECT["project"]
    lines = [*project["dependencies"], *PYPROJECT["dependency-groups"]["dev"]]
    lines += [line for extra in project["optional-dependencies"].values() for line in extra]
    for line in lines:
        wanted = Requirement(line)
        pins = [pin for pin in PINS if pin.name == wanted.name]
        assert pins, f"{line} is not pinned: run scripts/pin.sh"
        for pin in pins:
            assert wanted.specifier.contains(str(pin.specifier).removeprefix("==")), (line, str(pin))


def test_torch_is_new_enough() -> None:
    [pin] = [pin for pin in PINS if pin.name == "torch"]
    assert Version(str(pin.specifier).removeprefix("==")) >= Version("2.11")
    assert "torch>=2.11" in PYPROJECT["project"]["dependencies"]
