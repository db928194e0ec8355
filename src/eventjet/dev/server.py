"""What every embedded server is: a process that is supervised, and a folder that stays or goes with it."""

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

from eventjet.dev.process import ServerProcess
from eventjet.dev.supervisor import Program
from eventjet.errors import Unreachable

T = TypeVar("T")


class EmbeddedServer(ABC):
    """`stop`, `kill` and `start` again keep data, port and directory; `close` removes what it made."""

    name: str
    component: str
    """What errors call it."""

    def __init__(self, directory: Path | None, port: int | None) -> None:
        self._given = None if directory is None else directory.absolute()
        self._temporary: Path | None = None
        self._removal: weakref.finalize[[Path, bool], EmbeddedServer] | None = None
        self._port: int | None = port
        self._reservation = ExitStack()
        self._process: ServerProcess | None = None

    @abstractmethod
    def start(self) -> Self:
        """Return once clients are accepted; raises `Unreachable` with the end of the server's log otherwise."""

    def stop(self) -> None:
        """End it in good order, and kill it after a grace; `start` goes on with the same data."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """End it at once, as a crash would, with every process it has; `start` recovers the data."""
        if self._process is not None:
            self._process.kill()

    def pause(self) -> None:
        """Stop its clock (SIGSTOP): connections stay open and nothing answers."""
        if self._process is not None:
            self._process.pause()

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        if self._process is not None:
            self._process.send(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its temporary directory; a directory that was given stays as it is."""
        self.stop()
        if self._removal is not None:
            self._removal()
        self._temporary = self._removal = None
        self._reservation.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def port(self) -> int:
        """Chosen by the first start unless it was given."""
        return self._started(self._port)

    @property
    def pid(self) -> int:
        """Of the server last started."""
        return self._started(self._process).pid

    @property
    def directory(self) -> Path:
        """Configuration, log and data; a temporary one is gone after `close`, or when this object or the program is."""
        if self._given is not None:
            self._given.mkdir(parents=True, exist_ok=True)
            return self._given
        if self._temporary is None:
            # Directly under the temporary folder: its parents can be reached by the user PostgreSQL runs as.
            self._temporary = Path(tempfile.mkdtemp(prefix=f"eventjet-{self.name}-"))
            self._removal = weakref.finalize(self, shutil.rmtree, self._temporary, True)
        return self._temporary

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    def _reserved(self) -> int:
        """The port, which nobody else is given until `close`, not even while the server is stopped."""
        if self._port is None:
            self._port = self._reservation.enter_context(reserved_port())
        return self._port

    def _launch(self, program: Program, environ: Mapping[str, str] | None = None) -> ServerProcess:
        """Run a program of this server; a temporary directory goes with the program that uses this object."""
        remove = str(self.directory) if self._given is None else None
        return ServerProcess(self.component, replace(program, remove=remove), self.log, environ)

    def _started(self, value: T | None) -> T:
        if value is None:
            remedy = "Call `start()` first, or use it in a `with` block."
            raise Unreachable(self.component, "it was not started", remedy)
        return value


@contextmanager
def reserved_port() -> Generator[int]:
    """A free port of 127.0.0.1 that nobody else is given during the block, though a server may listen on it.

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
