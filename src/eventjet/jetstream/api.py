"""The JetStream API as requests: what is sent to which subject, and what the answer means. PURE.

A connection sends a `Request` and passes the answering frame to its `parse`. Subjects, bodies, error codes and times of
the API are known here and nowhere else.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import orjson

from eventjet.codec.headers import RawRecord, number_of
from eventjet.domain.moment import in_utc
from eventjet.errors import ApiRefused, LogUnusable, StoreUnavailable, StreamMissing
from eventjet.nats.protocol import Frame, status_of

T = TypeVar("T")

WRONG_SEQUENCE = 10071
"""Error code: the subject's last message is not at the expected sequence."""
IN_PROCESS = 10164
"""Error code with three replicas: another writer's message is being replicated, and nothing was compared."""
REPEATED_ID = 10201
"""Error code: a message of an atomic batch has an id that was stored within the duplicate window; nothing is stored."""
CONFLICTS = frozenset((WRONG_SEQUENCE, IN_PROCESS, REPEATED_ID))
"""Error codes of a publish that another writer may have been quicker than."""
NAME_IN_USE = 10058
"""Error code: a stream of this name exists with another configuration."""
MOVING = frozenset((10124, 10226))
"""Error codes of a change of a stream's replicas or placement while it is being moved or scaled."""
NOT_CLUSTERED = 10074
"""Error code: one server cannot hold several replicas."""
_NO_CONSUMER = 10014
_NO_MESSAGE = 10037
_NO_STREAM = 10059
_SWITCHED_OFF = (10039, 10076)
STORE_FAILED = 10077
"""Error code of any failed store: a definite refusal only if its text is that of a limit."""
NO_RESOURCES = 10002
"""Error code: the account has used up the storage that it may use."""
LIMITS = {
    "maximum bytes exceeded": "max_bytes",
    "maximum messages exceeded": "max_msgs",
    "maximum messages per subject exceeded": "max_msgs_per_subject",
}
"""The stream setting of each text of `STORE_FAILED` that says a limit is reached.

`disk quota exceeded` is not among them: followers may store what their leader could not write.
"""
_TRANSIENT = (10005, 10023)  # no peers for placement, no resources: a cluster that just lost a server says so
_STREAM = b"Nats-Stream: "
_SUBJECT = b"\r\nNats-Subject: "
_SEQUENCE = b"\r\nNats-Sequence: "
_TIME = b"\r\nNats-Time-Stamp: "
_BLOCK_END = b"\r\n\r\n"
_FIRST_TIME, _LAST_TIME = datetime(1678, 1, 1, tzinfo=UTC), datetime(2262, 1, 1, tzinfo=UTC)
"""The earliest and the latest start time of a request: the server counts 64-bit nanoseconds, and others would wrap."""
_POSITION_MAX = 2**63 - 1
"""The position to ask the server for in place of a greater one: it counts with 64 bits, and has nothing at either."""
LAG_S = 0.1
"""Pause between two requests to replicas that lag behind the leader."""
LAGS_MAX = 30
"""How often a replica that lags behind, or a page of which a part is lost, is asked again."""
PAGE_MAX, _PAGE_BYTES = 500, 2_000_000
"""Records and bytes of one request at most: there is no flow control inside a request."""
_STATUS = b"NATS/1.0 "
"""How the headers of the server's own messages begin; stored messages have no status."""


