"""Where a process of the run is, and what it says when the run ends early."""

import logging
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.config import Compress, Scope
from parallel.mesh import build_mesh, launched, saving_group, start_process_group
from training.attention import machine_rules
from training.check_layout import compiled_rules
from training.config import BackgroundSaves, Config
from training.devices import card_of, mixed_devices
from training.faults import Stopped, StopRequest
from training.folder import RunFolder
from training.metrics.console import Console
from training.ranks import Ranks
from training.refusal import Problem, Refusal
from training.resolve import World
from training.seeds import make_deterministic
from training.slurm import job_end
from training.status import State, Status, command
from training.watchdog import HUNG

FINISHED, FAILED, REFUSED, SAVED = 0, 1, 2, 75


@dataclass
class Place:
    """This process among the ranks. `ranks` and `mesh` are those of a single device until `connect`."""

    rank: int
    world: World
    device: torch.device
    folder: RunFolder
    console: Console
    status: Status
    stop: StopRequest
    ranks: Ranks
    trains: bool  # else it scores a checkpoint, and has no status
    saving: Ranks | None = None  # the same ranks, for saves in the background
    mesh: DeviceMesh | None = None
    claimed: bool = False  # whether the folder is known to be this run's


class Silent(Console):
    """Of the ranks that do not speak; their warnings still do."""

    def say(self, text: str) -> None:
        pass

    def progress(self, what: str, done: int, total: int, notes: Sequence[str] = ()) -> None:
        pass


class ToConsole(logging.Handler):
    """Warnings of modules that know no console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.warn(record.getMessage())


def find_place(config: Config, world: World) -> Place:
    """The device, the folder and the voice of this process. Nothing is connected or written yet. Raises Refusal."""
    assert config.name is not None
    rank = int(os.environ.get("RANK", "0"))
    device = find_device(config.hardware.device)
    if config.parallel.async_tp and device.type != "cuda":
        reason = f"needs a GPU's symmetric memory, and the device is {device.type}"
        raise Refusal([Problem("parallel.async_tp", True, reason, "parallel.async_tp=false")])
    if config.parallel.pp > 1:
        from parallel.pipeline import sends_to_itself  # imports FSDP, which takes seconds

        if sends_to_itself(config.parallel, device.type):
            name = config.parallel.schedule.name
            reason = f"torch {torch.__version__} cannot run this schedule over gloo"
            raise Refusal(
                [Problem("parallel.schedule", name, reason, "parallel.schedule=interleaved_1f1b, or torch 2.15")]
            )
    if problems := list(machine_rules(config, device)):
        raise Refusal(problems)
    if config.compile.scope is Scope.auto and device.type == "cuda" and (problems := list(compiled_rules(config))):
        raise Refusal(problems)
    if config.compile.scope in (Scope.block, Scope.model) and device.type == "cpu":
        check_compiler(config.compile.scope)
    make_deterministic(config.deterministic)
    folder = RunFolder(config.out, config.name, config.checkpoint.dir)
    console = Console() if rank == 0 else Silent()
    logger = logging.getLogger("training")
    logger.handlers, logger.propagate = [ToConsole(console)], False
    status = Status(folder.status_path, command())
    trains = not config.eval_only
    end = job_end() if rank == 0 and trains else None  # one that knows is enough: what it decides holds for all
    stop = StopRequest(config.max_minutes, config.checkpoint.every_minutes, end, config.checkpoint.grace_seconds)
    return Place(rank, world, device, folder, console, status, stop, Ranks.alone(), trains)


def check_compiler(scope: Scope) -> None:
    """Whether torch.compile finds what makes its kernels for a CPU. Raises Refusal."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
    if shutil.which(compiler) is None:
        reason = f"needs a C++ compiler on a CPU, and there is no {compiler}"
        raise Refusal([Problem("compile", scope.name, reason, "compile=none, or set CXX to a compiler")])


def find_device(wanted: str) -> torch.device:
    """This rank's device. Raises Refusal where there is no GPU, or not one for each rank of the host."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    place = int(os.environ.get("LOCAL_RANK", "0"))
    if place >= torch.cuda.device_count():
        reason = f"this host has {torch.cuda.device_count()} CUDA devices and this is rank {place} on it"
        instead = "as many ranks as devices (--nproc-per-node), or hardware.device=cpu"
        raise Refusal([Problem("hardware.device", wanted, reason, instead)])
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    return device


def connect(config: Config, place: Place) -> None:
    """The process group and the mesh. A single device has neither. Raises Refusal where devices differ."""
    if config.parallel.on_mesh:
        place.ranks = Ranks(start_process_group(place.device, config.parallel.timeout_seconds))
        cards = place.ranks.gather(card_of(place.device))
        if not config.parallel.allow_mixed_devices and (problems := mixed_devices(cards, allow_mixed(config))):
            raise Refusal(problems)
        place.mesh = build_mesh(config.parallel, place.device)
    if place.trains and config.checkpoint.background is BackgroundSaves.thread:
        on_mesh = config.parallel.on_mesh
        place.saving = Ranks(saving_group(config.parallel.timeout_seconds)) if on_mesh else Ranks.alone()


def allow_mixed(config: Config) -> str:
    """What to write to go on with devices of several kinds."""
    other = " optimizer.compression=bf16" if config.optimizer.compression is Compress.powersgd else ""
    return f"parallel.allow_mixed_devices=true{other}"


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def say_stopped(place: Place, stopped: Stopped, saved_step: int | None) -> int:
    """Tells how to go on. Under torchrun the code is 0: it would restart the run
    after another."""
    code = FINISHED if launched() else SAVED
    done = "nothing new to save" if saved_step is None else f"saved at step {saved_step:,}"
    place.console.close()
    place.console.say(f"stopped by {stopped.cause}: {done}\n  go on: {place.status.command}")
    if place.rank == 0 and place.trains and (place.claimed or not place.folder.holds_run()):
        place.folder.path.mkdir(parents=True, exist_ok=True)
        place.status.write(State.saved, code, f"stopped by {stopped.cause}")
    return code


def tell_failure(place: Place, error: BaseException) -> None:
    """Leaves the reason in the rank's log and in status.json."""
    if place.claimed:
        log = place.folder.log_path if place.rank == 0 else place.folder.rank_log_path(place.rank)
        with open(log, "a") as file:
            file.write("".join(traceback.format_exception(error)))
        place.status.fail(f"rank {place.rank}: {type(error).__name__}: {error}", FAILED)


def tell_hang(place: Place, message: str) -> None:
    """What the watchdog has found, while the main thread waits."""
    place.console.warn(message)
    place.status.fail(message, HUNG)


def tell_refusal(place: Place, refusal: Refusal) -> None:
    """Leaves in status.json what only came to light when the run had been told to be running."""
    if place.claimed:
        place.status.fail(str(refusal), REFUSED)
