"""PURE: names on the server: one stream per app, one subject per entity, one bucket for snapshots; and notices.

A notice is what a worker tells after a commit, over core NATS: how far a projection is true. Nobody may rely on it,
since core NATS loses messages: it only says when looking at the checkpoint is worth while.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from eventjet.domain.identity import decode_id, encode_id

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")

SERVER_MESSAGE_MAX = 900_000
"""Bytes of one message, headers included, that the stream takes."""


def is_name(text: str) -> bool:
    """Whether apps, aggregates and projections may be called so: `[a-z][a-z0-9_]*`, 63 characters at most."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None  # pyright: ignore[reportUnnecessaryIsInstance]


def stream_subjects(app: str) -> str:
    """What the stream of an app listens to."""
    return f"{app}.*.*"


def covers(subject: str, prefix: str) -> bool:
    """Whether a stream's subject takes whatever is published one token below a prefix."""
    wanted, parts = [*prefix.split("."), "*"], subject.split(".")
    for index, part in enumerate(parts):
        if part == ">":
            return index < len(wanted)
        if index >= len(wanted) or part not in ("*", wanted[index]):
            return False
    return len(parts) == len(wanted)


def subject_of(app: str, aggregate: str, aggregate_id: str) -> str:
    """The subject of one entity; raises `Refused` for an id that cannot be a token."""
    return f"{app}.{entity_key(aggregate, aggregate_id)}"


def type_subjects(app: str, aggregate: str) -> str:
    """The subjects of all entities of a type."""
    return f"{app}.{aggregate}.*"


def entity_key(aggregate: str, aggregate_id: str) -> str:
    """The subject of one entity without the app, which is also the key of its snapshot."""
    return f"{aggregate}.{encode_id(aggregate_id)}"


def entity_of(subject: bytes) -> tuple[str, str]:
    """(aggregate, aggregate id): the inverse of `subject_of`; raises `ValueError` for what it cannot have made."""
    return _entities.get(subject) or _entity_of(subject)


_entities: dict[bytes, tuple[str, str]] = {}
"""Remembered without an order of their use, which every event would have to write down."""
_ENTITIES_MAX = 65_536


def _entity_of(subject: bytes) -> tuple[str, str]:
    _, aggregate, token = subject.decode().split(".")
    if not is_name(aggregate):
        raise ValueError(f"{aggregate[:60]!r} is not the name of an aggregate")
    found = aggregate, decode_id(token)
    if len(_entities) >= _ENTITIES_MAX:
        _entities.clear()
    _entities[subject] = found
    return found


def entity_shown(subject: bytes) -> tuple[str | None, str | None]:
    """As `entity_of`, for display: None for each part that cannot be read."""
    try:
        return entity_of(subject)
    except ValueError:
        parts = subject.decode("utf-8", "replace").split(".")
        return (parts[1] if len(parts) == 3 else None), None


def snapshot_bucket(app: str) -> str:
    """The key-value bucket that holds an app's snapshots."""
    return f"{app}_snapshots"


def cursor_bucket(app: str) -> str:
    """The key-value bucket that holds how far an app's reactors, processes and publications have come."""
    return f"{app}_cursors"


def cursor_name(name: str, partition: int, partitions: int) -> str:
    """What the cursor of a partition is called, from 0 on; names that are declared have no `-`.

    With the number of partitions in it, no release takes the cursors of another for its own.
    """
    return name if partitions == 1 else f"{name}-{partition + 1}-of-{partitions}"


def declared_name(cursor: str) -> str:
    """What the app calls that whose cursor has this name: the inverse of `cursor_name`."""
    return cursor.partition("-")[0]


def timer_stream(app: str) -> str:
    """The stream of the schedules that wake an app's processes."""
    return f"EJ_{app}_timers"


def timer_subject(app: str, process: str, token: str) -> str:
    """Where the schedule of one process is; `token` is its encoded id, or `*`."""
    return f"_EJ.{app}.at.{process}.{token}"


def due_subject(app: str, process: str, token: str) -> str:
    """Where the server puts what is due."""
    return f"_EJ.{app}.due.{process}.{token}"


def probes(
    app: str, types: Iterable[str], published: Iterable[tuple[str, str]], *, cursors: bool, timers: bool
) -> list[tuple[str, str]]:
    """(stream, subject) of each kind of message that an app with these types stores, for who asks who answers there.

    No entity has these subjects. `published` are streams and names of publications; `cursors` and `timers` say whether
    the app has any.
    """
    name = "_probe"
    found = [(app, f"{app}.{each}.{name}") for each in types]
    buckets = [snapshot_bucket(app), *([cursor_bucket(app)] if cursors else [])]
    found += [(f"KV_{bucket}", f"$KV.{bucket}.{name}.{name}") for bucket in buckets]
    found += [(timer_stream(app), timer_subject(app, name, name))] if timers else []
    return [*found, *((stream, f"{stream}.{each}.{name}") for stream, each in published)]


def notice_subject(app: str, projection: str) -> str:
    """Where the notices of one projection go; outside the app's stream."""
    return f"_EJ.{app}.projected.{projection}"


def notice(revision: int, position: int) -> bytes:
    """A revision is true up to a position."""
    return b"%d %d" % (revision, position)


def read_notice(payload: bytes) -> tuple[int, int] | None:
    """(revision, position); None for anything else. What a later version may append is passed over."""
    parts = payload.split(b" ", 2)
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()) or len(payload) > 200:
        return None
    return int(parts[0]), int(parts[1])
