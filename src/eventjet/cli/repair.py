"""What `eventjet init --repair` and `--accept-loss` do, and what `init` says of the log under the checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventjet.errors import LogIncomplete, LogUnusable, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection

    from eventjet.cli.target import AppTarget
    from eventjet.jetstream.api import StreamState
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.sql.checkpoint import Checkpoint


def faults(at: AppTarget) -> list[str]:
    """Why projections cannot go on over the log, what is gone from it, and what this app cannot read of it."""
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.log.strangers import strangers
    from eventjet.log.stream_check import log_fault, state_of_log
    from eventjet.log.wholeness import loss
    from eventjet.nats.endpoint import Endpoint
    from eventjet.sql.checkpoint import RETIRED
    from eventjet.subscriptions.status import cursor_fault, cursors_of

    checkpoints = _checkpoints(at) if at.app().projections else []
    with NatsConnection.open(Endpoint.of(at.settings)) as connection:
        identity, state = state_of_log(connection, at.app().name)
        gone = loss(state)
        found = [log_fault(connection, identity, state, held) for held in checkpoints if held.state != RETIRED]
        unread = strangers(connection, state, at.app().catalog)
        found += [cursor_fault(connection, identity, state, held) for held in cursors_of(connection, at.app())]
    told = [LogIncomplete(f"The log {state.name!r}", gone)] if gone else []
    return list(dict.fromkeys(map(str, [*told, *filter(None, found), *unread])))


def refuse_a_lost_log(at: AppTarget, reset: Collection[str]) -> None:
    """Raise `LogUnusable` where the stream is gone that the database's read models, but those to `reset`, stand on.

    An empty one in its place would take commands, and to them every aggregate would be new.
    """
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.log import repairing
    from eventjet.nats.endpoint import Endpoint
    from eventjet.sql.checkpoint import RETIRED

    checkpoints = _checkpoints(at) if at.app().projections else []
    known = [held for held in checkpoints if held.state != RETIRED and held.log and held.position]
    known = [held for held in known if held.name not in reset]
    if not known:
        return
    with NatsConnection.open(Endpoint.of(at.settings)) as connection:
        if repairing.found(connection, at.app().name) is not None:
            return
    furthest = max(known, key=lambda held: held.position)
    anew = " ".join(f"--reset {name}" for name in dict.fromkeys(held.name for held in known))
    raise LogUnusable(
        f"The stream {at.app().name!r}",
        f"it does not exist on this server, and the database has read models of the log {furthest.log}, up to position "
        f"{furthest.position}",
        f"If it was lost, `eventjet restore` brings it back; if this is the wrong server or database, name the right "
        f"one. To begin with an empty log, throw these tables away: `eventjet init {anew}`.",
    )


def repair(at: AppTarget, log: str | None, *, accept_loss: bool) -> list[str]:
    """Give the stream and the bucket the settings that are declared, and the log its identity; what was healed.

    Raises `UsageError` where the identity cannot be found for certain, and `Unreachable`.
    """
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.log import repairing
    from eventjet.log.topology import IDENTITY
    from eventjet.nats.endpoint import Endpoint

    app, healed = at.app().name, list[str]()
    with NatsConnection.open(Endpoint.of(at.settings)) as connection:
        state = repairing.found(connection, app)
        if state is None:
            return healed  # `init` makes it
        identity = state.metadata.get(IDENTITY, "")
        if log is not None and identity not in ("", log):
            raise UsageError(f"The stream {app!r} is the log {identity}, and --log names another. Leave it out.")
        if not identity:
            identity = log or _identity_of(connection, state, _checkpoints(at))
            healed.append(f"{app}: it is the log {identity} again")
        healed += repairing.repair(connection, app, at.settings.replicas, identity, accept_loss=accept_loss)
    return healed


def _checkpoints(at: AppTarget) -> list[Checkpoint]:
    from eventjet.sql import migrations
    from eventjet.sql.checkpoint import read_all
    from eventjet.sql.database import Database

    where = Database(at.settings.database)
    with where.reaching_sync(), where.sync_engine("eventjet init").connect() as connection:
        if migrations.version(connection) != migrations.HEAD:
            return []
        return [held for held, _ in read_all(connection) if held.app in ("", at.app().name)]


def _identity_of(connection: NatsConnection, state: StreamState, checkpoints: list[Checkpoint]) -> str:
    """The log that every checkpoint is of, if the stream holds the very event at which each of them stands."""
    from eventjet.codec.headers import MSG_ID, header
    from eventjet.jetstream.api import message_at

    known = [held for held in checkpoints if held.log and held.position]
    logs = {held.log for held in known}
    why = f"the checkpoints are of {len(logs)} logs" if logs else "no checkpoint of this database says which log it is"
    if len(logs) == 1:
        for held in known:
            record = connection.ask(message_at(state.name, held.position))
            if record is None or header(record[3], MSG_ID) != held.event_id:
                why = f"the event at position {held.position} is not the one that {held.name!r} stands at"
                break
        else:
            return logs.pop()
    raise UsageError(
        f"The identity of the stream {state.name!r} cannot be found: {why}. If you know that it is eventjet's log, "
        "name its identity with --log: the manifest of an archive has it as `log`, and old answers of `init --json`."
    )
