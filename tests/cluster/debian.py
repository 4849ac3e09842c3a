"""Programs that tests need and Debian has packages for."""

import os
import shutil
import subprocess


def missing(programs: list[str], packages: list[str]) -> str:
    """Why they cannot be used here; "" where they are installed, now or before. Needs root, as what they are used for
    does."""
    if os.geteuid() != 0:
        return f"needs root, for {', '.join(programs)}"
    if all(map(shutil.which, programs)):
        return ""
    if shutil.which("apt-get") is None:
        return f"needs {' and '.join(packages)}, and there is no apt-get"
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    for command in (["apt-get", "update", "-qq"], install):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(command, env=quiet, capture_output=True, text=True)
        if done.returncode != 0:
            return f"needs {' and '.join(packages)}; {' '.join(command)}: {done.stderr.strip()[-300:]}"
    return ""
