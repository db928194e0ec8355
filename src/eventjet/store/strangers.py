"""What the log has and an app does not know: a newer release's, another app's, or of other names.

Aggregates are in the subjects, of which the server keeps a list, so all of them are found. Events are not: a few are
looked at.
"""

from __future__ import annotations

from collections.abc import Collection

from eventjet.codec.catalog import Catalog
from eventjet.codec.envelope import SCHEMA, TYPE, RawRecord, header, number_of
from eventjet.codec.voids import VOID_NAME
from eventjet.domain.unique import CLAIMS
from eventjet.errors import UnknownAggregate, UnknownEvent
from eventjet.nats.api import StreamState, last_message, message_at, stream_info, subjects_of
from eventjet.nats.connection import NatsConnection
from eventjet.store.topology import AGGREGATES
from eventjet.store.voids import voids_in

LOOKS = 32
"""Events that are looked at: the last ones, where a newer release records, and some evenly before them."""
_LAST = 12
_BEYOND = 2**31
"""An offset at which the server counts subjects and lists none."""
LIST_S = 30.0
"""So long the server may take for one look at the list of subjects: two seconds for a million of them."""
LISTED_MAX = 100_000
"""Of a log with more subjects a worker that starts does not have the list looked through."""
UNKNOWN_MAX = 100
"""Of more aggregates that are not known no more are named."""


def strangers(connection: NatsConnection, state: StreamState, catalog: Catalog) -> list[UnknownEvent]:
    """One error for each such event and schema on the subjects of the app's aggregates. Blocks; raises as `ask`."""
    aggregates = catalog.aggregates_of([kind.event_type for kind in catalog.kinds()])
    records = connection.ask_all([message_at(state.name, position) for position in _positions(state)])
    found: dict[tuple[str, int], UnknownEvent] = {}
    for record in records:
        error = None if record is None else _stranger(record, catalog, aggregates)
        if error is not None:
            found.setdefault((error.type_name, error.schema), error)
    if not found:
        return []
    voids = voids_in(connection, state.name)
    return [one for one in found.values() if one.position not in voids]


def unknown_aggregates(connection: NatsConnection, app: str, known: Collection[str]) -> list[UnknownAggregate]:
    """One error for each aggregate with events in the log of an app that is none of the `known` ones. Blocks.

    The subjects of the known ones are counted; only where there are others are they listed, 100,000 at a time, and
    those of an aggregate that was met are passed over. Raises as `NatsConnection.ask`, and `StreamMissing`.
    """
    own = sorted({*known, CLAIMS, VOID_NAME})
    counted = connection.ask_all([subjects_of(app, f"{app}.{name}.>", _BEYOND) for name in own], timeout_s=LIST_S)
    sizes = {name: count for name, (_, count) in zip(own, counted, strict=True)}
    # Asked for last: subjects are only ever added, so whatever came meanwhile is taken for unknown, and listed.
    if connection.ask(stream_info(app)).subjects <= sum(sizes.values()):
        return []
    at, total = 0, 1
    while at < total and len(sizes) < len(own) + UNKNOWN_MAX:
        subjects, total = connection.ask(subjects_of(app, f"{app}.>", at), timeout_s=LIST_S)
        if not subjects:
            break
        last = _aggregate_in(subjects[-1])
        for name in dict.fromkeys(map(_aggregate_in, subjects)):
            if name not in sizes and len(sizes) < len(own) + UNKNOWN_MAX:
                _, sizes[name] = connection.ask(subjects_of(app, f"{app}.{name}.>", _BEYOND), timeout_s=LIST_S)
        # Those of one aggregate stand together: the rest of the last one's need not be listed.
        at += next(index for index, subject in enumerate(subjects) if _aggregate_in(subject) == last)
        at += max(1, sizes.get(last, 0))
    return [_unknown(connection, app, name, count) for name, count in sorted(sizes.items()) if name not in own]


def noted_unknown(connection: NatsConnection, state: StreamState, known: Collection[str]) -> list[UnknownAggregate]:
    """As `unknown_aggregates`, of those alone that `init` has noted in the log: as quick in one of any length."""
    names = set(state.metadata.get(AGGREGATES, "").split()) - {*known, CLAIMS}
    ends = {name: connection.ask(last_message(state.name, f"{state.name}.{name}.>")) for name in sorted(names)}
    return [
        _unknown(
            connection, state.name, name, connection.ask(subjects_of(state.name, f"{state.name}.{name}.>", _BEYOND))[1]
        )
        for name, last in ends.items()
        if last is not None
    ]


def _aggregate_in(subject: str) -> str:
    return subject.split(".", 2)[1]


def _unknown(connection: NatsConnection, app: str, name: str, count: int) -> UnknownAggregate:
    record = connection.ask(last_message(app, f"{app}.{name}.>"))
    position, block = (0, b"") if record is None else (record[0], record[3])
    return UnknownAggregate(app, name[:100], count, (header(block, TYPE) or "?")[:100], position)


def _positions(state: StreamState) -> list[int]:
    first, last = max(1, state.first), state.last
    spread = LOOKS - _LAST
    wanted = {first + (last - first) * number // spread for number in range(spread)}
    return sorted(one for one in wanted | set(range(last - _LAST + 1, last + 1)) if first <= one <= last)


def _stranger(record: RawRecord, catalog: Catalog, aggregates: Collection[str] | None) -> UnknownEvent | None:
    """The error that reading it raises, where that is of its type and schema alone."""
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
