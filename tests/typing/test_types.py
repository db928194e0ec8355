"""Application code is clean in pyright strict and mypy strict, and each mistake is reported, without a plugin."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(700)  # the first run of pyright fetches it

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MISTAKES = {
    number for number, line in enumerate((HERE / "mistakes.py").read_text().splitlines(), 1) if line.endswith("# wrong")
}


def pyright(name: str) -> set[int]:
    config = ROOT / ".pyright-typing.json"
    config.write_text(
        json.dumps({
            "include": [f"tests/typing/{name}"],
            "typeCheckingMode": "strict",
            "pythonVersion": "3.11",
            "extraPaths": ["."],
            "reportUnusedFunction": False,
            "reportUnusedCoroutine": False,
        })
    )  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pyright", "-p", str(config), "--pythonpath", sys.executable, "--outputjson"],
            cwd=ROOT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    finally:
        config.unlink()
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1, done.stdout
    return {one["range"]["start"]["line"] + 1 for one in found["generalDiagnostics"] if one["severity"] == "error"}


def mypy(name: str) -> set[int]:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "--cache-dir",
         ".mypy_cache", f"tests/typing/{name}"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {int(line) for line in re.findall(rf"{name}:(\d+): error", done.stdout)}


@pytest.mark.parametrize("checker", [pyright, mypy])
def test_application_code_is_clean(checker: type) -> None:
    assert checker("application.py") == set()


@pytest.mark.parametrize("checker", [pyright, mypy])
def test_every_mistake_is_reported_and_nothing_else(checker: type) -> None:
    assert checker("mistakes.py") == MISTAKES
