"""`Shadow` is a read model that is made beside the live one, and takes its place in a swap."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeAlias, TypeVar

from sqlalchemy import Column, Connection, MetaData, Table, delete, func, insert, select

from eventjet import failpoints
from eventjet.domain.position import BUILDING, RETIRED
from eventjet.domain.quarantined import DECIDED_RESOLUTIONS, RETRIED
from eventjet.errors import RebuildOvertaken, RebuildRefused
from eventjet.projections.by_state import STATE_TABLE
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.rebuild import runs
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.runs import PURPOSE, Target
from eventjet.rebuild.workspace import workspace_of
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import DECLARED, Checkpoint, names_of, revisions
from eventjet.sql.database import Database, dialect_of
from eventjet.sql.dialect import TableName, TableRef, qualified, verbatim
from eventjet.sql.locations import (
    check_identity,
    check_owner,
    create_tables,
    identities,
    located_tables,
    making,
    recorded,
)
from eventjet.sql.own_tables import projections, quarantine
from eventjet.sql.quarantine import of
from eventjet.sql.table_moves import UNDECLARED_REMEDY, NotNow, dependents, lock_as_workers, undeclared
from eventjet.text import listed

TAIL_MAX = 5_000
"""The most events that a shadow writes while live tables are locked; one further behind catches up first."""

EPOCH = -1
"""The epoch of a shadow's checkpoint. No worker ever has it, so the shadow's writer can never write to the live table:
if the shadow were gone, the live checkpoint would fence it."""

R_co = TypeVar("R_co", bound=AnyResolved, covariant=True)


Pair: TypeAlias = tuple[Table, Table]
"""(copy of the live table, table made from the log)."""


class Shadow(Generic[R_co]):
    """The tables that one run makes for one projection: those of a fold, or several of an SQL projection.

    A fold has one table, and with `by_state` a table of states beside it. Every method blocks. The tables of a fold
    have no indexes (on PostgreSQL, no constraints either) while they are loaded, and get their checkpoint when they are
    caught up. The tables of an SQL projection are written by handlers from the first event on, so they are complete
    from the beginning, with a checkpoint at 0.
    """

    def __init__(self, database: Database, resolved: R_co, log: str) -> None:
        """Name a new run; `log` is the identity of the log from which the shadow will be made."""
        self.resolved: R_co = resolved
        self._log = log
        self.run = runs.new_run()
        self.workspace = workspace_of(database, self.run)
        self.tables = located_tables(resolved, self.workspace.location, database.dialect)
        """The shadow's tables, named as connections of the workspace's `engine` see them."""
        self._quarantine = quarantine.to_metadata(MetaData(), schema=self.workspace.schema)
        """The shadow's quarantine table, named as connections to the live database see it."""
        self._names = names_of(recorded(resolved))
        self._is_sql = isinstance(resolved, ResolvedSql)
        self._resolutions: Mapping[int, str] = {}
        self._decisions: frozenset[tuple[int, str]] | None = None
        """The decisions in the live quarantine when it was copied; None before."""

    @property
    def target(self) -> Target:
        """The table into which parts are loaded, with the table of states beside it."""
        (name, columns), *states = [
            (table.name, tuple(column.name for column in table.columns)) for table in self.tables
        ]
        return Target(
            run=self.run,
            projection=self.resolved.name,
            revision=self.resolved.revision,
            database=self.workspace.database,
            table=name,
            columns=columns,
            resolutions=self._resolutions,
            state_table=next(iter(states), None),
        )

    def create(self, *, to_swap: bool = True) -> None:
        """Announce the run and create the empty shadow; raises the errors of `check_swappable` if it is `to_swap`."""
        with self.workspace.live.begin() as connection:
            create_tables(connection, [self.resolved] if to_swap else (), to_rebuild=True, log=self._log)
        with self.workspace.live.begin() as connection:
            check_owner(connection, self.resolved.name, self.resolved.app, self._log)
            if to_swap:
                self.check_swappable(connection)
            runs.open_run(connection, self.run, self.resolved)
        failpoints.reach("rebuild.announced")
        with making(self.workspace.live, self.resolved.name, self.tables):
            self.workspace.create(self.tables, bare=not self._is_sql)
        if self._is_sql:
            with self.workspace.engine().begin() as connection:
                self.begin(connection)

    def begin(self, connection: Connection, position: int = 0, event_id: str = "", log: str = "") -> None:
        """Write the shadow's checkpoint, through a connection of the workspace's `engine`."""
        values = {"position": position, "event_id": event_id, "log": log, "epoch": EPOCH, "state": BUILDING}
        values |= {"name": self.resolved.name, "revision": self.resolved.revision, "generation": 0}
        values |= {"app": self.resolved.app, "code": self.resolved.code}
        connection.execute(insert(projections).values(values))

    def check_swappable(self, connection: Connection) -> None:
        """Raise `RebuildRefused` when a swap would lose something of the live tables; nothing is changed."""
        check_owner(connection, self.resolved.name, self.resolved.app, self._log)
        dialect = dialect_of(connection)
        tables = () if self._is_sql else self.resolved.tables
        keys = [key for table in tables for key in table.foreign_key_constraints]
        if keys:
            # A fold's table is loaded in the run's schema, where the table that a foreign key refers to is missing.
            foreign_keys = listed([f"the foreign key to {key.referred_table.name}" for key in keys])
            raise RebuildRefused(
                self.resolved.name,
                f"its table declares {foreign_keys}, which the table that is loaded could not have",
                "Take it out of the declaration, or make the projection an `SqlProjection`.",
            )
        live = checkpoint.read(connection, self.resolved.name, self.resolved.revision)
        live_tables = dialect.find_tables(connection, self._names, live.location if live else DECLARED)
        with ExitStack() as stack:
            # Without live tables there is nothing to compare; the types that a model table needs may be missing, too.
            with making(connection, self.resolved.name, self.tables):
                model = stack.enter_context(dialect.modelled(connection, self.tables)) if live_tables else connection
            new_tables = dialect.find_tables(model, self._names, self.workspace.location) if live_tables else {}
            self._check_nothing_lost(connection, live_tables, model, new_tables)

    def take_over_quarantine(self) -> None:
        """Copy the live quarantine to the shadow and its target; `swap` refuses if decisions changed since."""
        with self.workspace.snapshot() as connection:
            self._copy_quarantine(connection, quarantine, self._quarantine)
            self._resolutions, self._decisions = self._live_quarantine(connection)

    def copy_live(self) -> Checkpoint | None:
        """Copy the live rows and resolutions in one snapshot, and return its live checkpoint; None without any.

        Raises `TableLost` where the checkpoint has a table that is not in the database.
        """
        with self.workspace.snapshot() as connection:
            live = self._checkpoint(connection)
            if live is None or not live.log:
                return None
            live_tables = dialect_of(connection).find_tables(connection, self._names, live.location)
            if len(live_tables) < len(self._names):
                if live.state != RETIRED:
                    check_identity(connection, live)
                return None
            for name, (live_copy, shadow_table) in zip(self._names, self.pairs(), strict=True):
                columns = ", ".join(qualified(None, column.name) for column in shadow_table.columns)
                target = qualified(self.workspace.schema, live_copy.name)
                create = f"create {self.workspace.copied_as} {target}"
                connection.execute(verbatim(f"{create} as select {columns} from {live_tables[name].quoted()}"))
            if isinstance(self.resolved, ResolvedProjection) and self.resolved.quarantines:
                self._resolutions, _ = self._live_quarantine(connection)
            return live

    def note_proof(self, copied: Checkpoint) -> None:
        """Record in the live checkpoint that the current code makes the copied rows, unless rows may have changed."""
        if copied.code != self.resolved.code and self.resolved.code:
            with self.workspace.live.begin() as connection:
                checkpoint.note_proof(connection, copied, self.resolved.code)

    def pairs(self) -> list[Pair]:
        """Return each table that `copy_live` makes, together with the shadow's table."""
        return [
            (_without_constraints(table, f"eventjet_live_{number}"), table) for number, table in enumerate(self.tables)
        ]

    def count(self) -> int:
        """Return the number of rows in all tables of the shadow."""
        with self.workspace.engine().begin() as connection:
            return sum(connection.scalar(select(func.count()).select_from(table)) or 0 for table in self.tables)

    def check_confined(self, connection: Connection) -> None:
        """Raise `RebuildRefused` when the open transaction of a handler has written outside the shadow."""
        written = self.workspace.outside_writes(connection)
        if written:
            raise RebuildRefused(
                self.resolved.name,
                f"its handlers write to {', '.join(written)}, which it does not declare",
                "Declare these tables, or leave them alone, and name no schema. What was tried is undone.",
            )

    def finish(self) -> None:
        """Make the tables durable, with keys and indexes; raises `RowsRefused` for rows that break one."""
        self.workspace.finish(self.resolved.name, self.tables, bare=not self._is_sql)

    def live_checkpoint(self) -> Checkpoint | None:
        """Return the live checkpoint; None when there is none."""
        with self.workspace.live.begin() as connection:
            return self._checkpoint(connection)

    def swap(self, log: str, tail: Callable[[int], None] | None) -> Checkpoint:
        """Swap the shadow in for the live tables, and return the live checkpoint after the swap.

        `tail` catches the shadow up to a position, so that it is at least as far as the live read model. Without
        `tail`, the live read model was made from another past, and its position does not matter. Until the last step,
        the locks keep writers out and let readers in. Raises `NotNow` when nothing was changed and a new try may
        succeed, `RebuildOvertaken` and `RebuildRefused`.
        """
        with self.workspace.swapping() as connection:
            runs.renew(connection, self.run)
            unlocked_checkpoint = self._checkpoint(connection)
            assert unlocked_checkpoint is not None, "made by `create`"
            exchange = self.workspace.exchange(connection, self.resolved, unlocked_checkpoint.location)
            locked_checkpoints = lock_as_workers(
                connection,
                self.resolved,
                exchange.lock_leaving,
                # The other revisions are locked as well: one of them may be about to take the declared location.
                lambda: revisions(connection, self.resolved.name, lock=True),
            )
            live = next(
                locked_checkpoint
                for locked_checkpoint in locked_checkpoints
                if locked_checkpoint.revision == self.resolved.revision
            )
            check_not_retired(self.resolved, live)
            if live.location != unlocked_checkpoint.location:
                raise NotNow("its tables were moved meanwhile")
            exchange.look_again()
            shadow_checkpoint = self._catch_up(live.position, tail)
            self.workspace.attach(connection)
            self._replace_live_quarantine(connection, None if tail is None else self._decisions)
            # The check is repeated now that the tables are locked. SQLite gets rows instead of tables; there the
            # declared tables are checked.
            if exchange.coming:
                self._check_nothing_lost(connection, exchange.leaving, connection, exchange.coming)
            else:
                self.check_swappable(connection)
            self.workspace.carry_out(exchange, self.resolved, live.location)
            self._drop_states(connection, live)
            tables = recorded(self.resolved)
            table_identities = identities(connection, tables, live.location)
            swapped = checkpoint.swap_in(connection, live, shadow_checkpoint, log, tables, table_identities)
            failpoints.reach("rebuild.inside_swap")
            return swapped

    def _drop_states(self, connection: Connection, live: Checkpoint) -> None:
        """Drop the table of states that the live read model had, where the declared one has none, or another."""
        own = f"{STATE_TABLE}{self.resolved.name}"
        names = [name for name in names_of(live.tables) if name[1] == own and name not in self._names]
        dialect = dialect_of(connection)
        if tables := list(dialect.find_tables(connection, names, live.location).values()):
            dialect.drop(connection, tables)

    def _live_quarantine(self, connection: Connection) -> tuple[dict[int, str], frozenset[tuple[int, str]]]:
        """Return ({position: resolution} of events that are not in the live rows, {(position, decision)})."""
        condition = of(self.resolved.name, self.resolved.revision)
        events = connection.execute(select(quarantine.c.position, quarantine.c.resolution).where(condition)).all()
        resolutions = {position: resolution for position, resolution in events if resolution != RETRIED}
        return resolutions, frozenset(
            (position, resolution) for position, resolution in events if resolution in DECIDED_RESOLUTIONS
        )

    def _replace_live_quarantine(self, connection: Connection, decisions: frozenset[tuple[int, str]] | None) -> None:
        """Replace the locked live quarantine by the shadow's; raises `RebuildOvertaken` if `decisions` changed."""
        if decisions is not None and self._live_quarantine(connection)[1] != decisions:
            raise RebuildOvertaken(
                f"Somebody decided about quarantined events of {self.resolved.name!r} while it was rebuilt"
            )
        connection.execute(delete(quarantine).where(of(self.resolved.name, self.resolved.revision)))
        self._copy_quarantine(connection, self._quarantine, quarantine)

    def _copy_quarantine(self, connection: Connection, source: Table, target: Table) -> None:
        condition = (source.c.projection == self.resolved.name) & (source.c.revision == self.resolved.revision)
        connection.execute(
            insert(target).from_select([column.name for column in source.c], select(source).where(condition))
        )

    def _catch_up(self, position: int, tail: Callable[[int], None] | None) -> Checkpoint:
        """Catch the shadow up to the locked live one and return its checkpoint; raises `NotNow` if it is far behind."""
        shadow_checkpoint = self.checkpoint()
        if tail is not None and shadow_checkpoint.position < position:
            if position - shadow_checkpoint.position > TAIL_MAX:
                raise NotNow(f"the live read model is {position - shadow_checkpoint.position} events ahead")
            tail(position)
            shadow_checkpoint = self.checkpoint()
        assert tail is None or shadow_checkpoint.position >= position
        return shadow_checkpoint

    def checkpoint(self) -> Checkpoint:
        """Return the shadow's checkpoint."""
        with self.workspace.engine().begin() as connection:
            shadow_checkpoint = self._checkpoint(connection)
            assert shadow_checkpoint is not None, "made by `create`, or when the shadow was caught up"
            return shadow_checkpoint

    def _checkpoint(self, connection: Connection) -> Checkpoint | None:
        return checkpoint.read(connection, self.resolved.name, self.resolved.revision)

    def _check_nothing_lost(
        self,
        connection: Connection,
        live_tables: Mapping[TableName, TableRef],
        model: Connection,
        new_tables: Mapping[TableName, TableRef],
    ) -> None:
        """Raise `RebuildRefused` if something depends on the tables, or the new ones lack features of the live ones."""
        dialect = dialect_of(connection)
        live_dependents = dependents(connection, live_tables)
        if live_dependents:
            raise RebuildRefused(
                self.resolved.name,
                f"{listed(live_dependents)} would be lost by a swap, or stay with the table that leaves",
                "Drop it, and create it again after the rebuild.",
            )
        new_dependents = dependents(model, new_tables)
        if new_dependents:
            raise RebuildRefused(
                self.resolved.name,
                f"{listed(new_dependents)} would come with the table that is made",
                "Keep from it what gives it to new tables, an event trigger say.",
            )
        for name, table in live_tables.items():
            lost_features = undeclared(dialect.features(connection, table), dialect.features(model, new_tables[name]))
            if lost_features:
                raise RebuildRefused(
                    self.resolved.name,
                    f"the table {table.name} has "
                    + listed([f"{feature}, which the table does not declare" for feature in lost_features]),
                    f"A swap would lose it. {UNDECLARED_REMEDY}",
                )


