"""The app of the fault tests: events that are numbered per entity, and read models that reveal every fault.

The fold is not idempotent and depends on the order: an event lost, applied twice or out of order shows for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, Numeric, String, Table, select, text

from eventjet import App, Recorded, aggregate, entries, event, projection
from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY

MODULUS = 2**61 - 1


@event("tally.added")
class Added:
    number: int
    """Counts the additions of its entity, from 1."""
    amount: Decimal


@event("tally.noted")
class Noted:
    """An event to which no projection subscribes."""

    text: str


@aggregate("ledger")
class Tally:
    additions: int = 0

    def add(self, amount: Decimal) -> Added:
        return Added(number=self.additions + 1, amount=amount)

    def add_two(self, amount: Decimal) -> list[Added]:
        return [Added(number=self.additions + 1, amount=amount), Added(number=self.additions + 2, amount=-amount)]

    def evolve(self, event: Added | Noted) -> Tally:
        return replace(self, additions=event.number) if isinstance(event, Added) else self


@dataclass(frozen=True, slots=True)
class Total:
    entity: str
    additions: int = 0
    amount: Decimal = Decimal(0)
    last: int = 0
    disordered: int = 0
    """Additions that were not the one after the last."""
    digest: int = 0
    """The digest of all additions in their order."""


@dataclass(frozen=True, slots=True)
class Line:
    position: int
    entity: str
    number: int
    amount: Decimal


metadata = MetaData()
totals_table = Table(
    "totals",
    metadata,
    Column("entity", String(40), primary_key=True),
    Column("additions", Integer, nullable=False),
    Column("amount", Numeric(14, 2), nullable=False),
    Column("last", Integer, nullable=False),
    Column("disordered", Integer, nullable=False),
    Column("digest", BigInteger, nullable=False),
)
journal_table = Table(
    "journal",
    metadata,
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("entity", String(40), nullable=False),
    Column("number", Integer, nullable=False),
    Column("amount", Numeric(14, 2), nullable=False),
)


def added(row: Total | None, entity: str, number: int, amount: Decimal) -> Total:
    """Return the row after one addition."""
    row = row or Total(entity)
    return Total(
        entity,
        row.additions + 1,
        row.amount + amount,
        number,
        row.disordered + (number != row.last + 1),
        (row.digest * 1_000_003 + number * 7_919 + int(amount * 100)) % MODULUS,
    )


@projection("totals", table=totals_table)
def totals(row: Total | None, event: Recorded[Added]) -> Total:
    return added(row, event.aggregate_id, event.data.number, event.data.amount)


@entries("journal", table=journal_table)
def journal(event: Recorded[Added]) -> Line:
    return Line(event.position, event.aggregate_id, event.data.number, event.data.amount)


def tally_app(name: str) -> App:
    """Return the app over the stream of this name."""
    return App(name, aggregates=[Tally], projections=[totals, journal])


@dataclass(slots=True)
class Truth:
    """The rows as they must be, by the plainest loop; it only moves forward."""

    log: Sequence[tuple[str, Added | Noted]]
    """In the order of the log; the first one is at position 1."""
    position: int = 0
    rows: dict[str, Total] = field(default_factory=dict[str, Total])

    def at(self, position: int) -> list[Total]:
        """Return the totals at a position, by entity."""
        for entity, data in self.log[self.position : position]:
            if isinstance(data, Added):
                self.rows[entity] = added(self.rows.get(entity), entity, data.number, data.amount)
        self.position = max(self.position, position)
        return [self.rows[entity] for entity in sorted(self.rows)]

    def lines(self, after: int, position: int) -> list[Line]:
        """Return the journal between two positions."""
        return [
            Line(number, entity, data.number, data.amount)
            for number, (entity, data) in enumerate(self.log[after:position], after + 1)
            if isinstance(data, Added)
        ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The faults of the read models, compared with the log up to their checkpoints."""

    events: int
    lost: int
    twice: int
    disordered: int
    wrong_rows: int

    def __str__(self) -> str:
        faults = f"{self.lost} lost, {self.twice} twice, {self.disordered} out of order, {self.wrong_rows} wrong rows"
        return f"{faults}, over {self.events:,} events"

    @property
    def right(self) -> bool:
        return not (self.lost or self.twice or self.disordered or self.wrong_rows)


@dataclass(frozen=True, slots=True)
class Tables:
    """Both read models, each with its position, in one snapshot."""

    totals_at: int
    totals: list[Total]
    journal_at: int
    journal: list[Line]
    """The lines after a position."""
    journal_count: int


def look(connection: Connection, after: int = 0) -> Tables:
    """Read everything in the connection's transaction, the journal after a position only."""
    checkpoints = connection.execute(text("select name, position from eventjet_projection")).all()
    places: dict[str, int] = {row[0]: row[1] for row in checkpoints}
    rows = [Total(*row) for row in connection.execute(select(_readable(connection, totals_table)))]
    table = _readable(connection, journal_table)
    lines = [Line(*row) for row in connection.execute(select(table).where(table.c.position > after))]
    count = connection.scalar(text("select count(*) from journal")) or 0
    rows.sort(key=lambda row: row.entity)
    lines.sort(key=lambda line: line.position)
    return Tables(places.get("totals", 0), rows, places.get("journal", 0), lines, count)


def snapshot(database: str, after: int = 0) -> Tables:
    """Look at a database while workers write to it."""
    where = Database(database)
    options = {READ_ONLY: True} if not where.dialect.is_concurrent else {"isolation_level": "REPEATABLE READ"}
    engine = where.sync_engine("fault tests")
    try:
        with engine.connect().execution_options(**options) as connection:
            return look(connection, after)
    finally:
        engine.dispose()


def judge(truth: Truth, tables: Tables) -> Verdict:
    """Compare; the whole journal must have been read."""
    expected = {row.entity: row for row in truth.at(tables.totals_at)}
    actual = {row.entity: row for row in tables.totals}
    lines = truth.lines(0, tables.journal_at)
    missing = set(lines) - set(tables.journal)
    again = (
        len(tables.journal) - len({line.position for line in tables.journal}) + len(set(tables.journal) - set(lines))
    )
    pairs = [
        (expected.get(name, Total(name)), actual.get(name, Total(name))) for name in expected.keys() | actual.keys()
    ]
    return Verdict(
        events=max(tables.totals_at, tables.journal_at),
        lost=max(len(missing), sum(max(0, right.additions - row.additions) for right, row in pairs)),
        twice=max(again, sum(max(0, row.additions - right.additions) for right, row in pairs)),
        disordered=sum(row.disordered for row in actual.values()),
        wrong_rows=sum(right != row for right, row in pairs),
    )


def _readable(connection: Connection, table: Table) -> Table:
    from eventjet.sql.checkpoint import DECLARED
    from eventjet.sql.database import dialect_of
    from eventjet.sql.locations import located

    return located(table, DECLARED, dialect_of(connection))
