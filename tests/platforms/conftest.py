"""A Python of another platform, made of this one by `emulation.py`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BOUND_S = 280.0
OPTIONS = ("-W", "ignore:Module already imported", "-p", "no:cacheprovider", "-p", "no:xdist", "-q")
"""Options of pytest."""
EVERYTHING = """
import importlib, io, pkgutil
from contextlib import redirect_stdout

import eventjet

for module in pkgutil.walk_packages(eventjet.__path__, "eventjet."):
    if not module.name.startswith(("eventjet.examples.", "eventjet.starter")) and "__main__" not in module.name:
        importlib.import_module(module.name)

from eventjet.cli.main import app, commands_of, main

for name, _ in commands_of(app):
    with redirect_stdout(io.StringIO()) as help:
        assert main([*name.split(), "--help"]) == 0, name
    assert "Usage: eventjet " + name in help.getvalue(), name
"""
"""What imports every module, and asks every command for its help."""


@dataclass(frozen=True, slots=True)
class Platform:
    """A program with python's arguments, in the root folder of the project."""

    python: Path
    environ: Mapping[str, str]
    ending: ExitStack

    def __call__(self, *arguments: str, status: int = 0, **environ: str) -> str:
        """Run Python to its end, and return what it has printed to both outputs, as UTF-8."""
        done = subprocess.run(
            [self.python, *arguments],
            cwd=ROOT,
            env={**self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_BOUND_S,
        )
        output = done.stdout.decode("utf-8")
        assert done.returncode == status, output
        return output

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Start Python with its two outputs in one pipe; it is killed at the end of the test."""
        process = self.ending.enter_context(
            subprocess.Popen(
                [self.python, *arguments],
                cwd=ROOT,
                env={**self.environ, **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        self.ending.callback(process.kill)
        return process


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    """Read the process's output up to a line with a word, and return that line."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in iter(process.stdout.readline, ""):
        lines.append(line)
        if word in line:
            return line
    raise AssertionError("".join(lines))


@pytest.fixture
def windows(tmp_path: Path, processes: ExitStack) -> Platform:
    return _platform("windows", tmp_path, processes)


@pytest.fixture
def macos(tmp_path: Path, processes: ExitStack) -> Platform:
    return _platform("macos", tmp_path, processes)


def _platform(name: str, folder: Path, ending: ExitStack) -> Platform:
    python = folder / "python"
    real = shlex.join([sys.executable, "-X", "warn_default_encoding", str(Path(__file__).with_name("emulation.py"))])
    python.write_text(f'#!/bin/sh\nexec {real} {name} "$0" "$@"\n', encoding="utf-8")
    python.chmod(0o700)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("EVENTJET_", "PYTEST_"))}
    return Platform(python, {**environ, "EVENTJET_APP": "eventjet.examples.bank.app:bank"}, ending)
