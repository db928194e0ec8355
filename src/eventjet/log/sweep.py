"""Which objects of an app's bucket its log refers to; remove those that no event refers to, and check the others.

Everything here blocks. An object is removed only if all of this is so: it was there before the log was read; its
metadata is older than the age that is given; no event up to the end of the log has anything that looks like its
digest, whatever the app declares; that log is whole, and the one for which the bucket was made; and nobody has written
the object's metadata again meanwhile, as every command does before it refers to it. What runs longer than the age
between its claim and its append is not protected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from eventjet import failpoints
from eventjet.codec.headers import TYPE, RawRecord, header
from eventjet.domain.blob import DIGEST
from eventjet.errors import BlobDamaged, BlobMissing, Forbidden, LogUnusable, UsageError
from eventjet.jetstream import api
from eventjet.jetstream.api import Conversation, Request, StreamState
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import read_range
from eventjet.log.integrity import check_integrity, earlier_logs, first_position
from eventjet.log.objects import Bucket, ContentReader, StoredObject, patiently
from eventjet.log.topology import IDENTITY, finding_stream, identity_of, reading_log_state
from eventjet.nats.endpoint import Endpoint

AGE_S = 24 * 3600.0
"""The age from which on an object that no event refers to is taken for an orphan."""
AGE_MIN_S = 3600.0
"""The least age that may be given while commands run: far more than a command takes after its upload."""
_REQUEST_S = 30.0
_TRIES_MAX = 20
"""How often metadata is written over that of commands that claim the object at the same time."""

T = TypeVar("T")
Progress: TypeAlias = Callable[[int, int], object]
"""Called with (records read, records in all)."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A body that an event refers to."""

    digest: str
    position: int
    """The position of the first event that does."""
    type_name: str
    """The wire name of that event."""

    @property
    def where(self) -> str:
        """The event in words."""
        return f"{self.type_name} at position {self.position:,}"


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of an app's bucket, and what the log says of them."""

    bucket: str
    position: int
    """The position up to which the log was read."""
    objects: int
    bytes: int
    """Bytes of the content of all objects."""
    referenced: int
    """How many bodies events refer to."""
    missing: tuple[Reference, ...]
    """Bodies that events refer to and the bucket does not have."""
    orphans: tuple[StoredObject, ...]
    """Objects that no event refers to and that are older than the age."""
    young: int
    """How many objects no event refers to that are younger: a command may be about to."""
    unfinished: int
    """How many uploads have not ended and are older than the age."""
    removed: int = 0
    """How many orphans were removed."""
    removed_uploads: int = 0

    @property
    def orphaned_bytes(self) -> int:
        """Bytes of the content of the orphans."""
        return sum(orphan.size for orphan in self.orphans)


