"""The commands `eventjet init`, `db …` and `nats-config`: set up server and database for an app."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.output import Answer, Block, Table, leave_out_of_notes, note
from eventjet.cli.subscriptions import undeclared_cursors
from eventjet.cli.target import (
    AppTarget,
    DatabaseOption,
    JsonOption,
    ProjectionArgument,
    on_app,
    option,
    safe_settings,
    switch,
)
from eventjet.cli.unique import unbuilt
from eventjet.errors import EventjetError, LogIncomplete, LogUnusable, UsageError
from eventjet.observability import logs
from eventjet.runtime import run_async
from eventjet.text import cut

if TYPE_CHECKING:
    from eventjet.jetstream.api import StreamState
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.log.topology import Topology
    from eventjet.sql.checkpoint import Checkpoint
    from eventjet.sql.database import Database
    from eventjet.sql.revisions import Unused

db = typer.Typer(name="db", help="eventjet's own tables, and the tables of revisions.", no_args_is_help=True)

_IDENTITY = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_REVISION = re.compile(r"([a-z][a-z0-9_]*):([0-9]{1,9})")


@on_app()
def init(
    at: AppTarget,
    reset: Annotated[
        list[str] | None,
        option("--reset", "NAME", "Empty this projection and start it anew; may be repeated.", "projections"),
    ] = None,
    repair: Annotated[
        bool, switch("--repair", "Give the stream the settings back that another program changed.")
    ] = False,
    accept_loss: Annotated[
        bool, switch("--accept-loss", "With --repair: go on without the events that are gone from the log.")
    ] = False,
    log: Annotated[str | None, option("--log", "UUID", "With --repair: the log's identity, if nothing has it.")] = None,
) -> Answer:
    """Create what the app lacks on the server and in the database, and check that all of it belongs to one whole log.

    Reactors, processes and whatever else follows the log get a cursor where they have none. Nothing that exists is
    changed without --repair, or --reset: then the tables, the quarantine and the position of the projections that are
    named are thrown away, and workers make them again from the first event. Exit status 1 when something is not as it
    should be.
    """
    if (accept_loss or log is not None) and not repair:
        raise UsageError("--accept-loss and --log say how to repair. Give --repair too.")
    if log is not None and not _IDENTITY.fullmatch(log):
        raise UsageError(f"--log is {cut(log, 60)!r}, and a log's identity is a UUID, in full. Copy all of it.")
    leave_out_of_notes(logs.AGGREGATES_UNKNOWN, logs.LOG_DRIFTED)
    with at.connection() as link:
        link.await_leader()
    _refuse_lost_log(at, reset or [])
    repaired = _repair(at, log, accept_loss=accept_loss) if repair else []
    topology, tables = run_async(prepare(at, reset or []))
    app, drifts, answerers = at.app().name, [str(drift) for drift in topology.drifts], list(topology.others)
    faults = [*map(str, (*topology.unknown, *topology.unusable)), *_faults(at)]
    if not topology.unknown:
        faults += run_async(unbuilt(at))
    # The cursors of a log that another app may have are not offered to be dropped.
    undeclared = [] if topology.unknown else undeclared_cursors(at)
    database = f", {at.settings.shown()['database']}" if at.app().projections else ""
    lines = [f"repaired {change}" for change in repaired]
    lines += [f"created  stream {name}" for name in topology.created] + [f"created  table {name}" for name in tables]
    lines += [f"created  cursor {name}, which begins after position {start:,}" for name, start in topology.cursors]
    lines.append(f"{app} {'is not ready' if faults else 'is ready'}: log {topology.identity}{database}")
    lines += [f"unused   {cursor}" for cursor in undeclared]
    lines += [f"wrong    {fault}" for fault in faults] + [f"differs  {drift}" for drift in drifts]
    lines += [f"others   {answerer}" for answerer in answerers]
    if answerers:
        lines.append("Their answers are not believed, and saves take longer. `eventjet doctor` says how to end it.")
    sealed = {drift.stream: drift.remedy for drift in topology.drifts if drift.is_sealed}
    lines += [f"{stream} is sealed, and that cannot be undone. {remedy}" for stream, remedy in sealed.items()]
    if any(not drift.is_sealed for drift in topology.drifts):
        lines.append("What differs was changed by something else; `eventjet init --repair` changes it back.")
    value = {
        "app": app,
        "log": topology.identity,
        "created": [*topology.created, *tables],
        "cursors": dict(topology.cursors),
        "drifts": drifts,
        "faults": faults,
        "others": answerers,
        "repaired": repaired,
        "undeclared": undeclared,
    }
    return Answer(value, lines, ok=not drifts and not faults)


async def prepare(at: AppTarget, reset: Sequence[str] = ()) -> tuple[Topology, list[str]]:
    """Create missing streams, cursors and tables; return topology and created tables. Raises `TableLost`."""
    from eventjet.sql.database import Database
    from eventjet.sql.locations import create_tables
    from eventjet.sql.revisions import reset as begin_anew

    app = at.app()
    chosen = [at.projection(name) for name in dict.fromkeys(reset)]
    database = Database(at.settings.database)
    async with app.connect(at.settings) as jet:
        topology = await jet.init()
    if not app.projections or topology.unknown:
        return topology, []  # no database is needed, or the log has aggregates that are not declared
    await asyncio.to_thread(database.check_sessions)
    with database.reaching_sync():
        recreated = [table for resolved in chosen for table in begin_anew(database, resolved, topology.identity)]
        engine, log = database.sync_engine("eventjet init"), topology.identity
        return topology, recreated + create_tables(engine, app.projections.values(), log=log)


def _faults(at: AppTarget) -> list[str]:
    """Return what is wrong with the log, with checkpoints and cursors, and with events that the app cannot read."""
    from eventjet.log.integrity import log_fault, missing_range
    from eventjet.log.topology import identity_of, reading_log_state
    from eventjet.log.unknown_events import unknown_events
    from eventjet.subscriptions.status import cursor_fault, cursors_seen

    checkpoints = _live_checkpoints(at)
    with at.connection() as link:
        state = link.run(reading_log_state(at.app().name))
        identity_of(state)  # raises for a log that has lost its identity
        missing = missing_range(state)
        faults = [link.run(log_fault(state, checkpoint)) for checkpoint in checkpoints]
        unread = unknown_events(link, state, at.app().catalog)
        faults += [cursor_fault(link, state, stored.cursor) for stored in cursors_seen(link, at.app())]
    lost = [LogIncomplete(f"The log {state.name!r}", missing)] if missing else []
    return list(dict.fromkeys(map(str, [*lost, *filter(None, faults), *unread])))


def _refuse_lost_log(at: AppTarget, reset: Collection[str]) -> None:
    """Raise `LogUnusable` where the stream does not exist, but the database has read models of it outside `reset`.

    A new, empty stream in its place would take commands, and every aggregate would look new to them.
    """
    from eventjet.log.topology import finding_stream

    affected = [
        checkpoint
        for checkpoint in _live_checkpoints(at)
        if checkpoint.log and checkpoint.position and checkpoint.name not in reset
    ]
    if not affected:
        return
    with at.connection() as link:
        if link.run(finding_stream(at.app().name)) is not None:
            return
    furthest = max(affected, key=lambda checkpoint: checkpoint.position)
    reset_options = " ".join(f"--reset {name}" for name in dict.fromkeys(checkpoint.name for checkpoint in affected))
    raise LogUnusable(
        f"The stream {at.app().name!r}",
        f"it does not exist on this server, and the database has read models of the log {furthest.log}, up to position "
        f"{furthest.position}",
        f"If it was lost, `eventjet restore` brings it back; if this is the wrong server or database, name the right "
        f"one. To begin with an empty log, throw these tables away: `eventjet init {reset_options}`.",
    )


def _repair(at: AppTarget, log: str | None, *, accept_loss: bool) -> list[str]:
    """Restore declared settings and the log's identity; return the changes as lines. Raises `UsageError`."""
    from eventjet.log.integrity import repair
    from eventjet.log.topology import IDENTITY, finding_stream

    app, done = at.app().name, list[str]()
    with at.connection() as link:
        state = link.run(finding_stream(app))
        if state is None:
            return done  # `init` creates it
        identity = state.metadata.get(IDENTITY, "")
        if log is not None and identity not in ("", log):
            raise UsageError(f"The stream {app!r} is the log {identity}, and --log names another. Leave it out.")
        if not identity:
            try:
                identity = _identity_of(link, state, _checkpoints(at))
            except UsageError:
                if log is None:
                    raise
                identity = log
            if log not in (None, identity):
                raise UsageError(
                    f"The stream {app!r} has the events that the read models of this database stand at, so it is the "
                    f"log {identity}, and --log names another. Leave it out."
                )
            done.append(f"{app}: it is the log {identity} again")
        done += repair(link, app, at.settings.replicas, identity, accept_loss=accept_loss)
    return done


