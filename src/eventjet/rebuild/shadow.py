"""`Shadow`: a read model being made beside the live one, until a swap puts it in its place."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeAlias, TypeVar

from sqlalchemy import Column, Connection, MetaData, Table, delete, func, insert, select

from eventjet import failpoints
from eventjet.domain.parked import RETRIED, VERDICTS
from eventjet.errors import RebuildOvertaken, RebuildRefused
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.rebuild import runs
from eventjet.rebuild.progress import Watch
from eventjet.rebuild.runs import PURPOSE, Target
from eventjet.rebuild.workspace import workspace_of
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import BUILDING, DECLARED, RETIRED, Checkpoint, names_of, revisions
from eventjet.sql.database import Database
from eventjet.sql.dialect import listed
from eventjet.sql.dialects import dialect_of
from eventjet.sql.locations import check_owner, create_tables, identities, located_tables, making, recorded
from eventjet.sql.own_tables import projections, quarantine
from eventjet.sql.quarantine import of
from eventjet.sql.table_moves import UNDECLARED_REMEDY, NotNow, dependents, lock_as_workers, undeclared
from eventjet.sql.tables import TableName, TableRef, qualified, verbatim

TAIL_MAX = 5_000
"""Events a shadow may be behind when it is caught up while the live worker waits; more are caught up before."""

EPOCH = -1
"""Of a shadow's checkpoint. No worker ever has it: were the shadow gone, the live one would fence its writer."""

R_co = TypeVar("R_co", bound=AnyResolved, covariant=True)


Pair: TypeAlias = tuple[Table, Table]
"""(copy of the live table, table made from the log)."""