class Request(NamedTuple, Generic[T]):
    """A request to the server, and how its answer is read."""

    what: str
    """The request in words, for errors."""
    subject: str
    payload: bytes
    parse: Callable[[Frame], T]
    """Turns the answer into a value; raises the error that it means."""
    headers: bytes = b""
    stream: str = ""
    """For a publish, the stream that is to store the message: only answers of this stream count."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state and configuration of a stream, as its leader knew them when asked."""

    name: str
    first: int
    """Position of the first message; `last` + 1 in an empty stream, and 0 in a stream that never had a message."""
    last: int
    """Position of the last message ever stored; 0 in a stream that never had a message."""
    messages: int
    deleted: int
    """How many positions between `first` and `last` have no message."""
    bytes: int
    subjects: int
    metadata: dict[str, str]
    config: dict[str, Any]
    """The stream's configuration as JetStream returns it."""
    created: str = ""
    """When the stream was created, as the server writes it: a stream that was made again has another time."""
    cluster: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The servers that have copies, and those that it is moved to, as the server says; empty without a cluster."""
    mirror: Mapping[str, Any] | None = None
    """What a mirror says of its origin: `lag` in messages, `active` in nanoseconds, `error`; None for other streams.

    Empty while the mirror does not say it, such as just after an election."""
    sources: Sequence[Mapping[str, Any]] = ()
    """What the server says of each stream that it gathers messages from."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> StreamState:
        """Return the state that an answer of the stream API describes."""
        state, config = answer["state"], answer["config"]
        return cls(
            name=config["name"],
            first=state["first_seq"],
            last=state["last_seq"],
            messages=state["messages"],
            deleted=state.get("num_deleted", 0),
            bytes=state["bytes"],
            subjects=state.get("num_subjects", 0),
            metadata=config.get("metadata") or {},
            config=config,
            created=str(answer.get("created", "")),
            cluster=answer.get("cluster") or {},
            mirror=answer.get("mirror", {}) if config.get("mirror") else None,
            sources=answer.get("sources") or (),
        )


def call(subject: str, body: object = None) -> Request[dict[str, Any]]:
    """Return a request for the API's JSON answer, on `$JS.API.<subject>`; it raises `ApiRefused`."""
    return _call(subject, body, lambda answer: answer)


def _call(subject: str, body: object, read: Callable[[dict[str, Any]], T]) -> Request[T]:
    """Return the request of `call` with another result: `read` makes it of an answer without an error."""

    def parse(frame: Frame) -> T:
        return read(answer_in(frame, subject))

    payload = b"" if body is None else orjson.dumps(body)
    return Request(f"JetStream's {subject}", f"$JS.API.{subject}", payload, parse)


def answer_in(frame: Frame, subject: str) -> dict[str, Any]:
    """Return the JSON of an answer.

    Raises `ApiRefused` for an error in the answer, `StreamMissing` for a stream that does not exist, `LogUnusable` if
    JetStream is switched off, and `StoreUnavailable` for an error that may pass, an answer that cannot be read, and
    the state of a stream that has no leader.
    """
    try:
        answer = cast("dict[str, Any]", orjson.loads(frame[4]))
        error = answer.get("error")
        if not error:
            _check_leader(answer, subject)
            return answer
        code, err_code = int(error.get("code", 0)), int(error.get("err_code", 0))
    except (ValueError, AttributeError, TypeError):
        raise StoreUnavailable(subject, f"JetStream's answer cannot be read ({frame[4][:40]!r})") from None
    description = str(error.get("description", "no description"))
    if err_code in _SWITCHED_OFF:
        raise LogUnusable("JetStream", description, "Switch it on in the server's config and for this account.")
    is_full = err_code == STORE_FAILED and description in LIMITS
    if (code == 503 and not is_full) or err_code in _TRANSIENT:
        raise StoreUnavailable(subject, f"{description} ({err_code})")
    kind = StreamMissing if err_code == _NO_STREAM else ApiRefused
    raise kind(subject, code, err_code, description)


def _check_leader(answer: Mapping[str, Any], subject: str) -> None:
    """Raise `StoreUnavailable` for the state of a stream that has no leader: any replica answers, and it may lag.

    A stream that gets its second replica has no leader for a moment either, and the first one answers.
    """
    if str(answer.get("type", "")).endswith("stream_info_response"):
        cluster: Mapping[str, Any] = answer.get("cluster") or {}
        names = [str(replica.get("name", "?")) for replica in cluster.get("replicas") or ()]
        if len(names) > 1 and not cluster.get("leader"):
            raise StoreUnavailable(
                subject,
                "the stream has no leader, and what a replica says may be old. Start those of its servers "
                f"{', '.join(names)} that are away; more than half are needed, and they choose one within seconds",
            )


# Streams.


