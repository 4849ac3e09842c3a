"""Hosts on one machine: each is a network namespace with an address and a name of its own, on a bridge in one more, so
that the machine's own network stays as it is."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.debian import missing
from tests.cluster.paced import SECONDS
from tests.ranks import ROOT
from tests.runs.processes import environment

BRIDGE = "espalier-bridge"


@dataclass(frozen=True)
class Host:
    name: str
    address: str

    def start(self, log: Path, *command: str) -> "subprocess.Popen[bytes]":
        """A command on it, under its name. Its output is added to the log."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command]
        env = environment() | {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", SECONDS: "0.5"}
        with open(log, "ab") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *named], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT
            )

    def die(self) -> None:
        """Kills all that runs on it at once."""
        for pid in ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def share(host: Host, first: Host, least: int, log: Path, words: list[str]) -> "subprocess.Popen[bytes]":
    """One rank of two on the host, which meets the other at the first. least: of hosts that go on."""
    settings = [f"PYTHON={sys.executable}", "HOSTS=2", f"MIN_HOSTS={least}", f"HEAD={first.name}"]
    return host.start(log, "env", *settings, str(ROOT / "scripts" / "host.sh"), *words)


def wait(process: "subprocess.Popen[bytes]", log: Path, seconds: float = 120) -> None:
    """For its good end."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert process.returncode == 0, log.read_text()[-4000:]


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """Skips the test where there can be none."""
    if why := missing(["ip", "unshare"], ["iproute2", "util-linux"]):
        pytest.skip(why)
    made = [Host(f"espalier-h{place}", f"10.77.5.{10 + place}") for place in range(1, number + 1)]
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made)
    try:
        try:
            ip("netns", "add", BRIDGE)
            ip("-n", BRIDGE, "link", "add", "br0", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs network namespaces: {error.stderr.strip()}")
        ip("-n", BRIDGE, "link", "set", "br0", "up")
        for place, host in enumerate(made):
            etc = Path("/etc/netns", host.name)  # what `ip netns exec` shows in the place of files in /etc
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text(names)
            ip("netns", "add", host.name)
            ip("-n", host.name, "link", "set", "lo", "up")
            ip("link", "add", "eth0", "netns", host.name, "type", "veth", "peer", f"port{place}", "netns", BRIDGE)
            ip("-n", BRIDGE, "link", "set", f"port{place}", "master", "br0", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
        yield made
    finally:
        for host in made:
            with suppress(subprocess.CalledProcessError):
                host.die()
            shutil.rmtree(Path("/etc/netns", host.name), ignore_errors=True)
        for name in [BRIDGE, *(host.name for host in made)]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