class Shadow(Generic[R_co]):
    """One run's tables of one projection: one of a fold, several of SQL by hand. Every method blocks.

    A fold's table is bare while it is loaded, and gets its checkpoint when it is caught up. SQL by hand goes through
    handlers from the first event on, so its tables are whole, with a checkpoint at 0.
    """

    def __init__(self, database: Database, resolved: R_co, log: str) -> None:
        """`log` is the identity of the log that it will be made from."""
        self.resolved: R_co = resolved
        self._log = log
        self.run = runs.new_run()
        self.workspace = workspace_of(database, self.run)
        self.tables = located_tables(resolved, self.workspace.location, database.dialect)
        """As connections of the workspace's `engine` find them."""
        self._quarantine = quarantine.to_metadata(MetaData(), schema=self.workspace.schema)
        """The shadow's quarantine, as connections to the live database find it."""
        self._names = names_of(recorded(resolved))
        self._by_hand = isinstance(resolved, ResolvedSql)
        self._known: Mapping[int, str] = {}
        self._decided: frozenset[tuple[int, str]] | None = None
        """What people had decided about the live quarantine when it was taken over."""

    @property
    def target(self) -> Target:
        """Where parts are loaded."""
        (table,) = self.tables
        return Target(
            run=self.run,
            projection=self.resolved.name,
            revision=self.resolved.revision,
            database=self.workspace.database,
            table=table.name,
            columns=tuple(column.name for column in table.columns),
            known=self._known,
        )

    def create(self, *, to_swap: bool = True) -> None:
        """Announce the run and make the empty shadow; raises `RebuildRefused` for what a swap could not carry."""
        with self.workspace.live.begin() as connection:
            create_tables(connection, [self.resolved] if to_swap else (), to_rebuild=True, log=self._log)
        with self.workspace.live.begin() as connection:
            check_owner(connection, self.resolved.name, self.resolved.app, self._log)
            if to_swap:
                self.check_swappable(connection)
            runs.open_run(connection, self.run, self.resolved)
        failpoints.reach("rebuild.announced")
        with making(self.workspace.live, self.resolved.name, self.tables):
            self.workspace.create(self.tables, bare=not self._by_hand)
        if self._by_hand:
            with self.workspace.engine().begin() as connection:
                self.begin(connection)

    def begin(self, connection: Connection, position: int = 0, event_id: str = "", log: str = "") -> None:
        """Write its checkpoint; the connection finds the table by its name alone."""
        values = {"position": position, "event_id": event_id, "log": log, "epoch": EPOCH, "state": BUILDING}
        values |= {"name": self.resolved.name, "revision": self.resolved.revision, "generation": 0}
        values |= {"app": self.resolved.app, "code": self.resolved.code}
        connection.execute(insert(projections).values(values))

    def check_swappable(self, connection: Connection) -> None:
        """Raise `RebuildRefused` for what a swap could not carry; only looks."""
        check_owner(connection, self.resolved.name, self.resolved.app, self._log)
        dialect = dialect_of(connection)
        tables = () if self._by_hand else self.resolved.tables
        keys = [key for table in tables for key in table.foreign_key_constraints]
        if keys:
            # The rows of a fold are loaded without the table that they refer to.
            named = listed([f"the foreign key to {key.referred_table.name}" for key in keys])
            raise RebuildRefused(
                self.resolved.name,
                f"its table declares {named}, which the table that is loaded could not have",
                "Take it out of the declaration, or make the projection one of SQL by hand.",
            )
        live = checkpoint.read(connection, self.resolved.name, self.resolved.revision)
        leaving = dialect.tables.find_all(connection, self._names, live.location if live else DECLARED)
        with ExitStack() as stack:
            # Live tables that are not there have nothing to compare, nor the types that a model would need.
            with making(connection, self.resolved.name, self.tables):
                model = stack.enter_context(dialect.tables.modelled(connection, self.tables)) if leaving else connection
            coming = dialect.tables.find_all(model, self._names, self.workspace.location) if leaving else {}
            self._check_carried(connection, leaving, model, coming)

    def take_over_quarantine(self) -> None:
        """Obey the live quarantine, in `target.known`; the swap makes sure that people decided nothing meanwhile."""
        with self.workspace.snapshot() as connection:
            self._copy_quarantine(connection, quarantine, self._quarantine)
            self._known, self._decided = self._live_quarantine(connection)

    def copy_live(self) -> Checkpoint | None:
        """Copy the live rows as one snapshot shows them; return the checkpoint of that snapshot, if there is one.

        `target.known` is the quarantine of that snapshot.
        """
        with self.workspace.snapshot() as connection:
            live = self._checkpoint(connection)
            if live is None or not live.log:
                return None
            live_tables = dialect_of(connection).tables.find_all(connection, self._names, live.location)
            if len(live_tables) < len(self._names):
                return None
            for name, (copied, made) in zip(self._names, self.pairs(), strict=True):
                columns = ", ".join(qualified(None, column.name) for column in made.columns)
                target = qualified(self.workspace.schema, copied.name)
                create = f"create {self.workspace.copied_as} {target}"
                connection.execute(verbatim(f"{create} as select {columns} from {live_tables[name].quoted()}"))
            if isinstance(self.resolved, ResolvedProjection) and self.resolved.quarantines:
                self._known, _ = self._live_quarantine(connection)
            return live

    def note_proof(self, copied: Checkpoint) -> None:
        """Let the live checkpoint say that this code makes the copied rows, unless the live ones may have changed."""
        if copied.code != self.resolved.code and self.resolved.code:
            with self.workspace.live.begin() as connection:
                checkpoint.note_proof(connection, copied, self.resolved.code)

    def pairs(self) -> list[Pair]:
        """Return what `copy_live` made, beside the shadow's tables."""
        return [(_without_rules(table, f"eventjet_live_{number}"), table) for number, table in enumerate(self.tables)]

    def count(self) -> int:
        """Return how many rows there are in all tables."""
        with self.workspace.engine().begin() as connection:
            return sum(connection.scalar(select(func.count()).select_from(table)) or 0 for table in self.tables)

    def check_confined(self, connection: Connection) -> None:
        """Raise `RebuildRefused` when the open transaction of a handler has written to anything but the shadow."""
        written = self.workspace.strange_writes(connection)
        if written:
            raise RebuildRefused(
                self.resolved.name,
                f"its handlers write to {', '.join(written)}, which it does not declare",
                "Declare these tables, or leave them alone, and name no schema. What was tried is undone.",
            )

    def finish(self) -> None:
        """Make it what the declared tables are: durable, with keys and indexes; raises `RowsRefused`."""
        self.workspace.finish(self.resolved.name, self.tables, bare=not self._by_hand)

    def live_checkpoint(self) -> Checkpoint | None:
        """Return how far the live read model is."""
        with self.workspace.live.begin() as connection:
            return self._checkpoint(connection)

    def swap(self, log: str, tail: Callable[[int], None] | None) -> Checkpoint:
        """Put the shadow in the place of the live tables, if it is at least as far; return the live checkpoint now.

        `tail` catches it up to a position; without it the live position is of another past and does not count. Up to
        the last step the locks keep writers out and let readers in. Raises `NotNow`.
        """
        with self.workspace.swapping() as connection:
            runs.hold(connection, self.run)
            seen = self._checkpoint(connection)
            assert seen is not None, "made by `create`"
            exchange = self.workspace.exchange(connection, self.resolved, seen.location)
            locked = lock_as_workers(
                connection,
                self.resolved,
                exchange.lock_leaving,
                # With those of the other revisions, which may be about to take the declared location from it.
                lambda: revisions(connection, self.resolved.name, lock=True),
            )
            live = next(held for held in locked if held.revision == self.resolved.revision)
            check_kept(self.resolved, live)
            if live.location != seen.location:
                raise NotNow("its tables were moved meanwhile")
            exchange.look_again()
            own = self._caught_up(live.position, tail)
            self.workspace.attach(connection)
            self._give_quarantine_back(connection, None if tail is None else self._decided)
            # Once more, now that the tables are locked. Where rows come and no table, that is made as it is declared.
            if exchange.coming:
                self._check_carried(connection, exchange.leaving, connection, exchange.coming)
            else:
                self.check_swappable(connection)
            self.workspace.carry_out(exchange, self.resolved, live.location)
            tables = recorded(self.resolved)
            known = identities(connection, tables, live.location)
            swapped = checkpoint.swap_in(connection, live, own, log, tables, known)
            failpoints.reach("rebuild.inside_swap")
            return swapped

    def _live_quarantine(self, connection: Connection) -> tuple[dict[int, str], frozenset[tuple[int, str]]]:
        """Return (positions that are not in the live rows, with why; what people decided, and what came of it)."""
        own = of(self.resolved.name, self.resolved.revision)
        events = connection.execute(select(quarantine.c.position, quarantine.c.resolution).where(own)).all()
        known = {position: resolution for position, resolution in events if resolution != RETRIED}
        return known, frozenset((position, resolution) for position, resolution in events if resolution in VERDICTS)

    def _give_quarantine_back(self, connection: Connection, decided: frozenset[tuple[int, str]] | None) -> None:
        """Put the shadow's quarantine in the place of the live one, whose checkpoint is locked.

        Raises `RebuildOvertaken` when people have decided anything but `decided`.
        """
        if decided is not None and self._live_quarantine(connection)[1] != decided:
            raise RebuildOvertaken(
                f"Somebody decided about parked events of {self.resolved.name!r} while it was rebuilt"
            )
        connection.execute(delete(quarantine).where(of(self.resolved.name, self.resolved.revision)))
        self._copy_quarantine(connection, self._quarantine, quarantine)

    def _copy_quarantine(self, connection: Connection, source: Table, target: Table) -> None:
        own = (source.c.projection == self.resolved.name) & (source.c.revision == self.resolved.revision)
        connection.execute(insert(target).from_select([column.name for column in source.c], select(source).where(own)))

    def _caught_up(self, position: int, tail: Callable[[int], None] | None) -> Checkpoint:
        """Return the shadow's checkpoint, once it is at `position`, where the locked live one stands."""
        own = self.checkpoint()
        if tail is not None and own.position < position:
            if position - own.position > TAIL_MAX:
                raise NotNow(f"the live read model is {position - own.position} events ahead")
            tail(position)
            own = self.checkpoint()
        assert tail is None or own.position >= position
        return own

    def checkpoint(self) -> Checkpoint:
        """Return how far the shadow is."""
        with self.workspace.engine().begin() as connection:
            own = self._checkpoint(connection)
            assert own is not None, "made by `create`, or when the shadow was caught up"
            return own

    def _checkpoint(self, connection: Connection) -> Checkpoint | None:
        return checkpoint.read(connection, self.resolved.name, self.resolved.revision)

    def _check_carried(
        self,
        connection: Connection,
        leaving: Mapping[TableName, TableRef],
        model: Connection,
        coming: Mapping[TableName, TableRef],
    ) -> None:
        """Refuse what would be lost with the live tables, `leaving`, or what those `coming` lack."""
        dialect = dialect_of(connection)
        hanging = dependents(connection, leaving)
        if hanging:
            raise RebuildRefused(
                self.resolved.name,
                f"{listed(hanging)} would be lost by a swap, or stay with the table that leaves",
                "Drop it, and create it again after the rebuild.",
            )
        added = dependents(model, coming)
        if added:
            raise RebuildRefused(
                self.resolved.name,
                f"{listed(added)} would come with the table that is made",
                "Keep from it what gives it to new tables, an event trigger say.",
            )
        for name, table in leaving.items():
            lost = undeclared(dialect.tables.features(connection, table), dialect.tables.features(model, coming[name]))
            if lost:
                raise RebuildRefused(
                    self.resolved.name,
                    f"the table {table.name} has "
                    + listed([f"{feature}, which the table does not declare" for feature in lost]),
                    f"A swap would lose it. {UNDECLARED_REMEDY}",
                )


@contextmanager
def shadow_of(
    database: Database, resolved: R_co, log: str, watch: Watch, *, to_swap: bool = True
) -> Generator[Shadow[R_co]]:
    """Make a shadow, claimed and leased, that is gone afterwards, swapped in or not."""
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


def check_kept(resolved: AnyResolved, live: Checkpoint) -> None:
    """Raise `RebuildOvertaken` for a revision that was dropped: another revision's rows may be in its place."""
    if live.state == RETIRED:
        raise RebuildOvertaken(
            f"Revision {resolved.revision} of projection {resolved.name!r} was dropped while it was rebuilt"
        )


def _without_rules(table: Table, name: str) -> Table:
    """Return a table of the same columns, without any constraint or index."""
    columns = [Column(each.name, each.type, key=each.key, nullable=each.nullable) for each in table.columns]
    return Table(name, MetaData(), *columns, schema=table.schema)
