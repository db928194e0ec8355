"""A mirror of the log in another JetStream: how it is made, compared with the log, and read in its place (ADR 0071).

A mirror has the log's name and positions. It takes no events of its own, lags behind the log, and stays when the log is
gone. Nothing is read from it before it was compared with the log: both have the same identity, the mirror lacks no
position, and it has nothing that the log has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eventjet.codec.headers import event_id_of
from eventjet.errors import LogUnusable, StoreError, StoreUnavailable, Unreachable
from eventjet.jetstream.api import Conversation, StreamState, message_at
from eventjet.jetstream.client import Client
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.integrity import (
    Stand,
    check_running,
    check_unchanged,
    checking_whole_log,
    missing_range,
    pause_of,
    whole_log,
)
from eventjet.log.topology import (
    IDENTITY,
    cursors_config,
    finding_stream,
    identity_of,
    objects_config,
    reading_log_state,
    stream_config,
)
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings

SILENT_S = 30.0
"""After this long without a word from the log, a mirror counts as cut off."""
_NOT_OF_MIRRORS = ("subjects", "allow_atomic")
"""Settings that the server refuses for a mirror; a promotion adds them."""


def shown_servers(endpoint: Endpoint) -> str:
    """Return where a mirror is, as messages name it: a server, and the prefix of the API if it has one."""
    return endpoint.servers[0] + (f" ({endpoint.jetstream_prefix})" if endpoint.is_elsewhere else "")


def mirror_configs(app: str, replicas: int, api_prefix: str, states: Mapping[str, StreamState]) -> list[dict[str, Any]]:
    """Return the configurations of the mirrors of those of an app's streams that exist, by their states.

    Snapshots and timers are made again, so they have no mirror: a schedule that is copied never fires. `api_prefix`
    leads from the mirror's servers to the log's API.
    """
    origin = {"api": api_prefix, "deliver": ""}
    return [
        {
            **{name: value for name, value in declared.items() if name not in _NOT_OF_MIRRORS},
            "mirror": {"name": declared["name"], "external": origin},
            "metadata": states[declared["name"]].metadata,
        }
        for declared in mirrored_configs(app, replicas)
        if declared["name"] in states
    ]


def mirrored_configs(app: str, replicas: int) -> tuple[dict[str, Any], ...]:
    """Return what the app declares of the streams that have mirrors: large bodies, cursors, and the log last."""
    return objects_config(app, replicas), cursors_config(app, replicas), stream_config(app, replicas)


def silent_s(mirror: StreamState) -> float | None:
    """Return how long a mirror has heard nothing from its origin, in seconds; None if it never has."""
    active_ns = int((mirror.mirror or {}).get("active", -1))
    return None if active_ns < 0 else active_ns / 1e9


def mirror_fault(
    mirror: StreamState | None, log: StreamState | None, where: str, stream: str, log_id: str = ""
) -> LogUnusable | None:
    """Return why a mirror may not be read in place of the log; `log` is None if that is not reached."""
    what = f"The mirror of {stream!r} at {where}"
    if mirror is None:
        return LogUnusable(what, "it does not exist", "`eventjet mirror create` makes it.")
    if mirror.mirror is None and (log is None or mirror.metadata.get(IDENTITY) != log.metadata.get(IDENTITY)):
        remedy = "Name them in EVENTJET_SERVERS and unset EVENTJET_READ_FROM, or name a mirror."
        return LogUnusable(what, "the stream there is a log of its own; it may be a mirror that was promoted", remedy)
    if mirror.mirror is None:
        return LogUnusable(
            what, "these servers have the log itself", "Unset EVENTJET_READ_FROM, or name those of a mirror."
        )
    copied, identity = mirror.metadata.get(IDENTITY, ""), log_id if log is None else identity_of(log)
    make = "Delete that stream, then `eventjet mirror create` makes a mirror of this log."
    if identity and copied != identity:
        return LogUnusable(what, f"it is of the log {copied or 'without identity'}, and the log is {identity}", make)
    if log is None:
        return None
    if mirror.last > log.last:
        reason = f"it ends at position {mirror.last:,} and the log at {log.last:,}, which was rolled back or made anew"
        return LogUnusable(what, reason, "Compare the two: `eventjet mirror promote` makes the mirror the log.")
    if missing := missing_range(replace(mirror, metadata=log.metadata)):
        return LogUnusable(what, missing, make)
    return None


def silence(mirror: StreamState, lag: str = "") -> str | None:
    """Return in words that a mirror hears nothing from its log; None while it does, and for what is no mirror."""
    quiet_s = silent_s(mirror)
    error: Mapping[str, Any] = (mirror.mirror or {}).get("error") or {}
    if mirror.mirror is None or (quiet_s is not None and quiet_s <= SILENT_S and not error):
        return None
    since = "yet" if quiet_s is None else f"for {quiet_s:,.0f} s"
    detail = f" ({error.get('description')})" if error else ""
    return f"has heard nothing {since} from the log{lag}{detail}"


def lag_reason(mirror: StreamState, log: StreamState | None) -> str | None:
    """Return in words that the mirror has fallen behind or is cut off; None while it hears from its log."""
    lag = "" if log is None else f", and is {log.last - mirror.last:,} positions behind it"
    reason = silence(mirror, lag)
    return reason and (
        f"the mirror of {mirror.name!r} that events are read from {reason}. Look at the link between the servers, or "
        "unset EVENTJET_READ_FROM to read from the log"
    )


@dataclass(frozen=True, slots=True)
class LogReader:
    """The stream that a worker reads the log's events from: the log itself, or a mirror of it."""

    stream: str
    client: Client
    """For the log."""
    mirror: Client | None = None
    """For the mirror; None if events are read from the log itself."""
    _compared: set[int] = field(default_factory=set[int], compare=False)
    """Where the mirror ended when it was last compared: a log that is rolled back and grows again differs there."""

    @property
    def endpoint(self) -> Endpoint:
        """The servers to read from."""
        return (self.mirror or self.client).endpoint

    async def check(self, stand: Stand) -> str:
        """Return the log's identity, if reading can go on from a checkpoint or cursor, which is compared with the log.

        Raises as `checking_whole_log`, and `LogUnusable` for a mirror that may not be read, or that has not reached the
        position yet.
        """
        if self.mirror is None:
            return await self.client.run(checking_whole_log(self.stream, stand))
        mirror, log = await self.states()
        if log is None:
            raise StoreUnavailable("Comparing the mirror with the log", "the log cannot be reached")
        assert mirror is not None
        identity = await self.client.run(whole_log(log, stand))
        if mirror.last < stand.position:
            raise LogUnusable(
                f"The mirror of {self.stream!r} at {shown_servers(self.endpoint)}",
                f"it has reached position {mirror.last:,}, and {stand.name} position {stand.position:,}",
                "This goes on by itself once the mirror is there. `eventjet mirror status` says what keeps it.",
            )
        await self._compare(mirror, {*compared_positions(mirror), stand.position} - {0})
        return identity

    async def look(self, stand: Stand, log_id: str, durable: str) -> str | None:
        """Check what may change while events are read; return why none arrive, if that is known.

        The mirror is asked first: when it was promoted, the log may be gone and answer nothing. Raises as `check`; a
        server that does not answer is no fault here.
        """
        reason, mirror = None, None
        if self.mirror is not None:
            mirror, log = await self.states(log_id)
            reason = None if mirror is None else lag_reason(mirror, log)
            if log is not None:
                check_unchanged(log, stand, log_id)
        if mirror is None:
            await check_running(self.client, self.stream, stand, log_id)
        return reason or await pause_of(self.mirror or self.client, self.stream, durable)

    async def states(self, log_id: str = "") -> tuple[StreamState | None, StreamState | None]:
        """Return the states of mirror and log, None for one that is not reached; raises `LogUnusable`.

        The mirror is asked first, so that it never seems to be ahead of the log; the events at its end are compared.
        With the identity of a log, a mirror that is none of it any more is refused before the log is asked.
        """
        client = self.mirror or self.client
        where = shown_servers(client.endpoint)
        try:
            mirror = await client.run(finding_stream(self.stream))
        except LogUnusable:
            raise
        except (StoreError, Unreachable):
            return None, None
        if log_id and (fault := mirror_fault(mirror, None, where, self.stream, log_id)):
            raise fault
        try:
            log = await self.client.run(reading_log_state(self.stream))
        except LogUnusable:
            raise
        except (StoreError, Unreachable):
            log = None
        fault = mirror_fault(mirror, log, where, self.stream)
        if fault is not None:
            raise fault
        if mirror is not None and log is not None and mirror.messages:
            try:
                await self._compare(mirror, [mirror.last])
            except LogUnusable:
                raise
            except (StoreError, Unreachable):
                return mirror, None
        return mirror, log

    async def _compare(self, mirror: StreamState, positions: Iterable[int]) -> None:
        """Raise `LogUnusable` if mirror and log have different events at one of the positions."""
        earlier = {position for position in self._compared if 0 < position <= mirror.last}
        copied = await (self.mirror or self.client).run(event_ids(self.stream, {*positions, *earlier}))
        recorded = await self.client.run(event_ids(self.stream, copied))
        if differs := difference(copied, recorded):
            raise _differing(mirror, shown_servers(self.endpoint), differs)
        self._compared.clear()
        self._compared.add(mirror.last)


