"""Aggregates and events in the log that an app does not declare: of a newer release, of another app, or renamed.

Aggregate names are in the subjects, of which the server keeps a list, so all unknown aggregates are reported. Event
types are not, so a sample of the events is read.
"""

from __future__ import annotations

from collections.abc import Collection

from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import SCHEMA, SKIP_NAME, TYPE, RawRecord, header, number_of
from eventjet.domain.unique import CLAIMS
from eventjet.errors import UnknownAggregate, UnknownEvent
from eventjet.jetstream.api import Conversation, StreamState, last_message, message_at, stream_info, subjects_of
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.skip_markers import reading_skip_markers
from eventjet.log.topology import noted_aggregates

LOOKS = 32
"""Events in the sample: the last 12, where a newer release records, and others spread evenly over the log."""
_LAST = 12
_BEYOND = 2**31
"""An offset at which the server counts the subjects and lists none."""
LIST_S = 30.0
"""How long the server may take to list subjects once; it takes two seconds for a million."""
LISTED_MAX = 100_000
"""A starting worker does not search the list of subjects of a log with more subjects than this."""
UNKNOWN_MAX = 100
"""How many unknown aggregates are named at most."""


def unknown_events(connection: NatsConnection, state: StreamState, catalog: Catalog) -> list[UnknownEvent]:
    """Return an error for each unknown type and schema in a sample of the events of the app's aggregates. Blocks."""
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


def unknown_aggregates(app: str, known_aggregates: Collection[str]) -> Conversation[list[UnknownAggregate]]:
    """Return an error for each aggregate that has events in an app's log and is not among `known_aggregates`.

    An empty log that was made for other aggregates only is another app's, so its aggregates are returned too.
    The subjects of the known aggregates are counted. Only if the log has more subjects are they listed, 100,000 at a
    time, and the rest of an aggregate's subjects is left out once its name was met. The conversation is run with
    `LIST_S` as its timeout; it raises as `ask`, and `StreamMissing`.
    """
    known_names = sorted({*known_aggregates, CLAIMS, SKIP_NAME})
    sizes: dict[str, int] = {}
    for name in known_names:
        _, sizes[name] = yield subjects_of(app, f"{app}.{name}.>", _BEYOND)
    # Asked last: subjects are only ever added, so one that was added meanwhile leads to a listing and is not missed.
    state: StreamState = yield stream_info(app)
    if state.last == 0:
        noted = noted_aggregates(state.metadata) - {CLAIMS}
        others = [] if noted & set(known_aggregates) else sorted(noted)[:UNKNOWN_MAX]
        return [UnknownAggregate(app, name, 0, "", 0) for name in others]
    if state.subjects <= sum(sizes.values()):
        return []
    offset, total = 0, 1
    while offset < total and len(sizes) < len(known_names) + UNKNOWN_MAX:
        subjects: list[str]
        subjects, total = yield subjects_of(app, f"{app}.>", offset)
        if not subjects:
            break
        last_name = _aggregate_in(subjects[-1])
        for name in dict.fromkeys(map(_aggregate_in, subjects)):
            if name not in sizes and len(sizes) < len(known_names) + UNKNOWN_MAX:
                _, sizes[name] = yield subjects_of(app, f"{app}.{name}.>", _BEYOND)
        # The subjects of one aggregate are adjacent, so the rest of the last aggregate's need not be listed.
        offset += next(index for index, subject in enumerate(subjects) if _aggregate_in(subject) == last_name)
        offset += max(1, sizes.get(last_name, 0))
    errors: list[UnknownAggregate] = []
    for name, count in sorted(sizes.items()):
        if name not in known_names:
            errors.append(_unknown_aggregate(app, name, count, (yield last_message(app, f"{app}.{name}.>"))))
    return errors


def noted_unknown(state: StreamState, known_aggregates: Collection[str]) -> Conversation[list[UnknownAggregate]]:
    """Return the errors of `unknown_aggregates`, quickly, for the aggregates that `init` has noted in the log."""
    errors: list[UnknownAggregate] = []
    for name in sorted(noted_aggregates(state.metadata) - {*known_aggregates, CLAIMS}):
        last: RawRecord | None = yield last_message(state.name, f"{state.name}.{name}.>")
        if last is not None:
            _, count = yield subjects_of(state.name, f"{state.name}.{name}.>", _BEYOND)
            errors.append(_unknown_aggregate(state.name, name, count, last))
    return errors


def _aggregate_in(subject: str) -> str:
    return subject.split(".", 2)[1]


def _unknown_aggregate(app: str, name: str, count: int, last: RawRecord | None) -> UnknownAggregate:
    position, block = (0, b"") if last is None else (last[0], last[3])
    return UnknownAggregate(app, name[:100], count, (header(block, TYPE) or "?")[:100], position)


def _sample(state: StreamState) -> list[int]:
    first, last = max(1, state.first), state.last
    spread = LOOKS - _LAST
    positions = {first + (last - first) * number // spread for number in range(spread)}
    return sorted(
        position for position in positions | set(range(last - _LAST + 1, last + 1)) if first <= position <= last
    )


def _unknown_event(record: RawRecord, catalog: Catalog, aggregates: Collection[str] | None) -> UnknownEvent | None:
    """Return the error for a record whose event type or schema is unknown, or None."""
    position, _, subject, block, body = record
    name, schema = header(block, TYPE), number_of(block, SCHEMA)
    parts = subject.decode("utf-8", "replace").split(".")
    if name is None or schema is None or len(parts) < 2:
        return None
    if aggregates is not None and parts[1] not in aggregates:
        return None  # of another app, which shares the log
    if name in catalog.retired or catalog.resolve(name, schema) is not None:
        return None
    declared = catalog.named(name)
    return UnknownEvent(name[:100], schema, position, body, 0 if declared is None else declared.info.schema)
