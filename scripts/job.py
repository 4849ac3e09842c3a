"""What scripts that start a run again and again (slurm/train.sbatch, host.sh) ask before and after it. No torch here.

python -m scripts.job words HOSTS RANKS [key=value ...]
    The folder of the run, the step of its newest checkpoint, and the words of train.py, a line each. Refuses, with exit
    code 2, what train.py would refuse with so many ranks on each host. In a Slurm array each task takes its own of the
    runs that `train.py -m` would make of these words, by SLURM_ARRAY_TASK_ID from 0.
python -m scripts.job outcome FOLDER STEP
    How the run ended that began from this step: finished, again (it is to be started once more), stopped (the same, but
    it was told to stop from outside) or failed.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from training.status import read

STOPPED = ("SIGTERM", "SIGINT")
NOTHING = "-"  # in the place of a step: there is no checkpoint


def words_of_task(words: Sequence[str], task: int) -> list[str]:
    """The words of one run of a sweep, in the order in which `train.py -m` numbers them. Raises Refusal."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # takes a second

    from training.command import SWEPT_AT_MOST, jobs_of, open_presets, parse_flags
    from training.refusal import Problem, Refusal

    flags, _ = parse_flags(list(words))
    with open_presets(flags) as presets:
        overrides = OverridesParser.create(config_loader=presets.loader).parse_overrides(flags.overrides)
        jobs = list(product(*(jobs_of(override, presets, SWEPT_AT_MOST) for override in overrides)))
    if task >= len(jobs):
        reason = f"the words make {len(jobs)} runs, numbered from 0"
        raise Refusal([Problem("sbatch --array", task, reason, f"--array=0-{len(jobs) - 1}")])
    return [*(word for word in words if word not in flags.overrides), *jobs[task]]


def prepared(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The lines that `words` prints. Raises Refusal."""
    from training.check import settle
    from training.compose import compose
    from training.folder import RunFolder

    task = environment.get("SLURM_ARRAY_TASK_ID")
    if task is not None:
        words = words_of_task(words, int(task))
    config, chosen = compose(list(words))
    settle(config, chosen if task is None else replace(chosen, job=int(task)))
    assert config.name is not None
    folder = RunFolder(config.out, config.name)
    step = folder.saved_step()
    named = [word for word in words if not word.startswith("name=")]
    return [str(folder.path), NOTHING if step is None else str(step), *named, f"name={config.name}"]


def outcome(folder: Path, step: str) -> str:
    """A run that failed or was killed is started again if it has saved more than it began from: so it either comes to
    its end or fails twice in the same place."""
    status = read(folder / "status.json")
    if status is None or status["exit_code"] == 2:
        return "failed"
    if status["state"] == "finished":
        return "finished"
    if status["state"] == "saved":
        return "stopped" if status["message"].endswith(STOPPED) else "again"
    reached = status["checkpoint"]
    return "again" if reached is not None and (step == NOTHING or reached > int(step)) else "failed"


def main(argv: Sequence[str]) -> None:
    asked, *words = argv
    if asked == "outcome":
        print(outcome(Path(words[0]), words[1]))
        return
    from training.compose import refusing

    hosts, ranks, *words = words
    os.environ["WORLD_SIZE"] = str(int(hosts) * int(ranks))
    os.environ["LOCAL_WORLD_SIZE"] = ranks
    with refusing():
        print("\n".join(prepared(words, os.environ)))


if __name__ == "__main__":
    main(sys.argv[1:])
