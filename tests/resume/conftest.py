"""The unbroken run that the broken ones are compared with."""

import shutil

import pytest

from tests.runs.drive import DROPOUT, Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of all files here, which copy one unbroken run: no two may give a run the same name."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def whole(runs: Runs) -> str:
    """Its name."""
    runs.finish("whole", DROPOUT)
    return "whole"


@pytest.fixture
def copy(runs: Runs, whole: str, request: pytest.FixtureRequest) -> str:
    """The name of a copy of the finished run, to be damaged."""
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")
    shutil.copytree(runs.folder(whole), runs.folder(name))
    return name
