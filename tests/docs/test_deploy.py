"""The files of `deploy` are accepted by systemd and Kubernetes, and run commands that exist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
VALUES = "nats-values.yaml"
"""Values of a chart, not a manifest: `test_nats_on_kubernetes.py`."""
MANIFESTS = sorted(path for path in (ROOT / "deploy/kubernetes").glob("*.yaml") if path.name != VALUES)
KINDS = ["CronJob", "Job", "NetworkPolicy", "ConfigMap", "Deployment", "PodDisruptionBudget"]
VERSIONS = ("1.31", "1.37")
"""Versions of Kubernetes: an old one that is still in use, and the newest that the schemas know."""


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_every_manifest(version: str) -> None:
    manifests = documents()
    assert [manifest["kind"] for manifest in manifests] == KINDS
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def pods() -> list[dict[str, Any]]:
    """Return the templates of all pods."""
    templated = [
        document["spec"]["jobTemplate"] if document["kind"] == "CronJob" else document for document in documents()
    ]
    return [document["spec"]["template"]["spec"] for document in templated if "template" in document.get("spec", {})]


def test_each_pod_has_its_roles_inbox_prefix_and_the_ca() -> None:
    pod_specs = pods()
    assert len(pod_specs) == 3
    for pod in pod_specs:
        (container,) = pod["containers"]
        environ = {variable["name"]: variable.get("value") for variable in container["env"]}
        (role,) = [
            source["secretRef"]["name"].removeprefix("bank-")
            for source in container["envFrom"]
            if "secretRef" in source
        ]
        assert environ["EVENTJET_INBOX_PREFIX"] == f"_INBOX_{role}"
        (mounted,) = container["volumeMounts"]
        (volume,) = [volume_of_pod for volume_of_pod in pod["volumes"] if volume_of_pod["name"] == mounted["name"]]
        (item,) = volume["secret"]["items"]
        (settings,) = [document["data"] for document in documents() if document["kind"] == "ConfigMap"]
        assert settings["EVENTJET_TLS_CA"] == f"{mounted['mountPath']}/{item['path']}"


def test_a_wrong_manifest_is_detected() -> None:
    (worker,) = [document for document in documents() if document["kind"] == "Deployment"]
    worker["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(worker, VERSIONS[-1], strict=True)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    name = "eventjet-worker@.service"
    unit = (ROOT / "deploy/systemd" / name).read_text(encoding="utf-8")
    assert "/opt/%i/venv/bin/eventjet worker " in unit
    (tmp_path / name).write_text(unit.replace("/opt/%i/venv/bin/eventjet", sys.executable), encoding="utf-8")
    (tmp_path / "eventjet-worker@bank.service").symlink_to(name)
    done = subprocess.run(
        [program, "verify", "--man=no", str(tmp_path / "eventjet-worker@bank.service")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
