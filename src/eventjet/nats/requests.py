"""One inbox for all requests of a connection: single answers, and streams of answers that end with a status.

A denied publish shows only on the connection's error callback; it is matched to the request that caused it, so that a
violation is answered at once instead of looking like a timeout. A lost connection answers everything outstanding.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from eventjet.errors import Forbidden, StoreUnavailable

_DENIED = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)
_PENDING_BYTES = 1 << 30
_PENDING_MESSAGES = 1_000_000
ROOM_BYTES = 1 << 20
"""What may wait for the socket: half of what nats-py buffers before a publish waits with it."""


class Lost(Exception):
    """No answer came: a timeout, no responders, or a lost connection."""


class Denied(Exception):
    """The server denied the publish."""


class ApiError(Exception):
    """JetStream answered with an error."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        self.status = int(error.get("code", 0))
        self.code = int(error.get("err_code", 0))
        self.text = str(error.get("description", ""))
        super().__init__(f"{self.text} ({self.status}/{self.code})")


@dataclass(slots=True)
class _Waiting:
    subjects: Collection[str]
    """What was published for this answer: a violation on any of them ends the wait."""
    future: asyncio.Future[Msg]
    until: float
    """When the wait ends, by the loop's clock."""
    gathered: list[Msg] | None = None
    """Messages before the final status, when several are expected."""


@dataclass(slots=True)
class Requests:
    """Every wait ends: by an answer, a violation, a lost connection or `timeout_s`."""

    client: Client
    timeout_s: float
    _prefix: str = ""
    _count: int = 0
    on_lost: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    """Called when the connection is lost."""
    _waiting: dict[str, _Waiting] = field(default_factory=dict[str, _Waiting])
    _timer: asyncio.TimerHandle | None = None
    """One for all that wait: nearly every answer is there long before its time is over."""

    async def start(self) -> None:
        """Subscribe the inbox."""
        self._prefix = self.client.new_inbox()
        subscribe = cast("Callable[..., Awaitable[object]]", getattr(self.client, "subscribe"))  # noqa: B009  nats-py leaves a type open
        await subscribe(
            f"{self._prefix}.*",
            cb=self._received,
            pending_msgs_limit=_PENDING_MESSAGES,
            pending_bytes_limit=_PENDING_BYTES,
        )

    async def ask(
        self,
        subject: str,
        payload: bytes = b"",
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        *,
        also: Collection[str] = (),
    ) -> Msg:
        """One answer; raises `Lost` or `Denied`. `also` names what was published before for the same answer."""
        return await self._exchange(subject, payload, headers, None, timeout_s, also)

    async def answer(self, subject: str, payload: bytes = b"") -> Msg:
        """As `ask`; raises `StoreUnavailable` and `Forbidden` instead of `Lost` and `Denied`."""
        try:
            return await self.ask(subject, payload)
        except Lost as error:
            raise StoreUnavailable(subject, str(error)) from None
        except Denied as error:
            raise Forbidden(subject, str(error)) from None

    async def gather(self, subject: str, payload: bytes) -> tuple[list[Msg], Msg]:
        """All messages up to the final status, and that; raises `Lost` or `Denied`."""
        gathered: list[Msg] = []
        final = await self._exchange(subject, payload, None, gathered, None, ())
        return gathered, final

    async def api(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One call of the JetStream API; raises `ApiError`, `Lost` or `Denied`."""
        answer = await self.ask(f"$JS.API.{subject}", b"" if body is None else orjson.dumps(body))
        value: dict[str, Any] = orjson.loads(answer.data)
        if "error" in value:
            raise ApiError(value["error"])
        return value

    async def read(self, what: str, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """As `api`, for reads: raises `StoreUnavailable` and `Forbidden` instead of `Lost` and `Denied`."""
        try:
            return await self.api(subject, body)
        except Lost as error:
            raise StoreUnavailable(what, str(error)) from None
        except Denied as error:
            raise Forbidden(f"$JS.API.{subject}", str(error)) from None

    async def _exchange(
        self,
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None,
        gathered: list[Msg] | None,
        timeout_s: float | None,
        also: Collection[str],
    ) -> Msg:
        self._count += 1
        token = str(self._count)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Msg] = loop.create_future()
        wait_s = timeout_s or self.timeout_s
        self._waiting[token] = _Waiting((subject, *also), future, loop.time() + wait_s, gathered)
        reply = f"{self._prefix}.{token}"
        try:
            if self.client.pending_data_size > ROOM_BYTES:
                async with asyncio.timeout(wait_s):
                    await self.client.publish(subject, payload, reply=reply, headers=headers)
            else:
                # With room in its buffer, nats-py does not wait.
                await self.client.publish(subject, payload, reply=reply, headers=headers)
            self._watch(loop, self._waiting[token].until)
            return await future
        except TimeoutError:
            raise Lost(f"no answer within {wait_s:g} s") from None
        except (NatsError, OSError) as error:
            raise Lost(f"{type(error).__name__}: {error}") from None
        finally:
            del self._waiting[token]

    def _watch(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= until:
                return
            self._timer.cancel()
        self._timer = loop.call_at(until, self._end_late, loop)

    def _end_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the waits whose time is over, and look again when the next one's is."""
        self._timer = None
        now = loop.time()
        for waiting in self._waiting.values():
            if waiting.future.done():
                continue
            if waiting.until <= now:
                waiting.future.set_exception(TimeoutError())
            else:
                self._watch(loop, waiting.until)

    async def _received(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject.rpartition(".")[2])
        if waiting is None or waiting.future.done():
            return
        headers = message.headers
        # A stored event may carry a header of that name; what the server says of itself has no position.
        status = headers.get("Status") if headers and "Nats-Sequence" not in headers else None
        if status == "503":
            waiting.future.set_exception(Lost("no responders"))
        elif waiting.gathered is not None and status is None:
            waiting.gathered.append(message)
        else:
            waiting.future.set_result(message)

    def failed(self, error: Exception) -> None:
        """Take an error of the connection: a violation ends the requests it is about."""
        match = _DENIED.search(str(error))
        if match is None:
            return
        denied = match[1].lower()
        for waiting in self._waiting.values():
            if not waiting.future.done() and any(denied == subject.lower() for subject in waiting.subjects):
                waiting.future.set_exception(Denied(str(error)))

    def disconnected(self) -> None:
        """End all that is outstanding: its answers will not come. What was known of the log may be of another."""
        for forget in self.on_lost:
            forget()
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(Lost("the connection was lost"))
