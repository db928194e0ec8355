"""Whether the log under a checkpoint is still the one it was made from."""

from __future__ import annotations

from eventjet.codec.envelope import MSG_ID, header
from eventjet.errors import LogRolledBack, StreamMissing
from eventjet.nats.api import StreamState, message_at, stream_info
from eventjet.nats.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.sql.checkpoint import Checkpoint
from eventjet.store.topology import identity_of, missing


def state_of_log(connection: NatsConnection, stream: str) -> tuple[str, StreamState]:
    """(identity, state) of an app's stream; raises `Unreachable` when `init` has not made it."""
    try:
        state = connection.ask(stream_info(stream))
    except StreamMissing:
        raise missing(stream) from None
    return identity_of(state), state


def check_log(endpoint: Endpoint, stream: str, held: Checkpoint) -> str:
    """The log's identity, if the checkpoint was made from this log; raises `LogRolledBack`. Blocks.

    A log restored from an old backup and grown again has a longer tail but another past: hence the event's id.
    """
    with NatsConnection.open(endpoint) as connection:
        identity, state = state_of_log(connection, stream)
        if held.position == 0:
            return identity
        if held.log != identity:
            raise _rolled_back(held, f"it was made from the log {held.log} and the stream {stream!r} is {identity}")
        if state.last < held.position:
            raise _rolled_back(held, f"the log ends at position {state.last}")
        record = connection.ask(message_at(stream, held.position))
        if record is None:
            raise _rolled_back(held, "the log has no event there any more")
        event_id = header(record[3], MSG_ID) or ""
        if event_id != held.event_id:
            raise _rolled_back(held, f"the event there is {event_id or 'without id'}, and it was {held.event_id}")
    return identity


def _rolled_back(held: Checkpoint, reason: str) -> LogRolledBack:
    return LogRolledBack(held.name, held.position, reason)
