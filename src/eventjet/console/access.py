"""Access to the console: who may look and act, the check of forms against forgery, and the security headers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Literal, TypeAlias, cast, get_args
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eventjet.text import cut, printable

Level: TypeAlias = Literal["all", "read_only", "forbidden"]
"""`all`: look and act; `read_only`: look; `forbidden`: neither."""
Access: TypeAlias = Callable[[Request], "tuple[Level, str] | Awaitable[tuple[Level, str]]"]
"""A function that returns, for a request, what its sender may do and the sender's name, recorded with actions.

```python
def by_proxy(request: Request) -> tuple[Level, str]:
    user = request.headers.get("x-forwarded-user", "")
    return ("all" if user in {"ada", "grace"} else "read_only" if user else "forbidden"), user
```
"""

TOKEN = "csrf"  # noqa: S105 - the name of a field, not a secret
_COOKIE = "eventjet-console"
_TOKEN_BYTES = 32
_ACTOR_MAX = 200
_FORM_MAX = 100_000
"""The most bytes of a form."""
_FORM_S = 15.0
"""Seconds that a form may take to arrive whole."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """The sender of a request, and what the sender may do."""

    level: Level
    actor: str
    """The visitor's name as the application gives it, shown and recorded."""
    token: str
    """The value that each of the console's forms carries, equal to a cookie that no other site can read or set."""

    @property
    def may_act(self) -> bool:
        return self.level == "all"


def visitor_of(request: Request) -> Visitor:
    """Return the visitor that the middleware `Gate` has put on the request."""
    return request.state.visitor


def read_only(_request: Request) -> tuple[Level, str]:
    """Let everybody look and nobody act; this is the default of `console`."""
    return "read_only", ""


class Gate:
    """Middleware that puts the visitor on each request and sets the cookie that the console's forms are compared with.

    A form must carry the value of the cookie (double submit; OWASP Cross-Site Request Forgery Prevention), and an
    origin that the browser names must be the console's own; `form_of` checks both. There is no session, so any number
    of processes may serve.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(f"{scope.get('root_path', '')}/static/"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        level, actor = await self._permission(request)
        cookie_token = request.cookies.get(_COOKIE, "")
        token = cookie_token if _is_token(cookie_token) else secrets.token_hex(_TOKEN_BYTES)
        visitor = Visitor(level, cut(printable(actor), _ACTOR_MAX), token)

        async def may_look() -> bool:
            return (await self._permission(request))[0] != "forbidden"

        scope.setdefault("state", {}).update(visitor=visitor, may_look=may_look)

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start" and token != cookie_token:
                root = scope.get("root_path", "") or "/"
                secure = "; Secure" if scope.get("scheme") == "https" else ""
                cookie = f"{_COOKIE}={token}; Path={root}; HttpOnly; SameSite=Strict{secure}"
                MutableHeaders(scope=message).append("set-cookie", cookie)
            await send(message)

        await self._app(scope, receive, answered)

    async def _permission(self, request: Request) -> tuple[Level, str]:
        answer: Any = self._access(request)
        if isawaitable(answer):
            answer = await answer
        pair = cast("tuple[Any, ...]", answer) if isinstance(answer, tuple) else ()
        level: Any
        level, actor = pair if len(pair) == 2 else (None, None)
        if level not in get_args(Level) or not isinstance(actor, str):
            raise TypeError(
                'The `access` of the console returned no pair of "all", "read_only" or "forbidden" and the '
                "actor's name. Nobody is let in until it does."
            )
        return level, actor


def _is_token(text: str) -> bool:
    return len(text) == _TOKEN_BYTES * 2 and text.isascii() and text.isalnum()


def check_may_act(request: Request) -> None:
    """Raise `HTTPException` 403 for a visitor who may not act."""
    if not visitor_of(request).may_act:
        raise HTTPException(403, "You may look at this console, and not act in it.")


async def may_still_look(request: Request) -> bool:
    """Return whether the sender of a request that is still being answered may look now."""
    return await request.state.may_look()


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form that changes something, after checking that its sender may act and meant to send it.

    Raises `HTTPException`: 403 for a visitor who may not act and for a form that another site had the browser send, 413
    for a form of more than 100,000 bytes, and 408 for a form that does not arrive whole in 15 seconds (RFC 9110,
    section 15.5.9).
    """
    check_may_act(request)
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HTTPException(403, "This form was sent from another site. Nothing was done.")
    if int(request.headers.get("content-length") or 0) > _FORM_MAX:
        raise HTTPException(413, "This form is larger than any of the console's. Nothing was done.")
    try:
        async with asyncio.timeout(_FORM_S), request.form(max_files=0, max_fields=100, max_part_size=_FORM_MAX) as form:
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
    except (TimeoutError, ClientDisconnect):
        raise HTTPException(408, "This form did not arrive whole. Nothing was done; send it again.") from None
    cookie_token = request.cookies.get(_COOKIE, "")
    if not _is_token(cookie_token) or not secrets.compare_digest(fields.pop(TOKEN, "").encode(), cookie_token.encode()):
        raise HTTPException(403, "This form is not of this console, or it is an old one. Open the page again.")
    return fields


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; font-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content Security Policy Level 3."""
_ALWAYS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Headers:
    """Middleware that sets the security headers on every answer, also of errors: nothing from elsewhere is loaded."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _ALWAYS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, answered)