def stream_info(stream: str, prefix: str = "") -> Request[StreamState]:
    """Read a stream's bounds and configuration, at the API `prefix` (`$JS.hub.API`); raises `StreamMissing`."""
    request = _call(f"STREAM.INFO.{stream}", None, StreamState.of)
    return request._replace(subject=f"{prefix}.STREAM.INFO.{stream}") if prefix else request


def server_time(stream: str) -> Request[float]:
    """Read the clock of the server that leads the stream, in seconds since 1970; raises `StreamMissing`."""
    return _call(f"STREAM.INFO.{stream}", None, lambda info: nanoseconds(str(info["ts"]).encode()) / 1e9)


def deleted_positions(stream: str) -> Request[list[int]]:
    """List the positions of deleted messages."""
    return _call(f"STREAM.INFO.{stream}", {"deleted_details": True}, lambda info: info["state"].get("deleted") or [])


def messages_of(stream: str, subject: str) -> Request[int]:
    """Count the messages whose subject matches."""

    def count(info: dict[str, Any]) -> int:
        counts: dict[str, int] = info["state"].get("subjects") or {}
        return sum(counts.values())

    return _call(f"STREAM.INFO.{stream}", {"subjects_filter": subject}, count)


def subjects_of(stream: str, subject: str, offset: int = 0) -> Request[tuple[list[str], int]]:
    """List matching subjects with messages in order, 100,000 from an offset on at most, and count all of them."""

    def read(info: dict[str, Any]) -> tuple[list[str], int]:
        return sorted(info["state"].get("subjects") or ()), int(info.get("total", 0))

    return _call(f"STREAM.INFO.{stream}", {"subjects_filter": subject, "offset": offset}, read)


def create_stream(config: Mapping[str, Any]) -> Request[StreamState]:
    """Create a stream; raises `ApiRefused` with `NAME_IN_USE` if a stream with another configuration has the name."""
    return _call(f"STREAM.CREATE.{config['name']}", config, StreamState.of)


def update_stream(config: Mapping[str, Any]) -> Request[StreamState]:
    """Replace the configuration of an existing stream."""
    return _call(f"STREAM.UPDATE.{config['name']}", config, StreamState.of)


def purge_stream(stream: str, subject: str, until: int) -> Request[int]:
    """Remove the messages of a subject up to and including a sequence; the answer is how many they were."""
    body = {"filter": subject, "seq": until + 1}
    return _call(f"STREAM.PURGE.{stream}", body, lambda answer: int(answer.get("purged", 0)))