def _checkpoints(at: AppTarget) -> list[Checkpoint]:
    from eventjet.sql.database import Database
    from eventjet.sql.revisions import stored_checkpoints

    return stored_checkpoints(Database(at.settings.database), at.app().name, "eventjet init")


def _live_checkpoints(at: AppTarget) -> list[Checkpoint]:
    """Return the checkpoints of revisions that are not retired; none for an app that needs no database."""
    from eventjet.domain.position import RETIRED

    if not at.app().projections:
        return []
    return [checkpoint for checkpoint in _checkpoints(at) if checkpoint.state != RETIRED]


def _identity_of(link: NatsConnection, state: StreamState, checkpoints: list[Checkpoint]) -> str:
    """Return the identity that the checkpoints agree on, if the stream has their events; raises `UsageError`."""
    from eventjet.codec.headers import MSG_ID, header
    from eventjet.jetstream.api import message_at

    positioned = [checkpoint for checkpoint in checkpoints if checkpoint.log and checkpoint.position]
    logs = {checkpoint.log for checkpoint in positioned}
    why = f"the checkpoints are of {len(logs)} logs" if logs else "no checkpoint of this database says which log it is"
    if len(logs) == 1:
        for checkpoint in positioned:
            record = link.ask(message_at(state.name, checkpoint.position))
            if record is None or header(record[3], MSG_ID) != checkpoint.event_id:
                why = f"the event at position {checkpoint.position} is not the one that {checkpoint.name!r} stands at"
                break
        else:
            return logs.pop()
    raise UsageError(
        f"The identity of the stream {state.name!r} cannot be found: {why}. If you know that it is eventjet's log, "
        "name its identity with --log: the manifest of an archive has it as `log`, and old answers of `init --json`."
    )


