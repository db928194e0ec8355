"""Stream identity and integrity: which log a stream holds, whether it is complete, and whether a checkpoint is of it.

A save is fenced by positions alone, and a stream that was deleted and made again has the same positions. So a writer
keeps a `StreamIdentity`, which looks at the stream when the writer begins, every second while it is asked, and as soon
as the server announces that the stream was deleted, created or changed. What is remembered of the log counts for three
seconds after a look, and is forgotten when the log or a part of it is gone (ADR 0004). `repair` restores the settings.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from eventjet.codec.headers import RawRecord, event_id_of
from eventjet.errors import (
    ApiRefused,
    EventjetError,
    Forbidden,
    IdentityLost,
    LogIncomplete,
    LogRolledBack,
    LogUnusable,
    StoreError,
    StoreUnavailable,
    Unreachable,
)
from eventjet.jetstream.api import (
    MOVING,
    NOT_CLUSTERED,
    Conversation,
    StreamState,
    message_at,
    paused_until,
    update_stream,
)
from eventjet.jetstream.client import Client
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.topology import (
    CONTINUES,
    FIRST,
    IDENTITY,
    MISSING,
    Drift,
    check_settings,
    compare,
    drifted,
    drifts_of,
    every_config,
    finding_stream,
    identity_of,
    noted_aggregates,
    reading_log_state,
)
from eventjet.observability import logs

_log = logging.getLogger(__name__)

RENEW_S = 1.0
"""A look that is older is renewed in the background, while the command that asks goes on."""
RELY_S = 3.0
"""A look that is older is renewed before anything relies on it."""
_LIMITS = ("max_msgs", "max_bytes", "max_age", "max_msgs_per_subject")
"""Settings that make the server drop the oldest events."""


# Stream integrity: whether the log is complete. PURE.


def first_position(state: StreamState) -> int:
    """Return the position at which a complete log begins."""
    return _number(state, FIRST) or int(state.config.get("first_seq") or 0) or 1


def accepted_missing(state: StreamState) -> int:
    """Return how many missing positions after the first position an operator has accepted."""
    return _number(state, MISSING)


def missing_range(state: StreamState) -> str:
    """Describe in words which positions are missing from the log; empty for a complete log."""
    expected, first = first_position(state), max(state.first, 1)
    ranges: list[str] = []
    if first > expected:
        ranges.append(f"{_positions(expected, first - 1)} from its beginning")
    if state.deleted > accepted_missing(state):
        ranges.append(f"{state.deleted:,} between {first:,} and {state.last:,}")
    if not ranges:
        return ""
    limits = [f"{name} is {state.config[name]}" for name in _LIMITS if int(state.config.get(name) or 0) > 0]
    if (retention := state.config.get("retention", "limits")) != "limits":
        limits.append(f"retention is {retention}")
    limits_text = f" ({', '.join(limits)})" if limits else ""
    return f"{' and '.join(ranges)} are gone{limits_text}"


def check_integrity(state: StreamState) -> None:
    """Raise `LogIncomplete` unless every position of the log is there or accepted as missing."""
    if missing := missing_range(state):
        raise LogIncomplete(f"The log {state.name!r}", missing)


def _positions(first: int, last: int) -> str:
    return f"position {first:,}" if first == last else f"positions {first:,} to {last:,}"


def _number(state: StreamState, key: str) -> int:
    text = state.metadata.get(key, "")
    return int(text) if text.isascii() and text.isdecimal() else 0


# Stream identity: which log the stream holds.


class StreamIdentity:
    """What a writer knows of its log's stream, for the tasks of one event loop, which share each look; `close` it."""

    def __init__(self, stream: str, client: Client, *, is_mirror: bool = False) -> None:
        """`is_mirror` says that the stream is read as a mirror of the log, whose settings differ from the log's."""
        self.identity = ""
        """UUID of the log at the last look; empty before the first look, or without permission."""
        self.missing_range = ""
        """Which positions were missing from the log at the last look, in words; empty for a complete log."""
        self.aggregates: frozenset[str] = frozenset()
        """Names of the aggregates that `init` had noted in the stream by the last look; empty if there are none."""
        self.on_changed: list[Callable[[], object]] = []
        """Called when the stream has, or may have, other events than before at the same positions."""
        self._stream = stream
        self._is_mirror = is_mirror
        self._client = client
        self._state: StreamState | None = None
        self._looked_at = float("-inf")
        self._forgets = 0
        """How often `_forget` was called."""
        self._look: asyncio.Task[StreamState] | None = None
        self._listens = False
        self._may_look = True
        self._drifts: Sequence[Drift] = ()
        client.on_lost.append(self._forget)

    @property
    def is_confirmed(self) -> bool:
        """Whether what is remembered of the log counts now; begins a look in the background if the last one is old."""
        age_s = time.monotonic() - self._looked_at
        if RENEW_S < age_s <= RELY_S:
            self._shared_look()
        return age_s <= RELY_S and self.identity != ""

    async def confirm(self) -> bool:
        """Return `is_confirmed`, after a look if necessary; False if the look fails. Raises `LogUnusable`."""
        if not self.is_confirmed:
            try:
                await asyncio.shield(self._shared_look())
            except LogUnusable:
                raise
            except StoreError:
                return False
        return self.is_confirmed

    @property
    def first(self) -> int | None:
        """Position of the first record at the last look; None for an empty log, and before the first look."""
        return self._state.first if self._state is not None and self._state.messages else None

    @property
    def replicas(self) -> int:
        """How many replicas the stream had at the last look; 0 before the first look, or without permission."""
        return 0 if self._state is None else int(self._state.config.get("num_replicas") or 1)

    @property
    def is_forgotten(self) -> bool:
        """Whether the connection was lost, or the stream changed, after the last look: it may be another log by now."""
        return self._looked_at == float("-inf") and self.identity != "" and self._may_look

    async def remember(self) -> bool:
        """Look again if the log is forgotten; return whether it is known, or cannot be for lack of permission."""
        if self.is_forgotten:
            with suppress(StoreError):
                await asyncio.shield(self._shared_look())
        return not self.is_forgotten

    def replaced(self, log: str, position: int) -> str:
        """Return in words why a position of the log `log` is none of this log by the last look; empty if it may be."""
        if self._state is None or not log or self.identity in ("", log):
            return ""
        return succession_fault(self._state, log, position)

    def continuing(self, log: str, position: int) -> str:
        """Return the identity of this log if a position of the log `log` is its own by the last look, else `log`."""
        is_own = self._state is not None and not succession_fault(self._state, log, position)
        return self.identity if is_own else log

    @property
    def server_version(self) -> str:
        """Version of the server that answered the last look; empty before the first look."""
        return "" if self._state is None else self._state.metadata.get("_nats.ver", "")

    def check_settings(self) -> None:
        """Raise `LogDrifted` if the last look showed settings with which nothing may be recorded."""
        if self._drifts and self._state is not None:
            check_settings(self._state)

    async def drifts(self, age_s: float) -> Sequence[Drift]:
        """Return the drifted settings of the stream, by a look no older than `age_s`; raises as `look`."""
        await self._renew(age_s)
        return self._drifts

    async def end(self, age_s: float) -> int | None:
        """Return the position of the last record, by a look no older than `age_s`; None if the look fails."""
        try:
            await self._renew(age_s)
        except StoreError:
            return None
        return None if self._state is None else self._state.last

    async def _renew(self, age_s: float) -> None:
        if time.monotonic() - self._looked_at > age_s:
            await asyncio.shield(self._shared_look())

    async def look(self) -> StreamState:
        """Return the state of the stream, from its leader; raises `LogUnusable`, `StoreUnavailable` and `Forbidden`."""
        if not self._listens:
            self._listens = True
            await self._client.serve(f"$JS.EVENT.ADVISORY.STREAM.*.{self._stream}", lambda _: self._forget())
        asked_at, forgets = time.monotonic(), self._forgets
        try:
            state = await self._client.run(reading_log_state(self._stream))
        except LogUnusable:
            self._forget()
            raise
        except Forbidden:
            self._may_look = False
            raise
        self._may_look = True
        is_current = forgets == self._forgets  # else the stream changed while the answer was on its way
        previous, self._state = self._state, state
        missing = missing_range(state)
        if previous is not None and (_is_another(previous, state) or missing != self.missing_range):
            self._forget()
        self.identity = state.metadata.get(IDENTITY, "")
        identity_of(state)
        self.missing_range = missing
        self.aggregates = frozenset(noted_aggregates(state.metadata))
        self._warn(() if self._is_mirror else drifts_of(state))
        if is_current:
            self._looked_at = asked_at
        return state

    async def close(self) -> None:
        """Cancel the look that is under way, if any."""
        if self._look is not None:
            self._look.cancel()
            await asyncio.wait({self._look})

    def _shared_look(self) -> asyncio.Task[StreamState]:
        """Return the look that is under way, or begin one."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self.look(), name=f"eventjet look at {self._stream}")
            # Takes the error if nobody waits for it; the next look raises it again.
            self._look.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._look

    def _warn(self, drifts: Sequence[Drift]) -> None:
        if drifts != self._drifts:
            self._drifts = drifts
            for drift in drifts:
                logs.LOG_DRIFTED.log(_log, drift=drift, remedy=drift.remedy)

    def _forget(self) -> None:
        """Let nothing remembered of the log count any more: the stream may have other events at the same positions."""
        self._looked_at = float("-inf")
        self._forgets += 1
        for callback in self.on_changed:
            callback()


def _is_another(previous: StreamState, state: StreamState) -> bool:
    """Return whether the stream was created again, restored or rolled back between two looks."""
    origin = (previous.metadata.get(IDENTITY), previous.created)
    return origin != (state.metadata.get(IDENTITY), state.created) or state.last < previous.last


# Whether a checkpoint was made from this log.


class Stand(Protocol):
    """A checkpoint or a cursor: its name, its log's identity, and the position and id of the last event it contains."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> str: ...
    @property
    def position(self) -> int: ...
    @property
    def event_id(self) -> str: ...


