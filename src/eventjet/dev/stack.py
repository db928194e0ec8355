"""Everything an app needs on one machine: an embedded NATS server, and SQLite or an embedded PostgreSQL.

In a folder that is given, data and ports stay the same from one run to the next; without one everything is temporary.
Neither servers nor temporary folders outlive the program, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import socket
from pathlib import Path
from typing import Any, Self, cast

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.dev.server import Home
from eventjet.errors import UsageError

_PORTS = "ports.json"
_ENV = "env"


class Stack:
    """Started once; `close` ends it and removes what is temporary."""

    def __init__(self, folder: Path | None = None, *, postgres: bool = False) -> None:
        """`postgres`: an embedded PostgreSQL instead of a SQLite file."""
        self._home = Home(folder, "eventjet-dev-")
        self._postgres_wanted = postgres
        self._lock: int | None = None
        self._nats: NatsServer | None = None
        self._postgres: PostgresServer | None = None

    def start(self) -> Self:
        """Start what is needed; raises `Unreachable`, and `UsageError` when the folder is in use by another stack."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End the servers in good order and let go of the folder."""
        for server in (self._postgres, self._nats):
            if server is not None:
                server.close()
        self._nats = self._postgres = None
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / _ENV).unlink()
            os.close(self._lock)
            self._lock = None
        self._home.remove()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self._home.path()

    @property
    def servers(self) -> str:
        """As `EVENTJET_SERVERS` takes it."""
        assert self._nats is not None
        return self._nats.url

    @property
    def database(self) -> str:
        """As `EVENTJET_DATABASE` takes it; holds PostgreSQL's password."""
        if self._postgres is not None:
            return self._postgres.url.replace("+psycopg", "", 1)
        return f"sqlite:///{self.folder / 'eventjet.db'}"

    def exports(self, app: str | None = None) -> list[str]:
        """Shell lines that point another shell at this stack."""
        named = {"EVENTJET_APP": app, "EVENTJET_SERVERS": self.servers, "EVENTJET_DATABASE": self.database}
        return [f"export {name}={shlex.quote(value)}" for name, value in named.items() if value is not None]

    def write_exports(self, app: str | None = None) -> Path:
        """The same as a file that a shell reads with `. file`; for this user alone, and gone with the stack."""
        file = self.folder / _ENV
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write("".join(f"{line}\n" for line in self.exports(app)))
        return file

    def _start(self) -> None:
        self._take_folder()
        ports = {} if self._home.temporary else _remembered(self.folder / _PORTS)
        self._nats = NatsServer(self._home.part("nats"), port=ports.get("nats")).start()
        ports["nats"] = self._nats.port
        if self._postgres_wanted:
            # A temporary one has a folder of its own: as root it runs as another user, who could not pass through ours.
            place = None if self._home.temporary else self.folder / "postgres"
            self._postgres = PostgresServer(place, port=ports.get("postgres"))
            self._postgres.start()
            ports["postgres"] = self._postgres.port
        if not self._home.temporary:
            (self.folder / _PORTS).write_text(json.dumps(ports), encoding="utf-8")

    def _take_folder(self) -> None:
        """One stack a folder; what is in it is nobody's to commit."""
        folder = self.folder
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UsageError(
                f"Another `eventjet dev` runs on {folder}. Use that one, stop it, or run this one with --temporary."
            ) from None
        self._lock = lock
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")


def _remembered(file: Path) -> dict[str, int]:
    """Ports of the last run that are still free; those of a file that cannot be read are chosen anew."""
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    ports = cast("dict[str, Any]", found)
    return {name: port for name, port in ports.items() if isinstance(port, int) and _free(port)}


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True
