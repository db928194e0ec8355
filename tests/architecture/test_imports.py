"""Imports point one way, as `pyproject.toml` lays down, and every module says what it is for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.architecture.sources import ROOT, sources


def test_the_import_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([lint, "--no-logo"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_module_says_what_it_is_for() -> None:
    assert [source.name for source in sources("src") if source.text and not ast.get_docstring(source.tree)] == []
