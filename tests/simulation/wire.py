"""The simulated stream behind its protocol: subjects, headers and JSON, as the server writes them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from eventjet.codec.headers import EXPECTED, MSG_ID, header_block
from eventjet.log.outcome import Acked, ErrorReply
from tests.simulation.stream import Message, Proposal, Stream

BATCH_ID = "Nats-Batch-Id"
BATCH_NUMBER = "Nats-Batch-Sequence"
BATCH_COMMIT = "Nats-Batch-Commit"
_NO_MESSAGE = ErrorReply(404, 10037, "no message found")


@dataclass(slots=True)
class Wire:
    """A server that answers raw messages at once: its replicas always agree."""

    name: str
    stream: Stream

    def publish(self, subject: str, body: bytes, headers: Mapping[str, str], now: float) -> bytes:
        """Publish a message and return the answer, empty for a message of a batch that is only staged."""
        expected = headers.get(EXPECTED)
        message = Message(
            subject,
            headers.get(MSG_ID),
            None if expected is None else int(expected),
            header_block(headers.items()) if headers else b"",
            body,
        )
        batch_id = headers.get(BATCH_ID)
        if batch_id is None:
            answer = self.stream.publish(message, now)
            count = 0
        else:
            commit = BATCH_COMMIT in headers
            answer = self.stream.stage(batch_id, int(headers[BATCH_NUMBER]), commit, message, now)
            count = int(headers[BATCH_NUMBER])
        if isinstance(answer, Proposal):
            answer = self.stream.apply(answer, now)
        return b"" if answer is None else self._written(answer, batch_id, count)

    def get(self, body: Mapping[str, Any]) -> bytes:
        """Return the answer of `$JS.API.STREAM.MSG.GET`."""
        stored: tuple[int, Message] | None
        if "last_by_subj" in body:
            position = self.last(body["last_by_subj"])
            stored = (position, self.stream.log[position - 1]) if position else None
        elif "next_by_subj" not in body:
            position = int(body["seq"])
            stored = (position, self.stream.log[position - 1]) if position <= len(self.stream.log) else None
        else:
            stored = self._next(body["next_by_subj"], int(body["seq"]))
        value: dict[str, Any] = {"type": "io.nats.jetstream.api.v1.stream_msg_get_response"}
        if stored is None:
            value["error"] = _error(_NO_MESSAGE)
        else:
            position, message = stored
            value["message"] = {
                "subject": message.subject,
                "seq": position,
                "hdrs": base64.b64encode(message.block).decode(),
                "data": base64.b64encode(message.body).decode(),
                "time": stored_at(position),
            }
        return orjson.dumps(value)

    def last(self, pattern: str) -> int:
        """Return the position of the last message whose subject matches, 0 for none."""
        if not _is_wild(pattern):
            return self.stream.last.get(pattern, 0)
        return max((position for subject, position in self.stream.last.items() if fits(pattern, subject)), default=0)

    def _next(self, pattern: str, start: int) -> tuple[int, Message] | None:
        if not _is_wild(pattern):
            return self.stream.slot(pattern, start - 1)
        log = self.stream.log
        fitting = (at for at in range(start, len(log) + 1) if fits(pattern, log[at - 1].subject))
        position = next(fitting, None)
        return None if position is None else (position, log[position - 1])

    def _written(self, answer: Acked | ErrorReply, batch_id: str | None, count: int) -> bytes:
        value: dict[str, Any]
        if isinstance(answer, ErrorReply):
            value = {"error": _error(answer), "stream": self.name, "seq": 0}
        else:
            value = {"stream": self.name, "seq": answer.position}
            if answer.duplicate:
                value["duplicate"] = True
            elif batch_id is not None:
                value |= {"batch": batch_id, "count": count}
        return orjson.dumps(value)


def _is_wild(pattern: str) -> bool:
    return "*" in pattern or pattern.endswith(">")


def fits(pattern: str, subject: str) -> bool:
    """Return whether a subject matches a filter: `*` is one token, `>` at the end is one or more."""
    pattern_tokens, tokens = pattern.split("."), subject.split(".")
    if pattern_tokens[-1] == ">":
        pattern_tokens = (
            [*pattern_tokens[:-1], *tokens[len(pattern_tokens) - 1 :]]
            if len(tokens) >= len(pattern_tokens)
            else pattern_tokens
        )
    return len(pattern_tokens) == len(tokens) and all(
        token in ("*", subject_token) for token, subject_token in zip(pattern_tokens, tokens, strict=True)
    )


def stored_at(position: int) -> str:
    """Return a time that grows with the position, as the server writes it."""
    return datetime.fromtimestamp(1_767_225_600 + position, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _error(answer: ErrorReply) -> dict[str, Any]:
    return {"code": answer.status, "err_code": answer.code, "description": answer.text}
