"""`EmbeddedServer`: a supervised process with a folder for its data, permanent or temporary."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from eventjet.dev.process import ServerProcess, check_platform
from eventjet.dev.supervisor import Program
from eventjet.errors import Unreachable

T = TypeVar("T")


class EmbeddedServer(ABC):
    """The base of embedded servers; `close` removes a temporary directory, all else keeps data, port and directory."""

    name: str
    component: str
    """The server's name in error messages."""

    def __init__(self, directory: Path | None, port: int | None) -> None:
        check_platform(self.component)
        self._permanent = None if directory is None else directory.absolute()
        self._temporary: Path | None = None
        self._removal: weakref.finalize[[Path, bool], EmbeddedServer] | None = None
        self._port: int | None = port
        self._reservation = ExitStack()
        self._process: ServerProcess | None = None

    @abstractmethod
    def start(self) -> Self:
        """Start the server and return once it accepts clients; raises `Unreachable` with the end of its log."""

    def stop(self) -> None:
        """Ask the server to end, and kill it after a grace period; `start` goes on with the same data."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """End the server and all its processes at once, as a crash would; `start` recovers the data."""
        if self._process is not None:
            self._process.kill()

    def pause(self) -> None:
        """Stop the server (SIGSTOP): its connections stay open and nothing answers."""
        if self._process is not None:
            self._process.pause()

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        if self._process is not None:
            self._process.send(signal.SIGCONT)

    def close(self) -> None:
        """End the server and remove its temporary directory; a directory that was given stays as it is."""
        self.stop()
        if self._removal is not None:
            self._removal()
        self._temporary = self._removal = None
        self._reservation.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_running(self) -> None:
        """Raise `Unreachable`, with the end of its log, where a server that was started has ended."""
        if self._process is not None and not self._process.running:
            raise self._process.failure("it has ended")

    @property
    def running(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.running

    @property
    def port(self) -> int:
        """The port, chosen by the first start unless it was given; raises `Unreachable` before that."""
        return self._started(self._port)

    @property
    def pid(self) -> int:
        """The process id of the server that was started last; raises `Unreachable` if none was."""
        return self._started(self._process).pid

    @property
    def directory(self) -> Path:
        """The folder of configuration, log and data; a temporary one goes with `close`, this object or the program."""
        if self._permanent is not None:
            self._permanent.mkdir(parents=True, exist_ok=True)
            return self._permanent
        if self._temporary is None:
            # Directly under the temporary folder: its parents can be reached by the user PostgreSQL runs as.
            self._temporary = Path(tempfile.mkdtemp(prefix=f"eventjet-{self.name}-"))
            self._removal = weakref.finalize(self, shutil.rmtree, self._temporary, True)
        return self._temporary

    @property
    def log(self) -> Path:
        """The file that takes the server's output."""
        return self.directory / f"{self.name}.log"

    def _reserved(self) -> int:
        """Return the port, which no other process is given until `close`, not even while the server is stopped."""
        if self._port is None:
            self._port = self._reservation.enter_context(reserved_port())
        return self._port

    def _launch(self, program: Program, environ: Mapping[str, str] | None = None) -> ServerProcess:
        """Run a program of this server; a temporary directory is removed should our own program end without `close`."""
        remove = str(self.directory) if self._permanent is None else None
        return ServerProcess(self.component, replace(program, remove=remove), self.log, environ)

    def _started(self, value: T | None) -> T:
        if value is None:
            remedy = "Call `start()` first, or use it in a `with` block."
            raise Unreachable(self.component, "it was not started", remedy)
        return value


@contextmanager
def reserved_port() -> Generator[int]:
    """Reserve a free port of 127.0.0.1 during the block: no other process is given it, and a server may listen on it.

    Linux lets two sockets share an address that both bound with SO_REUSEADDR as long as one at most listens, and does
    not hand out a bound port meanwhile. Elsewhere the port is merely free when the block begins.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port
