"""Where the numbers of a run go. Only rank 0 has writers; the others have an empty `Writers`."""

import html
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from training.config import MetricsConfig
from training.files import append_line, write_bytes, write_json
from training.metrics.console import Console, ConsoleWriter
from training.metrics.records import Record, from_line, read, to_line
from training.refusal import Problem

METRICS_FILE = "metrics.jsonl"
EVALS_FILE = "evals.jsonl"


class Writer(Protocol):
    """Steps are counted from 1: the record of step 5 tells of the step that made the weights of checkpoint 5."""

    def start(self, first_step: int) -> None:
        """Called before anything is written, and again when the run goes back. Forgets what was written before of
        `first_step` and later, since these steps are done again; scores of checkpoint `first_step - 1` stay."""

    def steps(self, records: list[Record]) -> None:
        """The steps since the last call, in order."""

    def scores(self, records: list[Record]) -> None:
        """All scores of one step. Given again, they take the place of those given before."""

    def text(self, tag: str, text: str, step: int) -> None:
        """A piece of text, such as a sample of the model."""

    def flush(self) -> None:
        """Puts all that was given on disk. Called before each checkpoint, so that no step before it can be lost."""

    def close(self) -> None:
        """May be called twice."""


class Writers:
    """Several writers as one."""

    def __init__(self, writers: list[Writer]) -> None:
        self.writers = writers

    def start(self, first_step: int) -> None:
        for writer in self.writers:
            writer.start(first_step)

    def steps(self, records: list[Record]) -> None:
        if records:
            for writer in self.writers:
                writer.steps(records)

    def scores(self, records: list[Record]) -> None:
        if records:
            for writer in self.writers:
                writer.scores(records)

    def text(self, tag: str, text: str, step: int) -> None:
        for writer in self.writers:
            writer.text(tag, text, step)

    def flush(self) -> None:
        for writer in self.writers:
            writer.flush()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def build(
    config: MetricsConfig, folder: Path, console: Console, name: str, steps: int, saved_config: Record
) -> Writers:
    """The writers of rank 0. steps: length of the whole run; saved_config: what W&B may see, so without secrets."""
    writers: list[Writer] = [Jsonl(folder)]
    if config.tensorboard:
        writers.append(TensorBoard(folder))
    if config.wandb_project is not None:
        writers.append(WandB(config.wandb_project, name, folder, saved_config, console.warn))
    if config.console:
        writers.append(ConsoleWriter(console, steps))
    return Writers(writers)


def problems(config: MetricsConfig) -> list[Problem]:
    """What the config asks for and this installation lacks."""
    if config.wandb_project is None:
        return []
    found = find_spec("wandb")
    # A folder ./wandb, which W&B itself makes, looks like a package too; it has no origin.
    if found is not None and found.origin is not None:
        return []
    return [
        Problem(
            "metrics.wandb_project",
            config.wandb_project,
            "the package wandb is not installed",
            "install the extra (uv sync --extra wandb, or pip install wandb), or metrics.wandb_project=null",
        )
    ]


def tags(record: Record) -> dict[str, float]:
    """The numbers of a step under the names they have in TensorBoard and W&B."""
    groups = dict.fromkeys(("loss", "grad_norm", "lr", "tokens", "skipped_steps", "rollbacks"), "train")
    groups |= dict.fromkeys(("expert_load_max", "expert_load_min", "expert_load_cv", "dropped_share"), "experts")
    return {
        f"{groups.get(name, 'speed')}/{name}": value
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float)
    }


def score_tag(record: Record) -> str:
    return f"evals/{record['task']}/{record['metric']}"


