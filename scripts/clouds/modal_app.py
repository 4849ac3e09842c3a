"""A run on Modal, whose containers may be taken away and live a day at most: it goes on in the next one.

modal run --detach scripts/clouds/modal_app.py --words "model=gpt2_124m parallel=fsdp2 batch_sequences=512"

To be adapted: GPU and GPUS. The volume espalier-runs has the run's folder and its checkpoints.
"""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import modal

GPU, GPUS = "H100", 8
DAY_SECONDS = 24 * 60 * 60  # Modal's longest
SAVED = 75
ROOT = Path(__file__).parent / ".." / ".."  # Modal imports this file in the container too, where it lies elsewhere
LEFT_OUT = [".git", ".venv", "**/__pycache__", "outputs", "multirun"]

app = modal.App("espalier")
runs = modal.Volume.from_name("espalier-runs", create_if_missing=True)
image = (
    modal.Image.debian_slim(python_version="3.11")
    .pip_install("uv")
    .add_local_dir(ROOT, "/espalier", copy=True, ignore=LEFT_OUT)
    .run_commands("cd /espalier && uv sync --no-dev")
)


@app.function(  # type: ignore[untyped-decorator]
    image=image,
    gpu=f"{GPU}:{GPUS}",
    volumes={"/runs": runs},
    timeout=DAY_SECONDS,
    retries=modal.Retries(max_retries=10, initial_delay=0.0),
)
def train(words: str) -> None:
    """One start of the run. What it raises is a reason for Modal to start it again."""
    process = subprocess.Popen(
        ["scripts/host.sh", *shlex.split(words), "out=/runs", f"max_minutes={DAY_SECONDS // 60 - 30}"],
        cwd="/espalier",
        env=os.environ | {"RANKS": str(GPUS)},
    )

    try:
        code = process.wait()
    except KeyboardInterrupt:  # Modal's notice, 30 seconds before it takes the container away
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    finally:
        runs.commit()
    if code == SAVED:
        raise InterruptedError("saved; goes on in the next container")
    if code != 0:
        raise RuntimeError(f"the run ended with {code}")


@app.local_entrypoint()  # type: ignore[untyped-decorator]
def main(words: str = "") -> None:
    train.remote(words)
