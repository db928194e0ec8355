"""The plugin that the extra `testing` registers with pytest, in an application's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def pytest_in(folder: Path) -> subprocess.CompletedProcess[str]:
    """A run in which every warning is an error."""
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
def test_a_run_in_a_folder_without_settings_of_pytest_asyncio_warns_of_nothing(
    tmp_path: Path, file: str, text: str
) -> None:
    (tmp_path / file).write_text(text, encoding="utf-8")
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    done = pytest_in(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "warning" not in done.stdout


def test_a_folder_with_a_configuration_that_lacks_a_line_is_told(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n", encoding="utf-8")
    assert "asyncio_default_fixture_loop_scope" in pytest_in(tmp_path).stderr
