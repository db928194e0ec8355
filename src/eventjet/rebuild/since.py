"""Since when a live row differs: fold its history again and find the last event after which they were equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from eventjet.codec.envelope import RawRecord
from eventjet.domain.identity import encode_id
from eventjet.domain.recorded import Recorded
from eventjet.nats.ranges import read_range
from eventjet.projections.fold import Fold, RowKey, Rows
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.quarantine.fold import BlockedAggregates, ParkingFold, reader
from eventjet.rebuild.job import Job
from eventjet.rebuild.plan import Plan

NEVER = "never equal"
BATCH = 2_000


def since_when(
    job: Job, plan: Plan, resolved: ResolvedProjection, live: Mapping[RowKey, Any], known: Mapping[int, str]
) -> dict[RowKey, str]:
    """For each key: `missed since N`, where N is the first event the live row does not show, or `never equal`.

    `known` is what was decided about events in the quarantine.
    """
    fold = _fold(resolved, live, known)
    rows: dict[RowKey, Any] = {}
    equal: dict[RowKey, bool] = {key: row is None for key, row in live.items()}
    missed: dict[RowKey, int] = {}
    decode = reader(job.app.catalog, resolved, known)
    records = (record for batch in _records(job, plan, resolved, live) for record in batch)
    for event in filter(None, map(decode, records)):
        for key, row in fold(rows, event).items():
            if key not in live:
                continue
            was_equal, equal[key] = equal[key], row == live[key]
            rows[key] = row
            if equal[key]:
                missed.pop(key, None)
            elif was_equal:
                missed[key] = event.position
    return {key: f"missed since {missed[key]}" if key in missed else NEVER for key in live}


def _fold(
    resolved: ResolvedProjection, live: Mapping[RowKey, Any], known: Mapping[int, str]
) -> Callable[[Rows, Any], Rows]:
    """The fold of one event, for these keys."""
    codec = RowCodec(resolved.table, resolved.row_type)
    if not resolved.quarantines:
        fold = Fold(_only(resolved, live), codec)
        return lambda rows, event: fold(rows, [event])
    parking = ParkingFold(resolved, codec)
    held = BlockedAggregates(known=known)

    def parked_apart(rows: Rows, event: Any) -> Rows:
        found = parking(rows, [event], held)
        held.aggregates.update(found.blocked)
        return found.changed

    return parked_apart


def _only(resolved: ResolvedProjection, live: Mapping[RowKey, Any]) -> ResolvedProjection:
    """The projection reduced to these keys: nothing is known here about the rows of others."""

    def keys_of(event: Recorded[Any]) -> tuple[RowKey, ...]:
        return tuple(key for key in resolved.keys_of(event) if key in live)

    return replace(resolved, key_of=None, keys_of=keys_of) if resolved.reads else resolved


def _records(
    job: Job, plan: Plan, resolved: ResolvedProjection, live: Mapping[RowKey, Any]
) -> Iterator[list[RawRecord]]:
    """What could have touched the keys, in order: their own aggregates' records, or everything."""
    end = plan.last + 1
    if job.source.archive is not None or not resolved.keyed_by_aggregate:
        yield from job.source.records(plan.first, end, batch=BATCH)
        return
    for (aggregate_id,) in live:
        subject = f"{plan.stream}.*.{encode_id(aggregate_id)}"
        yield from read_range(job.log.endpoint, plan.stream, plan.first, end, filter_subject=subject)