# Consumers.


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer, as the server created it."""

    stream: str
    name: str
    pending: int
    """How many messages waited for the consumer when it was created."""
    config: dict[str, Any]
    """The consumer's configuration as the server returned it, with the server's own limits."""


def create_consumer(
    stream: str, name: str, config: Mapping[str, Any], filter_subject: str | None = None
) -> Request[Consumer]:
    """Create a consumer; raises `ApiRefused` if a consumer of this name has another configuration."""
    consumer_config = {**config, "name": name, **({"filter_subject": filter_subject} if filter_subject else {})}
    subject = f"CONSUMER.CREATE.{stream}.{name}" + (f".{filter_subject}" if filter_subject else "")

    def consumer_of(answer: dict[str, Any]) -> Consumer:
        return Consumer(stream, name, int(answer.get("num_pending", 0)), answer.get("config") or consumer_config)

    return _call(subject, {"stream_name": stream, "config": consumer_config, "action": "create"}, consumer_of)


def delete_consumer(stream: str, name: str) -> Request[bool]:
    """Delete a consumer, and end the pulls that wait at it with status 409; the answer is False if there was none."""
    return _unless(_NO_CONSUMER, False, _call(f"CONSUMER.DELETE.{stream}.{name}", None, lambda _: True))


def paused_until(stream: str, name: str) -> Request[str]:
    """Read until when a consumer is paused, as the server writes it; empty if it is not paused or does not exist."""

    def read(info: dict[str, Any]) -> str:
        return str(info["config"].get("pause_until", "")) if info.get("paused") else ""

    return _unless(_NO_CONSUMER, "", _call(f"CONSUMER.INFO.{stream}.{name}", None, read))


def waiting_consumers(stream: str) -> Request[list[str]]:
    """List the consumers at which pulls wait."""
    return _call(
        f"CONSUMER.LIST.{stream}",
        None,
        lambda answer: [
            str(consumer["name"]) for consumer in answer.get("consumers") or () if consumer.get("num_waiting")
        ],
    )


# Messages, from the stream's leader.


def message_at(stream: str, position: int) -> Request[RawRecord | None]:
    """Read the record at a position; None when there is none."""
    return _message(stream, {"seq": min(position, _POSITION_MAX)}, lambda record: record[0] == position)


def next_message(stream: str, position: int, subject: str = ">") -> Request[RawRecord | None]:
    """Read the first record at or after a position whose subject matches; None when there is none."""
    query = {"seq": min(max(position, 1), _POSITION_MAX), "next_by_subj": subject}
    return _message(stream, query, lambda record: record[0] >= position and _matches(record, subject))


def last_message(stream: str, subject: str) -> Request[RawRecord | None]:
    """Read the last record of a subject; None when there is none."""
    return _message(stream, {"last_by_subj": subject}, lambda record: _matches(record, subject))


def _message(stream: str, query: dict[str, Any], is_match: Callable[[RawRecord], bool]) -> Request[RawRecord | None]:
    def read(answer: dict[str, Any]) -> RawRecord:
        record = _stored_message(answer)
        if not is_match(record):
            raise StoreUnavailable(f"STREAM.MSG.GET.{stream}", f"the answer to {query} is of position {record[0]}")
        return record

    return _unless(_NO_MESSAGE, None, _call(f"STREAM.MSG.GET.{stream}", query, read))


def _matches(record: RawRecord, subject: str) -> bool:
    """Return whether a record has the requested subject; for a pattern, the server's answer is trusted."""
    return subject.endswith(("*", ">")) or record[2] == subject.encode()


def _stored_message(answer: dict[str, Any]) -> RawRecord:
    message = cast("dict[str, Any]", answer["message"])
    return (
        message["seq"],
        nanoseconds(message["time"].encode()),
        message["subject"].encode(),
        base64.b64decode(message.get("hdrs") or ""),
        base64.b64decode(message.get("data") or ""),
    )


def _unless(code: int, default: Any, request: Request[T]) -> Request[Any]:
    """Return the request, changed to answer `default` where the server answers with this error code."""

    def parse(frame: Frame) -> Any:
        try:
            return request.parse(frame)
        except ApiRefused as refusal:
            if refusal.err_code != code:
                raise
            return default

    return request._replace(parse=parse)


# Messages, from any replica (ADR-31). Each is returned as it is stored, with headers that the server appends.