def readable_log(settings: Settings, stream: str, purpose: str) -> tuple[Endpoint, StreamState]:
    """Return where bulk reads take the log's events from, and the log's state as it is there; blocks.

    From a mirror, the state has the log's settings and metadata. Raises as `LogReader.check`.
    """
    endpoint = Endpoint.of(settings.for_reads()).with_name(purpose)
    if settings.read_from is None:
        with NatsConnection.open(endpoint) as link:
            return endpoint, link.run(reading_log_state(stream))
    with NatsConnection.open(endpoint) as link:
        mirror = link.run(finding_stream(stream))
        with NatsConnection.open(Endpoint.of(settings).with_name(purpose)) as log_link:
            log = log_link.run(reading_log_state(stream))
            fault = mirror_fault(mirror, log, shown_servers(endpoint), stream)
            if fault is not None:
                raise fault
            assert mirror is not None
            if differs := log_link.run(comparing(mirror, link)):
                raise _differing(mirror, shown_servers(endpoint), differs)
    return endpoint, replace(mirror, config=log.config, metadata=log.metadata)


def comparing(mirror: StreamState, link: NatsConnection) -> Conversation[str | None]:
    """Return in words where a mirror, at `link`, differs from the log of this conversation; None if nowhere."""
    copied = link.run(event_ids(mirror.name, compared_positions(mirror)))
    return difference(copied, (yield from event_ids(mirror.name, copied)))


