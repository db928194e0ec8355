"""Which place a revision gets, and its tables there. Nothing here moves a table that exists.

A revision that finds the declared place held by another one gets a place of its own, to take the declared one over when
it has caught up. All choices are made under `migrations.lock`, so that two revisions never choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Inspector, Table, inspect, select, update

from eventjet.errors import ProjectionError, Unreachable
from eventjet.projections import checkpoint, migrations
from eventjet.projections.checkpoint import NEW, RETIRED, Checkpoint
from eventjet.projections.columns import POSTGRESQL
from eventjet.projections.database import shown_of
from eventjet.projections.own_tables import projections
from eventjet.projections.places import DECLARED, UNPLACED, check_place, home, names_of, placed_tables, recorded
from eventjet.projections.places_postgres import ensure_schema
from eventjet.projections.sql import AnyBound


class PlaceTaken(ProjectionError):
    """A revision has no tables yet, and another one holds the declared ones."""

    def __init__(self, bound: AnyBound, holder: int) -> None:
        self.projection = bound.name
        self.revision = bound.revision
        self.holder = holder
        super().__init__(
            f"Revision {bound.revision} of projection {bound.name!r} has no table of its own yet, and revision "
            f"{holder} holds {', '.join(repr(table.name) for table in bound.tables)}. "
            "Run `eventjet init`: it makes one, to build beside the other."
        )


def prepare(connection: Connection, bound: AnyBound) -> list[str]:
    """Give a revision its checkpoint, its place and its tables where they are missing; return the names of tables made.

    The caller holds `migrations.lock`.
    """
    dialect = connection.dialect.name
    held = checkpoint.read(connection, bound.name, bound.revision)
    if held is None or not _is_placed(held):
        held = _give(connection, bound, held)
    elif _begun(held) and held.tables != recorded(bound):
        return []  # `check` says what is to be done about it.
    made: list[str] = []
    for table in placed_tables(bound, held.place, dialect):
        if not inspect(connection).has_table(table.name, schema=table.schema):
            table.create(connection)
            made.append(table.fullname)
    return made


def ensure(connection: Connection, bound: AnyBound) -> None:
    """Make the checkpoint of a revision that has none and whose declared place is free; raises `PlaceTaken`.

    Raises `NamedByHandlers` for one that could not work in the place it has. A retired one stays retired: `prepare`
    lets it begin anew.
    """
    held = checkpoint.read(connection, bound.name, bound.revision)
    if held is not None and (_is_placed(held) or held.state == RETIRED):
        check_place(bound, held.place, connection.dialect.name)
        return
    migrations.lock(connection)
    held = checkpoint.read(connection, bound.name, bound.revision)
    if held is None or not _is_placed(held):
        _give(connection, bound, held, may_create=False)


def check(connection: Connection, bound: AnyBound) -> None:
    """Raise `Unreachable` when a worker of this revision would not find its tables, or other ones than declared.

    Raises `NamedByHandlers` when it could not work with them where they are.
    """
    dialect = connection.dialect.name
    held = checkpoint.read(connection, bound.name, bound.revision)
    shown = f"The database {shown_of(connection)}"
    named = f"revision {bound.revision} of projection {bound.name!r}"
    if held is not None and held.state == RETIRED:
        raise Unreachable(shown, f"{named} was retired", "Run `eventjet init` to let it begin anew.")
    if held is None or not _is_placed(held):
        holder = _holder(connection, bound, held)
        if holder is not None:
            check_place(bound, home(bound.name, bound.revision, dialect), dialect)
            raise Unreachable(shown, str(PlaceTaken(bound, holder)).partition(". Run")[0], "Run `eventjet init`.")
    elif _begun(held) and held.tables != recorded(bound):
        was = ", ".join(name for _, name in names_of(held.tables))
        remedy = "Raise its revision, or rebuild it."
        raise Unreachable(shown, f"the rows of {named} are in {was}, and another table is declared", remedy)
    found = inspect(connection)
    for table in placed_tables(bound, held.place if held else DECLARED, dialect):
        _check_table(found, table, shown)


def holders(found: Sequence[Checkpoint], bound: AnyBound) -> list[Checkpoint]:
    """Of all checkpoints of a projection, those of other revisions that hold a table this one declares."""
    own = set(names_of(recorded(bound)))
    return [
        one
        for one in found
        if one.revision != bound.revision
        and one.state != RETIRED
        and one.place == DECLARED
        and (own & set(names_of(one.tables)) or (one.tables == UNPLACED and _begun(one)))
    ]


def revisions(connection: Connection, name: str, *, lock: bool = False) -> list[Checkpoint]:
    """The checkpoints of all revisions of a projection, in their order; locked in that order if asked for."""
    query = select(projections).where(projections.c.name == name).order_by(projections.c.revision)
    return [Checkpoint(*row) for row in connection.execute(query.with_for_update() if lock else query)]


def _give(connection: Connection, bound: AnyBound, held: Checkpoint | None, *, may_create: bool = True) -> Checkpoint:
    """Decide on the place and write it into the checkpoint; raises `PlaceTaken` when that needs what may not be made.

    What began under an eventjet without places has the declared one.
    """
    holder = _holder(connection, bound, held)
    place = DECLARED if holder is None else home(bound.name, bound.revision, connection.dialect.name)
    check_place(bound, place, connection.dialect.name)
    if holder is not None and not may_create:
        raise PlaceTaken(bound, holder)
    values: dict[str, Any] = {
        "place": place,
        "tables": recorded(bound),
        # A revision older than the one in place does not push it away by itself.
        "takes_over": holder is not None and holder < bound.revision,
    }
    if held is not None and held.state == RETIRED:
        anew = {"position": 0, "event_id": "", "log": "", "state": NEW, "reason": None, "owner": None, "lease_until": 0}
        values |= {**anew, "epoch": projections.c.epoch + 1}
    if connection.dialect.name == POSTGRESQL and holder is not None:
        # The other's home too, so that whoever exchanges them needs no right to create schemas.
        for revision in (bound.revision, holder):
            ensure_schema(connection, home(bound.name, revision, POSTGRESQL))
    checkpoint.ensure(connection, bound.name, bound.revision)
    row = checkpoint.is_row(bound.name, bound.revision)
    given = connection.execute(update(projections).where(row).values(**values).returning(projections)).one()
    return Checkpoint(*given)


def _holder(connection: Connection, bound: AnyBound, held: Checkpoint | None) -> int | None:
    """The revision that keeps this one out of the declared place."""
    if held is not None and held.state != RETIRED and _begun(held):
        return None
    found = holders(revisions(connection, bound.name), bound)
    return max((one.revision for one in found), default=None)


def _is_placed(held: Checkpoint) -> bool:
    return held.tables != UNPLACED and held.state != RETIRED


def _begun(held: Checkpoint) -> bool:
    return held.position > 0 or held.log != ""


def _check_table(found: Inspector, table: Table, shown: str) -> None:
    if not found.has_table(table.name, schema=table.schema):
        raise Unreachable(shown, f"the table {table.fullname!r} is not in it", "Run `eventjet init` once.")
    present = {column["name"] for column in found.get_columns(table.name, schema=table.schema)}
    missing = [column.name for column in table.columns if column.name not in present]
    if missing:
        reason = f"the table {table.fullname!r} has no column {', '.join(map(repr, missing))}"
        raise Unreachable(shown, reason, "Rebuild the projection, or alter the table.")
