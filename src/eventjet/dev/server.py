"""What every embedded server is: a process that is supervised, and a folder that stays or goes with it."""

from __future__ import annotations

import shutil
import signal
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self, TypeVar

from eventjet.dev.process import ServerProcess
from eventjet.errors import Unreachable

T = TypeVar("T")


class EmbeddedServer(ABC):
    """`stop`, `kill` and `start` again keep data, port and directory; `close` removes what it made."""

    component: str
    """What errors call it."""

    def __init__(self, home: Home, port: int | None) -> None:
        self._home = home
        self._port: int | None = port
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
        self._home.remove()

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
        """Configuration, log and data."""
        return self._home.path()

    def _started(self, value: T | None) -> T:
        if value is None:
            remedy = "Call `start()` first, or use it in a `with` block."
            raise Unreachable(self.component, "it was not started", remedy)
        return value


class Home:
    """Made on first use; a temporary one is gone after `remove`, or when this object or the program is."""

    def __init__(self, given: Path | None, prefix: str = "eventjet-", *, scrap: str | None = None) -> None:
        """`scrap` is the temporary folder that a given folder is part of."""
        self._given = None if given is None else given.absolute()
        self._prefix = prefix
        self._scrap = scrap
        self._made: Path | None = None
        self._removal: weakref.finalize[[Path, bool], Home] | None = None

    @property
    def temporary(self) -> bool:
        return self._given is None or self._scrap is not None

    @property
    def scrap(self) -> str | None:
        """What a supervisor removes when the program ends without having closed its server."""
        return str(self.path()) if self._given is None else self._scrap

    def part(self, name: str) -> Home:
        """A folder within this one, which goes when this one goes."""
        return Home(self.path() / name, scrap=self.scrap)

    def path(self) -> Path:
        if self._given is not None:
            self._given.mkdir(parents=True, exist_ok=True)
            return self._given
        if self._made is None:
            # Directly under the temporary folder: its parents can be reached by the user PostgreSQL runs as.
            self._made = Path(tempfile.mkdtemp(prefix=self._prefix))
            self._removal = weakref.finalize(self, shutil.rmtree, self._made, True)
        return self._made

    def remove(self) -> None:
        """Remove the folder if it is a temporary one."""
        if self._removal is not None:
            self._removal()
        self._made = self._removal = None
