"""When the Slurm job that this process is part of ends."""

import logging
import os
import subprocess
from collections.abc import Mapping

SQUEUE_SECONDS = 20.0  # a busy controller answers late

log = logging.getLogger(__name__)


def job_end(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds since the epoch; None outside of Slurm, and where the job has no limit or nobody knows it.

    SLURM_JOB_END_TIME is set by newer Slurms only (not yet by 22.05), so squeue is asked where it is missing."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return None
    found = environment.get("SLURM_JOB_END_TIME")
    if found is None:
        if "SLURM_ARRAY_JOB_ID" in environment:  # the number of a task may also be that of its array
            job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
        command = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
        try:
            asked = subprocess.run(
                command,
                env={**environment, "SLURM_TIME_FORMAT": "%s"},
                capture_output=True,
                text=True,
                timeout=SQUEUE_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.warning(
                "when Slurm ends job %s is unknown, so the run saves only when it gets a signal: %s", job, error
            )
            return None
        found = asked.stdout.strip()
    return float(found) if found.isdecimal() else None
