"""The instances of a process by stage and age: where each of them stands, and what it waits for."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from eventjet.app import App
from eventjet.codec.headers import TYPE, RawRecord, header, recorded_at
from eventjet.codec.subjects import due_subject, entity_of, timer_stream, timer_subject, type_subjects
from eventjet.domain.identity import encode_id
from eventjet.domain.quarantined import BLOCKED
from eventjet.errors import StreamMissing, UsageError
from eventjet.jetstream.api import reading_last_records, subjects_of
from eventjet.jetstream.client import Client
from eventjet.log.timers import process_of, timer_time
from eventjet.log.topology import missing_stream
from eventjet.operations.processes import event_names, process_class
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.text import counted, duration, listed, suggestion, utc_text

LOOKED_MAX = 100_000
"""The most instances that one call looks at by default."""
LISTED_MAX = 50
"""The most instances that one call lists by default."""
_SPAN = re.compile(r"(\d{1,6}) ?([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_AT_ONCE = 500
"""Instances whose last events are read with one request."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a process: its last event, and what it waits for."""

    id: str
    stage: str
    """The stored name of its last event, such as `transfer.debited`."""
    position: int
    """The position of its last event."""
    at: datetime
    """When its last event was recorded: it has been in this stage since then."""
    waits_for: Literal["worker", "deadline", "quarantine", "nothing"]
    """`worker`: its last event, or a deadline that has come, is not handled yet. `deadline`: it rests until then.
    `quarantine`: an event of it is quarantined. `nothing`: it has ended, or waits for an event of others.
    """
    until: datetime | None = None
    """Its deadline, where one is set."""
    quarantined: int | None = None
    """The position of the quarantined event that blocks it."""

    @property
    def is_open(self) -> bool:
        """Whether something of its own is still to come."""
        return self.waits_for != "nothing"


@dataclass(slots=True)
class Stage:
    """The instances whose last event is of one type."""

    stage: str
    instances: int = 0
    open: int = 0
    """Those that wait for a worker, a deadline or a decision about a quarantined event."""
    oldest: datetime | None = None
    """When the one that has been in this stage for the longest time came into it."""
    oldest_open: datetime | None = None
    """The same of those that are open."""

    def add(self, instance: Instance) -> None:
        self.instances += 1
        self.oldest = min(self.oldest or instance.at, instance.at)
        if instance.is_open:
            self.open += 1
            self.oldest_open = min(self.oldest_open or instance.at, instance.at)


@dataclass(frozen=True, slots=True)
class Instances:
    """The instances of a process, by stage, and the oldest of those that were asked for."""

    process: str
    total: int
    """How many instances the log has."""
    looked_at: int
    """How many of them were looked at, in the order of their subjects from `offset` on."""
    offset: int
    stages: Sequence[Stage]
    """The stages of all that were looked at, by name."""
    matching: int
    """How many of those that were looked at were asked for."""
    instances: Sequence[Instance]
    """Those that were asked for, the longest in their stage first, up to the limit."""

    @property
    def is_whole(self) -> bool:
        """Whether all instances of the process were looked at."""
        return self.looked_at == self.total


async def instances_of(
    client: Client,
    app: App,
    name: str,
    *,
    stage: str | None = None,
    older_than: timedelta | None = None,
    everything: bool = False,
    limit: int = LISTED_MAX,
    looked_max: int = LOOKED_MAX,
    offset: int = 0,
) -> Instances:
    """Return the instances of a process by stage, and the oldest `limit` of those that are asked for.

    The stage is the type of an instance's last event, as a stored name or its last part (`debited`). Without a stage,
    only open instances are listed, unless `everything` is true. One request reads the last events of 500 instances.
    Raises `UsageError` for a process or a stage that the app lacks, `LogUnusable` before `eventjet init`,
    `StoreUnavailable` and `Forbidden`.
    """
    _, info = process_class(app, name)
    types = event_names(app, info.events)
    # The cursor is read first: what is handled meanwhile counts as open, and nothing that is open as handled.
    cursors = Cursors(client, app.name)
    stored = await cursors.find(name)
    blocked = {
        entry.key[1]: entry.position
        for entry in reversed(await cursors.quarantined(name))
        if entry.key[0] == name and entry.event.resolution != BLOCKED
    }
    reader = _InstanceReader(
        client, app.name, name, None if stored is None else stored.cursor, blocked, info.has_deadlines
    )
    stages: dict[str, Stage] = {}
    oldest: list[Instance] = []
    looked_at = matching = 0
    now = datetime.now(UTC)
    try:
        subjects, total = await client.ask(subjects_of(app.name, type_subjects(app.name, name), offset))
    except StreamMissing:
        raise missing_stream(app.name) from None
    while subjects and looked_at < looked_max:
        subjects = subjects[: looked_max - looked_at]
        for first in range(0, len(subjects), _AT_ONCE):
            matches: list[Instance] = []
            for instance in await reader.read(subjects[first : first + _AT_ONCE]):
                stages.setdefault(instance.stage, Stage(instance.stage)).add(instance)
                is_stage = everything or instance.is_open if stage is None else _is_stage(instance.stage, stage)
                if is_stage and (older_than is None or now - instance.at >= older_than):
                    matches.append(instance)
            matching += len(matches)
            oldest = heapq.nsmallest(limit, [*oldest, *matches], key=lambda each: each.at)
        looked_at += len(subjects)
        if looked_at == looked_max or offset + looked_at >= total:
            break
        subjects, total = await client.ask(subjects_of(app.name, type_subjects(app.name, name), offset + looked_at))
    if stage is not None and not any(_is_stage(each, stage) for each in (*types, *stages)):
        names = sorted({*types, *stages})
        raise UsageError(f"{name!r} has no stage {stage!r}. {suggestion(stage, names)}Its stages are {listed(names)}.")
    by_name = sorted(stages.values(), key=lambda each: each.stage)
    return Instances(name, total, looked_at, offset, by_name, matching, oldest)


