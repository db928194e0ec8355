"""Embedded nats-servers on 127.0.0.1 that form a JetStream cluster, for tests of failures.

All the guarantees of `NatsServer` hold for each of them. There are three servers, or more: with tags, or in several
clusters that gateways join.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from eventjet.dev.nats import NatsServer
from eventjet.dev.server import reserved_port
from eventjet.errors import Unreachable

_COMPONENT = "The embedded NATS cluster"
SYSTEM = "system"
"""User and password of the system account."""
_POLL_S = 0.05
_REQUEST_S = 2.0


class NatsCluster:
    """Three servers. A single one is killed, paused and started again through `servers`."""

    def __init__(
        self,
        *,
        sync_interval: str = "always",
        data: Sequence[Path] = (),
        sizes: Sequence[int] = (3,),
        tags: Sequence[str] = (),
    ) -> None:
        """`data`: folders that hold the servers' data, where it is not to be with the rest of theirs.

        `sizes` says how many servers each cluster has, the first of which is called eventjet and the second eventjet2;
        `tags` has those of each server, separated by blanks.
        """
        self._sync_interval = sync_interval
        self._data = data
        self._sizes = sizes
        self._tags = tags
        self.servers: list[NatsServer] = []
        """Empty before the first start; then n1, n2, n3 and so on, through all clusters."""
        self._routes = ExitStack()

    def start(self, timeout_s: float = 60.0) -> Self:
        """Start servers that do not run; return once JetStream and all streams have leaders, known everywhere."""
        deadline = time.monotonic() + timeout_s
        if not self.servers:
            self.servers = self._new_servers()
        try:
            for server in self.servers:
                server.start(max(0.0, deadline - time.monotonic()))
            self.wait_ready(max(0.0, deadline - time.monotonic()))
        except BaseException:
            self.kill()
            raise
        return self

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Return once all servers are healthy and name the same leader; raise `Unreachable` otherwise."""
        wait_agreed(self.servers, timeout_s)

    def leader(self) -> NatsServer | None:
        """Return the leader of JetStream's meta group, by the first answer."""
        for server in self.servers:
            name = _leader_by(server)
            if name is not None:
                return self.named(name)
        return None

    def stream_leader(self, stream: str) -> NatsServer | None:
        """Return the leader of this stream, by the first answer that names one."""
        for server in self.servers:
            leader = _leaders_by(server).get(stream)
            if leader is not None:
                return self.named(leader)
        return None

    def named(self, name: str) -> NatsServer:
        """Return the server with this name, such as n1."""
        return self.servers[int(name.removeprefix("n")) - 1]

    def stop(self) -> None:
        """End all cleanly; `start` goes on with the same data."""
        for server in self.servers:
            server.stop()

    def kill(self) -> None:
        """End all at once, as a power cut of the processes would; `start` recovers the data."""
        for server in self.servers:
            server.kill()

    def pause(self) -> None:
        """Pause all processes."""
        for server in self.servers:
            server.pause()

    def resume(self) -> None:
        """Let all processes go on."""
        for server in self.servers:
            server.resume()

    def close(self) -> None:
        """End all and remove their directories."""
        for server in self.servers:
            server.close()
        self.servers = []
        self._routes.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """Return whether all of them run."""
        return bool(self.servers) and all(server.running for server in self.servers)

    @property
    def urls(self) -> list[str]:
        """Return the URLs for clients, one for each server."""
        return [server.url for server in self.servers]

    @property
    def url(self) -> str:
        """Return the URLs as one string separated by commas."""
        return ",".join(self.urls)

    def _new_servers(self) -> list[NatsServer]:
        names = [f"eventjet{number if number > 1 else ''}" for number in range(1, len(self._sizes) + 1)]
        routes = {name: self._ports(size) for name, size in zip(names, self._sizes, strict=True)}
        gateways = {name: self._ports(size) for name, size in zip(names, self._sizes, strict=True)}
        remotes = "\n".join(f"{{ name: {name}, urls: [{_urls('nats', gateways[name])}] }}" for name in names)
        lines: list[str] = []
        for name in names:
            for route, gateway in zip(routes[name], gateways[name], strict=True):
                peers = _urls("nats-route", routes[name])
                group = f"cluster {{ name: {name}, listen: 127.0.0.1:{route}, routes: [{peers}] }}"
                joined = f"gateway {{ name: {name}, listen: 127.0.0.1:{gateway}, gateways: [{remotes}] }}"
                lines.append(f"{group}\n{joined if len(names) > 1 else ''}")
        system = f"accounts {{ $SYS {{ users: [ {{ user: {SYSTEM}, password: {SYSTEM} }} ] }} }}"
        tags = [f"server_tags: {json.dumps(of_server.split())}" for of_server in self._tags] or [""] * len(lines)
        servers = [
            NatsServer(
                sync_interval=self._sync_interval, config="\n".join((f"server_name: n{number}", line, tag, system))
            )
            for number, (line, tag) in enumerate(zip(lines, tags, strict=True), start=1)
        ]
        for server, data in zip(servers, self._data, strict=False):
            (server.directory / "data").symlink_to(data)
        return servers

    def _ports(self, count: int) -> list[int]:
        return [self._routes.enter_context(reserved_port()) for _ in range(count)]


def _urls(scheme: str, ports: Sequence[int]) -> str:
    return ", ".join(f"{scheme}://127.0.0.1:{port}" for port in ports)


def wait_agreed(servers: Sequence[NatsServer], timeout_s: float = 60.0) -> None:
    """Return once all servers are healthy and name the same leader; raise `Unreachable` otherwise."""
    deadline = time.monotonic() + timeout_s
    while not _agreed(servers):
        if time.monotonic() > deadline:
            raise Unreachable(
                _COMPONENT,
                f"its servers did not agree on a JetStream leader within {timeout_s:g} s",
                "See that all three run and are not paused, or allow more time.",
            )
        time.sleep(_POLL_S)


def _agreed(servers: Sequence[NatsServer]) -> bool:
    leaders = [_leader_by(server) for server in servers if _healthy(server)]
    return len(leaders) == len(servers) and None not in leaders and len(set(leaders)) == 1


def _healthy(server: NatsServer) -> bool:
    """Return whether the server is healthy and knows a leader of each stream it has."""
    if _get(server, "/healthz").get("status") != "ok":
        return False
    return None not in _leaders_by(server).values()


def _leaders_by(server: NatsServer) -> dict[str, str | None]:
    """Return the leaders of the streams that this server has, as it names them."""
    accounts: list[dict[str, Any]] = _get(server, "/jsz?accounts=true&streams=true").get("account_details", [])
    streams: list[dict[str, Any]] = [stream for account in accounts for stream in account.get("stream_detail", [])]
    return {stream["name"]: _leader_of(stream.get("cluster")) for stream in streams}


def _leader_by(server: NatsServer) -> str | None:
    """Return the leader that this server names; None while it knows of none, or does not answer."""
    return _leader_of(_get(server, "/jsz").get("meta_cluster"))


def _leader_of(group: dict[str, Any] | None) -> str | None:
    return (group.get("leader") or None) if group else None


def _get(server: NatsServer, path: str) -> dict[str, Any]:
    """Return the JSON object of the server's own monitor; an empty one when it does not answer."""
    if not server.running:
        return {}
    connection = http.client.HTTPConnection(urlsplit(server.monitor_url).netloc, timeout=_REQUEST_S)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    finally:
        connection.close()
