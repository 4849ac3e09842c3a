"""The drill with torchrun, as a user runs it."""

import shutil
from pathlib import Path

import pytest

from scripts.fault_drill import Differs, check_readable, check_same, main

TINY = (
    "steps=20 model.layers=2 model.dim=32 model.heads=2 model.context=32 tokenizer=bytes compile=none evals=none "
    "evals.every=0 hardware.device=cpu"
)


@pytest.mark.slow
def test_a_killed_run_is_the_untouched_one_and_another_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "drill"
    assert main(["--kills", "2", "--folder", str(folder), *TINY.split()]) == 0
    assert "is the untouched run, bit by bit" in capfd.readouterr().out

    twice = folder / "twice"
    shutil.copytree(folder / "whole", twice)
    check_same(twice, folder / "whole")
    metrics = twice / "metrics.jsonl"
    metrics.write_text(metrics.read_text() * 2)
    with pytest.raises(Differs, match="has the steps"):
        check_same(twice, folder / "whole")

    data = bytearray((twice / "checkpoints" / "step-000020" / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (twice / "checkpoints" / "step-000020" / "__0_0.distcp").write_bytes(data)
    with pytest.raises(Differs, match="says it is complete"):
        check_readable(twice)


def test_a_folder_that_is_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--folder", str(tmp_path)])
    assert end.value.code == 2 and "is there already" in capsys.readouterr().err
