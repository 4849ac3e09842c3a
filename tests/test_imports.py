"""Which module may import which, beyond what import-linter sees: torch itself, its parts, and train.py."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("models", "parallel", "training", "scripts")

# A typo must be refused in a second or two; torch alone takes longer to import.
WITHOUT_TORCH = [
    "models.config",
    "models.derive",
    "models.flops",
    "models.schema",
    "models.shapes",
    "parallel.config",
    "parallel.planning.activations",
    "parallel.planning.layout",
    "parallel.planning.memory",
    "parallel.planning.stages",
    "parallel.planning.traffic",
    "training.advice",
    "training.check",
    "training.compose",
    "training.config",
    "training.data.corpus",
    "training.data.order",
    "training.data.prepare",
    "training.files",
    "training.folder",
    "training.metrics.throughput",
    "training.plan",
    "training.refusal",
    "training.resolve",
    "training.status",
    "training.tokenizers",
]
SLOW = ["torch", "transformers", "datasets", "tensorboard", "pyarrow", "pandas"]

IMPORT_EACH = """
import importlib, json, sys
names, slow = json.loads(sys.argv[1])
for name in names:
    importlib.import_module(name)
    if found := [s for s in slow if s in sys.modules]:
        sys.exit(f"{name} imports {found}")
"""


def fresh_import(names: list[str], slow: list[str]) -> str:
    """Imports the modules in a new process and says which first brought in one of `slow`; "" where none did."""
    arguments = [sys.executable, "-c", IMPORT_EACH, json.dumps([names, slow])]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL).stderr.strip()


def test_config_and_checks_need_no_torch() -> None:
    assert fresh_import(WITHOUT_TORCH, SLOW) == ""


def test_a_slow_import_would_be_seen() -> None:
    assert fresh_import(["models.config", "models.head"], SLOW) == "models.head imports ['torch']"


@pytest.mark.torch211
def test_the_default_run_imports_neither_fsdp_nor_dynamo() -> None:
    slow = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", *SLOW[1:]]
    assert fresh_import(["training.run"], slow) == ""


def imported(path: Path) -> set[str]:
    """Everything a file imports or reaches through `torch.`, as dotted names, wherever in the file it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                names.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                names.add(module)
                names.update(f"{module}.{alias.name}" for alias in node.names)
            case ast.Attribute(value=ast.Name(id="torch")):
                names.add(f"torch.{node.attr}")
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_imports_the_entry_point(package: str) -> None:
    assert [str(path) for path in (ROOT / package).rglob("*.py") if "train" in imported(path)] == []


def test_models_know_no_ranks() -> None:
    ranks = "torch.distributed"
    files = list((ROOT / "models").rglob("*.py"))
    assert files
    found = {
        path.name: name for path in files for name in imported(path) if name == ranks or name.startswith(f"{ranks}.")
    }
    assert found == {}


@pytest.mark.parametrize(
    "line", ["import torch.distributed.fsdp", "from torch import distributed", "import torch\ntorch.distributed"]
)
def test_each_way_to_reach_a_module_is_seen(line: str, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(line)
    assert any(name.startswith("torch.distributed") for name in imported(tmp_path / "file.py"))
