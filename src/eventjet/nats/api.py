"""What the log says of itself: its bounds, its identity, and single records, read through the leader."""

from __future__ import annotations

import base64
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from eventjet.codec.envelope import RawRecord
from eventjet.errors import ApiRefused
from eventjet.nats.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint

_NO_MESSAGE = 10037


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream as its leader saw it when asked."""

    name: str
    first: int
    """Position of the first message; one past `last` when there is none (0 in a stream that never had any)."""
    last: int
    """Position of the last message ever stored; 0 when there never was one."""
    messages: int
    deleted: int
    """Holes between `first` and `last`."""
    bytes: int
    subjects: int
    metadata: dict[str, str]
    config: dict[str, Any]
    """The stream's configuration as JetStream tells it."""


def stream_state(where: Endpoint | NatsConnection, stream: str, *, timeout_s: float = 5.0) -> StreamState:
    """Ask for the stream's bounds; raises `ApiRefused` (10059) when there is no such stream."""
    with _linked(where, timeout_s) as link:
        found = link.api(f"STREAM.INFO.{stream}", timeout_s=timeout_s)
    state: dict[str, Any] = found["state"]
    config: dict[str, Any] = found["config"]
    return StreamState(
        name=stream,
        first=state["first_seq"],
        last=state["last_seq"],
        messages=state["messages"],
        deleted=state.get("num_deleted", 0),
        bytes=state["bytes"],
        subjects=state.get("num_subjects", 0),
        metadata=config.get("metadata") or {},
        config=config,
    )


def get_record(
    where: Endpoint | NatsConnection, stream: str, position: int, *, timeout_s: float = 5.0
) -> RawRecord | None:
    """The record at a position; None when there is none."""
    return _message(where, stream, {"seq": position}, timeout_s)


def next_record(
    where: Endpoint | NatsConnection, stream: str, position: int, subject: str = ">", *, timeout_s: float = 5.0
) -> RawRecord | None:
    """The first record at or after a position whose subject matches; None when there is none."""
    return _message(where, stream, {"seq": max(position, 1), "next_by_subj": subject}, timeout_s)


def _message(
    where: Endpoint | NatsConnection, stream: str, query: dict[str, Any], timeout_s: float
) -> RawRecord | None:
    with _linked(where, timeout_s) as link:
        try:
            found = link.api(f"STREAM.MSG.GET.{stream}", query, timeout_s=timeout_s)
        except ApiRefused as refusal:
            if refusal.err_code == _NO_MESSAGE:
                return None
            raise
    message = cast("dict[str, Any]", found["message"])
    return (
        message["seq"],
        _nanoseconds(message["time"]),
        message["subject"].encode(),
        base64.b64decode(message.get("hdrs") or ""),
        base64.b64decode(message.get("data") or ""),
    )


def _nanoseconds(text: str) -> int:
    """RFC 3339 with up to nine decimals, in UTC, as nanoseconds since 1970."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
    return seconds * 1_000_000_000 + int(fraction.ljust(9, "0") or 0)


@contextmanager
def _linked(where: Endpoint | NatsConnection, timeout_s: float) -> Generator[NatsConnection]:
    if isinstance(where, NatsConnection):
        yield where
        return
    with NatsConnection.open(where, timeout_s=timeout_s) as link:
        yield link
