"""`eventjet db …`: eventjet's own tables, and the tables of revisions."""

from __future__ import annotations

from dataclasses import asdict

import typer

from eventjet.cli.target import DatabaseOption, JsonOption, safe_settings

db = typer.Typer(name="db", help="eventjet's own tables, and the tables of revisions.", no_args_is_help=True)


@db.command()
def upgrade(json: JsonOption = False, database: DatabaseOption = None) -> None:
    """Bring eventjet's own tables to what this version needs; an application's tables are not looked at."""
    from eventjet.cli.terminal import print_json, say
    from eventjet.projections.database import Database
    from eventjet.projections.migrations import upgrade as migrate

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
