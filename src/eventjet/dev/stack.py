"""All servers of an app on one machine: an embedded NATS server, and SQLite or an embedded PostgreSQL.

With a given folder, data and ports stay the same from one run to the next; without a folder everything is temporary.
Neither servers nor temporary folders outlive the program, however it ends.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.dev.process import check_platform
from eventjet.dev.server import EmbeddedServer
from eventjet.errors import UsageError
from eventjet.runtime import try_lock

_PORTS = "ports.json"
_TITLES = {"nats": "NATS", "postgres": "PostgreSQL", "console": "the console"}
_ENV = "env"


class Ports:
    """The ports that the servers of a folder had the last time, so that they stay the same."""

    def __init__(self, file: Path | None) -> None:
        """Read the ports that a run before has kept in `file`; without one nothing is kept."""
        self._file = file
        self._ports = {} if file is None else _remembered(file)
        self.notes: list[str] = []
        """In words, which servers got another port than before, and why."""

    def of(self, server: str, default: int | None = None) -> int | None:
        """Return the server's port, or the next free one where it is taken; None for a server that had none yet."""
        port = self._ports.get(server, default)
        if port is None or is_free(port):
            return port
        following = next((number for number in range(port + 1, min(port + 100, 65_536)) if is_free(number)), None)
        instead = "another one" if following is None else f"port {following}"
        self.notes.append(f"Another program has port {port} of {_TITLES[server]}, which is on {instead} this time.")
        return following

    def keep(self, server: str, port: int) -> None:
        """Remember the port of a server, unless it had another one that is only taken for now."""
        self._ports.setdefault(server, port)
        if self._file is not None:
            self._file.write_text(json.dumps(self._ports), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Stack:
    """The folder and the addresses of running servers."""

    folder: Path
    servers: str
    """The NATS server's URL, as `EVENTJET_SERVERS` takes it."""
    database: str
    """The database's URL, as `EVENTJET_DATABASE` takes it; it contains PostgreSQL's password."""
    monitoring: str
    """The NATS server's monitoring endpoint, as `EVENTJET_MONITORING` takes it."""
    ports: Ports
    """The ports of its servers, and of what is served beside them."""
    embedded: Sequence[EmbeddedServer]
    """The servers themselves."""

    def write_exports(self, app: str) -> Path:
        """Write a file, for this user alone, that points another shell at this stack; return its path."""
        variables = {"EVENTJET_APP": app, "EVENTJET_SERVERS": self.servers, "EVENTJET_DATABASE": self.database}
        file = self.folder / _ENV
        file.unlink(missing_ok=True)
        file.touch(0o600, exist_ok=False)
        file.write_text(
            "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()), encoding="utf-8"
        )
        return file


@contextmanager
def running_stack(folder: Path | None = None, *, postgres: bool = False) -> Generator[Stack]:
    """Run an app's servers during the block; with `postgres`, an embedded PostgreSQL instead of a SQLite file.

    `folder` is an absolute path; without it everything is temporary. Raises `Unreachable` when a server does not start,
    and `UsageError` when another stack uses the folder or another user owns it.
    """
    check_platform("`eventjet dev`")
    with ExitStack() as ending:
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Locked first: another stack may run a PostgreSQL there, which needs the modes that it has given.
            ending.enter_context(sole_user(folder))
            _make_private(folder, passable=postgres and os.geteuid() == 0)
        ports = Ports(None if folder is None else folder / _PORTS)
        data = None if folder is None else folder / "nats"
        nats = ending.enter_context(closing(NatsServer(data, port=ports.of("nats")))).start()
        ports.keep("nats", nats.port)
        # Without a folder, files are in the NATS server's temporary one and are removed with it.
        path, embedded = folder or nats.directory, list[EmbeddedServer]([nats])
        if postgres:
            # A temporary PostgreSQL has its own folder: for root it runs as another user, who could not enter ours.
            data = None if folder is None else folder / "postgres"
            server = ending.enter_context(closing(PostgresServer(data, port=ports.of("postgres")))).start()
            ports.keep("postgres", server.port)
            embedded.append(server)
            database = server.url.replace("+psycopg", "", 1)
        else:
            file = path / "eventjet.db"
            file.touch(0o600)  # SQLite gives its journal the modes of the file
            database = f"sqlite:///{file}"
        if folder is not None:
            _make_private(folder, passable=postgres and os.geteuid() == 0)
        yield Stack(path, nats.url, database, nats.monitor_url, ports, embedded)


def _make_private(folder: Path, *, passable: bool) -> None:
    """Make an existing folder accessible to its owner alone; raises `UsageError` if another user owns it.

    A PostgreSQL that root starts runs as another user, who must get to its own folder: with `passable`, others may pass
    through the folder and see nothing.
    """
    try:
        folder.chmod(0o711 if passable else 0o700)
        for entry in folder.iterdir():
            if entry.name != "postgres" and not entry.is_symlink():
                entry.chmod(0o700 if entry.is_dir() else 0o600)
    except PermissionError as error:
        raise _foreign(folder, error) from None


def _foreign(folder: Path, error: PermissionError) -> UsageError:
    return UsageError(
        f"{folder} is not this user's own, and what `eventjet dev` keeps there is for its owner only "
        f"({error.strerror}). Remove it, or run in another folder."
    )


@contextmanager
def sole_user(folder: Path) -> Generator[None]:
    """Lock a folder for one stack or server, and have Git ignore it.

    Raises `UsageError` while another uses it, and where it belongs to another user.
    """
    try:
        file = (folder / "lock").open("wb")
    except PermissionError as error:
        raise _foreign(folder, error) from None
    with file as lock:
        if not try_lock(lock):
            raise UsageError(
                f"Another `eventjet dev` or `server` runs on {folder}. Use that one, stop it, or run this one "
                "elsewhere: `dev --temporary`, `server --store DIR`."
            )
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
        try:
            yield
        finally:
            (folder / _ENV).unlink(missing_ok=True)


def _remembered(file: Path) -> dict[str, int]:
    """Return the ports of the last run, or no ports if the file cannot be read."""
    try:
        ports: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {name: port for name, port in ports.items() if isinstance(port, int)}
    except (OSError, ValueError, AttributeError):
        return {}


def is_free(port: int) -> bool:
    """Return whether a server may listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True
