"""Imports point one way, as `pyproject.toml` lays down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([lint, "--no-logo"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_package_says_what_it_is_for() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "src").rglob("*.py")
        if path.stat().st_size and not path.read_text(encoding="utf-8").lstrip("#! \n").startswith(('"""', 'r"""'))
    ]
    assert not silent
