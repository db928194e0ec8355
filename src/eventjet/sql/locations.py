"""Locations of tables: a revision's tables are where they are declared, or in the revision's own location.

A revision's own location is a schema on PostgreSQL, with the declared names in it, and a suffix of the tables' names on
SQLite. Each revision has its own, to which its tables move when it loses the declared location.

Where another revision has the declared location, a new revision gets its own, and takes the declared one over once it
has caught up. Locations are chosen under `Dialect.lock_migrations`, so that two revisions never choose the same.
Nothing here moves a table that exists.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, MetaData, Table, inspect, select
from sqlalchemy.exc import CompileError, DBAPIError

from eventjet.domain.position import RETIRED
from eventjet.errors import LocationTaken, TableLost
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.sql import checkpoint, migrations
from eventjet.sql.checkpoint import DECLARED, UNASSIGNED, Checkpoint, names_of, revisions
from eventjet.sql.database import dialect_of, unusable
from eventjet.sql.dialect import Dialect, Fault, make_enums, qualified
from eventjet.sql.own_tables import projections
from eventjet.sql.table_differences import column_differences
from eventjet.text import listed

_LISTED_MAX = 5
"""The most columns that one message names."""


def create_tables(
    engine: Engine | Connection, resolved: Iterable[AnyResolved] = (), *, to_rebuild: bool = False, log: str = ""
) -> list[str]:
    """Create the missing tables of eventjet and of the read models; return the names of the tables made.

    A revision whose declared table another revision has gets a table of its own. Nothing else changes. Raises
    `TableLost` for a revision whose tables are not those in which it began, and `Unreachable` for tables that are not
    as declared; a caller that is about to rebuild them (`to_rebuild`) gets neither for what a rebuild mends. Raises as
    `check_owner`, too.
    """
    if isinstance(engine, Engine):
        with engine.begin() as connection:
            return create_tables(connection, resolved, to_rebuild=to_rebuild, log=log)
    created = list(migrations.upgrade(engine).tables)
    for projection in resolved:
        created += prepare(engine, projection, to_rebuild=to_rebuild, log=log)
    return created


def check_tables(connection: Connection, resolved: Iterable[AnyResolved], log: str = "") -> None:
    """Raise `Unreachable` for missing tables, columns that lose values, or old tables of eventjet, and as `check`."""
    migrations.check(connection)
    for projection in resolved:
        tables = check(connection, projection, log)
        check_columns(connection, projection, tables)


def check_owner(connection: Connection, name: str, app: str, log: str = "") -> None:
    """Raise `Unreachable` where the checkpoints of a projection of this name belong to another app.

    A checkpoint of an older eventjet names no app. It belongs to this app where its log is the app's `log`, as the
    caller knows it, or a log that another checkpoint names together with this app.
    """
    row = projections.c
    own_logs = select(row.log).where(row.app == app, row.log != "")
    unproven = (row.app == "") & row.log.not_in(("", log)) & row.log.not_in(own_logs)
    of_another = row.app.not_in(("", app)) | unproven
    query = select(row.app, row.log).where(row.name == name, of_another).order_by(row.app.desc())
    foreign = connection.execute(query.limit(1)).one_or_none() if app else None
    if foreign is None:
        return
    renamed = f"update eventjet_projection set app = '{app}' where app = '{foreign.app}'"  # noqa: S608 - for a person
    if not foreign.app:
        reason = f"the app {app!r} has the log {log}: it belongs to another app"
        if not log:
            reason = f"nothing in the database says that this is the log of the app {app!r}"
        raise unusable(
            connection,
            f"its read model {name!r} was made from the log {foreign.log} by an older eventjet, and {reason}",
            f"Run the worker of the app that made it, which notes whose it is. Where that is another app, give the "
            f"projection another name and another table, or {app!r} a database of its own. If it is {app!r} itself, "
            f"and its log was replaced or the projection is paused, run: {renamed} and name = '{name}'. Where the log "
            f"was replaced, `eventjet rebuild {name}` then.",
        )
    raise unusable(
        connection,
        f"its read model {name!r} belongs to the app {foreign.app!r}, and this is the app {app!r}",
        f"Give the projection another name and another table, or {app!r} a database of its own. If {foreign.app!r} is "
        f"called {app!r} now, stop its workers and run: {renamed}.",
    )


def prepare(connection: Connection, resolved: AnyResolved, *, to_rebuild: bool = False, log: str = "") -> list[str]:
    """Give a revision its checkpoint, location and tables where they are missing; return the names of the tables made.

    The caller must have called `Dialect.lock_migrations`. Raises as `create_tables`.
    """
    dialect = dialect_of(connection)
    current = _own_checkpoint(connection, resolved, log)
    if current is None or not _is_assigned(current):
        current = _assign_location(connection, resolved, log)
    tables = located_tables(resolved, current.location, dialect)
    missing: list[Table] = []
    if current.has_begun:
        # Must not be created again: an empty table in the place of a lost one would be mistaken for it.
        if not to_rebuild:
            _check_declared(connection, resolved, current)
            check_identity(connection, current)
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
    """Raise `Unreachable` within the block for tables that the database cannot create as they are declared."""
    try:
        yield
    except (DBAPIError, CompileError) as error:
        dialect, cause = dialect_of(database), error
        if isinstance(error, DBAPIError):
            cause = error.orig or error
            unrelated = Fault.TRANSIENT | Fault.LOCKED_OUT | Fault.FORBIDDEN
            if error.connection_invalidated or dialect.faults(error) & unrelated:
                raise
        message = str(cause).strip().partition("\n")[0].rstrip(".")
        raise unusable(
            database,
            f"the table {listed([table.name for table in tables])} of projection {name!r} could not be made as it is "
            f"declared: {message}",
            "Make there what it asks for (say an extension, a type, a collation, a function or a tablespace), or "
            "declare the table otherwise; then run this again.",
        ) from None


def ensure(connection: Connection, resolved: AnyResolved, log: str = "") -> None:
    """Create the checkpoint of a revision that has none, in the declared location.

    Raises `LocationTaken` where another revision has that location, or where the revision cannot work in the location
    that it has, and raises as `check_owner`. A retired revision stays retired: `prepare` lets it begin anew.
    """
    current = checkpoint.read(connection, resolved.name, resolved.revision)
    if current is not None and (_is_assigned(current) or current.state == RETIRED):
        check_location(resolved, current.location, dialect_of(connection))
        return
    dialect_of(connection).lock_migrations(connection)
    current = checkpoint.read(connection, resolved.name, resolved.revision)
    if current is None or not _is_assigned(current):
        _assign_location(connection, resolved, log, may_create=False)


def check(connection: Connection, resolved: AnyResolved, log: str = "") -> list[Table]:
    """Return the tables of a revision in their location; none where they are lost, which its worker reports.

    Raises `Unreachable` when a worker would not find them, or would find other tables than declared, and
    `LocationTaken` when it could not work with them in their location. Raises as `check_owner`, too.
    """
    dialect = dialect_of(connection)
    current = _own_checkpoint(connection, resolved, log)
    subject = f"revision {resolved.revision} of projection {resolved.name!r}"
    if current is not None and current.state == RETIRED:
        raise unusable(connection, f"{subject} was retired", "Run `eventjet init` to let it begin anew.")
    if current is None or not _is_assigned(current):
        holder = _newest_holder(connection, resolved)
        if holder is not None:
            check_location(resolved, dialect.own_location(resolved.name, resolved.revision), dialect)
            refusal = str(LocationTaken(resolved, holder)).partition(". Run")[0]
            raise unusable(connection, refusal, "Run `eventjet init`.")
    elif current.has_begun:
        _check_declared(connection, resolved, current)
        try:
            check_identity(connection, current)
        except TableLost:
            return []  # Only this projection stops, with that reason: its worker raises the same.
    inspector = inspect(connection)
    tables = located_tables(resolved, current.location if current else DECLARED, dialect)
    for table in tables:
        if not inspector.has_table(table.name, schema=table.schema):
            raise unusable(connection, f"the table {table.fullname!r} is not in it", "Run `eventjet init` once.")
    return tables


def _check_declared(connection: Connection, resolved: AnyResolved, current: Checkpoint) -> None:
    """Raise `Unreachable` where the rows of a revision are in other tables than those that it declares now."""
    if current.tables == recorded(resolved):
        return
    recorded_names, declared_names = (
        ", ".join(name for _, name in names_of(tables)) for tables in (current.tables, recorded(resolved))
    )
    raise unusable(
        connection,
        f"the rows of revision {resolved.revision} of projection {resolved.name!r} are in {recorded_names}, and it "
        f"declares {declared_names}",
        f"Raise its revision, or run `eventjet rebuild {resolved.name}`.",
    )


def _own_checkpoint(connection: Connection, resolved: AnyResolved, log: str) -> Checkpoint | None:
    """Return the checkpoint of a revision; raises `Unreachable` where it, or a table, belongs to something else."""
    check_owner(connection, resolved.name, resolved.app, log)
    current = checkpoint.read(connection, resolved.name, resolved.revision)
    if current is None or not current.has_begun:
        _check_free(connection, resolved)
    return current


def check_columns(
    connection: Connection, resolved: AnyResolved, tables: Sequence[Table], *, to_rebuild: bool = False
) -> None:
    """Raise `Unreachable` for columns that lose declared values; with `to_rebuild`, only if a rebuild keeps them."""
    differences = [
        difference
        for difference in column_differences(connection, tables)
        if difference.breaks and (difference.statement or not to_rebuild)
    ]
    if not differences:
        return
    text = "; ".join(f"{difference.what} ({difference.cost})" for difference in differences[:_LISTED_MAX])
    suffix = f"; and {len(differences) - _LISTED_MAX} more" if len(differences) > _LISTED_MAX else ""
    reason = f"projection {resolved.name!r} is declared otherwise than its table is: {text}{suffix}"
    remedy = (
        f"Run `eventjet rebuild {resolved.name}`, which makes the table as it is declared while readers have the "
        "old one, or raise the revision and run `eventjet init`. A table that you migrate yourself: alter it."
    )
    statements = dict.fromkeys(difference.statement for difference in differences if difference.statement)
    if statements:
        remedy = f"Run: {'; '.join(statements)}."
    raise unusable(connection, reason, remedy)


def holders(checkpoints: Sequence[Checkpoint], resolved: AnyResolved) -> list[Checkpoint]:
    """Return the checkpoints of other revisions that have, in the declared location, a table that this one declares."""
    own_names = set(names_of(recorded(resolved)))
    return [
        candidate
        for candidate in checkpoints
        if candidate.revision != resolved.revision
        and candidate.state != RETIRED
        and candidate.location == DECLARED
        and own_names & set(names_of(candidate.tables))
    ]


def recorded(resolved: AnyResolved) -> str:
    """Return the names of the declared tables as a checkpoint stores them: JSON, with the schema if one is declared."""
    return json.dumps([table.name if table.schema is None else [table.schema, table.name] for table in resolved.tables])


def located(table: Table, location: str, dialect: Dialect) -> Table:
    """Return the table of a fold as it is created and read in a location."""
    return _copies([table], location, dialect)[0]


def located_tables(resolved: AnyResolved, location: str, dialect: Dialect) -> list[Table]:
    """Return a projection's tables as they are in a location, in an order to create them; raises `LocationTaken`."""
    check_location(resolved, location, dialect)
    return _copies(resolved.tables, location, dialect, has_handlers=isinstance(resolved, ResolvedSql))


