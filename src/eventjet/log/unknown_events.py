"""Aggregates and events of the log that an app does not declare: a newer release's, another app's, or renamed ones.

Aggregates are in the subjects, of which the server keeps a list, so all of them are reported. Events are not: a sample
is read.
"""

from __future__ import annotations

from collections.abc import Collection

from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import SCHEMA, TYPE, VOID_NAME, RawRecord, header, number_of
from eventjet.domain.unique import CLAIMS
from eventjet.errors import UnknownAggregate, UnknownEvent
from eventjet.jetstream.api import Conversation, StreamState, last_message, message_at, stream_info, subjects_of
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.skip_markers import reading_skip_markers
from eventjet.log.topology import AGGREGATES

LOOKS = 32
"""Events in the sample: the last ones, where a newer release records, and some evenly before them."""
_LAST = 12
_BEYOND = 2**31
"""An offset at which the server counts subjects and lists none."""
LIST_S = 30.0
"""How long the server may take for one look at the list of subjects: two seconds for a million of them."""
LISTED_MAX = 100_000
"""Of a log with more subjects a worker that starts does not have the list looked through."""
UNKNOWN_MAX = 100
"""How many unknown aggregates are named at most."""


def unknown_events(connection: NatsConnection, state: StreamState, catalog: Catalog) -> list[UnknownEvent]:
    """Return an error for each unknown event type and schema on the app's aggregates. Blocks; raises as `ask`."""
    aggregates = catalog.aggregates_of([kind.event_type for kind in catalog.kinds()])
    records = connection.ask_all([message_at(state.name, position) for position in _sample(state)])
    errors: dict[tuple[str, int], UnknownEvent] = {}
    for record in records:
        error = None if record is None else _unknown_event(record, catalog, aggregates)
        if error is not None:
            errors.setdefault((error.type_name, error.schema), error)
    if not errors:
        return []
    skipped = connection.run(reading_skip_markers(state.name))
    return [error for error in errors.values() if error.position not in skipped]


def unknown_aggregates(app: str, known: Collection[str]) -> Conversation[list[UnknownAggregate]]:
    """Return an error for each aggregate with events in the log of an app that is none of the `known` ones.

    The subjects of the known ones are counted; only where there are others are they listed, 100,000 at a time, and
    those of an aggregate that was met are passed over. To be run with `LIST_S`; raises as `ask`, and `StreamMissing`.
    """
    own = sorted({*known, CLAIMS, VOID_NAME})
    sizes: dict[str, int] = {}
    for name in own:
        _, sizes[name] = yield subjects_of(app, f"{app}.{name}.>", _BEYOND)
    # Asked for last: subjects are only ever added, so whatever came meanwhile is taken for unknown, and listed.
    state: StreamState = yield stream_info(app)
    if state.subjects <= sum(sizes.values()):
        return []
    at, total = 0, 1
    while at < total and len(sizes) < len(own) + UNKNOWN_MAX:
        subjects: list[str]
        subjects, total = yield subjects_of(app, f"{app}.>", at)
        if not subjects:
            break
        last = _aggregate_in(subjects[-1])
        for name in dict.fromkeys(map(_aggregate_in, subjects)):
            if name not in sizes and len(sizes) < len(own) + UNKNOWN_MAX:
                _, sizes[name] = yield subjects_of(app, f"{app}.{name}.>", _BEYOND)
        # Those of one aggregate stand together: the rest of the last one's need not be listed.
        at += next(index for index, subject in enumerate(subjects) if _aggregate_in(subject) == last)
        at += max(1, sizes.get(last, 0))
    unknown: list[UnknownAggregate] = []
    for name, count in sorted(sizes.items()):
        if name not in own:
            unknown.append(_unknown_aggregate(app, name, count, (yield last_message(app, f"{app}.{name}.>"))))
    return unknown


def noted_unknown(state: StreamState, known: Collection[str]) -> Conversation[list[UnknownAggregate]]:
    """Return what `unknown_aggregates` does, of those that `init` has noted in the log: quick in one of any length."""
    unknown: list[UnknownAggregate] = []
    for name in sorted(set(state.metadata.get(AGGREGATES, "").split()) - {*known, CLAIMS}):
        last: RawRecord | None = yield last_message(state.name, f"{state.name}.{name}.>")
        if last is not None:
            _, count = yield subjects_of(state.name, f"{state.name}.{name}.>", _BEYOND)
            unknown.append(_unknown_aggregate(state.name, name, count, last))
    return unknown


def _aggregate_in(subject: str) -> str:
    return subject.split(".", 2)[1]


def _unknown_aggregate(app: str, name: str, count: int, last: RawRecord | None) -> UnknownAggregate:
    position, block = (0, b"") if last is None else (last[0], last[3])
    return UnknownAggregate(app, name[:100], count, (header(block, TYPE) or "?")[:100], position)


def _sample(state: StreamState) -> list[int]:
    first, last = max(1, state.first), state.last
    spread = LOOKS - _LAST
    positions = {first + (last - first) * number // spread for number in range(spread)}
    return sorted(each for each in positions | set(range(last - _LAST + 1, last + 1)) if first <= each <= last)


def _unknown_event(record: RawRecord, catalog: Catalog, aggregates: Collection[str] | None) -> UnknownEvent | None:
    """Return the error that reading the record raises, where that is of its type and schema alone."""
    position, _, subject, block, body = record
    name, schema = header(block, TYPE), number_of(block, SCHEMA)
    parts = subject.decode("utf-8", "replace").split(".")
    if name is None or schema is None or len(parts) < 2:
        return None
    if aggregates is not None and parts[1] not in aggregates:
        return None  # another app's, which shares the log
    if catalog.is_retired(name) or catalog.resolve(name, schema) is not None:
        return None
    return UnknownEvent(name[:100], schema, position, body)
