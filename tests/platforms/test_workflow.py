"""The workflow for macOS and Windows runs the commands of the documentation, and nothing else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.docs.pages import blocks_of
from tests.platforms.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
_PAGES = (ROOT / "README.md", ROOT / "docs" / "tutorial" / "first-project.md")


def jobs_of(workflow: Path) -> dict[str, Any]:
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]


def documented_commands() -> set[str]:
    """Return the lines of shell in the documentation, as one writes them in a clone."""
    lines = {
        line.strip()
        for page in _PAGES
        for block in blocks_of(page)
        if block.language == "sh"
        for line in block.text.splitlines()
    }
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return {line.replace('"eventjet[', '".[') for line in lines} | {f"make {target}" for target in targets}


def test_the_workflow_runs_the_documented_commands() -> None:
    assert WORKFLOWS
    known = documented_commands()
    for workflow in WORKFLOWS:
        for job in jobs_of(workflow).values():
            lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
            own = {line for line in lines if not line.startswith("git config ")}
            assert own
            assert {line.removesuffix(" PYTHON=python") for line in own} <= known
            assert "://" not in str(job["steps"])


def test_it_runs_on_each_system_and_python_that_the_package_names() -> None:
    (job,) = [jobs["project"] for jobs in map(jobs_of, WORKFLOWS) if "project" in jobs]
    matrix = job["strategy"]["matrix"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {kind.rpartition(" :: ")[2] for kind in project["classifiers"] if ":: Python :: 3." in kind}
    assert named <= set(matrix["python"])
    page = ROOT / "docs" / "reference" / "platforms.md"
    assert all(f" {version}" in page.read_text(encoding="utf-8") for version in named)