def check_location(resolved: AnyResolved, location: str, dialect: Dialect) -> None:
    """Raise `LocationTaken` where the tables of a projection cannot be in that location."""
    if location != DECLARED and isinstance(resolved, ResolvedSql) and not dialect.relocates_handlers:
        raise LocationTaken(resolved, None)


def _assign_location(connection: Connection, resolved: AnyResolved, log: str, *, may_create: bool = True) -> Checkpoint:
    """Choose a revision's location for its checkpoint; raises `LocationTaken`, and as `check_owner`."""
    check_owner(connection, resolved.name, resolved.app, log)
    _check_free(connection, resolved)
    holder = _newest_holder(connection, resolved)
    dialect = dialect_of(connection)
    location = DECLARED if holder is None else dialect.own_location(resolved.name, resolved.revision)
    check_location(resolved, location, dialect)
    if holder is not None:
        if not may_create:
            raise LocationTaken(resolved, holder)
        # Also the own location of the other revision, so that a worker that exchanges them needs no right to create it.
        for revision in (resolved.revision, holder):
            dialect.ensure_location(connection, dialect.own_location(resolved.name, revision))
    checkpoint.ensure(connection, resolved.name, resolved.revision, resolved.app)
    return checkpoint.assign(
        connection,
        resolved.name,
        resolved.revision,
        app=resolved.app,
        location=location,
        tables=recorded(resolved),
        # An older revision does not displace a newer one by itself.
        takes_over=holder is not None and holder < resolved.revision,
    )