def log_fault(state: StreamState, checkpoint: Stand) -> Conversation[LogRolledBack | LogIncomplete | None]:
    """Return the error that keeps a subscription from going on over this log from its checkpoint; None if it can."""
    fault = yield from _rollback_fault(state, checkpoint)
    missing = "" if fault else missing_range(state)
    return LogIncomplete(f"The log {state.name!r}", missing) if missing else fault


def checking_same_log(stream: str, checkpoint: Stand) -> Conversation[None]:
    """Raise `LogRolledBack` if the checkpoint was not made from this log."""
    state = yield from reading_log_state(stream)
    fault = yield from _rollback_fault(state, checkpoint)
    if fault is not None:
        raise fault


def checking_whole_log(stream: str, checkpoint: Stand) -> Conversation[str]:
    """Check that reading can go on from a checkpoint, and return the log's identity; raises as `whole_log`."""
    state = yield from reading_log_state(stream)
    return (yield from whole_log(state, checkpoint))


def whole_log(state: StreamState, checkpoint: Stand) -> Conversation[str]:
    """Return the log's identity; raises `LogRolledBack`, `LogIncomplete` or `LogDrifted` if reading cannot go on."""
    fault = yield from log_fault(state, checkpoint)
    if fault is not None:
        raise fault
    check_settings(state)
    return identity_of(state)


