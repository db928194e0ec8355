"""`Service`: chosen decisions as endpoints of a NATS micro-service (ADR-32), each request a task of its own.

`cmd.<app>.<aggregate>.<command>.<encoded id>`, so that permissions can name command and id; a queue group shares them
among instances. The body has the decision's parameters by name, the headers an id that makes it idempotent. `problem`
says what a caller is told of an error, over NATS or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from uuid import uuid4

import orjson

from eventjet.codec.commands import Arguments, arguments_of
from eventjet.codec.headers import TRACEPARENT, header, header_block, metadata_of
from eventjet.codec.reasons import faults_of, reason_of, traceback_of
from eventjet.commands.repository import Repositories
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.decision import Served
from eventjet.domain.identity import decode_id
from eventjet.errors import (
    CommandReused,
    ConcurrencyConflict,
    EventjetError,
    Forbidden,
    NotUnique,
    OutcomeUnknown,
    Refused,
    StoreUnavailable,
    UnexpectedExit,
    UsageError,
)
from eventjet.jetstream.client import Client
from eventjet.nats.client import Listening
from eventjet.nats.protocol import Frame
from eventjet.observability import logs, spans, tracing
from eventjet.runtime import is_cancelled
from eventjet.text import cut

_DETAIL_MAX = 500
DOMAIN, INVALID, CONFLICT, UNAVAILABLE, UNKNOWN, INTERNAL = 422, 400, 409, 503, 504, 500

REUSED = ("command_id", "where", "version", "recorded", "asked")
"""What a `CommandReused` says, and is made of again."""
TAKEN = ("aggregate", "constraint", "aggregate_id")
"""What a caller is told of a `NotUnique`: not who has the value."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One error, as others may know it (RFC 9457 has the same fields)."""

    status: int
    type: str
    detail: str
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    """Its facts, by name: members beside these (RFC 9457, section 3.2)."""


def problem(error: BaseException, errors: Sequence[type[Exception]] = ()) -> Problem:
    """Status, type and detail; `errors` are those of the domain that a caller may know, and of others nothing is told.

    For any framework: `raise HTTPException(problem(error).status, problem(error).detail)`.
    """
    if isinstance(error, NotUnique):
        facts = {name: getattr(error, name) for name in TAKEN}
        return Problem(CONFLICT, NotUnique.__name__, str(NotUnique(**facts, holder=None))[:_DETAIL_MAX], facts)
    kind = next((kind for kind in errors if isinstance(error, kind)), None)
    if kind is not None:
        return Problem(DOMAIN, kind.__name__, str(error)[:_DETAIL_MAX])
    if isinstance(error, CommandReused):
        facts = {name: getattr(error, name) for name in REUSED}
        return Problem(INVALID, CommandReused.__name__, str(error)[:_DETAIL_MAX], facts)
    if isinstance(error, Refused | UsageError):
        return Problem(INVALID, "Refused", str(error)[:_DETAIL_MAX])
    if isinstance(error, OutcomeUnknown):
        return Problem(UNKNOWN, "OutcomeUnknown", "It may be stored. Send it again with the same id.")
    if isinstance(error, ConcurrencyConflict):
        return Problem(CONFLICT, "ConcurrencyConflict", "Others were quicker, a hundred times. Try again.")
    if isinstance(error, StoreUnavailable):
        return Problem(UNAVAILABLE, "StoreUnavailable", "The log does not answer. Try again.")
    return Problem(INTERNAL, "Internal", "The service's log says what went wrong.")


_log = logging.getLogger(__name__)

QUEUE = "q"
ERROR, ERROR_CODE = "Nats-Service-Error", "Nats-Service-Error-Code"
IN_FLIGHT = 256
"""Requests dealt with at once."""
WAITING_MAX = 4_096
"""In hand, those that wait included; what comes beyond is told to come again."""
_BODY_MAX = 800_000
_WARN_S = 60.0
"""Between two lines of the log about answers that go nowhere: whoever asks can cause as many as it likes."""
_DRAIN_S = 10.0
_VERBS = ("PING", "INFO", "STATS")


def command_subject(app: str, aggregate: str, command: str, token: str) -> str:
    """Where a command on one aggregate is asked for; `token` is its encoded id, or `*`."""
    return f"cmd.{app}.{aggregate}.{command}.{token}"


