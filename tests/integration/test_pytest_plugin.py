"""The plugin that the extra `testing` registers with pytest, in an application's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def pytest_in(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder with every warning as an error."""
    program = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--rootdir", "."]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", '[tool.pytest.ini_options]\ntestpaths = ["."]\n'),
        pytest.param("README.md", "", marks=pytest.mark.slow),
        pytest.param("pyproject.toml", '[tool.eventjet]\napp = "bank:bank"\n', marks=pytest.mark.slow),
        pytest.param("pytest.ini", "[pytest]\n", marks=pytest.mark.slow),
    ],
)
def test_a_run_without_settings_of_pytest_asyncio_has_no_warnings(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text, encoding="utf-8")
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    process = pytest_in(tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stderr == ""
    assert "warning" not in process.stdout


def test_a_configuration_without_the_loop_scope_is_reported(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n", encoding="utf-8")
    assert "asyncio_default_fixture_loop_scope" in pytest_in(tmp_path).stderr