async def check_running(client: Client, stream: str, checkpoint: Stand, log: str) -> None:
    """Check what may change while a worker reads; raises as `whole_log`, and never because the server is silent."""
    try:
        state = await client.run(reading_log_state(stream))
        identity_of(state)
    except IdentityLost:
        raise
    except (StoreError, Unreachable):
        return
    check_unchanged(state, checkpoint, log)


def check_unchanged(state: StreamState, checkpoint: Stand, log: str) -> None:
    """Check the state of a log under a worker that has read it up to its checkpoint's position.

    Raises as `checking_whole_log`, and `LogDrifted` for a sealed log that was read to its end.
    """
    identity = identity_of(state)
    if identity != log:
        if reason := succession_fault(state, log, checkpoint.position):
            raise LogRolledBack(checkpoint.name, checkpoint.position, reason)
        raise StoreUnavailable(
            f"The log {state.name!r}", f"a promoted mirror continues it, with the identity {identity}"
        )
    check_integrity(state)
    check_settings(state)
    if state.config.get("sealed") and checkpoint.position >= state.last:
        # Nothing comes any more. A worker that waits here keeps the lease from those that read the promoted mirror.
        raise drifted(state.name, [drift for drift in drifts_of(state) if drift.setting == "sealed"])


async def pause_of(client: Client, stream: str, durable: str) -> str | None:
    """Return in words that the server has paused the durable; None if it has not, or if that cannot be asked."""
    try:
        until = await client.ask(paused_until(stream, durable))
    except EventjetError:
        return None
    description = f"its consumer {durable!r} of the stream {stream!r} is paused at the server until {until}"
    return f"{description}. Run `nats consumer resume {stream} {durable}`" if until else None