def _check_free(connection: Connection, resolved: AnyResolved) -> None:
    """Raise `Unreachable` where a declared table belongs to another projection, of this app or another app."""
    dialect = dialect_of(connection)
    own_names = {dialect.name_in_full(connection, name) for name in names_of(recorded(resolved))}
    for row, _ in checkpoint.read_all(connection):
        if row.name == resolved.name or row.state == RETIRED:
            continue
        shared = [name for name in names_of(row.tables) if dialect.name_in_full(connection, name) in own_names]
        if shared:
            drop = f"`eventjet db unused --drop {row.name}:{row.revision}` of that app"
            raise unusable(
                connection,
                f"its table {shared[0][1]!r}, which projection {resolved.name!r} declares, belongs to the read model "
                f"{row.name!r}{f' of the app {row.app!r}' if row.app else ''}",
                f"Give {resolved.name!r} a table of another name. If {row.name!r} is not declared any more, {drop} "
                "drops its table; run `eventjet init` then.",
            )


def _newest_holder(connection: Connection, resolved: AnyResolved) -> int | None:
    """Return the newest revision that keeps this one out of the declared location; None when there is none."""
    checkpoints = holders(revisions(connection, resolved.name), resolved)
    return max((holder.revision for holder in checkpoints), default=None)


def _is_assigned(row: Checkpoint) -> bool:
    return row.tables != UNASSIGNED and row.state != RETIRED


