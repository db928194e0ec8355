"""Names of streams, subjects and buckets on the server, and the format of notices. PURE.

An app has one stream, one subject per entity, and one bucket for snapshots. A notice is a message that a worker
publishes over core NATS after a commit, with the position that a projection has reached. It is delivered at most once,
so nobody may rely on it: it is only a hint to look at the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from eventjet.domain.identity import decode_id, encode_id

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")

SERVER_MESSAGE_MAX = 900_000
"""The largest message that the stream takes, in bytes with headers."""


def is_name(text: str) -> bool:
    """Return whether a text may name an app, aggregate or projection: `[a-z][a-z0-9_]*`, at most 63 characters."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None  # pyright: ignore[reportUnnecessaryIsInstance]


def stream_subjects(app: str) -> str:
    """Return the subjects that the stream of an app stores."""
    return f"{app}.*.*"


def covers(pattern: str, subject: str) -> bool:
    """Return whether a subject pattern matches all that another one matches."""
    parts, other_parts = pattern.split("."), subject.split(".")
    for index, part in enumerate(parts):
        if part == ">":
            return index < len(other_parts)
        if index >= len(other_parts) or other_parts[index] == ">" or part not in ("*", other_parts[index]):
            return False
    return len(parts) == len(other_parts)


def without_covered(subjects: Iterable[str]) -> list[str]:
    """Return the subject patterns that no other one of them covers, each once and in their order."""
    unique = list(dict.fromkeys(subjects))
    return [subject for subject in unique if not any(other != subject and covers(other, subject) for other in unique)]


def overlap(subject: str, other_subject: str) -> bool:
    """Return whether two subject patterns both match some subject."""
    tokens, other_tokens = subject.split("."), other_subject.split(".")
    for token, other_token in zip(tokens, other_tokens, strict=False):
        if ">" in (token, other_token):
            return True
        if token != other_token and "*" not in (token, other_token):
            return False
    return len(tokens) == len(other_tokens)


def subject_of(app: str, aggregate: str, aggregate_id: str) -> str:
    """Return the subject of one entity; raises `Refused` for an id that cannot be a token."""
    return f"{app}.{entity_key(aggregate, aggregate_id)}"


def type_subjects(app: str, aggregate: str) -> str:
    """Return the wildcard for the subjects of all entities of a type."""
    return f"{app}.{aggregate}.*"


def entity_key(aggregate: str, aggregate_id: str) -> str:
    """Return the subject of one entity without the app, which is also the key of its snapshot."""
    return f"{aggregate}.{encode_id(aggregate_id)}"


def entity_of(subject: bytes) -> tuple[str, str]:
    """Return (aggregate, aggregate id), the inverse of `subject_of`; raises `ValueError` for any other subject."""
    return _entities.get(subject) or _entity_of(subject)


_entities: dict[bytes, tuple[str, str]] = {}
"""A cache of `entity_of` without an order of use, since each event would have to update that order."""
_ENTITIES_MAX = 65_536


def _entity_of(subject: bytes) -> tuple[str, str]:
    _, aggregate, token = subject.decode().split(".")
    if not is_name(aggregate):
        raise ValueError(f"{aggregate[:60]!r} is not the name of an aggregate")
    entity = aggregate, decode_id(token)
    if len(_entities) >= _ENTITIES_MAX:
        _entities.clear()
    _entities[subject] = entity
    return entity


def entity_shown(subject: bytes) -> tuple[str | None, str | None]:
    """Return (aggregate, aggregate id) for display, with None for each part that cannot be decoded."""
    try:
        return entity_of(subject)
    except ValueError:
        parts = subject.decode("utf-8", "replace").split(".")
        return (parts[1] if len(parts) == 3 else None), None


def snapshot_bucket(app: str) -> str:
    """Return the name of the key-value bucket with an app's snapshots."""
    return f"{app}_snapshots"


def object_bucket(app: str) -> str:
    """Return the name of the object store with the content of an app's blobs."""
    return f"{app}_objects"


def cursor_bucket(app: str) -> str:
    """Return the name of the key-value bucket with the cursors of an app's reactors, processes and publications."""
    return f"{app}_cursors"


def cursor_name(name: str, partition: int, partitions: int) -> str:
    """Return the cursor's name of a partition, from 0 on; it has their number, so another number has other cursors."""
    return name if partitions == 1 else f"{name}-{partition + 1}-of-{partitions}"


def declared_name(cursor: str) -> str:
    """Return the declared name of a cursor's reactor, process or publication, the inverse of `cursor_name`."""
    return cursor.partition("-")[0]


def timer_stream(app: str) -> str:
    """Return the name of the stream with the schedules that wake an app's processes."""
    return f"EJ_{app}_timers"


def timer_subject(app: str, process: str, token: str) -> str:
    """Return the subject of the schedule of one process; `token` is its encoded id, or `*`."""
    return f"_EJ.{app}.at.{process}.{token}"


def due_subject(app: str, process: str, token: str) -> str:
    """Return the subject on which the server publishes a due schedule."""
    return f"_EJ.{app}.due.{process}.{token}"


def probes(
    app: str, types: Iterable[str], published: Iterable[tuple[str, str]], *, cursors: bool, timers: bool
) -> list[tuple[str, str]]:
    """Return a (stream, subject) for each kind of message that an app stores, to ask who else answers there.

    No entity has these subjects. `published` are (stream, name) of publications; `cursors` and `timers` say whether the
    app has any.
    """
    name = "_probe"
    pairs = [(app, f"{app}.{aggregate}.{name}") for aggregate in types]
    buckets = [snapshot_bucket(app), *([cursor_bucket(app)] if cursors else [])]
    pairs += [(f"KV_{bucket}", f"$KV.{bucket}.{name}.{name}") for bucket in buckets]
    pairs += [(timer_stream(app), timer_subject(app, name, name))] if timers else []
    return [*pairs, *((stream, f"{stream}.{publication}.{name}") for stream, publication in published)]


def notice_subject(app: str, projection: str) -> str:
    """Return the subject of the notices of one projection, which is outside the app's stream."""
    return f"_EJ.{app}.projected.{projection}"


def notice(revision: int, position: int) -> bytes:
    """Return the payload of a notice: the position that a revision has reached."""
    return b"%d %d" % (revision, position)


def read_notice(payload: bytes) -> tuple[int, int] | None:
    """Return (revision, position) of a notice; None for any other payload. Text after these numbers is ignored."""
    parts = payload.split(b" ", 2)
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()) or len(payload) > 200:
        return None
    return int(parts[0]), int(parts[1])
