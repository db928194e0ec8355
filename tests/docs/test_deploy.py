"""What `deploy` holds is what systemd and Kubernetes take, and runs commands that there are."""

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
"""Of a chart, not a manifest: `test_nats_on_kubernetes.py`."""
MANIFESTS = sorted(path for path in (ROOT / "deploy/kubernetes").glob("*.yaml") if path.name != VALUES)
KINDS = ["CronJob", "Job", "NetworkPolicy", "ConfigMap", "Deployment", "PodDisruptionBudget"]
VERSIONS = ("1.31", "1.37")
"""Of Kubernetes: an old one that is still about, and the newest that the schemas know."""


def documents() -> list[dict[str, Any]]:
    return [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_manifest(version: str) -> None:
    found = documents()
    assert [one["kind"] for one in found] == KINDS
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)


def pods() -> list[dict[str, Any]]:
    """The templates of all pods."""
    held = [one["spec"]["jobTemplate"] if one["kind"] == "CronJob" else one for one in documents()]
    return [one["spec"]["template"]["spec"] for one in held if "template" in one.get("spec", {})]


def test_each_pod_knows_whose_inbox_it_hears_and_whom_it_trusts() -> None:
    found = pods()
    assert len(found) == 3
    for pod in found:
        (container,) = pod["containers"]
        given = {one["name"]: one.get("value") for one in container["env"]}
        (role,) = [one["secretRef"]["name"].removeprefix("bank-") for one in container["envFrom"] if "secretRef" in one]
        assert given["EVENTJET_INBOX_PREFIX"] == f"_INBOX_{role}"
        (mounted,) = container["volumeMounts"]
        (volume,) = [one for one in pod["volumes"] if one["name"] == mounted["name"]]
        (item,) = volume["secret"]["items"]
        (settings,) = [one["data"] for one in documents() if one["kind"] == "ConfigMap"]
        assert settings["EVENTJET_TLS_CA"] == f"{mounted['mountPath']}/{item['path']}"


def test_a_manifest_that_is_wrong_is_seen() -> None:
    (worker,) = [one for one in documents() if one["kind"] == "Deployment"]
    worker["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(worker, VERSIONS[-1], strict=True)


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
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
