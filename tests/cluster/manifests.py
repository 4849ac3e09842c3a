"""Checks the files for Kubernetes and the clouds with their own parsers, whose packages are no part of the project's
environment: uv run --no-project --with kubernetes-validate python -m tests.cluster.manifests kubernetes FILE ..."""

import importlib
import sys
from pathlib import Path
from typing import Any

import yaml

# What a JobSet adds to the Jobs in it: the fields of kubernetes-sigs/jobset, api/jobset/v1alpha2, that are used here.
JOBSET: dict[str, set[str]] = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"network", "failurePolicy", "replicatedJobs"},
    "spec.network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "spec.failurePolicy": {"maxRestarts", "rules", "restartStrategy"},
    "spec.failurePolicy.rules": {"name", "action", "onJobFailureReasons", "targetReplicatedJobs"},
    "spec.replicatedJobs": {"name", "replicas", "template"},
}


def check_kubernetes(path: Path) -> None:
    """Raises what the schemas of Kubernetes say, unknown fields among it."""
    validate = importlib.import_module("kubernetes_validate").validate
    for document in yaml.safe_load_all(path.read_text()):
        for part in jobs_of(document) if document["kind"] == "JobSet" else [document]:
            validate(part, "1.37", strict=True)


def jobs_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The Jobs of a JobSet. Raises ValueError where there is a field that none has."""
    for place, known in JOBSET.items():
        found: Any = [document]
        for name in filter(None, place.split(".")):
            found = [inner for one in found for inner in (one[name] if isinstance(one[name], list) else [one[name]])]
        for one in found:
            if unknown := set(one) - known:
                raise ValueError(f"{place or 'JobSet'}: {unknown}")
    jobs = document["spec"]["replicatedJobs"]
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}} | job["template"] for job in jobs
    ]


def check_sky(path: Path) -> None:
    task = importlib.import_module("sky").Task.from_yaml(str(path))
    assert [str(one.cloud).lower() for one in task.resources] == [path.name.partition(".")[0]], task.resources


def check_modal(path: Path) -> None:
    sys.path.insert(0, str(path.parent))
    app = importlib.import_module(path.stem)
    assert list(app.app.registered_functions) == ["train"]


if __name__ == "__main__":
    checks = {"kubernetes": check_kubernetes, "sky": check_sky, "modal": check_modal}
    for name in sys.argv[2:]:
        checks[sys.argv[1]](Path(name))
        print(f"{name}: valid")
