"""The command `eventjet ui`: serve the console by itself."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Annotated, cast

from eventjet.cli.output import INTERRUPTED, LogFormat, LogFormatOption, log_to_stderr, show
from eventjet.cli.running import CLEARED_S, until_signalled
from eventjet.cli.target import AppTarget, MonitoringOption, on_app, option, switch
from eventjet.errors import Unreachable, UsageError
from eventjet.projections.app_ref import AppRef
from eventjet.runtime import run_async
from eventjet.urls import Url, parse

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from eventjet.console.access import Access, Level

HERE = "127.0.0.1"
PORT = 8321
_HERE = (HERE, "::1", "localhost")
_REQUEST_S = 15.0
"""Seconds in which a request must arrive completely, its body included."""
_UNFINISHED_MAX = 100
"""Connections with an incomplete request at most: far fewer than the files that a process may open."""
AccessOption = Annotated[
    str | None,
    option(
        "--access",
        "MODULE:NAME",
        "Your function that says who may look and who may act; needed where others can reach it.",
    ),
]


def check_installed() -> None:
    """Raise `UsageError` where the extra `ui` is missing."""
    try:
        import jinja2
        import python_multipart
        import starlette
        import uvicorn
    except ModuleNotFoundError as error:
        raise UsageError(f"The console needs {error.name}. Install it with `pip install 'eventjet[ui]'`.") from None
    del jinja2, python_multipart, starlette, uvicorn


@on_app()
def ui(
    at: AppTarget,
    host: Annotated[str, option("--host", "HOST", "Where it listens.")] = HERE,
    port: Annotated[int, option("--port", "PORT", "0: any free one.", min=0, max=65535)] = PORT,
    allow_actions: Annotated[
        bool, switch("--allow-actions", "Let whoever looks also act; else they can only look.")
    ] = False,
    access: AccessOption = None,
    public_url: Annotated[
        str | None,
        option("--public-url", "URL", "The URL under which a proxy serves it, such as https://host/path."),
    ] = None,
    monitoring: MonitoringOption = None,
    is_announced: Annotated[bool, switch("--announced", "", hidden=True)] = False,
    logs: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Look at the log, the read models and what went wrong in a browser, until Ctrl-C.

    It listens on this machine alone and only shows, unless told otherwise.
    """
    check_installed()
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from eventjet.console.access import read_only
    from eventjet.console.site import console

    log_to_stderr(logs)
    public = None if public_url is None else _public(public_url)
    if access is not None and allow_actions:
        raise UsageError("--access says who may act, so --allow-actions has no say. Leave one of them out.")
    if (host not in _HERE or public_url is not None) and access is None:
        where = host if public_url is None else "that URL"
        raise UsageError(
            f"Others can reach {where}, and nothing would ask them who they are. Give --access module:name, a function "
            "of the request that says who may look and who may act, or leave it out."
        )
    decide: Access = _owner if allow_actions else read_only
    if access is not None:
        decide = _access(at, access)
    site = console(at.app(), settings=at.settings, access=decide, monitoring=monitoring or ())
    # Check the host name: by DNS rebinding a page of another site could make a browser send requests to this machine.
    hosts = [*_HERE, "[::1]", *([] if public is None else [public.host])]
    served: ASGIApp = TrustedHostMiddleware(site, hosts) if host in _HERE else site
    if public_url is not None:
        served = behind(served, public_url)
    with closing(_listening(host, port)) as listening:
        address = f"[{host}]" if ":" in host else host
        if not is_announced:  # `dev --ui` prints the URL itself
            show(f"http://{address}:{listening.getsockname()[1]}/")
        run_async(_serve(served, site.state.streams.end, listening))


def behind(site: ASGIApp, public_url: str) -> ASGIApp:
    """Return the site as a proxy serves it under this URL, whether the proxy keeps the path prefix or strips it.

    Raises `UsageError` for an invalid URL.
    """
    public = _public(public_url)
    root = public.path.rstrip("/")

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            path = path if path == root or path.startswith(f"{root}/") else root + path
            scope = {**scope, "scheme": public.scheme, "root_path": root, "path": path}
        await site(scope, receive, send)

    return served


def _public(url: str) -> Url:
    """Return a parsed URL. Raises `UsageError` where it is no URL of a site, or has a user or options."""
    parsed = parse(url)
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host or parsed.user or parsed.options:
        raise UsageError("--public-url is no URL of a site. Write it as https://host/path, without a password.")
    return parsed


async def _serve(site: ASGIApp, end_streams: Callable[[], None], listening: socket.socket) -> None:
    """Serve until a signal; requests in progress get two seconds to finish."""
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class BoundedRequests(H11Protocol):
        """A protocol that aborts a connection whose request is incomplete after 15 s, and the oldest of more than 100.

        uvicorn would keep such connections open for ever, until the process cannot open any more files.
        """

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  as uvicorn has it
            super().connection_made(transport)
            self._await_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._forget()
            elif self not in unfinished:
                self._await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _await_request(self) -> None:
            if len(unfinished) >= _UNFINISHED_MAX:
                oldest = next(iter(unfinished))
                oldest._forget()
                oldest.transport.abort()
            unfinished[self] = self.loop.call_later(_REQUEST_S, self.transport.abort)

        def _forget(self) -> None:
            if (bound := unfinished.pop(self, None)) is not None:
                bound.cancel()

    unfinished: dict[BoundedRequests, asyncio.TimerHandle] = {}  # oldest first

    class Server(uvicorn.Server):
        """A server that leaves signals to the function around it."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    config = uvicorn.Config(
        site,
        http=BoundedRequests,
        backlog=_UNFINISHED_MAX,  # asyncio accepts as many at once before it calls a protocol
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2,
        server_header=False,
    )
    server = Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    signalled = asyncio.ensure_future(until_signalled())
    await asyncio.wait({serving, signalled}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    end_streams()
    server.should_exit = True
    # Rebuilds that run in threads get a limited time to clean up.
    bound = threading.Timer(CLEARED_S, os._exit, (INTERRUPTED,))
    bound.daemon = True
    bound.start()
    await serving
    bound.cancel()


def _listening(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `Unreachable` where the address is taken, or not of this machine."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unreachable(f"{host}:{port}", reason, "Give another --port, or 0 for any free one.") from None


def _access(at: AppTarget, reference: str) -> Access:
    """Import the function that decides about each request. Raises `UsageError` for an unusable reference."""
    function = AppRef.parse(reference, at.folder).function()
    try:
        signature(function).bind(None)
    except TypeError:
        raise UsageError(f"{reference} takes no request. Give it one parameter, the request to decide about.") from None
    return cast("Access", function)


def _owner(_request: Request) -> tuple[Level, str]:
    """Grant every right to all who reach this machine's own address, under the name of who runs the console."""
    return "all", getpass.getuser()
