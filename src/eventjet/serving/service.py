"""`Service`: serve decisions as endpoints of a NATS micro-service (ADR-32), with one task for each request.

The subject is `cmd.<app>.<aggregate>.<command>.<encoded id>`, so that permissions can name command and id. A queue
group distributes requests among instances. The body has the decision's arguments by name, and a header the command id
that makes the request idempotent. `problem` makes the answer for an error, over NATS or HTTP.
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
"""Attributes of `CommandReused` in an answer, from which the caller builds the error again."""
TAKEN = ("aggregate", "constraint", "aggregate_id")
"""Attributes of `NotUnique` in an answer: the holder of the value is left out."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The public description of one error, with the fields of RFC 9457."""

    status: int
    type: str
    detail: str
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further attributes of the error by name: extension members (RFC 9457, section 3.2)."""


def problem(error: BaseException, errors: Sequence[type[Exception]] = ()) -> Problem:
    """Return status, type and detail of an error for a caller.

    `errors` are the domain errors that a caller may know; unexpected errors get no detail. For any framework:
    `raise HTTPException(problem(error).status, problem(error).detail)`.
    """
    if isinstance(error, NotUnique):
        facts = {name: getattr(error, name) for name in TAKEN}
        return Problem(CONFLICT, NotUnique.__name__, str(NotUnique(**facts, holder=None))[:_DETAIL_MAX], facts)
    kind = next((kind for kind in errors if isinstance(error, kind)), None)
    if kind is not None:
        return Problem(DOMAIN, kind.__name__, _text_of(error)[:_DETAIL_MAX])
    if isinstance(error, CommandReused):
        facts = {name: getattr(error, name) for name in (*REUSED, "arguments")}
        return Problem(INVALID, CommandReused.__name__, str(error)[:_DETAIL_MAX], facts)
    if isinstance(error, Refused | UsageError):
        return Problem(INVALID, "Refused", str(error)[:_DETAIL_MAX])
    if isinstance(error, OutcomeUnknown):
        return Problem(UNKNOWN, "OutcomeUnknown", "It may be stored. Send it again with the same id.")
    if isinstance(error, ConcurrencyConflict):
        quicker = "Another was quicker" if error.races == 1 else f"Others were quicker, {error.races} times"
        detail = "The log refuses it as if another was quicker" if error.is_unseen else quicker
        return Problem(CONFLICT, "ConcurrencyConflict", f"{detail}. Try again.")
    if isinstance(error, StoreUnavailable):
        return Problem(UNAVAILABLE, "StoreUnavailable", "The log does not answer. Try again.")
    return Problem(INTERNAL, "Internal", "The service's log says what went wrong.")


def _text_of(error: BaseException) -> str:
    """Return the message of an error of the application, without lone surrogates; empty if it cannot be printed."""
    try:
        return str(error).encode(errors="replace").decode()
    except Exception:  # noqa: BLE001 - an error that cannot even be printed
        return ""


_log = logging.getLogger(__name__)

QUEUE = "q"
ERROR, ERROR_CODE = "Nats-Service-Error", "Nats-Service-Error-Code"
IN_FLIGHT = 256
"""Requests that are executed concurrently."""
WAITING_MAX = 4_096
"""Accepted requests, waiting and executing; further requests are answered with 503."""
_BODY_MAX = 800_000
_WARN_S = 60.0
"""Seconds between two log lines about requests without an answer, because a caller could cause any number of them."""
_DRAIN_S = 10.0
_VERBS = ("PING", "INFO", "STATS")


def command_subject(app: str, aggregate: str, command: str, token: str) -> str:
    """Return the subject of a command on one aggregate; `token` is the aggregate's encoded id, or `*`."""
    return f"cmd.{app}.{aggregate}.{command}.{token}"