class Jsonl:
    """metrics.jsonl and evals.jsonl, the source of truth of the other writers."""

    def __init__(self, folder: Path) -> None:
        self.metrics = folder / METRICS_FILE
        self.evals = folder / EVALS_FILE

    def start(self, first_step: int) -> None:
        for path in (self.metrics, self.evals):
            keep_lines(path, lambda record: record["step"] < first_step)

    def steps(self, records: list[Record]) -> None:
        append_line(self.metrics, "\n".join(map(to_line, records)))

    def scores(self, records: list[Record]) -> None:
        def name(record: Record) -> tuple[Any, ...]:
            return (record["step"], record["task"], record["metric"])

        new = {name(record) for record in records}
        keep_lines(self.evals, lambda record: name(record) not in new, added=records)

    def text(self, tag: str, text: str, step: int) -> None:
        pass

    def flush(self) -> None:
        if self.metrics.exists():
            with open(self.metrics, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        pass


def keep_lines(path: Path, wanted: Callable[[Record], bool], added: list[Record] | None = None) -> None:
    """Replaces the file in one step by its wanted records, each as it was, and the added ones. Torn lines go too."""
    before = path.read_bytes() if path.exists() else b""
    kept = [line for line in before.splitlines() if (record := from_line(line)) is not None and wanted(record)]
    after = b"".join(line + b"\n" for line in [*kept, *(to_line(record).encode() for record in added or [])])
    if after != before:
        write_bytes(path, after)


class TensorBoard:
    """Event files in the run's folder. Written without torch.utils.tensorboard, whose import takes seconds; one event a
    step holds all its numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first_step = 1
        self.file: Any = None

    def start(self, first_step: int) -> None:
        self.first_step = first_step
        self._open(first_step)

    def _open(self, purge_step: int) -> None:
        """A new event file; readers drop all events of `purge_step` and later in the files before it."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.close()
        self.file = EventFileWriter(str(self.folder), flush_secs=10)
        self.file.add_event(
            Event(wall_time=time.time(), step=purge_step, session_log=SessionLog(status=SessionLog.START))
        )

    def steps(self, records: list[Record]) -> None:
        for record in records:
            self._write(tags(record), record["step"])

    def scores(self, records: list[Record]) -> None:
        step = records[0]["step"]
        if step < self.first_step:
            # The checkpoint the run goes on from is scored again. Events are dropped by step only, so all of it is
            # written again.
            self.first_step = step
            self._open(step)
            self.steps([record for record in read(self.folder / METRICS_FILE) if record["step"] == step])
        self._write({score_tag(record): record["value"] for record in records}, step)

    def _write(self, values: dict[str, float], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self.file.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.text.summary_v2 import text_pb

        # Indented: TensorBoard reads text as Markdown, and this keeps it as it is.
        shown = "\n".join("    " + line for line in text.splitlines())
        self.file.add_event(Event(wall_time=time.time(), step=step, summary=text_pb(tag, shown)))

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class WandB:
    """A run of Weights & Biases that goes on after a restart, under the id in wandb.json.

    Nothing sent can be taken back there, and what was on its way when a run was killed is lost. So each start asks what
    W&B has and sends the rest again from metrics.jsonl and evals.jsonl; steps it has are not sent again, since a
    resumed run gives the same numbers. The x axis is `step`, not W&B's own, below whose last value W&B drops what
    comes. Without a login or a network the whole run is kept in the newest <run folder>/wandb/offline-run-*, to be sent
    by `wandb sync` when it has ended. WANDB_MODE and W&B's other variables are heeded.
    """

    def __init__(
        self, project: str, name: str, folder: Path, saved_config: Record, warn: Callable[[str], None]
    ) -> None:
        self.project = project
        self.name = name
        self.folder = folder
        self.saved_config = saved_config
        self.warn = warn
        self.run: Any = None
        self.sent = {"step": 0, "scored": 0}  # last step whose record, and whose scores, W&B has

    def start(self, first_step: int) -> None:
        if self.run is not None:  # the steps that are done again are others
            self.sent = {key: min(last, first_step - 1) for key, last in self.sent.items()}
            return
        path = self.folder / "wandb.json"
        if not path.exists():
            write_json(path, {"id": secrets.token_hex(4)})
        run_id = json.loads(path.read_text())["id"]
        for old in (self.folder / "wandb").glob(f"offline-run-*-{run_id}"):
            shutil.rmtree(old)  # all of it is sent again
        self.run = self._open(run_id)
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        self.sent = {key: int(self.run.summary.get(key) or 0) for key in self.sent}
        self.steps([record for record in read(self.folder / METRICS_FILE) if record["step"] < first_step])
        by_step: dict[int, list[Record]] = {}
        for record in read(self.folder / EVALS_FILE):
            if record["step"] < first_step:
                by_step.setdefault(record["step"], []).append(record)
        for step in sorted(by_step):
            self.scores(by_step[step])

    def _open(self, run_id: str) -> Any:
        import wandb

        def init(mode: Any) -> Any:
            return wandb.init(
                project=self.project,
                name=self.name,
                id=run_id,
                dir=self.folder,
                resume="allow",
                config=self.saved_config,
                mode=mode,
                settings=wandb.Settings(console="off"),
            )

        later = f"kept in {self.folder / 'wandb'}; when it has ended, send it with wandb sync"
        if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False):
            self.warn(f"not logged in to Weights & Biases: the run is {later}")
            return init("offline")
        try:
            return init(None)
        except wandb.errors.CommError as error:
            self.warn(f"Weights & Biases cannot be reached ({error}): the run is {later}")
            wandb.teardown()  # its service still holds the run
            return init("offline")

    def steps(self, records: list[Record]) -> None:
        for record in records:
            if record["step"] > self.sent["step"]:
                self.sent["step"] = record["step"]
                self.run.log({"step": record["step"], **tags(record)})

    def scores(self, records: list[Record]) -> None:
        step = records[0]["step"]
        if step > self.sent["scored"]:
            self.sent["scored"] = step
            self.run.log({"step": step, "scored": step, **{score_tag(record): record["value"] for record in records}})

    def text(self, tag: str, text: str, step: int) -> None:
        import wandb

        self.run.log({"step": step, tag: wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None