def direct_last(stream: str, subject: str) -> Request[RawRecord | None]:
    """Read the last record of a subject, None when there is none; may lag behind the leader."""
    return _direct(f"The last message of {subject}", stream, f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")


def direct_since(stream: str, at: datetime, subject: str) -> Request[RawRecord | None]:
    """Read the first record stored at or after a time whose subject matches; None when there is none."""
    start = min(max(in_utc(at), _FIRST_TIME), _LAST_TIME)
    query = orjson.dumps({"start_time": start, "next_by_subj": subject})
    return _direct(f"The first message after {at.isoformat()}", stream, f"$JS.API.DIRECT.GET.{stream}", query)


def direct_page(
    stream: str, position: int, subject: str | None, *, count: int, size: int
) -> Request[tuple[int, int] | None]:
    """Read a page of up to `count` messages, about `size` bytes, from a position on; results in `end_of_page`."""
    what = f"The history of {subject}" if subject else f"The log from position {position}"
    start = {"seq": min(position, _POSITION_MAX), **({"next_by_subj": subject} if subject else {})}
    query = {**start, "batch": count, "max_bytes": size}
    return Request(what, f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(query), partial(end_of_page, what=what))


Conversation: TypeAlias = Generator[Request[Any] | None, Any, T]
"""A generator of requests, which `Client.run` (asynchronous) and `NatsConnection.run` (blocking) send.

Each yielded request is sent, and the generator receives its answer: for a page (see `is_page`) the frames. An error of
the request is thrown into the generator. A yielded None is a pause of `LAG_S`. The generator's return value is that of
`run`.
"""


def reading_records(
    stream: str, subject: str, limit: int | None = None, *, start: int = 1
) -> Conversation[list[RawRecord]]:
    """Read the records of a stream whose subject matches, in order and in a few large pages, at most `limit` of them.

    Pages come from any replica. Up to the position that a lagging replica has reached, it lacks no message that the
    leader has, and may still have messages that are gone there or were replaced. So the records, read in order up to
    the last that the leader knows of, are complete. The result is empty if the stream does not exist. Raises
    `StoreUnavailable` if the replicas stay behind.
    """
    records: list[RawRecord] = []
    lags = 0
    try:
        last: RawRecord | None = yield last_message(stream, subject)
        while last is not None and start <= last[0] and (limit is None or len(records) < limit):
            count = PAGE_MAX if limit is None else min(PAGE_MAX, limit - len(records))
            request = direct_page(stream, start, subject, count=count, size=_PAGE_BYTES)
            page, _ = yield from reading_page(request, stream)
            if not page:
                lags += 1
                if lags > LAGS_MAX:
                    raise StoreUnavailable(request.what, f"a replica lags behind position {last[0]}")
                yield None
                last = yield last_message(stream, subject)  # the last record may be gone, with its time to live
            else:
                start = page[-1][0] + 1
                records += page
    except StreamMissing:
        return []
    return records


def reading_values(bucket: str, keys: str, limit: int | None = None) -> Conversation[list[RawRecord]]:
    """Read the newest value of each matching key of a key-value bucket, without deleted keys: see `reading_records`."""
    records = yield from reading_records(f"KV_{bucket}", f"$KV.{bucket}.{keys}", limit)
    return [record for record in {record[2]: record for record in records}.values() if record[4]]


def reading_last_records(stream: str, subjects: Sequence[str]) -> Conversation[list[RawRecord]]:
    """Read the last record, which may lag, of each of up to 1,000 subjects; one without any is left out."""
    records: list[RawRecord] = []
    pending = 1
    while pending:
        query = {
            "multi_last": list(subjects),
            "batch": len(subjects),
            "max_bytes": _PAGE_BYTES,
            **({"seq": records[-1][0] + 1} if records else {}),
        }
        what = f"The last messages of {len(subjects)} subjects"
        request = Request(what, f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(query), partial(end_of_page, what=what))
        page, pending = yield from reading_page(request, stream)
        records += page
    return records


def reading_page(request: Request[Any], stream: str) -> Conversation[tuple[list[RawRecord], int]]:
    """Read the records of one page, and how many are left after it; raises `StoreUnavailable` if some stay lost."""
    for _ in range(LAGS_MAX):
        frames: Sequence[Frame] = yield request
        position, pending = end_of_page(frames[-1], request.what) or (0, 0)
        page = direct_records(frames[:-1], stream, None)
        if position == (page[-1][0] if page else 0):
            return page, pending
        yield None
    raise StoreUnavailable(request.what, "a part of the answer is lost on the way again and again")


def shortened(request: Request[T]) -> Request[T]:
    """Return the request for a page, changed to ask for one message instead of many."""
    return request._replace(payload=orjson.dumps({**orjson.loads(request.payload), "batch": 1}))


def is_status(frame: Frame) -> bool:
    """Return whether a frame is a status of the server, which ends a page, and not a stored message."""
    return frame[3].startswith(_STATUS)


def is_page(request: Request[Any]) -> bool:
    """Return whether many messages answer the request."""
    return request.subject.startswith("$JS.API.DIRECT.GET.")


def _direct(what: str, stream: str, subject: str, query: bytes) -> Request[RawRecord | None]:
    def parse(frame: Frame) -> RawRecord | None:
        if not is_status(frame):
            return direct_record(frame, stream=stream)
        _check_status(frame, what, 404)
        return None

    return Request(what, subject, query, parse)


def end_of_page(frame: Frame, what: str) -> tuple[int, int] | None:
    """Return (position of the page's last message, how many messages are left) from the status that ends a page.

    It is None for an empty page. Other statuses raise `StoreUnavailable`: a refusal must not become an empty history.
    """
    if _check_status(frame, what, 204, 404) == 404:
        return None
    return number_of(frame[3], "Nats-Last-Sequence") or 0, number_of(frame[3], "Nats-Num-Pending") or 0


def _check_status(frame: Frame, what: str, *ends: int) -> int:
    status, description = status_of(frame[3])
    if status not in ends:
        raise StoreUnavailable(what, f"the server answered status {status} {description}".rstrip())
    return status


def direct_records(frames: Sequence[Frame], stream: str, subject: bytes | None) -> list[RawRecord]:
    """Return the records of a page of direct gets; `subject` is their subject if all have the same, else None."""
    if subject is None:
        return [direct_record(frame, stream=stream) for frame in frames]
    records: list[RawRecord] = []
    separator = b"\r\nNats-Stream: %b%b%b%b" % (stream.encode(), _SUBJECT, subject, _SEQUENCE)
    for frame in frames:
        # The server's own headers come last, whatever the record's headers contain.
        stored, _, appended = frame[3].rpartition(separator)
        position, _, timestamp = appended.partition(_TIME)
        decimals = timestamp[20:29]
        if (
            stored != b"NATS/1.0"
            and position.isdigit()
            and timestamp[29:32] == b"Z\r\n"
            and len(decimals) == 9
            and decimals.isdigit()
            and _STREAM not in timestamp
        ):
            time_ns = _seconds(timestamp[:19]) + int(decimals)
            records.append((int(position), time_ns, subject, stored + _BLOCK_END, frame[4]))
        else:
            records.append(direct_record(frame, subject, stream))
    return records


def direct_record(frame: Frame, subject: bytes | None = None, stream: str = "") -> RawRecord:
    """Return the record of a direct get from `stream`; raises `StoreUnavailable` for anything else."""
    block = frame[3]
    end = block.rfind(_STREAM)
    if end < 0:
        raise StoreUnavailable("A direct get", f"the server answered {block[:80]!r}")
    # Stream, subject, sequence, time: servers write this order; in any other, they are looked up by name.
    lines = block[end:].split(b"\r\n", 4)
    if stream and lines[0] != _STREAM + stream.encode():
        raise StoreUnavailable(f"A direct get from {stream}", f"the answer is of another stream ({lines[0][:80]!r})")
    try:
        position, timestamp = lines[2], lines[3]
        if position[:15] == b"Nats-Sequence: " and timestamp[:17] == b"Nats-Time-Stamp: ":
            position, timestamp = position[15:], timestamp[17:]
        else:
            position, timestamp = _header(block[end:], _SEQUENCE), _header(block[end:], _TIME)
        stored = block[:end] + b"\r\n" if end > 10 else b""
        if block[end - 2 : end] != b"\r\n":
            stored = block[:end]  # headers without their end: the server wrote its own over their last two bytes
        if subject is None:
            is_usual = lines[1][:14] == b"Nats-Subject: "
            subject = lines[1][14:] if is_usual else _header(block[end:], _SUBJECT)
        return int(position), nanoseconds(timestamp), subject, stored, frame[4]
    except (IndexError, ValueError):
        raise StoreUnavailable("A direct get", f"the server answered {block[:80]!r}") from None


def _header(block: bytes, name: bytes) -> bytes:
    start = block.find(name)
    return block[start + len(name) : block.index(b"\r\n", start + 2)] if start >= 0 else b""


def nanoseconds(text: bytes) -> int:
    """Return the nanoseconds since 1970 of an RFC 3339 time in UTC with up to nine decimals."""
    return _seconds(text[:19]) + int(text[20:29] if len(text) == 30 else text[20:-1].ljust(9, b"0"))


@lru_cache(maxsize=1_024)
def _seconds(text: bytes) -> int:
    return int(datetime.fromisoformat(f"{text.decode()}+00:00").timestamp()) * 1_000_000_000
