import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.metrics.samples import score_records, step_record
from training.metrics.console import Console, ConsoleWriter, duration, final_table, printable

ROOT = Path(__file__).parents[3]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_lines_at_first_every_ten_seconds_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    writer = ConsoleWriter(Console(tmp_path / "run.log", clock), 100)
    writer.start(1)
    for step in range(1, 101):
        writer.steps([step_record(step)])
        clock.now += 0.3  # 34 steps in 10 s
    writer.close()
    out = capsys.readouterr().out
    assert [int(found) for found in re.findall(r"step (\d+)/100", out)] == [1, 35, 69, 100]
    assert "loss 10.000  0:20 left  41,213 tok/s  lr 9.8e-04  norm 1.25" in out.splitlines()[0]
    assert "\x1b" not in out
    assert out.count("memory") == 1 and out.splitlines()[1] == "  memory at the peak after the first step: 1.00 GiB"
    log = (tmp_path / "run.log").read_text()
    assert [line[20:] for line in log.splitlines()] == out.splitlines()  # a date and a time before each


def test_a_run_that_is_stopped_leaves_its_last_step_as_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    writer = ConsoleWriter(Console(clock=Clock()), 100)
    writer.start(41)
    writer.steps([step_record(41)])
    writer.steps([step_record(42), step_record(43)])
    writer.close()
    writer.close()
    assert re.findall(r"step (\d+)/", capsys.readouterr().out) == ["41", "43"]


def test_time_left_counts_from_the_first_report_and_not_within_a_burst(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    writer = ConsoleWriter(Console(clock=clock), 100)
    writer.start(1)
    clock.now = 500.0  # compilation
    writer.steps([step_record(step, step_seconds=50.0) for step in range(1, 11)])
    clock.now = 520.0  # ten steps in 20 s
    writer.steps([step_record(step) for step in range(11, 21)])
    assert "step 20/100  loss 0.500  2:40 left" in capsys.readouterr().out  # 80 steps of 2 s


def test_mfu_and_skipped_steps_are_shown_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    writer = ConsoleWriter(Console(clock=Clock()), 2)
    writer.start(1)
    writer.steps([step_record(1)])
    writer.steps([step_record(2, mfu=0.4321, skipped_steps=3, loss=float("nan"))])
    first, _, last = capsys.readouterr().out.splitlines()
    assert "MFU" not in first
    assert "skipped" not in first
    assert "loss nan" in last
    assert "MFU 43.2%" in last
    assert "skipped 3" in last


def test_scores_are_a_line_for_each_task(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleWriter(Console(), 10).scores(score_records(4))
    assert capsys.readouterr().out == (
        "step 4  heldout: loss 1.5000 ± 0.01  perplexity 4.5000\nstep 4  continuation: accuracy 0.5000 ± 0.06\n"
    )


def test_final_table() -> None:
    scores = [*score_records(4), *score_records(10, loss=1.25)]
    assert final_table(scores, {"bigram": {("heldout", "loss"): 2.0}}).splitlines() == [
        "              heldout     heldout   continuation",
        "step             loss  perplexity       accuracy",
        "------------------------------------------------",
        "4       1.5000 ± 0.01      4.5000  0.5000 ± 0.06",
        "10      1.2500 ± 0.01      4.5000  0.5000 ± 0.06",
        "bigram         2.0000",
    ]


def test_final_table_of_a_long_run_has_its_first_and_last_rows() -> None:
    scores = [record for step in range(1, 40) for record in score_records(step)]
    rows = final_table(scores, {}).splitlines()[3:]
    assert [int(row.split()[0]) for row in rows] == [1, *range(30, 40)]


def test_text_of_a_model_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(tmp_path / "run.log")
    ConsoleWriter(console, 10).text("sample", "a\x1b[2J\x07b\r\x9b[bold]\ttabs\nstay :smile: \ud800", 10)
    out = capsys.readouterr().out
    assert out == "sample at step 10:\n    a\ufffd[2J\ufffdb\n    \ufffd[bold]\ttabs\n    stay :smile: \ufffd\n"
    assert "\x1b" not in (tmp_path / "run.log").read_text()
    assert printable("plain ± ∑ 文") == "plain ± ∑ 文"


def test_warnings_go_to_stderr_and_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Console(tmp_path / "run.log").warn("odd")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "warning: odd\n")
    assert "warning: odd" in (tmp_path / "run.log").read_text()


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.6, 75, 3599.4, 3675, 90000)] == [
        "0:00",
        "1:00",
        "1:15",
        "59:59",
        "1:01:15",
        "25:00:00",
    ]


RUN = """
import time
from tests.training.metrics.samples import score_records, step_record
from training.metrics.console import Console, ConsoleWriter
writer = ConsoleWriter(Console(), 4)
writer.start(1)
for step in (1, 2, 3, 4):
    time.sleep(0.3)
    writer.steps([step_record(step)])
    if step == 2:
        writer.scores(score_records(2))
        writer.console.say("a line longer than the terminal is wide " * 4)
writer.close()
"""


def on_a_terminal(**variables: str) -> str:
    """What the run writes to a terminal of 80 columns."""
    parent, child = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "80"} | variables
    process = subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, env=environment, stdout=child, stderr=child)
    os.close(child)
    out = b""
    while process.poll() is None or select.select([parent], [], [], 0)[0]:
        if select.select([parent], [], [], 0.1)[0]:
            try:
                out += os.read(parent, 65536)
            except OSError:  # the other end is closed
                break
    os.close(parent)
    assert process.wait() == 0
    return out.decode()


def test_on_a_terminal_there_is_a_bar_with_every_number() -> None:
    out = on_a_terminal()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
    assert re.search(r"step 3/4 [━╸╺]+ loss 3.333  0:0\d left  41,213 tok/s  lr 9.8e-04  norm 1.25", plain)
    assert "\rstep 2  heldout: loss 1.5000 ± 0.01  perplexity 4.5000" in plain
    assert "a line longer than the terminal is wide " * 4 in plain  # not cut into lines: it can be copied
    assert re.search(r"step 4/4  loss 2.500  41,213 tok/s", plain)  # the bar is gone, its last state stays
    assert re.search(r"\x1b\[[0-9;]+m", out)  # colours
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")  # the cursor is back


def test_no_color_is_heeded() -> None:
    out = on_a_terminal(NO_COLOR="1")
    assert "━" in out
    assert not re.search(r"\x1b\[(3|4|9|10)\d[;\dm]", out)


def test_a_dumb_terminal_gets_lines() -> None:
    out = on_a_terminal(TERM="dumb")
    assert "\x1b" not in out
    assert "step 1/4" in out


def test_no_escape_codes_in_a_pipe_even_where_colour_is_forced() -> None:
    environment = os.environ | {"FORCE_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    out = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, env=environment, capture_output=True, check=True).stdout
    assert b"\x1b" not in out
    assert rb"1.5000 \xb1 0.01" in out  # what an encoding lacks is spelled out
