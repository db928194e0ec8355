"""Where the tables of a revision are: as declared, or in a location of their own beside another revision's.

A location of its own is a schema on PostgreSQL, with the declared names in it, and a suffix of the tables' names on
SQLite. Each revision has one, so that one that loses the declared location goes to where it would be looked for.

A revision that finds the declared location held by another one gets its own, and takes the declared one over once it
has caught up. All choices are made under `Dialect.lock_migrations`, so that two revisions never choose the same.
Nothing here moves a table that exists.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, MetaData, Table, inspect, select
from sqlalchemy.exc import CompileError, DBAPIError

from eventjet.errors import LocationTaken, TableLost
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.sql import checkpoint, migrations
from eventjet.sql.checkpoint import DECLARED, RETIRED, UNASSIGNED, Checkpoint, names_of, revisions
from eventjet.sql.database import unusable
from eventjet.sql.dialect import Dialect, Fault, listed
from eventjet.sql.dialects import dialect_of
from eventjet.sql.own_tables import projections
from eventjet.sql.table_differences import column_differences
from eventjet.sql.tables import make_enums, qualified

_TOLD_MAX = 5
"""Columns that one message names."""


def create_tables(
    engine: Engine | Connection, resolved: Iterable[AnyResolved] = (), *, to_rebuild: bool = False, log: str = ""
) -> list[str]:
    """Create what is missing of eventjet's tables and the read models'; return the names made.

    A revision that finds its table held by another one gets one of its own. Nothing else changes. Raises `TableLost`
    for a revision that has begun in other tables than are there, and `Unreachable` for tables that are not as declared,
    unless it is `to_rebuild` them, and as `check_owner`.
    """
    if isinstance(engine, Engine):
        with engine.begin() as connection:
            return create_tables(connection, resolved, to_rebuild=to_rebuild, log=log)
    made = list(migrations.upgrade(engine).tables)
    for one in resolved:
        made += prepare(engine, one, to_rebuild=to_rebuild, log=log)
    return made


def check_tables(connection: Connection, resolved: Iterable[AnyResolved], log: str = "") -> None:
    """Raise `Unreachable` when a table is not there or not as declared, in what values it takes, or eventjet's are old.

    Raises as `check`, too.
    """
    migrations.check(connection)
    for one in resolved:
        tables = check(connection, one, log)
        check_columns(connection, one, tables)


def check_owner(connection: Connection, name: str, app: str, log: str = "") -> None:
    """Raise `Unreachable` where the checkpoints of a projection of this name belong to another app.

    A checkpoint of an older eventjet names no app. Its log proves whose it is: it is this app's where that is the app's
    `log`, as the caller knows it, or one that a checkpoint names together with the app.
    """
    row = projections.c
    own = select(row.log).where(row.app == app, row.log != "")
    unproven = (row.app == "") & row.log.not_in(("", log)) & row.log.not_in(own)
    of_another = row.app.not_in(("", app)) | unproven
    others = select(row.app, row.log).where(row.name == name, of_another).order_by(row.app.desc())
    other = connection.execute(others.limit(1)).one_or_none() if app else None
    if other is None:
        return
    renamed = f"update eventjet_projection set app = '{app}' where app = '{other.app}'"  # noqa: S608 - for a person
    if not other.app:
        whose = f"the app {app!r} has the log {log}: it belongs to another app"
        if not log:
            whose = f"nothing in the database says that this is the log of the app {app!r}"
        raise unusable(
            connection,
            f"its read model {name!r} was made from the log {other.log} by an older eventjet, and {whose}",
            f"Run the worker of the app that made it, which notes whose it is. Where that is another app, give the "
            f"projection another name and another table, or {app!r} a database of its own. If it is {app!r} itself, "
            f"and its log was replaced or the projection is paused, run: {renamed} and name = '{name}'. Where the log "
            f"was replaced, `eventjet rebuild {name}` then.",
        )
    raise unusable(
        connection,
        f"its read model {name!r} belongs to the app {other.app!r}, and this is the app {app!r}",
        f"Give the projection another name and another table, or {app!r} a database of its own. If {other.app!r} is "
        f"called {app!r} now, stop its workers and run: {renamed}.",
    )


def prepare(connection: Connection, resolved: AnyResolved, *, to_rebuild: bool = False, log: str = "") -> list[str]:
    """Give a revision its checkpoint, location and tables where they are missing; return the names of the tables made.

    The caller holds `Dialect.lock_migrations`. Raises as `create_tables`.
    """
    check_owner(connection, resolved.name, resolved.app, log)
    dialect = dialect_of(connection)
    held = checkpoint.read(connection, resolved.name, resolved.revision)
    if held is None or not held.has_begun:
        _check_free(connection, resolved)
    if held is None or not _is_assigned(held):
        held = _give(connection, resolved, log)
    tables = located_tables(resolved, held.location, dialect)
    missing: list[Table] = []
    if held.has_begun:
        # An empty table in the place of one that is lost would pass for it.
        if not to_rebuild:
            check_identity(connection, held)
    else:
        missing = [table for table in tables if not inspect(connection).has_table(table.name, schema=table.schema)]
    for schema in {table.schema for table in missing if table.schema is not None}:
        if not inspect(connection).has_schema(schema):
            remedy = "There are none here: leave it out of the Table."
            if dialect.has_schemas:
                remedy = f"Run: create schema {qualified(None, schema)}. Or leave it out of the Table."
            reason = f"the schema {schema!r}, which projection {resolved.name!r} declares for its table, is not in it"
            raise unusable(connection, reason, remedy)
    for table in missing:
        with making(connection, resolved.name, [table]):
            make_enums(connection, [table])
            table.create(connection)
    check_columns(connection, resolved, tables, to_rebuild=to_rebuild)
    return [table.fullname for table in missing]


@contextmanager
def making(database: Connection | Engine, name: str, tables: Sequence[Table]) -> Generator[None]:
    """Raise `Unreachable` for tables of a projection that the database does not make as they are declared.

    What says nothing about the declaration, a lock or a lost connection or a missing right, is raised as it is.
    """
    try:
        yield
    except (DBAPIError, CompileError) as error:
        dialect, cause = dialect_of(database), error
        if isinstance(error, DBAPIError):
            cause = error.orig or error
            others = Fault.TRANSIENT | Fault.LOCKED_OUT | Fault.FORBIDDEN
            if error.connection_invalidated or dialect.faults(error) & others:
                raise
        said = str(cause).strip().partition("\n")[0].rstrip(".")
        raise unusable(
            database,
            f"the table {listed([table.name for table in tables])} of projection {name!r} could not be made as it is "
            f"declared: {said}",
            "Make there what it asks for (say an extension, a type, a collation, a function or a tablespace), or "
            "declare the table otherwise; then run this again.",
        ) from None


def ensure(connection: Connection, resolved: AnyResolved, log: str = "") -> None:
    """Make the checkpoint of a revision that has none and whose declared location is free; raises `LocationTaken`.

    Raises `LocationTaken` for one that could not work in the location it has, and as `check_owner`. A retired one
    stays retired: `prepare` lets it begin anew.
    """
    held = checkpoint.read(connection, resolved.name, resolved.revision)
    if held is not None and (_is_assigned(held) or held.state == RETIRED):
        check_location(resolved, held.location, dialect_of(connection))
        return
    dialect_of(connection).tables.lock_migrations(connection)
    held = checkpoint.read(connection, resolved.name, resolved.revision)
    if held is None or not _is_assigned(held):
        _give(connection, resolved, log, may_create=False)


def check(connection: Connection, resolved: AnyResolved, log: str = "") -> list[Table]:
    """The tables of this revision where they are; none where they are lost, which its worker tells.

    Raises `Unreachable` when a worker would not find them, or other ones than declared, and `LocationTaken` when it
    could not work with them where they are. Raises as `check_owner`, too.
    """
    check_owner(connection, resolved.name, resolved.app, log)
    dialect = dialect_of(connection)
    held = checkpoint.read(connection, resolved.name, resolved.revision)
    if held is None or not held.has_begun:
        _check_free(connection, resolved)
    named = f"revision {resolved.revision} of projection {resolved.name!r}"
    if held is not None and held.state == RETIRED:
        raise unusable(connection, f"{named} was retired", "Run `eventjet init` to let it begin anew.")
    if held is None or not _is_assigned(held):
        holder = _holder(connection, resolved)
        if holder is not None:
            check_location(resolved, dialect.own_location(resolved.name, resolved.revision), dialect)
            taken = str(LocationTaken(resolved, holder)).partition(". Run")[0]
            raise unusable(connection, taken, "Run `eventjet init`.")
    elif held.has_begun and held.tables != recorded(resolved):
        was = ", ".join(name for _, name in names_of(held.tables))
        reason = f"the rows of {named} are in {was}, and another table is declared"
        raise unusable(connection, reason, "Raise its revision, or rebuild it.")
    elif held.has_begun:
        try:
            check_identity(connection, held)
        except TableLost:
            return []  # Its worker stops it with that reason, and the others work.
    inspector = inspect(connection)
    tables = located_tables(resolved, held.location if held else DECLARED, dialect)
    for table in tables:
        if not inspector.has_table(table.name, schema=table.schema):
            raise unusable(connection, f"the table {table.fullname!r} is not in it", "Run `eventjet init` once.")
    return tables


def check_columns(
    connection: Connection, resolved: AnyResolved, tables: Sequence[Table], *, to_rebuild: bool = False
) -> None:
    """Raise `Unreachable` when a column that is there would not give back what is declared for it.

    One that is `to_rebuild` is refused for what a rebuild would not mend.
    """
    wrong = [one for one in column_differences(connection, tables) if one.breaks]
    if to_rebuild:
        wrong = [one for one in wrong if one.statement]
    if wrong:
        told = "; ".join(f"{one.what} ({one.cost})" for one in wrong[:_TOLD_MAX])
        more = f"; and {len(wrong) - _TOLD_MAX} more" if len(wrong) > _TOLD_MAX else ""
        reason = f"projection {resolved.name!r} is declared otherwise than its table is: {told}{more}"
        remedy = (
            f"Run `eventjet rebuild {resolved.name}`, which makes the table as it is declared while readers have the "
            "old one, or raise the revision and run `eventjet init`. A table that you migrate yourself: alter it."
        )
        statements = list(dict.fromkeys(one.statement for one in wrong if one.statement))
        if statements:
            remedy = f"Run: {'; '.join(statements)}."
        raise unusable(connection, reason, remedy)


def holders(found: Sequence[Checkpoint], resolved: AnyResolved) -> list[Checkpoint]:
    """Of all checkpoints of a projection, those of other revisions that hold a table this one declares."""
    own = set(names_of(recorded(resolved)))
    return [
        one
        for one in found
        if one.revision != resolved.revision
        and one.state != RETIRED
        and one.location == DECLARED
        and own & set(names_of(one.tables))
    ]


def recorded(resolved: AnyResolved) -> str:
    """The names of its tables as a checkpoint keeps them: JSON, with the schema where one is declared."""
    return json.dumps([table.name if table.schema is None else [table.schema, table.name] for table in resolved.tables])


def located(table: Table, location: str, dialect: Dialect) -> Table:
    """The table of a fold as it is created and read in a location."""
    return _copies([table], location, dialect)[0]


def located_tables(resolved: AnyResolved, location: str, dialect: Dialect) -> list[Table]:
    """The tables of a projection as they are created and read in a location, in an order in which they can be created.

    Raises `LocationTaken` where they cannot be in that location.
    """
    check_location(resolved, location, dialect)
    return _copies(resolved.tables, location, dialect, by_hand=isinstance(resolved, ResolvedSql))


def check_location(resolved: AnyResolved, location: str, dialect: Dialect) -> None:
    """Raise `LocationTaken` where the tables of a projection cannot be in that location."""
    if location != DECLARED and isinstance(resolved, ResolvedSql) and not dialect.relocates_handlers:
        raise LocationTaken(resolved, None)


def _give(connection: Connection, resolved: AnyResolved, log: str, *, may_create: bool = True) -> Checkpoint:
    """Decide on the location and write it into the checkpoint.

    Raises `LocationTaken` when that needs what may not be made, and as `check_owner`.
    """
    check_owner(connection, resolved.name, resolved.app, log)
    _check_free(connection, resolved)
    holder = _holder(connection, resolved)
    dialect = dialect_of(connection)
    location = DECLARED if holder is None else dialect.own_location(resolved.name, resolved.revision)
    check_location(resolved, location, dialect)
    if holder is not None and not may_create:
        raise LocationTaken(resolved, holder)
    if holder is not None:
        # The holder's own location too, so that whoever exchanges them needs no right to create it.
        for revision in (resolved.revision, holder):
            dialect.tables.ensure_location(connection, dialect.own_location(resolved.name, revision))
    checkpoint.ensure(connection, resolved.name, resolved.revision, resolved.app)
    # A revision older than the one that holds the location does not push it away by itself.
    takes_over = holder is not None and holder < resolved.revision
    tables = recorded(resolved)
    return checkpoint.assign(
        connection,
        resolved.name,
        resolved.revision,
        app=resolved.app,
        location=location,
        tables=tables,
        takes_over=takes_over,
    )


def _check_free(connection: Connection, resolved: AnyResolved) -> None:
    """Raise `Unreachable` where a declared table is that of another projection, of this app or another one."""
    dialect = dialect_of(connection)
    own = {dialect.tables.name_in_full(connection, name) for name in names_of(recorded(resolved))}
    for other, _ in checkpoint.read_all(connection):
        if other.name == resolved.name or other.state == RETIRED:
            continue
        shared = [name for name in names_of(other.tables) if dialect.tables.name_in_full(connection, name) in own]
        if shared:
            drop = f"`eventjet db unused --drop {other.name}:{other.revision}` of that app"
            raise unusable(
                connection,
                f"its table {shared[0][1]!r}, which projection {resolved.name!r} declares, belongs to the read model "
                f"{other.name!r}{f' of the app {other.app!r}' if other.app else ''}",
                f"Give {resolved.name!r} a table of another name. If {other.name!r} is not declared any more, {drop} "
                "drops its table; run `eventjet init` then.",
            )


def _holder(connection: Connection, resolved: AnyResolved) -> int | None:
    """The revision that keeps this one out of the declared location."""
    found = holders(revisions(connection, resolved.name), resolved)
    return max((one.revision for one in found), default=None)


def _is_assigned(held: Checkpoint) -> bool:
    return held.tables != UNASSIGNED and held.state != RETIRED


def _copies(tables: Sequence[Table], location: str, dialect: Dialect, *, by_hand: bool = False) -> list[Table]:
    """Copies of declared tables with the types that a database holds exactly, in a `MetaData` of their own."""
    together = MetaData()
    made = [table.to_metadata(together) for table in tables]
    for table, declared in zip(made, tables, strict=True):
        # UNLOGGED, say, which SQLAlchemy does not copy.
        vars(table)["_prefixes"] = vars(declared)["_prefixes"]
        for column in table.columns:
            column.type = dialect.storage_type(column.type)
    for table in made if by_hand else ():
        for check in dialect.exactness_checks(table):
            table.append_constraint(check)
        for key in table.foreign_keys:
            # Resolved by name while the names are still those of the declaration.
            _ = key.column
    if location != DECLARED:
        dialect.relocate(made, location)
    return made


def identities(connection: Connection, tables: str, location: str) -> str:
    """Of tables that are there, as a checkpoint keeps them: JSON of their home and of each table.

    Notes an identity on those that have none, where the database gives none by itself.
    """
    dialect = dialect_of(connection)
    names = names_of(tables)
    found = dialect.tables.find_all(connection, names, location)
    known = [dialect.tables.identity(connection, found[name], make=True) for name in names if name in found]
    return json.dumps([dialect.tables.home(connection), *known])


def are_noted(connection: Connection, held: Checkpoint) -> bool:
    """Whether its tables are known here; if not, it was restored from a dump."""
    home, *known = json.loads(held.identities) or [""]
    return len(known) == len(names_of(held.tables)) and home == dialect_of(connection).tables.home(connection)


def check_identity(connection: Connection, held: Checkpoint) -> None:
    """Raise `TableLost` when a revision has begun and its tables are not those that its checkpoint is true for.

    Nothing is locked: a swap that came in between is seen by the epoch, and looked at once more.
    """
    reason = _lost(connection, held)
    if reason is not None:
        again = checkpoint.read(connection, held.name, held.revision) or held
        reason = reason if again.epoch == held.epoch else _lost(connection, again)
    if reason is not None:
        raise TableLost(held.name, held.revision, reason)


def _lost(connection: Connection, held: Checkpoint) -> str | None:
    if not held.has_begun:
        return None
    dialect = dialect_of(connection)
    names = names_of(held.tables)
    found = dialect.tables.find_all(connection, names, held.location)
    missing = [repr(name[1]) for name in names if name not in found]
    if missing:
        return f"{listed(missing)} is not in the database"
    if not are_noted(connection, held):
        return None
    known = zip(names, json.loads(held.identities)[1:], strict=True)
    strange = [
        repr(name[1]) for name, identity in known if dialect.tables.identity(connection, found[name]) != identity
    ]
    return f"{listed(strange)} is another table than the one its rows were written to" if strange else None
