"""Whether a log is the one that a checkpoint or a cursor was made from, and still whole; and what readers ask of it."""

from __future__ import annotations

from typing import Protocol

from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import MSG_ID, RawRecord, header
from eventjet.errors import (
    EventjetError,
    IdentityLost,
    LogIncomplete,
    LogRolledBack,
    StoreError,
    StreamMissing,
    Unreachable,
)
from eventjet.jetstream.api import StreamState, message_at, paused_until, stream_info
from eventjet.jetstream.client import Client
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.topology import check_settings, identity_of, info, missing
from eventjet.log.voids import voids_of
from eventjet.log.wholeness import check_whole, loss


class Stand(Protocol):
    """Where something that follows a log stands, a checkpoint or a cursor: at which event of which log."""

    @property
    def name(self) -> str: ...
    @property
    def log(self) -> str: ...
    @property
    def position(self) -> int: ...
    @property
    def event_id(self) -> str: ...


def state_of_log(connection: NatsConnection, stream: str) -> tuple[str, StreamState]:
    """(identity, state) of an app's stream; raises `Unreachable` when `init` has not made it."""
    try:
        state = connection.ask(stream_info(stream))
    except StreamMissing:
        raise missing(stream) from None
    return identity_of(state), state


async def learn_voids(client: Client, stream: str, catalog: Catalog) -> None:
    """Have the readers of a worker pass over what its log declares void."""
    catalog.voids.update(await voids_of(client, stream))


def check_same_log(connection: NatsConnection, stream: str, held: Stand) -> None:
    """Raise `LogRolledBack` where the checkpoint was not made from this log. Blocks."""
    identity, state = state_of_log(connection, stream)
    fault = _another_past(identity, state, held, _record_under(connection, stream, held))
    if fault is not None:
        raise fault


async def check_whole_log(client: Client, stream: str, held: Stand) -> str:
    """The log's identity, if the checkpoint was made from it, and may go on from there.

    Raises `LogRolledBack`, `LogIncomplete` and `LogDrifted`.
    """
    state = await info(client, stream)
    identity = identity_of(state)
    record = await client.ask(message_at(stream, held.position)) if held.position else None
    fault = _fault(identity, state, held, record)
    if fault is not None:
        raise fault
    check_settings(state)
    return identity


async def check_running(client: Client, stream: str, held: Stand, log: str) -> None:
    """What may change under a worker while it reads: raises as `check_whole_log`.

    A server that is away is no fault, and another past under the same identity ends the reading by itself.
    """
    try:
        state = await info(client, stream)
        identity = identity_of(state)
    except IdentityLost:
        raise
    except (StoreError, Unreachable):
        return
    if identity != log:
        raise LogRolledBack(held.name, held.position, _other(log, stream, identity))
    check_whole(state)
    check_settings(state)


async def pause_of(client: Client, stream: str, durable: str) -> str | None:
    """Why nothing comes where somebody has paused the durable at the server, whose heartbeats go on; None else.

    Nor is anything known where the server is away, or does not let us ask.
    """
    try:
        until = await client.ask(paused_until(stream, durable))
    except EventjetError:
        return None
    what = f"its consumer {durable!r} of the stream {stream!r} is paused at the server until {until}"
    return f"{what}. Run `nats consumer resume {stream} {durable}`" if until else None


def log_fault(
    connection: NatsConnection, identity: str, state: StreamState, held: Stand
) -> LogRolledBack | LogIncomplete | None:
    """Why the projection cannot go on over this log; None if it can. Blocks."""
    return _fault(identity, state, held, _record_under(connection, state.name, held))


def _record_under(connection: NatsConnection, stream: str, held: Stand) -> RawRecord | None:
    """What the log has where the checkpoint stands. Blocks."""
    return connection.ask(message_at(stream, held.position)) if held.position else None


def _fault(
    identity: str, state: StreamState, held: Stand, record: RawRecord | None
) -> LogRolledBack | LogIncomplete | None:
    """As `log_fault`, for a log that has `record` where the checkpoint stands."""
    fault = _another_past(identity, state, held, record)
    gone = "" if fault else loss(state)
    return LogIncomplete(f"The log {state.name!r}", gone) if gone else fault


def _another_past(identity: str, state: StreamState, held: Stand, record: RawRecord | None) -> LogRolledBack | None:
    """Why the checkpoint was not made from this log, None if it was.

    A log restored from an old backup and grown again has a longer tail but another past: hence the event's id.
    """
    if held.position == 0:
        return None
    if held.log != identity:
        return LogRolledBack(held.name, held.position, _other(held.log, state.name, identity))
    if state.last < held.position:
        return LogRolledBack(held.name, held.position, f"the log ends at position {state.last}")
    if record is None:
        return LogRolledBack(held.name, held.position, "the log has no event there any more")
    event_id = header(record[3], MSG_ID) or ""
    if event_id == held.event_id:
        return None
    reason = f"the event there is {event_id or 'without id'}, and it was {held.event_id}"
    return LogRolledBack(held.name, held.position, reason)


def _other(log: str, stream: str, identity: str) -> str:
    return f"it was made from the log {log} and the stream {stream!r} is {identity}"