@dataclass(slots=True)
class ServedEndpoint:
    """One served decision, and what was counted of it."""

    served: Served
    aggregate: str
    arguments: Arguments
    requests: int = 0
    errors: int = 0
    nanoseconds: int = 0
    last_error: str = ""
    began: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        return f"{self.aggregate}-{self.served.name}"

    def info(self, app: str) -> dict[str, Any]:
        """As `$SRV.INFO` tells it."""
        metadata = {
            "schema": orjson.dumps(self.arguments.schema()).decode(),
            "errors": ",".join(kind.__name__ for kind in self.served.errors),
            "doc": (self.served.decide.__doc__ or "").strip(),
        }
        return {**self._named(app), "metadata": metadata}

    def stats(self, app: str) -> dict[str, Any]:
        """As `$SRV.STATS` tells it."""
        return {
            **self._named(app),
            "num_requests": self.requests,
            "num_errors": self.errors,
            "last_error": self.last_error,
            "processing_time": self.nanoseconds,
            "average_processing_time": self.nanoseconds // max(1, self.requests),
            "data": None,  # nats-py reads no answer without it
        }

    def _named(self, app: str) -> dict[str, Any]:
        subject = command_subject(app, self.aggregate, self.served.name, "*")
        return {"name": self.name, "subject": subject, "queue_group": QUEUE}