@db.command()
def upgrade(json: JsonOption = False, database: DatabaseOption = None) -> None:
    """Bring eventjet's own tables to what this version needs; an application's tables are not looked at."""
    from eventjet.sql.database import Database
    from eventjet.sql.migrations import upgrade as migrate

    where = Database(safe_settings(None, database).database)
    with where.reaching_sync(), where.sync_engine("eventjet db").begin() as connection:
        done = migrate(connection)
    was = "was there already" if done.before == done.after else f"before: {done.before or 'none'}"
    lines = [f"created  table {name}" for name in done.tables]
    lines += [f"added or renamed column {name}" for name in done.columns]
    lines.append(f"eventjet's tables in {where.shown} are at revision {done.after} ({was})")
    Answer({"database": where.shown, **asdict(done)}, lines).give(as_json=json)


@db.command()
@on_app()
def promote(at: AppTarget, projection: ProjectionArgument) -> Answer:
    """Give the revision that the app declares the declared table, for readers to see: to go back to an older one.

    The other revision's table goes aside and is kept. Refused while the app's revision lacks events the other has.
    """
    from eventjet.operations import actions

    resolved = at.projection(projection)
    done = actions.promote(at.settings, resolved)
    inactive = list(done.previous_revisions) if done else []
    value = {"projection": projection, "revision": resolved.revision, "promoted": done is not None, "left": inactive}
    return Answer(value, actions.promoted_text(resolved, done))


@db.command()
@on_app()
def unused(
    at: AppTarget,
    drop: Annotated[
        list[str] | None,
        option("--drop", "NAME:REVISION", "Drop the tables of this one; may be given several times."),
    ] = None,
    drop_runs: Annotated[bool, switch("--drop-runs", "Remove what killed rebuilds left behind.")] = False,
) -> Answer:
    """List the tables of revisions that the app no longer declares, and what killed rebuilds left; drop what is named.

    Nothing that a worker keeps or that readers see is dropped.
    """
    from eventjet.rebuild.workspace import leftovers, remove_leftovers
    from eventjet.sql.database import Database
    from eventjet.sql.revisions import unused as look

    named_revisions = [_name_and_revision(text) for text in drop or []]
    database = Database(at.settings.database)
    with database.reaching_sync():
        dropped = [_drop(at, database, *named_revision) for named_revision in named_revisions]
        cleared = remove_leftovers(database, existing=True) if drop_runs else []
        with database.sync_engine("eventjet db", existing=True).begin() as connection:
            revisions = look(connection, list(at.app().projections.values()), at.app().name)
            runs = leftovers(connection, database)
    value = {"revisions": revisions, "runs": runs, "dropped": dropped, "dropped_runs": cleared}
    return Answer(value, unused_blocks(dropped, cleared, revisions, runs))


def _name_and_revision(text: str) -> tuple[str, int]:
    match = _REVISION.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not NAME:REVISION, as in balances:1.")
    return match[1], int(match[2])


