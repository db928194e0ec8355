"""Application code is clean in pyright strict and mypy strict, and each mistake is reported, without a plugin."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(700)  # the first run of pyright fetches it

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FILES = ("application.py", "several.py", "mistakes.py", "acting_mistakes.py")
MISTAKES = {
    (name, number)
    for name in FILES
    for number, line in enumerate((HERE / name).read_text().splitlines(), 1)
    if line.endswith("# wrong")
}


def pyright() -> set[tuple[str, int]]:
    """Return the file and line of every error."""
    config = ROOT / ".pyright-typing.json"
    config.write_text(
        json.dumps({
            "include": [f"tests/typing/{name}" for name in FILES],
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
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(FILES), done.stdout
    errors = [diagnostic for diagnostic in report["generalDiagnostics"] if diagnostic["severity"] == "error"]
    return {(Path(diagnostic["file"]).name, diagnostic["range"]["start"]["line"] + 1) for diagnostic in errors}


def mypy() -> set[tuple[str, int]]:
    """Return the file and line of every error."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "--cache-dir",
         ".mypy_cache", *(f"tests/typing/{name}" for name in FILES)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {(name, int(line)) for name, line in re.findall(r"(\w+\.py):(\d+): error", done.stdout)}


@pytest.mark.parametrize("checker", [pyright, mypy])
def test_application_code_is_clean_and_every_mistake_is_reported(checker: Callable[[], set[tuple[str, int]]]) -> None:
    assert checker() == MISTAKES
