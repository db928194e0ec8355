"""Everything an app needs on one machine: an embedded NATS server, and SQLite or an embedded PostgreSQL.

In a folder that is given, data and ports stay the same from one run to the next; without one everything is temporary.
Neither servers nor temporary folders outlive the program, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.errors import UsageError

_PORTS = "ports.json"
_ENV = "env"


@dataclass(frozen=True, slots=True)
class Stack:
    """Where its parts are."""

    folder: Path
    servers: str
    """As `EVENTJET_SERVERS` takes it."""
    database: str
    """As `EVENTJET_DATABASE` takes it; holds PostgreSQL's password."""
    monitoring: str
    """The server's monitoring endpoint, as `EVENTJET_MONITORING` takes it."""

    def write_exports(self, app: str, jvm_cache: Path | None = None) -> Path:
        """A file that points another shell at this stack by `. file`; for this user alone, and gone with the stack.

        With where the bulk jobs that are started there are to keep the classes of their JVM.
        """
        named = {"EVENTJET_APP": app, "EVENTJET_SERVERS": self.servers, "EVENTJET_DATABASE": self.database}
        named |= {} if jvm_cache is None else {"EVENTJET_JVM_CACHE": str(jvm_cache.absolute())}
        file = self.folder / _ENV
        file.unlink(missing_ok=True)
        file.touch(0o600, exist_ok=False)
        file.write_text(
            "".join(f"export {name}={shlex.quote(value)}\n" for name, value in named.items()), encoding="utf-8"
        )
        return file


@contextmanager
def running_stack(folder: Path | None = None, *, postgres: bool = False) -> Generator[Stack]:
    """Start what is needed, and end it with the block; `postgres` is an embedded PostgreSQL instead of a SQLite file.

    `folder` is an absolute path; without one all of it is temporary. Raises `Unreachable`, and `UsageError` when the
    folder is in use by another stack.
    """
    with ExitStack() as ending:
        ports: dict[str, int] = {}
        if folder is not None:
            _make_private(folder, passable=postgres and os.geteuid() == 0)
            ending.enter_context(_sole_user(folder))
            ports = _remembered(folder / _PORTS)
        data = None if folder is None else folder / "nats"
        nats = ending.enter_context(closing(NatsServer(data, port=ports.get("nats")))).start()
        ports["nats"] = nats.port
        # What is temporary goes with the server's own folder.
        path = folder or nats.directory
        database = f"sqlite:///{path / 'eventjet.db'}"
        if not postgres:
            # SQLite gives its journal the modes of the file.
            (path / "eventjet.db").touch(0o600)
        if postgres:
            # A temporary one has a folder of its own: as root it runs as another user, who could not pass through ours.
            data = None if folder is None else folder / "postgres"
            server = ending.enter_context(closing(PostgresServer(data, port=ports.get("postgres")))).start()
            ports["postgres"] = server.port
            database = server.url.replace("+psycopg", "", 1)
        if folder is not None:
            (folder / _PORTS).write_text(json.dumps(ports), encoding="utf-8")
            _make_private(folder, passable=postgres and os.geteuid() == 0)
        yield Stack(path, nats.url, database, nats.monitor_url)


def _make_private(folder: Path, *, passable: bool) -> None:
    """Make the folder, or take it over, for its owner alone; raises `UsageError` where it is somebody else's.

    Where root runs a PostgreSQL, which then runs as another user, that user has to pass through to its own folder:
    others may pass then, and see nothing.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        folder.chmod(0o711 if passable else 0o700)
        for entry in folder.iterdir():
            if entry.name != "postgres" and not entry.is_symlink():
                entry.chmod(0o700 if entry.is_dir() else 0o600)
    except PermissionError as error:
        raise UsageError(
            f"{folder} is not this user's own, and what `eventjet dev` keeps there is for its owner only "
            f"({error.strerror}). Remove it, or run in another folder."
        ) from None


@contextmanager
def _sole_user(folder: Path) -> Generator[None]:
    """One stack a folder; what is in it is nobody's to commit."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another `eventjet dev` runs on {folder}. Use that one, stop it, or run this one with --temporary."
            ) from None
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
        try:
            yield
        finally:
            (folder / _ENV).unlink(missing_ok=True)


def _remembered(file: Path) -> dict[str, int]:
    """Ports of the last run that are still free; those of a file that cannot be read are chosen anew."""
    try:
        ports: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {name: port for name, port in ports.items() if isinstance(port, int) and _free(port)}
    except (OSError, ValueError, AttributeError):
        return {}


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True
