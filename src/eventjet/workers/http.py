"""`/healthz` and `/metrics` of a process of workers, by the standard library's server in threads of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from eventjet.errors import Unreachable, UsageError
from eventjet.observability.metrics import CONTENT_TYPE
from eventjet.workers.health import HealthMonitor

_log = logging.getLogger(__name__)

_REQUESTS_MAX = 16
"""Answered at once; whoever comes beyond that is turned away."""
_REQUEST_S = 5.0
_POLL_S = 0.1


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; raises `UsageError`."""
    host, separator, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise UsageError(f"{text!r} is not an address to listen at. Write HOST:PORT, for instance 127.0.0.1:8080.")
    return host, int(port)


@asynccontextmanager
async def serving(address: tuple[str, int], monitor: HealthMonitor) -> AsyncGenerator[tuple[str, int]]:
    """Answer at the address, yielded with its real port, within the block; raises `Unreachable`."""
    server = await asyncio.to_thread(_server, address, monitor)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="eventjet http", daemon=True)
    keeping = asyncio.create_task(monitor.keep(), name="eventjet health")
    thread.start()
    try:
        host, port = server.server_address[:2]
        shown = f"[{host!s}]" if server.address_family == socket.AF_INET6 else str(host)
        _log.info("health and metrics at http://%s:%d/healthz and /metrics", shown, port)
        yield str(host), port
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        await asyncio.to_thread(server.shutdown)
        server.server_close()


def _server(address: tuple[str, int], monitor: HealthMonitor) -> _Server:
    host, port = address
    shown = f"The address {host}:{port}"
    try:
        (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return _Server(address, family, monitor)
    except OSError as error:
        reason = f"nothing can listen there ({error.strerror or error})"
        raise Unreachable(shown, reason, "Choose another with --http HOST:PORT, or end what listens there.") from None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], family: int, monitor: HealthMonitor) -> None:
        self.address_family = family
        self.monitor = monitor
        self._room = threading.BoundedSemaphore(_REQUESTS_MAX)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # past HTTPServer's, which asks DNS for a name that nobody needs
        self.server_name, self.server_port = "eventjet", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  as it is called
        _log.debug("a request from %s broke off", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server_version = "eventjet"
    sys_version = ""
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]  the one that made it

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            verdict = self.server.monitor.verdict()
            self._answer(200 if verdict.healthy else 503, "application/json", json.dumps(verdict.as_json()) + "\n")
        elif path == "/metrics":
            self._answer(200, CONTENT_TYPE, self.server.monitor.metrics())
        else:
            self._answer(404, "text/plain; charset=utf-8", "There are /healthz and /metrics.\n")

    do_HEAD = do_GET  # noqa: N815  the name the server calls

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  as it is called
        """Probes are not worth a line each."""

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
