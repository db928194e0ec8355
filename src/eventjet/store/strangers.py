"""Events of the log that an app does not know, as far as a few looks tell: a newer release's, or of other names."""

from __future__ import annotations

from collections.abc import Collection

from eventjet.codec.catalog import Catalog
from eventjet.codec.envelope import SCHEMA, TYPE, RawRecord, header, number_of
from eventjet.errors import UnknownEvent
from eventjet.nats.api import StreamState, message_at
from eventjet.nats.connection import NatsConnection
from eventjet.store.voids import voids_in

LOOKS = 32
"""Events that are looked at: the last ones, where a newer release records, and some evenly before them."""
_LAST = 12


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
