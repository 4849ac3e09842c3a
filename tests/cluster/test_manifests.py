"""The files for Kubernetes and the clouds: what their own parsers say, and what must not get lost of them."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.job import prepared
from tests.cluster.manifests import jobs_of
from tests.ranks import ROOT

K8S, CLOUDS = ROOT / "scripts" / "k8s", ROOT / "scripts" / "clouds"
PARSERS = {
    "kubernetes": ("kubernetes-validate==1.37.0", sorted(K8S.glob("*.yaml"))),
    "sky": ("skypilot==0.14.1", sorted(CLOUDS.glob("*.sky.yaml"))),
    "modal": ("modal==1.6.4", [CLOUDS / "modal_app.py"]),
}


def checked(kind: str, paths: list[Path]) -> "subprocess.CompletedProcess[str]":
    """In an environment of its own, which uv makes."""
    environment = ["--no-project", "--python", "3.11", "--with", PARSERS[kind][0], "--with", "pyyaml"]
    command = ["uv", "run", *environment, "python", "-m", "tests.cluster.manifests", kind, *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARSERS)
def test_their_own_parsers_take_them(kind: str) -> None:
    if shutil.which("uv") is None:
        pytest.skip("needs uv, to install the parser apart")
    paths = PARSERS[kind][1]
    result = checked(kind, paths)
    if "Failed to fetch" in result.stderr and "CI" not in os.environ:
        pytest.skip(f"{PARSERS[kind][0]} cannot be fetched")
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count(": valid") == len(paths) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("kubernetes", "podFailurePolicy:", "podFailurePolicies:"),
        ("kubernetes", "terminationGracePeriodSeconds: 120", "terminationGracePeriodSeconds: soon"),
        ("sky", "use_spot:", "spot:"),
    ],
)
def test_the_parsers_see_a_mistake(tmp_path: Path, kind: str, old: str, new: str) -> None:
    if shutil.which("uv") is None:
        pytest.skip("needs uv, to install the parser apart")
    for source in PARSERS[kind][1]:
        path = tmp_path / source.name
        assert old in source.read_text()
        path.write_text(source.read_text().replace(old, new))
        assert checked(kind, [path]).returncode != 0


def jobs() -> list[dict[str, Any]]:
    _, job = yaml.safe_load_all((K8S / "job.yaml").read_text())
    [inner] = jobs_of(yaml.safe_load((K8S / "jobset.yaml").read_text()))
    return [job, inner]


@pytest.mark.parametrize("job", jobs(), ids=["Job", "JobSet"])
def test_a_preempted_pod_comes_back_and_so_do_those_that_stopped_with_it(job: dict[str, Any]) -> None:
    """A pod that ends with 0 would be done for good: its run may not be."""
    spec = job["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]
    }
    assert by_code == {2: "FailJob", 75: "Ignore"}
    assert {"type": "DisruptionTarget", "status": "True"} in [c for r in rules for c in r.get("onPodConditions", [])]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a policy needs it
    [container] = pod["containers"]
    assert container["command"] == ["scripts/host.sh"] and {
        rule["onExitCodes"]["containerName"] for rule in rules[:2]
    } == {container["name"]}
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(values["HOSTS"]) == spec["completions"] == spec["parallelism"]
    assert int(values["RANKS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"checkpoint.grace_seconds={pod['terminationGracePeriodSeconds']}" in container["args"]


def test_the_first_pod_has_the_name_where_all_meet() -> None:
    service, _ = yaml.safe_load_all((K8S / "job.yaml").read_text())
    for job, name in zip(jobs(), ["espalier-0.espalier", "espalier-hosts-0-0.espalier"], strict=True):
        [container] = job["spec"]["template"]["spec"]["containers"]
        assert {"name": "HEAD", "value": name} in container["env"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == jobs()[0]["spec"]["template"]["spec"]["subdomain"]


@pytest.mark.parametrize("path", PARSERS["sky"][1], ids=lambda path: path.name)
def test_a_lost_machine_is_replaced(path: Path) -> None:
    task = yaml.safe_load(path.read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert "/runs" in task["file_mounts"] and "out=/runs" in task["run"]


def shown() -> list[tuple[int, list[str]]]:
    """Every command in these files and the pages about them: its ranks, eight on a host, and the words of train.py."""
    found = [
        (8 * job["spec"]["completions"], job["spec"]["template"]["spec"]["containers"][0]["args"]) for job in jobs()
    ]
    for path in PARSERS["sky"][1]:
        task = yaml.safe_load(path.read_text())
        found.append((8 * task["num_nodes"], task["envs"]["WORDS"].split()))
    pages = ["README.md", "docs/cluster.md", "scripts/slurm/README.md", "scripts/slurm/train.sbatch", "scripts/host.sh"]
    for page in [*pages, "scripts/clouds/modal_app.py", *(f"scripts/clouds/{path.name}" for path in PARSERS["sky"][1])]:
        for line in (ROOT / page).read_text().splitlines():
            if command := re.search(
                r"(?:train\.sbatch|host\.sh|WORDS=|--words) \"?((?:[\w.]+=\S+ ?)+)", line.replace('="', "= ")
            ):
                hosts = re.search(r"(?:--nodes=|HOSTS=)(\d)", line)
                found.append((8 * int(hosts[1]) if hosts else 8, command[1].strip(' "`.').split()))
    return found


@pytest.mark.parametrize(("ranks", "words"), shown(), ids=str)
def test_the_runs_in_them_would_start(ranks: int, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 8)))
    swept = any("," in word for word in words)
    assert prepared(words, {"SLURM_ARRAY_TASK_ID": "1"} if swept else {})


def test_all_of_them_are_seen() -> None:
    assert len(shown()) >= 12