def _rollback_fault(state: StreamState, checkpoint: Stand) -> Conversation[LogRolledBack | None]:
    """Return the error for a checkpoint that was not made from this log; None if it was.

    A log that was restored from an old backup and has grown again reaches the position, but with other events: so the
    id of the event there is compared.
    """
    identity = identity_of(state)
    if checkpoint.position == 0:
        return None
    if checkpoint.log != identity:
        reason = succession_fault(state, checkpoint.log, checkpoint.position)
        if reason:
            reason += ", which is sealed, so its mirror may have been promoted" if state.config.get("sealed") else ""
            return LogRolledBack(checkpoint.name, checkpoint.position, reason)
    if state.last < checkpoint.position:
        return LogRolledBack(checkpoint.name, checkpoint.position, f"the log ends at position {state.last}")
    record: RawRecord | None = yield message_at(state.name, checkpoint.position)
    if record is None:
        return LogRolledBack(checkpoint.name, checkpoint.position, "the log has no event there any more")
    event_id = event_id_of(record)
    if event_id == checkpoint.event_id:
        return None
    reason = f"the event there is {event_id or 'without id'}, and it was {checkpoint.event_id}"
    return LogRolledBack(checkpoint.name, checkpoint.position, reason)


def succession_fault(state: StreamState, log: str, position: int) -> str:
    """Return in words why a position of the log `log` is none of this log; empty if it is (ADR 0071)."""
    if log == identity_of(state):
        return ""
    end = earlier_logs(state).get(log)
    if end is None:
        return f"it was made from the log {log} and the stream {state.name!r} is {identity_of(state)}"
    if position > end:
        return (
            f"it was made from the log {log}, of which this log has the events up to position {end:,} only, where its "
            "mirror ended when it was promoted"
        )
    return ""


def earlier_logs(state: StreamState) -> dict[str, int]:
    """Return the identities of the logs that this one continues, and the last position that it has of each."""
    return continued_logs(state.metadata.get(CONTINUES, ""))


def continued_logs(noted: str) -> dict[str, int]:
    """Parse what a promotion notes in a stream, and an archive in its manifest: `identity@position` of each log."""
    pairs = (pair.rpartition("@") for pair in noted.split())
    return {log: int(end) for log, _, end in pairs if end.isdecimal()}


# Repair, for an administrator. Blocks.


def repair(connection: NatsConnection, app: str, replicas: int, identity: str, *, accept_loss: bool) -> list[str]:
    """Restore the declared settings of the app's streams and buckets; return each change in words.

    With `accept_loss`, the positions that are missing from the log at present do not count as missing from then on.
    Raises `Unreachable` for a setting that the server will not change.
    """
    changes: list[str] = []
    for declared in every_config(app, replicas):
        name = str(declared["name"])
        state = connection.run(finding_stream(name))
        if state is None:
            continue
        drifts = compare(declared, state.config)
        metadata = dict(state.metadata)
        if name == app:
            metadata[IDENTITY] = identity
            if accept_loss:
                first, missing = max(state.first, 1), state.deleted
                metadata |= {FIRST: str(first), MISSING: str(missing)}
                changes.append(f"{name}: it begins at position {first:,}, and {missing:,} later ones are missing")
        config = {**state.config, **{drift.setting: drift.declared for drift in drifts}, "metadata": metadata}
        for drift in drifts:
            if drift.setting not in declared:
                del config[drift.setting]  # eventjet's declarations do not mention this setting
        if config == state.config:
            continue
        try:
            connection.ask(update_stream(config))
        except ApiRefused as refusal:
            raise Unreachable(
                f"The stream {name!r}",
                f"the server would not change {', '.join(drift.setting for drift in drifts)}: {refusal.description}",
                _way_out(refusal, drifts),
            ) from None
        changes += map(str, drifts)
    return changes


def _way_out(refusal: ApiRefused, drifts: Sequence[Drift]) -> str:
    """Return what to do if the server refuses to set settings back."""
    if refusal.err_code in MOVING:
        return "Run it again once `eventjet doctor` no longer says that the stream is on its way."
    if refusal.err_code == NOT_CLUSTERED:
        return "Set EVENTJET_REPLICAS to 1, or name the servers of a cluster."
    remedies = (drift.remedy for drift in drifts if drift.setting == "sealed")
    return next(remedies, "Restore an archive of it to another server or account.")