@dataclass(slots=True)
class ServedEndpoint:
    """One served decision and the statistics of its requests."""

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
        """Return the description of the endpoint in an answer to `$SRV.INFO`."""
        metadata = {
            "schema": orjson.dumps(self.arguments.schema()).decode(),
            "errors": ",".join(kind.__name__ for kind in self.served.errors),
            "doc": (self.served.decide.__doc__ or "").strip(),
        }
        return {**self._address(app), "metadata": metadata}

    def stats(self, app: str) -> dict[str, Any]:
        """Return the statistics of the endpoint in an answer to `$SRV.STATS`."""
        return {
            **self._address(app),
            "num_requests": self.requests,
            "num_errors": self.errors,
            "last_error": self.last_error,
            "processing_time": self.nanoseconds,
            "average_processing_time": self.nanoseconds // max(1, self.requests),
            "data": None,  # nats-py reads no answer without it
        }

    def _address(self, app: str) -> dict[str, Any]:
        subject = command_subject(app, self.aggregate, self.served.name, "*")
        return {"name": self.name, "subject": subject, "queue_group": QUEUE}


class Service:
    """The service of an app over one connection: `open` starts it, and `close` finishes the accepted requests."""

    def __init__(self, repositories: Repositories, client: Client, served: Sequence[Served]) -> None:
        self._app = repositories.app.name
        self._repositories = repositories
        self._client = client
        self._endpoints = [
            ServedEndpoint(decision, aggregate_info(decision.aggregate).name, arguments_of(decision.decide))
            for decision in served
        ]
        self._id = uuid4().hex[:22]
        self._in_flight = asyncio.Semaphore(IN_FLIGHT)
        self._subscriptions: list[Listening] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered = 0
        self._warned_at = -_WARN_S

    async def open(self) -> None:
        """Start to serve, also after every reconnect."""
        self._client.on_denied.append(self._answer_denied)
        for endpoint in self._endpoints:
            subject = command_subject(self._app, endpoint.aggregate, endpoint.served.name, "*")
            await self._serve(subject, lambda frame, endpoint=endpoint: self._accept(endpoint, frame), QUEUE)
        for verb in _VERBS:
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{self._app}", f"$SRV.{verb}.{self._app}.{self._id}"):
                await self._serve(subject, lambda frame, verb=verb: self._answer_discovery(verb, frame))
        # The server handles messages in order: an answer to this request shows that all subscriptions are active.
        await self._repositories.store.state()

    async def close(self) -> None:
        """Accept no more requests, and wait up to ten seconds for the accepted ones."""
        served, self._subscriptions = self._subscriptions, []
        await self._client.unsubscribe(served)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_DRAIN_S)
        if self._answer_denied in self._client.on_denied:
            self._client.on_denied.remove(self._answer_denied)

    async def _serve(self, subject: str, handler: Callable[[Frame], object], queue: str = "") -> None:
        self._subscriptions.append(await self._client.serve(subject, handler, queue))

    def _accept(self, endpoint: ServedEndpoint, frame: Frame) -> None:
        if not self._client.may_answer(frame[2], frame[1]):
            # The command is not executed either: a client that may only read the stream can make the server send stored
            # messages to this subject, without a reply or with a reply subject of its own.
            endpoint.requests += 1
            endpoint.errors += 1
            endpoint.last_error = f"{INVALID}:Reply"
            self._refuse_reply(endpoint.name, frame)
            return
        if len(self._tasks) >= WAITING_MAX:
            self._answer(frame, Problem(503, "Busy", "The service has too many requests waiting. Try again."))
            return
        task = asyncio.ensure_future(self._handle(endpoint, frame))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, endpoint: ServedEndpoint, frame: Frame) -> None:
        async with self._in_flight:
            began = time.perf_counter_ns()
            labels = {"eventjet.aggregate": endpoint.aggregate, "eventjet.decision": endpoint.served.name}
            parent = header(frame[3], TRACEPARENT)
            with tracing.span(
                spans.SERVE, f"{endpoint.aggregate}.{endpoint.served.name}", labels, parent=parent
            ) as attributes:
                answer = await self._execute(endpoint, frame)
                attributes["eventjet.status"] = answer.status if isinstance(answer, Problem) else 200
            endpoint.requests += 1
            endpoint.nanoseconds += time.perf_counter_ns() - began
            if isinstance(answer, Problem):
                endpoint.errors += 1
                endpoint.last_error = f"{answer.status}:{answer.type}"
            self._answer(frame, answer)

    async def _execute(self, endpoint: ServedEndpoint, frame: Frame) -> dict[str, Any] | Problem:
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
            return self._problem_of(endpoint, endpoint.name, raised)
        repository = self._repositories.of(endpoint.served.aggregate)
        try:
            command = repository.command(command_id, ignoring=endpoint.served.ignoring, metadata=metadata)
            committed = await command.execute(aggregate_id, endpoint.served.decide, **arguments)
        except BaseException as raised:  # noqa: BLE001 - a caller is told what it may know, whatever it is
            if is_cancelled(raised):
                return problem(
                    OutcomeUnknown((), (), "the process ends", ())
                )  # the process ends, and so does this task once it has answered
            command_label = f"{endpoint.name} of {aggregate_id!r} (command {command_id or 'without an id'})"
            return self._problem_of(endpoint, command_label, raised)
        return {
            "position": committed.position,
            "version": committed.version,
            "token": committed.token,
            "events": len(committed.events),
        }

    def _problem_of(self, endpoint: ServedEndpoint, command_label: str, raised: BaseException) -> Problem:
        """Return the answer for an error, and log an error whose details the caller does not get."""
        error = UnexpectedExit.instead_of(raised)
        answer = problem(error, endpoint.served.errors)
        if answer.status == INTERNAL:
            private = self._repositories.catalog.is_private
            is_foreseen = isinstance(error, EventjetError) and not isinstance(error, UnexpectedExit)
            trace = "" if is_foreseen else f"\n{traceback_of(error, private=private)}"
            logs.COMMAND_FAILED.log(_log, name=command_label, reason=reason_of(error, private=private), trace=trace)
        return answer

    def _answer(self, frame: Frame, answer: dict[str, Any] | Problem) -> None:
        if isinstance(answer, Problem):
            headers = header_block([(ERROR, answer.type), (ERROR_CODE, str(answer.status))])
            body = orjson.dumps({**answer.more, "type": answer.type, "detail": answer.detail})
        else:
            headers, body = b"", orjson.dumps(answer)
        self._client.publish(frame[2].decode(), body, headers)

    def _refuse_reply(self, name: str, frame: Frame) -> None:
        reply = frame[2].decode("utf-8", "replace")
        clause = f"names the reply {cut(reply, 100)!r}" if reply else "names no reply"
        inboxes = ", ".join(self._client.endpoint.caller_inboxes)
        self._warn(
            f"a request {clause}, and answers go to inboxes of callers alone ({inboxes}). Have the caller hear its "
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
            logs.UNANSWERED.log(_log, name=name, reason=reason, count=self._unanswered)
            self._warned_at, self._unanswered = now, 0

    def _answer_discovery(self, verb: str, frame: Frame) -> None:
        if not self._client.may_answer(frame[2], frame[1]):
            self._refuse_reply(f"$SRV.{verb}", frame)
            return
        kind = f"io.nats.micro.v1.{verb.lower()}_response"
        log = self._repositories.store.identity
        answer: dict[str, Any] = {"type": kind, "name": self._app, "id": self._id, "version": version("eventjet")}
        answer["metadata"] = {"eventjet.log": log}
        if verb == "INFO":
            answer["description"] = f"Commands of {self._app}."
            answer["endpoints"] = [endpoint.info(self._app) for endpoint in self._endpoints]
        elif verb == "STATS":
            began = min((endpoint.began for endpoint in self._endpoints), default=time.time())
            # nats-py reads no time without a fraction of a second.
            answer["started"] = datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
            answer["endpoints"] = [endpoint.stats(self._app) for endpoint in self._endpoints]
        self._client.publish(frame[2].decode(), orjson.dumps(answer))
