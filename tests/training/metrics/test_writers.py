"""After a resume no step is missing or double in any writer. Everywhere: killed after step 7, resumed from checkpoint
4, done at 10."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.training.metrics.samples import score_records, step_record
from training.config import MetricsConfig
from training.metrics.console import Console
from training.metrics.records import Record, read
from training.metrics.writers import Jsonl, TensorBoard, WandB, Writer, Writers, build, problems

STEPS = list(range(1, 11))


def killed(writer: Writer) -> None:
    """The first start: steps 1 to 7, scores at 4, saved at 4; then gone without a word."""
    writer.start(1)
    writer.steps([step_record(step) for step in (1, 2, 3, 4)])
    writer.flush()
    writer.scores(score_records(4))
    writer.steps([step_record(step, loss=-1.0) for step in (5, 6, 7)])


def resumed(writer: Writer, scored_again: bool = False) -> None:
    writer.start(5)
    if scored_again:
        writer.scores(score_records(4, loss=1.25))
    writer.steps([step_record(step) for step in (5, 6, 7)])
    writer.steps([step_record(step) for step in (8, 9, 10)])
    writer.scores(score_records(10))
    writer.close()
    writer.close()


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("tail", [b"", b'{"step": 8, "loss": 0.', b"\0" * 50])
def test_jsonl_has_each_step_once(tmp_path: Path, tail: bytes) -> None:
    killed(Jsonl(tmp_path))
    for name in ("metrics.jsonl", "evals.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(tail)
    resumed(Jsonl(tmp_path))
    assert steps_of(tmp_path / "metrics.jsonl") == STEPS
    assert [record["loss"] for record in read(tmp_path / "metrics.jsonl")] == [10.0 / step for step in STEPS]
    assert steps_of(tmp_path / "evals.jsonl") == [4, 4, 4, 10, 10, 10]


def test_jsonl_scores_given_again_take_the_place_of_the_old(tmp_path: Path) -> None:
    killed(Jsonl(tmp_path))
    resumed(Jsonl(tmp_path), scored_again=True)
    found = [(r["step"], r["value"]) for r in read(tmp_path / "evals.jsonl") if r["metric"] == "loss"]
    assert found == [(4, 1.25), (10, 1.5)]


def test_jsonl_start_from_nothing_forgets_a_run_that_died_before_its_first_checkpoint(tmp_path: Path) -> None:
    killed(Jsonl(tmp_path))
    writer = Jsonl(tmp_path)
    writer.start(1)
    assert read(tmp_path / "metrics.jsonl") == read(tmp_path / "evals.jsonl") == []


def test_jsonl_kept_lines_stay_byte_for_byte(tmp_path: Path) -> None:
    line = b'{"step":3,  "loss":1.2500, "of_a_later_version": {"a": [1]}}\n'
    (tmp_path / "metrics.jsonl").write_bytes(line + b'{"step": 4}\n')
    Jsonl(tmp_path).start(4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == line


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


@pytest.mark.parametrize("scored_again", [False, True])
def test_tensorboard_has_each_step_once(tmp_path: Path, scored_again: bool) -> None:
    for act in (killed, lambda writer: resumed(writer, scored_again)):
        act(Writers([Jsonl(tmp_path), TensorBoard(tmp_path)]))
    found = scalars(tmp_path)
    assert dict(found["train/loss"]) == pytest.approx({step: 10.0 / step for step in STEPS})
    assert [step for step, _ in found["train/loss"]] == STEPS
    assert [step for step, _ in found["speed/tokens_per_second"]] == STEPS
    assert found["evals/heldout/loss"] == [(4, 1.25 if scored_again else 1.5), (10, 1.5)]
    assert [step for step, _ in found["evals/continuation/accuracy"]] == [4, 10]
    assert {"train/grad_norm", "train/lr", "speed/data_wait_share", "speed/memory_bytes"} <= found.keys()
    assert "speed/mfu" not in found  # null


def test_tensorboard_flush_survives_sigkill(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from tests.training.metrics.samples import step_record\n"
        "from training.metrics.writers import TensorBoard\n"
        "writer = TensorBoard(Path(sys.argv[1])); writer.start(1)\n"
        "writer.steps([step_record(step) for step in range(1, 300)]); writer.flush(); os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parents[3])
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == list(range(1, 300))


def test_tensorboard_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(tmp_path)
    writer.start(1)
    writer.text("sample", "def f(x):\n  return *x*", 7)
    writer.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    (event,) = accumulator.Tensors("sample")
    assert event.step == 7
    assert event.tensor_proto.string_val == [b"    def f(x):\n      return *x*"]


class FakeWandb(ModuleType):
    """As much of wandb as is used. `history` is what its server has; a killed run loses what came after `delivered`
    logs."""

    class CommError(Exception):
        pass

    def __init__(self, logged_in: bool = True, network: bool = True) -> None:
        super().__init__("wandb")
        self.errors = SimpleNamespace(CommError=FakeWandb.CommError)
        self.logged_in, self.network = logged_in, network
        self.inits: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.Settings = dict

    def login(self, prompt: bool, verify: bool) -> bool:
        assert not prompt, "a job would wait for an answer"
        return self.logged_in

    def teardown(self) -> None:
        pass

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        if options["mode"] != "offline" and not self.network:
            raise FakeWandb.CommError("no route")
        summary: dict[str, Any] = {}
        if options["mode"] != "offline":
            for row in self.history:
                summary |= row

        def log(row: dict[str, Any]) -> None:
            self.history.append(row)

        return SimpleNamespace(summary=summary, log=log, define_metric=lambda *a, **b: None, finish=lambda: None)


def wandb_run(folder: Path, warnings: list[str]) -> Writers:
    return Writers([Jsonl(folder), WandB("project", "name", folder, {"optimizer.lr": 1.0}, warnings.append)])


@pytest.mark.parametrize("delivered", range(9))
def test_wandb_has_each_step_once_whatever_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delivered: int
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    killed(wandb_run(tmp_path, []))
    assert len(fake.history) == 8
    del fake.history[delivered:]
    resumed(wandb_run(tmp_path, []), scored_again=True)
    assert [row["step"] for row in fake.history if "train/loss" in row] == STEPS
    assert [row["step"] for row in fake.history if "evals/heldout/loss" in row] == [4, 10]
    assert len({options["id"] for options in fake.inits}) == 1
    assert all(options["resume"] == "allow" for options in fake.inits)


@pytest.mark.parametrize(("logged_in", "network"), [(False, True), (True, False)])
def test_wandb_without_login_or_network_keeps_the_whole_run_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged_in: bool, network: bool
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    first, second = FakeWandb(logged_in, network), FakeWandb(logged_in, network)
    warnings: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", first)
    killed(wandb_run(tmp_path, warnings))
    run_id = first.inits[0]["id"]
    old = tmp_path / "wandb" / f"offline-run-20260101_000000-{run_id}"
    old.mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "wandb", second)
    resumed(wandb_run(tmp_path, warnings))
    assert second.inits[-1]["mode"] == "offline"
    assert second.inits[-1]["id"] == run_id
    assert [row["step"] for row in second.history if "train/loss" in row] == STEPS
    assert [row["step"] for row in second.history if "evals/heldout/loss" in row] == [4, 10]
    assert not old.exists()
    assert len(warnings) == 2
    assert "wandb sync" in warnings[0]


def test_wandb_not_installed_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()  # W&B's own output folder looks like a package
    assert problems(MetricsConfig()) == []
    (problem,) = problems(MetricsConfig(wandb_project="mine"))
    assert problem.key == "metrics.wandb_project"
    (tmp_path / "wandb" / "__init__.py").touch()
    sys.path_importer_cache.pop(str(tmp_path), None)
    assert problems(MetricsConfig(wandb_project="mine")) == []


def test_build_heeds_the_config(tmp_path: Path) -> None:
    def kinds(config: MetricsConfig) -> list[str]:
        return [type(w).__name__ for w in build(config, tmp_path, Console(), "name", 10, {}).writers]

    assert kinds(MetricsConfig()) == ["Jsonl", "TensorBoard", "ConsoleWriter"]
    assert kinds(MetricsConfig(tensorboard=False, console=False, wandb_project="x")) == ["Jsonl", "WandB"]


def test_nothing_to_write_writes_nothing(tmp_path: Path) -> None:
    records: list[Record] = []
    writers = Writers([Jsonl(tmp_path)])
    writers.start(1)
    writers.steps(records)
    writers.scores(records)
    writers.flush()
    assert list(tmp_path.iterdir()) == []
