"""A real Slurm on this machine: each node is a slurmd with a port of its own. Debian's packages are built for that
(multiple-slurmd)."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.cluster.debian import missing
from tests.ranks import ROOT

NODES = ["espalier-n1", "espalier-n2"]
FIRST_PORT = 16820
# A requeued job waits until the credential of its last start has expired, and a node that is silent so long is down.
CREDENTIAL_SECONDS, NODE_SECONDS = 10, 10
CONFIG = """
ClusterName=espalier
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=cred_expire={credential}
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout={silent}
ReturnToService=2
KillWait=12
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Controller and nodes, started and stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = ""  # /etc/hosts as it was
        self.pids = [folder / f"{name}.pid" for name in ("controller", *NODES)]  # of what is to be stopped

    def start(self) -> None:
        (self.folder / "state").mkdir()
        host = os.uname().nodename.partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={FIRST_PORT + 1 + place} CPUs=4 "
            "RealMemory=2000 State=UNKNOWN"
            for place, name in enumerate(NODES)
        )
        config = CONFIG.format(
            folder=self.folder,
            host=host,
            nodes=nodes,
            controller=FIRST_PORT,
            credential=CREDENTIAL_SECONDS,
            silent=NODE_SECONDS,
        )
        path = self.folder / "slurm.conf"
        path.write_text(config)
        os.environ["SLURM_CONF"] = str(path)
        self._name_the_nodes()
        self._start_munge()
        subprocess.run(["slurmctld", "-c"], check=True)
        for name in NODES:
            self.start_node(name)
        self.wait_until(lambda: self.idle() == len(NODES), 60)

    def _name_the_nodes(self) -> None:
        """The batch script looks for its first node by name."""
        hosts = Path("/etc/hosts")
        self.hosts = hosts.read_text()
        hosts.write_text(self.hosts.rstrip("\n") + "\n" + "".join(f"127.0.0.1 {name}\n" for name in NODES))

    def _start_munge(self) -> None:
        if self._munge_answers():
            return
        for path in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
            mode = "755" if path.startswith("/run") else "700"
            subprocess.run(["install", "-d", "-o", "munge", "-g", "munge", "-m", mode, path], check=True)
        subprocess.run(["runuser", "-u", "munge", "--", "munged"], check=True)
        self.wait_until(self._munge_answers, 20)
        self.pids.append(Path("/run/munge/munged.pid"))

    @staticmethod
    def _munge_answers() -> bool:
        return subprocess.run(["munge", "-n"], capture_output=True).returncode == 0

    def start_node(self, name: str) -> None:
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        subprocess.run(["slurmd", "-N", name], check=True)

    def lose_node(self, name: str) -> None:
        """Kills all that runs on it at once, as when its power fails."""
        daemon = int((self.folder / f"{name}.pid").read_text())
        # The steps' daemons are no children of the node's; what they started is theirs.
        found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        table = [line.split(None, 2) for line in found.splitlines()[1:]]
        parents = {int(pid): int(parent) for pid, parent, _ in table}
        steps = {int(pid) for pid, _, words in table if words.startswith("slurmstepd") and self._is_on(int(pid), name)}

        def below(pid: int) -> bool:
            while pid in parents and pid not in steps:
                pid = parents[pid]
            return pid in steps

        for pid in [daemon, *steps, *filter(below, parents)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _is_on(pid: int, name: str) -> bool:
        """Whether a step's daemon is of this node: it has the node's socket or log open."""
        with suppress(OSError):
            return any(name in os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
        return False

    def stop(self) -> None:
        subprocess.run(["scancel", "--user=root", "--signal=KILL"], capture_output=True)
        for path in filter(Path.exists, self.pids):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)
        if self.hosts:
            Path("/etc/hosts").write_text(self.hosts)
        os.environ.pop("SLURM_CONF", None)

    def ask(self, *command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()

    def idle(self) -> int:
        return int(self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") or 0)

    def state(self, job: str) -> str:
        """RUNNING, COMPLETED, CANCELLED, ..."""
        words = self.ask("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def restarts(self, job: str) -> int:
        words = self.ask("scontrol", "show", "job", job).split()
        return next(int(word.partition("=")[2]) for word in words if word.startswith("Restarts="))

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.3)

    def told(self) -> str:
        """The end of what Slurm and the jobs have written."""
        paths = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in paths)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Skips the test where there can be none."""
    if why := missing(["slurmctld", "slurmd", "munged"], ["slurm-wlm", "munge"]):
        pytest.skip(why)
    running = Cluster(folder)
    try:
        running.start()
        yield running
    finally:
        running.stop()
