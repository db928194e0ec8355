"""`eventjet db …`: eventjet's own tables, and the tables of revisions."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from eventjet.cli.target import AppTarget, DatabaseOption, JsonOption, on_app, safe_settings
from eventjet.cli.terminal import note, print_json, print_table, say
from eventjet.errors import EventjetError, UsageError

if TYPE_CHECKING:
    from eventjet.sql.database import Database
    from eventjet.sql.retired_tables import Unused

db = typer.Typer(name="db", help="eventjet's own tables, and the tables of revisions.", no_args_is_help=True)

_NAMED = re.compile(r"([a-z][a-z0-9_]*):([0-9]{1,9})")

DropOption = Annotated[
    list[str] | None,
    typer.Option("--drop", metavar="NAME:REVISION", help="Drop the tables of this one; may be given several times."),
]
DropRunsOption = Annotated[bool, typer.Option("--drop-runs", help="Remove what killed rebuilds left behind.")]


@db.command()
def upgrade(json: JsonOption = False, database: DatabaseOption = None) -> None:
    """Bring eventjet's own tables to what this version needs; an application's tables are not looked at."""
    from eventjet.sql.database import Database
    from eventjet.sql.migrations import upgrade as migrate

    where = Database(safe_settings(None, database).database)
    with where.reaching_sync(), where.sync_engine("eventjet db").begin() as connection:
        done = migrate(connection)
    if json:
        print_json({"database": where.shown, **asdict(done)})
        return
    for name in done.tables:
        say(f"created  table {name}")
    for name in done.columns:
        say(f"added    column {name}")
    was = "was there already" if done.before == done.after else f"before: {done.before or 'none'}"
    say(f"eventjet's tables in {where.shown} are at revision {done.after} ({was})")


@db.command()
@on_app()
def promote(
    at: AppTarget,
    projection: Annotated[str, typer.Argument(help="Which one.")],
    json: JsonOption = False,
) -> None:
    """Give the revision that the app declares the declared table, for readers to see: to go back to an older one.

    The other revision's table goes aside and is kept. Refused while the app's revision lacks events the other has.
    """
    from eventjet.sql.database import Database
    from eventjet.sql.promotion import promote as exchange

    (name,) = at.chosen([projection])
    resolved = at.app().projections[name]
    where = Database(at.settings.database)
    with where.reaching_sync():
        done = exchange(where, resolved)
    tables = ("the table " if len(resolved.tables) == 1 else "the tables ") + ", ".join(
        one.name for one in resolved.tables
    )
    left = list(done.left) if done else []
    if json:
        print_json({"projection": name, "revision": resolved.revision, "promoted": done is not None, "left": left})
    elif done is None:
        say(f"{name} revision {resolved.revision} has {tables} already")
    else:
        aside = ", ".join(f"revision {one}" for one in left) or "no revision"
        say(f"{name} revision {resolved.revision} has {tables}; {aside} went aside")


@db.command()
@on_app()
def unused(
    at: AppTarget,
    drop: DropOption = None,
    drop_runs: DropRunsOption = False,
    json: JsonOption = False,
) -> None:
    """List the tables of revisions that the app no longer declares, and what killed rebuilds left; drop what is named.

    Nothing that a worker keeps or that readers see is dropped.
    """
    from eventjet.rebuild.orphaned_runs import orphaned, remove_orphaned
    from eventjet.sql.database import Database
    from eventjet.sql.retired_tables import unused as look

    wanted = [_named(one) for one in drop or []]
    where = Database(at.settings.database)
    with where.reaching_sync():
        dropped = [_drop(at, where, *one) for one in wanted]
        cleared = remove_orphaned(where) if drop_runs else []
        with where.sync_engine("eventjet db").begin() as connection:
            found = look(connection, list(at.app().projections.values()))
            left = orphaned(connection, where)
    if json:
        gone = {"dropped": [asdict(one) for one in dropped], "dropped_runs": cleared}
        print_json({"revisions": [asdict(one) for one in found], "runs": left, **gone})
    else:
        _print(dropped, cleared, found, left)


def _named(given: str) -> tuple[str, int]:
    found = _NAMED.fullmatch(given)
    if found is None:
        raise UsageError(f"{given!r} is not NAME:REVISION, as in balances:1.")
    return found[1], int(found[2])


def _drop(at: AppTarget, where: Database, name: str, revision: int) -> Unused:
    from eventjet.nats.api import delete_consumer
    from eventjet.nats.connection import NatsConnection
    from eventjet.nats.endpoint import Endpoint
    from eventjet.sql.retired_tables import retire

    with where.sync_engine("eventjet db").begin() as connection:
        dropped = retire(connection, name, revision, list(at.app().projections.values()))
    try:
        with NatsConnection.open(Endpoint.of(at.settings).with_name("eventjet db")) as link:
            link.ask(delete_consumer(at.app().name, f"{name}-r{revision}"))
    except (EventjetError, OSError) as error:
        note(f"The durable {name}-r{revision} stays on the server, where it costs next to nothing: {error}")
    return dropped


def _print(dropped: list[Unused], cleared: list[str], found: list[Unused], left: list[str]) -> None:
    for one in dropped:
        say(f"dropped  {one.projection}:{one.revision}: {', '.join(one.tables) or 'it had no table'}")
    for name in cleared:
        say(f"dropped  {name}, of a rebuild that was killed")
    if found:
        rows = [
            (f"{one.projection}:{one.revision}", one.state, ", ".join(one.tables), one.rows, one.position, one.owner)
            for one in found
        ]
        print_table(("unused", "state", "table", "rows", "position", "worker"), rows)
    for one in found:
        if one.in_use:
            say(f"{one.projection}:{one.revision} cannot be dropped: {one.in_use}")
    for name in left:
        say(f"unused   {name}, of a rebuild that was killed; the next rebuild removes it, and --drop-runs does")
    if not found and not left:
        say("There is nothing unused.")
