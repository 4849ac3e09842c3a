"""What a person sees of a run: lines, a progress bar where there is a terminal, tables; all of it also in run.log."""

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.files import append_line
from training.metrics.records import Record

LINE_SECONDS = 10.0  # between progress lines where there is no bar, and in run.log
BAR_SECONDS = 0.25  # between two drawings of the bar
BAR_WIDTH = 8  # columns kept for the bar itself before notes are left out

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without characters that steer a terminal (a young model may well write one) or that no file can hold."""
    return CONTROL.sub("\ufffd", text)


class Console:
    """Lines to stdout, warnings to stderr, and both to the log. The bar is drawn when it has news, without a thread."""

    def __init__(self, log: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.log = log
        self.clock = clock
        # Not left to rich, which takes FORCE_COLOR for a terminal and would fill a log file with escape codes.
        self.terminal = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # any text can be shown, whatever the terminal's encoding
        self._bar: Any = None
        self._what = ""
        self._drawn = self._printed = -LINE_SECONDS
        self._unprinted = ""  # the newest progress, where no line has told of it yet

    def say(self, text: str) -> None:
        text = printable(text)
        if self._bar is not None:
            from rich.text import Text

            self._bar.console.print(Text(text), soft_wrap=True)  # above the bar
        else:
            print(text, flush=True)
        self._to_log(text)

    def warn(self, text: str) -> None:
        text = printable(f"warning: {text}")
        print(text, file=sys.stderr, flush=True)
        self._to_log(text)

    def progress(self, what: str, done: int, total: int, notes: Sequence[str] = ()) -> None:
        """How far something is, with notes in order of importance. Where there is no terminal: a line at first, every
        ten seconds and at the end, when `done` reaches `total`."""
        now = self.clock()
        new, end = what != self._what, done >= total
        self._what = "" if end else what
        line = "  ".join([f"{what} {done}/{total}", *notes])
        if self.terminal and not end and (new or now - self._drawn >= BAR_SECONDS):
            self._drawn = now
            self._draw(f"{what} {done}/{total}", done, total, notes)
        if end:
            self._remove_bar()
        due = new or end or now - self._printed >= LINE_SECONDS
        if due:
            self._printed = now
            if self._bar is None:
                self.say(line)
            else:
                self._to_log(line)
        self._unprinted = "" if due else line

    def close(self) -> None:
        """Takes the bar away and leaves the newest progress as a line."""
        self._remove_bar()
        self._what = ""
        if self._unprinted:
            self.say(self._unprinted)
            self._unprinted = ""

    def _draw(self, title: str, done: int, total: int, notes: Sequence[str]) -> None:
        bar = self._bar or make_bar()
        room = bar.console.width - len(title) - BAR_WIDTH
        shown = [note for place, note in enumerate(notes) if len("  ".join(notes[: place + 1])) <= room]
        state = {"description": title, "completed": done, "total": total, "notes": "  ".join(shown)}
        if self._bar is None:
            self._bar = bar
            bar.add_task(**state)
            bar.start()
            bar.console.show_cursor(True)  # rich hides it; a run that is killed would leave it hidden
        bar.update(bar.task_ids[0], refresh=True, **state)

    def _remove_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _to_log(self, text: str) -> None:
        if self.log is not None:
            append_line(self.log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def make_bar() -> Any:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[notes]}", markup=False),
        console=RichConsole(force_terminal=True, highlight=False, markup=False, emoji=False),
        auto_refresh=False,
        transient=True,
        expand=True,
        redirect_stderr=sys.stderr.isatty(),
    )


class ConsoleWriter:
    """The steps as progress with the time that is left, the scores as lines."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self.console = console
        self.total_steps = total_steps
        self._first: tuple[float, int] | None = None  # when the first step was reported, and its number

    def start(self, first_step: int) -> None:
        self._first = None

    def steps(self, records: list[Record]) -> None:
        record, first = records[-1], self._first is None
        notes = step_notes(record)
        if record["step"] < self.total_steps:
            notes.insert(1, f"{duration(self._seconds_left(record))} left")
        self.console.progress("step", record["step"], self.total_steps, notes)
        if first:
            self.console.say(f"  memory at the peak after the first step: {records[0]['memory_bytes'] / 2**30:.2f} GiB")

    def _seconds_left(self, record: Record) -> float:
        """By the clock since the first report: saves and scores are in it, compilation before the first step is not."""
        now, step = self.console.clock(), record["step"]
        if self._first is None:
            self._first = (now, step)
        then, first = self._first
        pace = (now - then) / (step - first) if step > first else record["step_seconds"]
        return (self.total_steps - step) * pace

    def scores(self, records: list[Record]) -> None:
        self.console.say(scores_lines(records))

    def text(self, tag: str, text: str, step: int) -> None:
        self.console.say("\n".join([f"{tag} at step {step}:", *("    " + line for line in text.splitlines())]))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.console.close()


def step_notes(record: Record) -> list[str]:
    """The numbers of a step for a line, the most important first."""
    notes = [f"loss {record['loss']:.3f}", f"{record['tokens_per_second']:,.0f} tok/s"]
    notes += [f"lr {record['lr']:.1e}", f"norm {record['grad_norm']:.2f}"]
    if record.get("mfu") is not None:
        notes.append(f"MFU {record['mfu']:.1%}")
    if record.get("skipped_steps"):
        notes.append(f"skipped {record['skipped_steps']}")
    return notes


def duration(seconds: float) -> str:
    """75 -> 1:15, 3675 -> 1:01:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def score_value(record: Record) -> str:
    """4 digits after the point, and the standard error, in 2 digits, where there is one."""
    error = record.get("stderr")
    return f"{record['value']:.4f}" + ("" if error is None else f" ± {error:.2g}")


def scores_lines(records: Sequence[Record]) -> str:
    """All scores of one step, a line for each task."""
    tasks: dict[str, list[str]] = {}
    for record in records:
        tasks.setdefault(record["task"], []).append(f"{record['metric']} {score_value(record)}")
    step = records[0]["step"]
    return "\n".join(f"step {step}  {task}: {'  '.join(values)}" for task, values in tasks.items())


def table(header: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Columns of text, the first `texts` to the left and the others to the right, with a line under the header."""
    widths = [max(map(len, column)) for column in zip(*header, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(
            cell.ljust(width) if place < texts else cell.rjust(width) for place, (cell, width) in cells
        ).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([*map(line, header), rule, *map(line, rows)])


def final_table(
    scores: Sequence[Record], references: Mapping[str, Mapping[tuple[str, str], float]], last: int = 10
) -> str:
    """A row for each scored step (the first and the `last` ones where there are more) and one for each reference, a
    column for each score. references: {"bigram of bytes": {("heldout", "bits_per_byte"): 3.53}, ...}"""
    columns = list(dict.fromkeys((record["task"], record["metric"]) for record in scores))
    by_step: dict[int, dict[tuple[str, str], str]] = {}
    for record in scores:
        by_step.setdefault(record["step"], {})[record["task"], record["metric"]] = score_value(record)
    steps = sorted(by_step)
    if len(steps) > last + 1:
        steps = [steps[0], *steps[-last:]]
    header = [["", *(task for task, _ in columns)], ["step", *(metric for _, metric in columns)]]
    rows = [[str(step), *(by_step[step].get(column, "") for column in columns)] for step in steps]
    rows += [
        [name, *(f"{values[column]:.4f}" if column in values else "" for column in columns)]
        for name, values in references.items()
    ]
    return table(header, rows)
