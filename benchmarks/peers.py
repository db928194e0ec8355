"""Which peers are here, and the program of each. `make bench` installs them; one that cannot be is left out."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from benchmarks.message_db import NODE
from benchmarks.postings import postings
from benchmarks.readmodel import libpq

PYEVENTSOURCING = "pyeventsourcing"
EVENTSOURCE = "eventsource-py"
PROTEAN = "Protean"
EMMETT = "Emmett"

Program: TypeAlias = Callable[..., list[str]]
"""Arguments in, a command line out."""

_HERE = Path(__file__).parent


def python(module: str, executable: str = sys.executable) -> Program:
    """A module of `benchmarks.subjects`."""
    return lambda *arguments: [executable, "-m", f"benchmarks.subjects.{module}", *map(str, arguments)]


def eventsource_python() -> str | None:
    """It asks for a newer Python than eventjet does, so it may be in an environment of its own."""
    return sys.executable if find_spec("eventsource") is not None else _own("peer")


def pyeventsourcing_python() -> str | None:
    return sys.executable if find_spec("eventsourcing") is not None else None


def protean_python() -> str | None:
    """It asks for other versions than eventjet does, and for Message DB, which comes from npm."""
    return _own("protean") if (NODE / "node_modules" / "@eventide" / "message-db").is_dir() else None


def emmett(job: str, folder: Path) -> Program | None:
    """`(store, count, tasks)` in; it reads the postings from a file."""
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules" / "@event-driven-io" / "emmett").is_dir():
        return None
    script = str(_HERE / "node" / "emmett.mjs")
    os.environ["BENCH_NODE"] = str(NODE)
    return lambda store, count, tasks=1: [node, script, job, libpq(store), _file(folder, int(count)), str(tasks)]


def left_out(name: str) -> None:
    print(f"{name}: not installed, so it is left out (`make bench` installs what this machine can)")


@cache
def _file(folder: Path, count: int) -> str:
    file = folder / f"postings{count}.jsonl"
    file.write_text("".join(json.dumps([str(account), *rest]) + "\n" for account, *rest in postings(count)))
    return str(file)


def _own(name: str) -> str | None:
    executable = Path(sys.prefix) / name / "bin" / "python"
    return str(executable) if executable.exists() else None