class References(Mapping[str, Reference]):
    """The bodies that records refer to, by digest; each takes some 300 bytes of memory."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        """The position up to which the log was read."""
        self._positions: dict[bytes, tuple[int, str]] = {}

    def take(self, record: RawRecord) -> None:
        """Note what a record refers to, whatever the app declares."""
        for match in DIGEST.finditer(record[4]):
            key = bytes.fromhex(match[1].decode())
            if key not in self._positions:
                self._positions[key] = record[0], header(record[3], TYPE) or "?"

    def __getitem__(self, digest: str) -> Reference:
        return Reference(digest, *self._positions[bytes.fromhex(digest.partition(":")[2])])

    def __iter__(self) -> Iterator[str]:
        return (f"sha256:{key.hex()}" for key in self._positions)

    def __len__(self) -> int:
        return len(self._positions)


def references_of(
    link: NatsConnection, endpoint: Endpoint, app: str, progress: Progress = lambda _read, _all: None
) -> References:
    """Read the log up to its present end, and return what its events refer to."""
    state = link.run(reading_log_state(app))
    references, read = References(state.last), 0
    if state.messages:
        for batch in read_range(endpoint, app, first_position(state), state.last + 1, allow_holes=True):
            for record in batch:
                references.take(record)
            read += len(batch)
            progress(read, state.messages)
    return references


def sweep_objects(
    link: NatsConnection,
    endpoint: Endpoint,
    app: str,
    *,
    age_s: float = AGE_S,
    removes: bool = False,
    progress: Progress = lambda _read, _all: None,
) -> Objects:
    """Read the bucket, then the log, and with `removes` remove orphans, unless log or bucket are in doubt."""
    bucket = Bucket(app)
    # In this order: what is written after it was read here is protected by the comparison when it is removed.
    oldest_ns = (_run(link, bucket, _asking(api.server_time(bucket.stream))) - age_s) * 1e9
    metas = [stored for stored in _run(link, bucket, bucket.reading_metas()) if not stored.is_deleted]
    uploads = _run(link, bucket, _uploads(bucket, {stored.token for stored in metas}, oldest_ns))
    references = references_of(link, endpoint, app, progress)
    unused = [stored for stored in metas if stored.digest not in references]
    orphans = [stored for stored in unused if stored.time_ns < oldest_ns]
    removed = removed_uploads = 0
    if removes:
        _run(link, bucket, _checking_log(bucket, app))
        for orphan in orphans:
            failpoints.reach("objects.sweep")
            removed += _run(link, bucket, bucket.removing(orphan))
        removed_uploads = _run(link, bucket, _removing_uploads(bucket, uploads))
    present = {stored.digest for stored in metas if stored.digest == f"sha256:{stored.name}"}
    # What was stored after the bucket was read is asked for alone.
    missing = (digest for digest in references if digest not in present)
    return Objects(
        bucket=bucket.name,
        position=references.last,
        objects=len(metas),
        bytes=sum(stored.size for stored in metas),
        referenced=len(references),
        missing=tuple(references[digest] for digest in missing if _run(link, bucket, bucket.reading(digest)) is None),
        orphans=tuple(orphans),
        young=len(unused) - len(orphans),
        unfinished=len(uploads),
        removed=removed,
        removed_uploads=removed_uploads,
    )


def faults_of(
    link: NatsConnection, app: str, references: Iterable[Reference], progress: Callable[[int], object] = lambda _: None
) -> Iterator[tuple[Reference, str]]:
    """Read each body that is referred to, compare it with its digest, and yield those that are missing or damaged."""
    bucket = Bucket(app)
    for number, reference in enumerate(references, 1):
        reader = ContentReader(bucket, reference.digest)
        try:
            while _run(link, bucket, reader.next()) is not None:
                pass
        except BlobMissing:
            yield reference, f"the object store {bucket.name!r} does not have it"
        except BlobDamaged as error:
            yield reference, error.fault
        progress(number)


def age_in(text: str) -> float:
    """Return the seconds of an age such as `90m`, `36h` or `2d`; raises `UsageError` for less than an hour."""
    unit_s = {"m": 60.0, "h": 3600.0, "d": 86_400.0}.get(text[-1:], 0.0)
    age_s = float(text[:-1]) * unit_s if text[:-1].isdecimal() else 0.0
    if age_s < AGE_MIN_S:
        raise UsageError(
            f"{text[:20]!r} is no age for a sweep. Give minutes, hours or days, an hour at least, such as 90m, 36h or "
            "2d: younger objects may belong to a command that has not recorded its events yet."
        )
    return age_s


def has_bucket(link: NatsConnection, app: str) -> bool:
    """Return whether an app has a bucket, whatever it declares now; False if these credentials may not ask."""
    try:
        return link.run(finding_stream(Bucket(app).stream)) is not None
    except Forbidden:
        return False


def _checking_log(bucket: Bucket, app: str) -> Conversation[None]:
    log = yield from reading_log_state(app)
    check_integrity(log)
    objects: StreamState = yield api.stream_info(bucket.stream)
    noted, identity = objects.metadata.get(IDENTITY, ""), identity_of(log)
    if noted != identity and noted not in earlier_logs(log):
        raise LogUnusable(
            f"The log {app!r}",
            f"it is the log {identity}, and the object store {bucket.name!r} was made for the log {noted or '?'}, "
            "whose events may refer to what these do not",
            "Nothing was removed. Restore that log; if nobody needs it, say that the bodies are of this one: "
            f"`nats stream edit {bucket.stream} --metadata {IDENTITY}={identity}`.",
        )


def _asking(request: Request[T]) -> Conversation[T]:
    return (yield request)


def _uploads(bucket: Bucket, ended: Collection[str], oldest_ns: float) -> Conversation[list[tuple[str, int]]]:
    """Return the (token, last position) of each upload without metadata whose last chunk is old."""
    uploads: list[tuple[str, int]] = []
    offset = 0
    while True:
        subjects, total = yield api.subjects_of(bucket.stream, bucket.chunk_subject("*"), offset)
        for subject in subjects:
            token = subject.rpartition(".")[2]
            if token in ended:
                continue
            last: RawRecord | None = yield api.last_message(bucket.stream, subject)
            if last is not None and last[1] < oldest_ns:
                uploads.append((token, last[0]))
        offset += len(subjects)
        if not subjects or offset >= total:
            return uploads


def _removing_uploads(bucket: Bucket, uploads: Collection[tuple[str, int]]) -> Conversation[int]:
    """Remove the chunks of uploads that nobody goes on with, and return how many uploads they were.

    An empty chunk is added to each first. An upload looks for it after it has written its metadata, and metadata is
    read here after it: so either the upload fails, or its chunks stay.
    """
    marked: dict[str, int] = {}
    for token, last in uploads:
        position = yield from bucket.writing(bucket.chunk_subject(token), b"", last)
        if position is not None:
            marked[token] = position
    if not marked:
        return 0
    ended = {stored.token: stored for stored in (yield from bucket.reading_metas()) if not stored.is_deleted}
    removed = 0
    for token, position in marked.items():
        if token in ended:
            yield from _keeping_mark(bucket, ended[token])
        else:
            yield bucket.purging(token, position)
            removed += 1
    return removed


def _keeping_mark(bucket: Bucket, ended: StoredObject) -> Conversation[None]:
    """Count the mark among the chunks of an upload that has ended meanwhile, so that its object is whole."""
    stored: StoredObject | None = ended
    for _ in range(_TRIES_MAX):
        if stored is None or (stored.token, stored.chunks) != (ended.token, ended.chunks):
            return
        if (yield from bucket.writing_meta(replace(stored, chunks=ended.chunks + 1))) is not None:
            return
        stored = yield from bucket.reading(ended.digest)


def _run(link: NatsConnection, bucket: Bucket, conversation: Conversation[T]) -> T:
    return link.run(patiently(conversation, bucket, _REQUEST_S), _REQUEST_S, writes=True)