def _copies(tables: Sequence[Table], location: str, dialect: Dialect, *, has_handlers: bool = False) -> list[Table]:
    """Copy declared tables into a `MetaData` of their own, with types that the database stores exactly."""
    metadata = MetaData()
    copies = [table.to_metadata(metadata) for table in tables]
    for table, declared in zip(copies, tables, strict=True):
        # SQLAlchemy does not copy prefixes such as UNLOGGED.
        vars(table)["_prefixes"] = vars(declared)["_prefixes"]
        for column in table.columns:
            column.type = dialect.storage_type(column)
    for table in copies if has_handlers else ():
        for check in dialect.exactness_checks(table):
            table.append_constraint(check)
        for key in table.foreign_keys:
            # Resolves the foreign key by name, while the tables still have their declared names.
            _ = key.column
    if location != DECLARED:
        dialect.relocate(copies, location)
    return copies


def identities(connection: Connection, tables: str, location: str) -> str:
    """Return the identities of existing tables, made where missing, as JSON: of their home, and of each table."""
    dialect = dialect_of(connection)
    names = names_of(tables)
    existing = dialect.find_tables(connection, names, location)
    table_ids = [dialect.identity(connection, existing[name], make=True) for name in names if name in existing]
    return json.dumps([dialect.home(connection), *table_ids])


def are_noted(connection: Connection, row: Checkpoint) -> bool:
    """Whether the checkpoint knows the identities of its tables in this database; not after a restore from a dump."""
    home, *table_ids = json.loads(row.identities) or [""]
    return len(table_ids) == len(names_of(row.tables)) and home == dialect_of(connection).home(connection)


def check_identity(connection: Connection, row: Checkpoint) -> None:
    """Raise `TableLost` when a revision has begun and its tables are not those to which its checkpoint belongs.

    Locks nothing: if a swap came in between, which raises the epoch, the tables are compared once more.
    """
    reason = _loss_reason(connection, row)
    if reason is not None:
        current = checkpoint.read(connection, row.name, row.revision) or row
        reason = reason if current.epoch == row.epoch else _loss_reason(connection, current)
    if reason is not None:
        raise TableLost(row.name, row.revision, reason)


def _loss_reason(connection: Connection, row: Checkpoint) -> str | None:
    if not row.has_begun:
        return None
    dialect = dialect_of(connection)
    names = names_of(row.tables)
    existing = dialect.find_tables(connection, names, row.location)
    missing = [repr(name[1]) for name in names if name not in existing]
    if missing:
        return f"{listed(missing)} is not in the database"
    if not are_noted(connection, row):
        return None
    expected = zip(names, json.loads(row.identities)[1:], strict=True)
    replaced = [
        repr(name[1]) for name, identity in expected if dialect.identity(connection, existing[name]) != identity
    ]
    return f"{listed(replaced)} is another table than the one its rows were written to" if replaced else None