def _is_stage(name: str, stage: str) -> bool:
    return name == stage or name.endswith(f".{stage}")


@dataclass(frozen=True, slots=True)
class _InstanceReader:
    """Reads the instances of a process, as of one state of its cursor and of its quarantine."""

    client: Client
    app: str
    process: str
    cursor: Cursor | None
    blocked: dict[str, int]
    """The position of the quarantined event by the id of the instance that it blocks."""
    has_deadlines: bool

    async def read(self, subjects: Sequence[str]) -> list[Instance]:
        """Return the instances of these subjects."""
        records = await self.client.run(reading_last_records(self.app, subjects))
        resting = [record for record in records if self._is_resting(record)] if self.has_deadlines else []
        timers = await self._timers([_id_of(record) for record in resting])
        return [self._instance(record, timers.get(_id_of(record))) for record in records]

    def _is_resting(self, record: RawRecord) -> bool:
        """Return whether the worker has handled the last event of an instance, and nothing blocks the instance."""
        return _id_of(record) not in self.blocked and self.cursor is not None and self.cursor.is_done(record[0])

    async def _timers(self, ids: Sequence[str]) -> dict[str, tuple[datetime, bool]]:
        """Return (when, whether it has fired) of the timers of these instances."""
        tokens = [*map(encode_id, ids)]
        subjects = [timer_subject(self.app, self.process, token) for token in tokens]
        subjects += [due_subject(self.app, self.process, token) for token in tokens]
        records = await self.client.run(reading_last_records(timer_stream(self.app), subjects)) if ids else []
        is_due = due_subject(self.app, self.process, "").encode()
        return {process_of(record[2]): (timer_time(record[3]), record[2].startswith(is_due)) for record in records}

    def _instance(self, record: RawRecord, timer: tuple[datetime, bool] | None) -> Instance:
        process_id = _id_of(record)
        place = process_id, header(record[3], TYPE) or "?", record[0], recorded_at(record)
        if process_id in self.blocked:
            return Instance(*place, "quarantine", quarantined=self.blocked[process_id])
        if self.cursor is None or not self.cursor.is_done(record[0]):
            return Instance(*place, "worker")
        if timer is None:
            return Instance(*place, "nothing")
        until, has_fired = timer
        return Instance(*place, "worker" if has_fired else "deadline", until)


def _id_of(record: RawRecord) -> str:
    """Return the id of the instance of a record; its subject where that has no id."""
    try:
        return entity_of(record[2])[1]
    except ValueError:
        return record[2].decode("utf-8", "replace")


def span_of(text: str) -> timedelta:
    """Return the time that a text such as `90s`, `15m`, `2h` or `1d 12h` says. Raises `UsageError` for other text."""
    parts = _SPAN.findall(text)
    if not parts or _SPAN.sub("", text).strip():
        raise UsageError(f"{text!r} is not a time. Write a number with s, m, h or d: 90s, 15m, 2h, 1d 12h.")
    return timedelta(seconds=sum(int(number) * _SECONDS[unit] for number, unit in parts))


def instances_value(listing: Instances) -> dict[str, Any]:
    """Return the instances as a value for JSON: times as text, and ages in seconds."""
    now = datetime.now(UTC)

    def age_s(at: datetime | None) -> float | None:
        return None if at is None else max(0.0, (now - at).total_seconds())

    return {
        **{name: getattr(listing, name) for name in ("process", "total", "looked_at", "matching")},
        "stages": [
            {
                **{name: getattr(each, name) for name in ("stage", "instances", "open")},
                "oldest_s": age_s(each.oldest),
                "oldest_open_s": age_s(each.oldest_open),
            }
            for each in listing.stages
        ],
        "instances": [
            {
                **{name: getattr(each, name) for name in ("id", "stage", "position")},
                "at": utc_text(each.at, "seconds"),
                "age_s": age_s(each.at),
                "waits_for": each.waits_for,
                "until": None if each.until is None else utc_text(each.until, "seconds"),
                "quarantined": each.quarantined,
            }
            for each in listing.instances
        ],
    }


def waits_text(instance: Instance) -> str:
    """Return in few words what an instance waits for; `nothing` also where it waits for an event of others."""
    match instance.waits_for:
        case "worker" if instance.until is not None:
            return f"worker, due {instance.until:%Y-%m-%d %H:%M:%SZ}"
        case "worker":
            return "worker"
        case "deadline":
            return f"deadline {instance.until:%Y-%m-%d %H:%M:%SZ}"
        case "quarantine":
            return f"quarantined event {instance.quarantined:,}"
        case "nothing":
            return "nothing"


def age_text(at: datetime | None) -> str:
    """Return how long ago a time was, such as `2h 5m`."""
    return duration(None if at is None else max(0.0, (datetime.now(UTC) - at).total_seconds()))


def remarks_on(listing: Instances) -> Iterator[str]:
    """Yield how many instances were looked at and are listed, one sentence each."""
    open_count = sum(stage.open for stage in listing.stages)
    looked = f"{counted(listing.looked_at, 'instance')} of {listing.process}, {open_count:,} open"
    if not listing.is_whole:
        first, last = listing.offset + 1, listing.offset + listing.looked_at
        looked = f"Looked at {first:,} to {last:,} of {counted(listing.total, 'instance')} of {listing.process}"
        looked += f", {open_count:,} of them open"
    yield f"{looked}."
    if listing.matching > len(listing.instances):
        yield f"The {len(listing.instances):,} that are longest in their stage are listed, of {listing.matching:,}."
