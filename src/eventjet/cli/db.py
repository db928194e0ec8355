"""`eventjet init` and `eventjet db …`: what the app needs on the server and in the database."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.completing import names_of
from eventjet.cli.cursor import undeclared_cursors
from eventjet.cli.target import AppTarget, DatabaseOption, JsonOption, on_app, safe_settings
from eventjet.cli.terminal import Answer, note, print_table, say
from eventjet.cli.unique import unbuilt
from eventjet.errors import EventjetError, UsageError

if TYPE_CHECKING:
    from eventjet.log.topology import Topology
    from eventjet.sql.database import Database
    from eventjet.sql.revisions import Unused

db = typer.Typer(name="db", help="eventjet's own tables, and the tables of revisions.", no_args_is_help=True)

_NAMED = re.compile(r"([a-z][a-z0-9_]*):([0-9]{1,9})")


@on_app()
def init(
    at: AppTarget,
    reset: Annotated[
        list[str] | None,
        typer.Option(
            "--reset",
            metavar="NAME",
            help="Let this projection begin anew, empty; may be given several times.",
            autocompletion=names_of("projections"),
        ),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Give the stream the settings back that another program changed.")
    ] = False,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="With --repair: go on without the events that are gone from the log.")
    ] = False,
    log: Annotated[
        str | None, typer.Option("--log", metavar="UUID", help="With --repair: which log it is, if nothing tells.")
    ] = None,
) -> Answer:
    """Create or check what the app has on the server and in the database: is it of this log, and is that whole?

    Reactors, processes and whatever else follows the log get a cursor where they have none. Nothing that exists is
    changed without --repair, or --reset: then the tables, the quarantine and the position of the projections that are
    named are thrown away, and workers make them again from the first event. Exit status 1 when something is not as it
    should be.
    """
    from eventjet.cli import repair as repairing

    if (accept_loss or log is not None) and not repair:
        raise UsageError("--accept-loss and --log say how to repair. Give --repair too.")
    repairing.refuse_a_lost_log(at, reset or [])
    healed = repairing.repair(at, log, accept_loss=accept_loss) if repair else []
    topology, tables = asyncio.run(prepare(at, reset or []))
    app, drifts = at.app().name, [str(drift) for drift in topology.drifts]
    lines = [f"created  stream {name}" for name in topology.created] + [f"created  table {name}" for name in tables]
    lines += [f"created  cursor {name}, which begins after position {at_:,}" for name, at_ in topology.cursors]
    wrong = [*map(str, (*topology.unknown, *topology.unusable)), *repairing.faults(at)]
    if not topology.unknown:
        wrong += asyncio.run(unbuilt(at))
    lines = [f"repaired {one}" for one in healed] + lines
    ready = "is not ready" if wrong else "is ready"
    where = f", {at.settings.shown()['database']}" if at.app().projections else ""
    lines.append(f"{app} {ready}: log {topology.identity}{where}")
    left = undeclared_cursors(at)
    lines += [f"unused   {one}" for one in left]
    lines += [f"wrong    {fault}" for fault in wrong] + [f"differs  {drift}" for drift in drifts]
    lines += [f"others   {other}" for other in topology.others]
    if topology.others:
        lines.append("Their answers are not believed, and saves take longer. `eventjet doctor` says how to end it.")
    if drifts:
        lines.append("What differs was changed by something else; `eventjet init --repair` changes it back.")
    value = {
        "app": app,
        "log": topology.identity,
        "created": [*topology.created, *tables],
        "cursors": dict(topology.cursors),
        "drifts": drifts,
        "faults": wrong,
        "others": list(topology.others),
        "repaired": healed,
        "undeclared": left,
    }
    return Answer(value, "\n".join(lines), ok=not drifts and not wrong)


async def prepare(at: AppTarget, reset: Sequence[str] = ()) -> tuple[Topology, list[str]]:
    """Make what is missing; what is on the server, and the tables it created.

    Raises `Unreachable`, and `TableLost` for a projection that has lost its rows and is not among those to `reset`.
    """
    from eventjet.sql.database import Database
    from eventjet.sql.locations import create_tables
    from eventjet.sql.revisions import reset as begin_anew

    app = at.app()
    chosen = [at.projection(name) for name in dict.fromkeys(reset)]
    where = Database(at.settings.database)
    async with app.connect(at.settings) as jet:
        topology = await jet.init()
    if not app.projections or topology.unknown:
        return topology, []  # without read models no database is needed, and those of another log would be wrong
    await asyncio.to_thread(where.check_sessions)
    with where.reaching_sync():
        made = [table for one in chosen for table in begin_anew(where, one, topology.identity)]
        engine, log = where.sync_engine("eventjet init"), topology.identity
        return topology, made + create_tables(engine, app.projections.values(), log=log)


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
    lines += [f"added    column {name}" for name in done.columns]
    lines.append(f"eventjet's tables in {where.shown} are at revision {done.after} ({was})")
    Answer({"database": where.shown, **asdict(done)}, "\n".join(lines)).give(as_json=json)


@db.command()
@on_app()
def promote(
    at: AppTarget,
    projection: Annotated[
        str, typer.Argument(metavar="PROJECTION", help="Which one.", autocompletion=names_of("projections"))
    ],
) -> Answer:
    """Give the revision that the app declares the declared table, for readers to see: to go back to an older one.

    The other revision's table goes aside and is kept. Refused while the app's revision lacks events the other has.
    """
    from eventjet.operations.promotion import promote as exchange
    from eventjet.operations.promotion import promoted_told

    resolved = at.projection(projection)
    done = exchange(at.settings, resolved)
    left = list(done.left) if done else []
    value = {"projection": projection, "revision": resolved.revision, "promoted": done is not None, "left": left}
    return Answer(value, promoted_told(resolved, done))


@db.command()
@on_app()
def unused(
    at: AppTarget,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            "--drop", metavar="NAME:REVISION", help="Drop the tables of this one; may be given several times."
        ),
    ] = None,
    drop_runs: Annotated[bool, typer.Option("--drop-runs", help="Remove what killed rebuilds left behind.")] = False,
) -> Answer:
    """List the tables of revisions that the app no longer declares, and what killed rebuilds left; drop what is named.

    Nothing that a worker keeps or that readers see is dropped.
    """
    from eventjet.rebuild.workspace import leftovers, remove_leftovers
    from eventjet.sql.database import Database
    from eventjet.sql.revisions import unused as look

    wanted = [_named(text) for text in drop or []]
    where = Database(at.settings.database)
    with where.reaching_sync():
        dropped = [_drop(at, where, *one) for one in wanted]
        cleared = remove_leftovers(where) if drop_runs else []
        with where.sync_engine("eventjet db").begin() as connection:
            revisions = look(connection, list(at.app().projections.values()), at.app().name)
            runs = leftovers(connection, where)
    value = {"revisions": revisions, "runs": runs, "dropped": dropped, "dropped_runs": cleared}
    return Answer(value, lambda: _print(dropped, cleared, revisions, runs))


def _named(text: str) -> tuple[str, int]:
    named = _NAMED.fullmatch(text)
    if named is None:
        raise UsageError(f"{text!r} is not NAME:REVISION, as in balances:1.")
    return named[1], int(named[2])


def _drop(at: AppTarget, where: Database, name: str, revision: int) -> Unused:
    from eventjet.jetstream.api import delete_consumer
    from eventjet.jetstream.connection import NatsConnection
    from eventjet.nats.endpoint import Endpoint
    from eventjet.sql.revisions import retire

    with where.sync_engine("eventjet db").begin() as connection:
        dropped = retire(connection, name, revision, list(at.app().projections.values()), at.app().name)
    try:
        with NatsConnection.open(Endpoint.of(at.settings).with_name("eventjet db")) as link:
            link.ask(delete_consumer(at.app().name, f"{name}-r{revision}"))
    except (EventjetError, OSError) as error:
        note(f"The durable {name}-r{revision} stays on the server, where it costs next to nothing: {error}")
    return dropped


def _print(dropped: list[Unused], cleared: list[str], revisions: list[Unused], runs: list[str]) -> None:
    for gone in dropped:
        say(f"dropped  {gone.projection}:{gone.revision}: {', '.join(gone.tables) or 'it had no table'}")
    for name in cleared:
        say(f"dropped  {name}, of a rebuild that was killed")
    if revisions:
        rows = [
            (f"{one.projection}:{one.revision}", one.state, ", ".join(one.tables), one.rows, one.position, one.owner)
            for one in revisions
        ]
        print_table(("unused", "state", "table", "rows", "position", "worker"), rows)
    for one in revisions:
        if one.in_use:
            say(f"{one.projection}:{one.revision} cannot be dropped: {one.in_use}")
    for name in runs:
        say(f"unused   {name}, of a rebuild that was killed; the next rebuild removes it, and --drop-runs does")
    if not revisions and not runs:
        say("There is nothing unused.")