class Service:
    """What an app serves over one connection; `open` it, and `close` it to finish what is in hand."""

    def __init__(self, repositories: Repositories, client: Client, served: Sequence[Served]) -> None:
        self._app = repositories.app.name
        self._repositories = repositories
        self._client = client
        self._endpoints = [
            ServedEndpoint(one, aggregate_info(one.aggregate).name, arguments_of(one.decide)) for one in served
        ]
        self._id = uuid4().hex[:22]
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._served: list[Listening] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered = 0
        self._warned_at = -_WARN_S

    async def open(self) -> None:
        """Serve from now on, over every later connection too."""
        self._client.on_denied.append(self._answer_denied)
        for endpoint in self._endpoints:
            subject = command_subject(self._app, endpoint.aggregate, endpoint.served.name, "*")
            await self._serve(subject, lambda frame, endpoint=endpoint: self._took(endpoint, frame), QUEUE)
        for verb in _VERBS:
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{self._app}", f"$SRV.{verb}.{self._app}.{self._id}"):
                await self._serve(subject, lambda frame, verb=verb: self._tell(verb, frame))
        # The server has taken all of that once it answers what came after it.
        await self._repositories.store.state()

    async def close(self) -> None:
        """Take nothing more, and finish what is in hand, for ten seconds at the most."""
        served, self._served = self._served, []
        await self._client.unsubscribe(served)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_DRAIN_S)
        if self._answer_denied in self._client.on_denied:
            self._client.on_denied.remove(self._answer_denied)

    async def _serve(self, subject: str, heard: Callable[[Frame], object], queue: str = "") -> None:
        self._served.append(await self._client.serve(subject, heard, queue))

    def _took(self, endpoint: ServedEndpoint, frame: Frame) -> None:
        if not self._client.may_answer(frame[2], frame[1]):
            # Not carried out either: whoever may read can have the server send stored messages here, without a reply
            # or with one of its own.
            endpoint.requests += 1
            endpoint.errors += 1
            endpoint.last_error = f"{INVALID}:Reply"
            self._refuse_reply(endpoint.name, frame)
            return
        if len(self._tasks) >= WAITING_MAX:
            self._answer(frame, Problem(503, "Busy", "The service has too much in hand. Try again."))
            return
        task = asyncio.ensure_future(self._handle(endpoint, frame))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, endpoint: ServedEndpoint, frame: Frame) -> None:
        async with self._room:
            began = time.perf_counter_ns()
            labels = {"eventjet.aggregate": endpoint.aggregate, "eventjet.decision": endpoint.served.name}
            parent = header(frame[3], TRACEPARENT)
            with tracing.span(
                spans.SERVE, f"{endpoint.aggregate}.{endpoint.served.name}", labels, parent=parent
            ) as told:
                answer = await self._executed(endpoint, frame)
                told["eventjet.status"] = answer.status if isinstance(answer, Problem) else 200
            endpoint.requests += 1
            endpoint.nanoseconds += time.perf_counter_ns() - began
            if isinstance(answer, Problem):
                endpoint.errors += 1
                endpoint.last_error = f"{answer.status}:{answer.type}"
            self._answer(frame, answer)

    async def _executed(self, endpoint: ServedEndpoint, frame: Frame) -> dict[str, Any] | Problem:
        _, subject, _, headers, body = frame
        try:
            if len(body) > _BODY_MAX:
                raise ValueError(f"a body of {len(body):,} bytes is too large")
            aggregate_id = decode_id(subject.decode().rpartition(".")[2])
            arguments = endpoint.arguments.decode(body)
            command_id, metadata = metadata_of(headers)
        except (ValueError, RecursionError) as error:
            return Problem(INVALID, "Invalid", cut(faults_of(error)))
        except BaseException as raised:  # noqa: BLE001 - a type of the application's own
            return self._failed(endpoint, endpoint.name, raised)
        repository = self._repositories.of(endpoint.served.aggregate)
        try:
            command = repository.command(command_id, metadata=metadata)
            done = await command.execute(aggregate_id, endpoint.served.decide, **arguments)
        except BaseException as raised:  # noqa: BLE001 - a caller is told what it may know, whatever it is
            if is_cancelled(raised):
                return problem(
                    OutcomeUnknown((), (), "the process ends", ())
                )  # the process ends, and so does this task once it has answered
            whose = f"{endpoint.name} of {aggregate_id!r} (command {command_id or 'without an id'})"
            return self._failed(endpoint, whose, raised)
        return {"position": done.position, "version": done.version, "token": done.token, "events": len(done.events)}

    def _failed(self, endpoint: ServedEndpoint, whose: str, raised: BaseException) -> Problem:
        """What a caller is told of an error; what it is not told is logged."""
        error = UnexpectedExit.instead_of(raised)
        told = problem(error, endpoint.served.errors)
        if told.status == INTERNAL:
            private = self._repositories.catalog.is_private
            foreseen = isinstance(error, EventjetError) and not isinstance(error, UnexpectedExit)
            trace = "" if foreseen else f"\n{traceback_of(error, private=private)}"
            logs.COMMAND_FAILED.tell(_log, name=whose, reason=reason_of(error, private=private), trace=trace)
        return told

    def _answer(self, frame: Frame, answer: dict[str, Any] | Problem) -> None:
        if isinstance(answer, Problem):
            headers = header_block([(ERROR, answer.type), (ERROR_CODE, str(answer.status))])
            body = orjson.dumps({**answer.more, "type": answer.type, "detail": answer.detail})
        else:
            headers, body = b"", orjson.dumps(answer)
        self._client.publish(frame[2].decode(), body, headers)

    def _refuse_reply(self, name: str, frame: Frame) -> None:
        reply = frame[2].decode("utf-8", "replace")
        named = f"names the reply {cut(reply, 100)!r}" if reply else "names no reply"
        inboxes = ", ".join(self._client.endpoint.caller_inboxes)
        self._warn(
            f"a request {named}, and answers go to inboxes of callers alone ({inboxes}). Have the caller hear its "
            "answers there, or name the prefix of its inboxes in EVENTJET_CALLER_INBOXES.",
            name,
        )

    def _answer_denied(self, fault: Forbidden) -> None:
        if self._client.may_answer(fault.subject.encode()):
            self._warn(f"an answer was lost: {fault}", self._app)

    def _warn(self, reason: str, name: str) -> None:
        self._unanswered += 1
        now = time.monotonic()
        if now - self._warned_at >= _WARN_S:
            logs.UNANSWERED.tell(_log, name=name, reason=reason, count=self._unanswered)
            self._warned_at, self._unanswered = now, 0

    def _tell(self, verb: str, frame: Frame) -> None:
        if not self._client.may_answer(frame[2], frame[1]):
            self._refuse_reply(f"$SRV.{verb}", frame)
            return
        kind = f"io.nats.micro.v1.{verb.lower()}_response"
        log = self._repositories.store.identity
        told: dict[str, Any] = {"type": kind, "name": self._app, "id": self._id, "version": version("eventjet")}
        told["metadata"] = {"eventjet.log": log}
        if verb == "INFO":
            told["description"] = f"Commands of {self._app}."
            told["endpoints"] = [endpoint.info(self._app) for endpoint in self._endpoints]
        elif verb == "STATS":
            began = min((endpoint.began for endpoint in self._endpoints), default=time.time())
            # nats-py reads no time without a fraction of a second.
            told["started"] = datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
            told["endpoints"] = [endpoint.stats(self._app) for endpoint in self._endpoints]
        self._client.publish(frame[2].decode(), orjson.dumps(told))