def compared_positions(mirror: StreamState) -> list[int]:
    """Return the positions at which mirror and log are compared: the last, and those 1, 3, 7, 15 … before it."""
    back = [2**power - 1 for power in range(mirror.last.bit_length())]
    return [mirror.last - each for each in back if mirror.messages and mirror.last - each >= max(mirror.first, 1)]


def event_ids(stream: str, positions: Iterable[int]) -> Conversation[dict[int, str | None]]:
    """Read the id of the event at each position: empty if the event has no id, None if there is no event."""
    ids: dict[int, str | None] = {}
    for position in positions:
        record = yield message_at(stream, position)
        ids[position] = None if record is None else event_id_of(record)
    return ids


def difference(copied: Mapping[int, str | None], recorded: Mapping[int, str | None]) -> str | None:
    """Return in words where a mirror has another event than the log; None if nowhere."""
    for position, event_id in copied.items():
        if event_id != recorded[position]:
            other = recorded[position] or "none"
            return f"at position {position:,} it has the event {event_id or 'none'}, and the log has {other}"
    return None


def _differing(mirror: StreamState, where: str, differs: str) -> LogUnusable:
    remedy = (
        "The log was restored or made again. If it is the right one, delete the stream at the mirror, then `eventjet "
        "mirror create` makes it again; read models that were made from the mirror meanwhile are rebuilt."
    )
    return LogUnusable(f"The mirror of {mirror.name!r} at {where}", differs, remedy)