@contextmanager
def shadow_of(
    database: Database, resolved: R_co, log: str, watch: Watch, *, to_swap: bool = True
) -> Generator[Shadow[R_co]]:
    """Yield a shadow whose run is claimed and leased; its workspace is removed afterwards, swapped in or not."""
    shadow = Shadow(database, resolved, log)
    with shadow.workspace.claimed():
        failpoints.reach("rebuild.claimed")
        try:
            with watch.interrupted_by(shadow.workspace.interrupt):
                shadow.create(to_swap=to_swap)
                with runs.renewed(database.sync_engine(PURPOSE), shadow.run, watch.stop):
                    failpoints.reach("rebuild.shadow_made")
                    yield shadow
        finally:
            shadow.workspace.drop()
            failpoints.reach("rebuild.dropped")


def check_not_retired(resolved: AnyResolved, live: Checkpoint) -> None:
    """Raise `RebuildOvertaken` for a dropped revision, whose place another revision's rows may have taken."""
    if live.state == RETIRED:
        raise RebuildOvertaken(
            f"Revision {resolved.revision} of projection {resolved.name!r} was dropped while it was rebuilt"
        )


def _without_constraints(table: Table, name: str) -> Table:
    """Return a table of the same columns, without any constraint or index."""
    columns = [Column(column.name, column.type, key=column.key, nullable=column.nullable) for column in table.columns]
    return Table(name, MetaData(), *columns, schema=table.schema)