def _drop(at: AppTarget, database: Database, name: str, revision: int) -> Unused:
    from eventjet.jetstream.api import delete_consumer
    from eventjet.sql.revisions import retire

    with database.sync_engine("eventjet db", existing=True).begin() as connection:
        dropped = retire(connection, name, revision, list(at.app().projections.values()), at.app().name)
    try:
        with at.connection("db") as link:
            link.ask(delete_consumer(at.app().name, f"{name}-r{revision}"))
    except (EventjetError, OSError) as error:
        note(f"The durable {name}-r{revision} stays on the server, where it costs next to nothing: {error}")
    return dropped


def unused_blocks(
    dropped: list[Unused], cleared: list[str], revisions: list[Unused], runs: list[str]
) -> Iterator[Block]:
    """Yield the blocks that show dropped and unused tables, and leftovers of rebuilds."""
    for retired in dropped:
        yield f"dropped  {retired.projection}:{retired.revision}: {', '.join(retired.tables) or 'it had no table'}"
    yield from (f"dropped  {name}, of a rebuild that was killed" for name in cleared)
    if revisions:
        rows = [
            (
                f"{revision.projection}:{revision.revision}",
                revision.state,
                ", ".join(revision.tables),
                revision.rows,
                revision.position,
                revision.owner,
            )
            for revision in revisions
        ]
        yield Table(("unused", "state", "table", "rows", "position", "worker"), rows)
    for revision in revisions:
        if revision.in_use:
            yield f"{revision.projection}:{revision.revision} cannot be dropped: {revision.in_use}"
    for name in runs:
        yield f"unused   {name}, of a rebuild that was killed; the next rebuild removes it, and --drop-runs does"
    if not revisions and not runs:
        yield "There is nothing unused."


@on_app(servers=False, database=False)
def nats_config(
    at: AppTarget,
    accounts: Annotated[
        bool, switch("--accounts", "Only the accounts, for a configuration of your own to include.")
    ] = False,
    mirror: Annotated[bool, switch("--mirror", "A user for the leaf node that has a mirror of the log, too.")] = False,
    postgres: Annotated[bool, switch("--postgres", "The GRANTs of PostgreSQL instead.")] = False,
) -> None:
    """Print a nats-server configuration with a user for each role of the app, or PostgreSQL's GRANTs.

    It holds no password: the server takes them from its environment. Make it again when the app has a new aggregate,
    projection or revision. With EVENTJET_JETSTREAM_DOMAIN it is the accounts of a leaf node, whose hub has the log.
    """
    from eventjet.nats.endpoint import CALLER_INBOX, Endpoint
    from eventjet.operations import roles
    from eventjet.sql.database import grants
    from eventjet.subscriptions.declarations import declarations_of

    app = at.app()
    if postgres and (accounts or mirror):
        raise UsageError("--postgres prints GRANTs, and --accounts and --mirror are about NATS. Leave either out.")
    if postgres:
        tables = [table for resolved in app.projections.values() for table in resolved.tables]
        print(grants((table.schema, table.name) for table in tables), end="")
        return
    # Include the next revision, so that its deploy need not wait for a new server configuration.
    durables = [
        f"{resolved.name}-r{resolved.revision + offset}" for resolved in app.projections.values() for offset in (0, 1)
    ]
    app_roles = roles.roles_of(
        app.name,
        [info.name for info in app.aggregates.values()],
        durables,
        list(declarations_of(app)),
        published=[(publication.stream, publication.name) for publication in app.publications.values()],
        received=[(inbox.stream, f"{app.name}-{inbox.name}") for inbox in app.inboxes.values()],
        unique=[info.name for info in app.aggregates.values() if info.unique],
        gathered=[
            stream
            for inbox in app.inboxes.values()
            if inbox.sources
            for stream in (inbox.stream, *(source.stream for source in inbox.sources if not source.prefix))
        ],
        origins=[
            (source.prefix, source.stream)
            for inbox in app.inboxes.values()
            for source in inbox.sources
            if source.prefix
        ],
        objects=bool(app.catalog.with_blobs),
        mirror=mirror,
    )
    if app.served:
        app_roles += roles.serving_roles(app.name, app_roles, at.settings.caller_inboxes or (CALLER_INBOX,))
    routed, domain = Endpoint.of(at.settings).routed, at.settings.jetstream_domain
    if domain is not None:
        print(roles.leaf_accounts(app.name, app_roles, routed, domain), end="")
    else:
        print((roles.accounts if accounts else roles.server_config)(app.name, app_roles, routed), end="")
