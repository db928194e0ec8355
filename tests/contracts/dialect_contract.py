"""The contract of every database: a new one joins by a file like `test_dialects.py`."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, MetaData, Table, select
from sqlalchemy.exc import DBAPIError

from eventjet.domain.quarantined import DROPPED, QUARANTINED, Quarantined
from eventjet.projections.row_codec import RowCodec
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import DECLARED
from eventjet.sql.database import dialect_of, is_about_data, is_transient
from eventjet.sql.dialect import Dialect, Fault
from eventjet.sql.locations import create_tables, located
from eventjet.sql.own_tables import Clock, quarantine
from eventjet.sql.statements import Changes, QuarantineChanges, keys_from

TABLE = Table(
    "contract",
    MetaData(),
    sa.Column("id", sa.String(40), primary_key=True),
    sa.Column("index", sa.Integer, primary_key=True),
    sa.Column("amount", sa.Numeric(12, 2)),
    sa.Column("at", sa.DateTime(timezone=True)),
    sa.Column("day", sa.Date),
    sa.Column("whose", sa.Uuid),
    sa.Column("is_open", sa.Boolean),
    sa.Column("share", sa.Double),
    sa.Column("tags", sa.JSON),
    sa.Column("raw", sa.LargeBinary),
    sa.Column("kind", sa.Enum("cash", "card", native_enum=False)),
    sa.Index("ix_contract_amount", "amount"),
)


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    index: int
    amount: Decimal | None = None
    at: datetime | None = None
    day: Any = None
    whose: UUID | None = None
    is_open: bool | None = None
    share: float | None = None
    tags: Any = None
    raw: bytes | None = None
    kind: str | None = None


def odd_batches(codec: RowCodec) -> list[list[Changes]]:
    """Return batches in parts: rows of all kinds, kept, inserted and deleted, with quarantined events."""
    at = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
    odd = "\"{},\\ %s'\n\u00e4\U0001f600"
    full = [
        Row(
            f"{odd}{n}",
            n,
            Decimal("-1234567890.5"),
            at,
            at.date(),
            UUID(int=n),
            n > 1,
            0.1,
            {odd: [n]},
            b"\0{}",
            "card",
        )
        for n in range(3)
    ]
    bare = [Row("", n, raw=b"", tags=[]) for n in range(3)]
    fit = [[codec.normalise(row) for row in rows] for rows in (full, bare)]
    changed = [codec.normalise(replace(row, amount=Decimal(n), kind=None, tags=None)) for n, row in enumerate(full)]
    keys = [codec.key(row) for rows in fit for row in rows]
    events = [Quarantined(n, "account", odd, f"e-{n}", "account.opened", QUARANTINED, odd, odd, b'\0"') for n in (1, 2)]
    first = [Changes(inserts=fit[0][:1], upserts=fit[1][:2]), Changes(inserts=fit[0][1:]), Changes(upserts=fit[1][2:])]
    second = [Changes(upserts=changed[:1]), Changes(upserts=changed[1:], deletions=keys[5:]), Changes()]
    third = [Changes(deletions=keys[:1]), Changes(deletions=keys[1:2]), Changes(deletions=keys[2:5])]
    return [[replace(first[0], quarantine=QuarantineChanges(events)), *first[1:]], second, third]


def whole(shares: list[Changes]) -> Changes:
    """Return the changes of a batch from its parts."""
    quarantined = [share.quarantine for share in shares if share.quarantine is not None]
    return Changes(
        [row for share in shares for row in share.upserts],
        [row for share in shares for row in share.inserts],
        [key for share in shares for key in share.deletions],
        quarantined[0] if quarantined else None,
    )


class DialectContract:
    """The tests of a database: inherit it, and give `engine` on an empty database."""

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        raise NotImplementedError

    @pytest.fixture
    def dialect(self, engine: Engine) -> Dialect:
        return dialect_of(engine)

    @pytest.fixture
    def codec(self, dialect: Dialect) -> RowCodec:
        return RowCodec(TABLE, Row, dialect)

    def test_it_can_be_sent_to_another_process(self, dialect: Dialect) -> None:
        assert pickle.loads(pickle.dumps(dialect)).name == dialect.name

    def test_it_locks_unless_writers_exclude_one_another(self, dialect: Dialect) -> None:
        locks = ("lock_migrations", "lock", "bound_waits")
        own = {name for name in locks if getattr(type(dialect), name) is not getattr(Dialect, name)}
        assert own == (set(locks) if dialect.is_concurrent else set())

    def test_its_clock_is_in_seconds_since_1970(self, engine: Engine, dialect: Dialect) -> None:
        with engine.begin() as connection:
            now = connection.scalar(select(Clock()))
        assert now is not None
        assert abs(now - datetime.now(UTC).timestamp()) < 3_600

    def test_rows_come_back_equal_and_of_the_same_types(
        self, engine: Engine, dialect: Dialect, codec: RowCodec
    ) -> None:
        at = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=timezone(timedelta(hours=2)))
        rows = [
            Row(
                "a", 0, Decimal("-1234567890.5"), at, at.date(), UUID(int=7), True, 0.1, {"b": [1, "12"]}, b"\0", "card"
            ),
            Row('"%s\\', -1),
        ]
        table = located(TABLE, DECLARED, dialect)
        statements = dialect.statements(table, codec)
        fitted = {codec.key(row): codec.normalise(row) for row in rows}
        with engine.begin() as connection:
            lease = self.lease(connection, table)
            mark = (lease.name, lease.revision, lease.epoch)
            assert statements.write(connection, (1, "e-1", 60.0, *mark, 0), Changes(inserts=list(fitted.values())))
            rows_read = statements.read(connection, [*fitted, ("none", 3)])
            assert {key: repr(row) for key, row in rows_read.items()} == {key: repr(row) for key, row in fitted.items()}
            changed = codec.normalise(Row("a", 0, Decimal(1)), None)
            changes = Changes(upserts=[changed], deletions=[('"%s\\', -1)])
            assert statements.write(connection, (2, "e-2", 60.0, *mark, 1), changes)
            assert statements.read(connection, list(fitted)) == {("a", 0): changed}

    def test_rows_of_all_kinds_are_inserted_replaced_and_deleted(
        self, engine: Engine, dialect: Dialect, codec: RowCodec
    ) -> None:
        table = located(TABLE, DECLARED, dialect)
        statements = dialect.statements(table, codec)
        columns = quarantine.c
        with engine.begin() as connection:
            lease = self.lease(connection, table)
            counts: list[int] = []
            for number, shares in enumerate(odd_batches(codec), lease.position + 1):
                changes = whole(shares)
                mark = (lease.name, lease.revision, lease.epoch, number - 1)
                assert statements.write(connection, (number, f"e-{number}", 60.0, *mark), changes)
                counts.append(len(connection.execute(select(table)).all()))
                written = [*changes.upserts, *changes.inserts]
                stored = statements.read(connection, [codec.key(row) for row in written]) if written else {}
                assert {key: repr(row) for key, row in stored.items()} == {codec.key(row): repr(row) for row in written}
            assert counts == [6, 5, 0]
            assert len(connection.execute(select(columns.position)).all()) == 2

    def test_a_batch_of_another_epoch_or_position_changes_nothing(
        self, engine: Engine, dialect: Dialect, codec: RowCodec
    ) -> None:
        table = located(TABLE, DECLARED, dialect)
        statements = dialect.statements(table, codec)
        with engine.begin() as connection:
            lease = self.lease(connection, table)
            quarantined = Quarantined(1, "account", "a", "e-1", "account.opened", QUARANTINED, "because")
            changes = Changes(inserts=[Row("a", 0)], quarantine=QuarantineChanges([quarantined]))
            for epoch, after in ((lease.epoch + 1, 0), (lease.epoch - 1, 0), (lease.epoch, 1)):
                mark = (lease.name, lease.revision, epoch, after)
                assert not statements.write(connection, (2, "e-2", 60.0, *mark), changes)
            assert statements.read(connection, [("a", 0)]) == {}
            assert connection.execute(select(quarantine)).all() == []
            assert checkpoint.read(connection, lease.name, lease.revision) == lease

    def test_the_quarantine_is_written_with_the_batch(self, engine: Engine, dialect: Dialect, codec: RowCodec) -> None:
        table = located(TABLE, DECLARED, dialect)
        statements = dialect.statements(table, codec)
        first = Quarantined(1, "account", "a", "e-1", "account.opened", QUARANTINED, "because", "Traceback …", b"{}")
        second = Quarantined(2, "account", "b", "e-2", "account.opened", QUARANTINED, "because")
        with engine.begin() as connection:
            lease = self.lease(connection, table)
            dialect.write_quarantine(connection, lease.name, lease.revision, QuarantineChanges([first, second]))
            mark = (lease.name, lease.revision, lease.epoch, 0)
            changes = QuarantineChanges(deletions=[1], resolutions=[(2, DROPPED)])
            assert statements.write(connection, (5, "e-5", 60.0, *mark), Changes(quarantine=changes))
            columns = quarantine.c
            entries = connection.execute(select(columns.position, columns.resolution, columns.resolved_at)).all()
        assert [(position, resolution, at is not None) for position, resolution, at in entries] == [(2, DROPPED, True)]

    def test_every_location_has_its_own_tables(self, engine: Engine, dialect: Dialect) -> None:
        names = [dialect.own_location("contract", revision) for revision in (1, 2)]
        with engine.begin() as connection:
            for location in (DECLARED, *names):
                if location:
                    dialect.ensure_location(connection, location)
                table = located(TABLE, location, dialect)
                table.create(connection)
                connection.execute(table.insert().values(id=location, index=0))
            for location in (DECLARED, *names):
                table = located(TABLE, location, dialect)
                assert connection.scalars(select(table.c.id)).all() == [location]
                assert dialect.declared_name(table.name) == "contract"

    def test_text_ranges_follow_code_points_or_are_declared_not_to(self, engine: Engine, dialect: Dialect) -> None:
        words = ["A", "a", "a%", "aB", "aa", "b", "\u00e4", "\ue000", "\U0001f600"]
        table = Table("words", MetaData(), sa.Column("word", sa.String(40), primary_key=True))
        with engine.begin() as connection:
            table.create(connection)
            connection.execute(table.insert(), [{"word": word} for word in words])
            there = dialect.find_table(connection, (None, "words"), DECLARED)
            assert there is not None
            order = dialect.text_order(connection, there, "word")
            if order is not None:
                assert list(connection.scalars(keys_from(table, "word", order, "", "", 100))) == sorted(words)
                assert list(connection.scalars(keys_from(table, "word", order, "a", "a", 100))) == ["a%", "aB", "aa"]

    def test_a_table_is_known_until_it_is_dropped(self, engine: Engine, dialect: Dialect) -> None:
        table, name, own = located(TABLE, DECLARED, dialect), (None, "contract"), dialect.own_location("contract", 1)

        def identity_in(connection: sa.Connection, location: str) -> str | None:
            contract_table = dialect.find_table(connection, name, location)
            assert contract_table is not None
            return dialect.identity(connection, contract_table)

        create_tables(engine)
        with engine.begin() as connection:
            table.create(connection)
            contract_table = dialect.find_table(connection, name, DECLARED)
            assert contract_table is not None
            known = dialect.identity(connection, contract_table, make=True)
            assert known == dialect.identity(connection, contract_table, make=True)
            assert dialect.dependents(connection, contract_table, [], for_good=True) == []
            home = dialect.home(connection)
        with engine.begin() as connection:
            connection.execute(table.insert().values(id="a", index=0))
            connection.execute(table.delete())
            connection.exec_driver_sql("alter table contract add column note text")
            assert identity_in(connection, DECLARED) == known
            dialect.ensure_location(connection, own)
            dialect.move(connection, contract_table, name, own, None)
            assert identity_in(connection, own) == known
            moved = dialect.find_table(connection, name, own)
            assert moved is not None
            dialect.drop(connection, [moved])
        with engine.begin() as connection:
            table.create(connection)
            assert identity_in(connection, DECLARED) != known
            again = dialect.find_table(connection, name, DECLARED)
            assert again is not None
            assert dialect.identity(connection, again, make=True) != known
            assert dialect.home(connection) == home

    def test_data_errors_are_distinguished_from_transient_errors(self, engine: Engine, dialect: Dialect) -> None:
        table = located(TABLE, DECLARED, dialect)
        with engine.begin() as connection:
            table.create(connection)
            connection.execute(table.insert().values(id="a", index=0))
        with pytest.raises(DBAPIError) as twice, engine.begin() as connection:
            connection.execute(table.insert().values(id="a", index=0))
        assert is_about_data(twice.value)
        assert not is_transient(twice.value)
        with pytest.raises(DBAPIError) as missing, engine.begin() as connection:
            connection.exec_driver_sql("select * from no_such_table_there")
        assert Fault.NO_TABLE in dialect.faults(missing.value)
        assert not is_about_data(missing.value)

    def test_own_tables_are_found_by_name(self, engine: Engine, dialect: Dialect) -> None:
        with engine.begin() as connection:
            assert dialect.find_table(connection, (None, "eventjet_projection"), DECLARED) is None
        create_tables(engine)
        with engine.begin() as connection:
            dialect.lock_migrations(connection)
            assert dialect.find_table(connection, (None, "eventjet_projection"), DECLARED) is not None

    @staticmethod
    def lease(connection: sa.Connection, table: Table) -> checkpoint.Checkpoint:
        """Return the lease of a projection whose table was just made."""
        create_tables(connection)
        table.create(connection)
        checkpoint.ensure(connection, "contract", 1)
        lease = checkpoint.take(connection, "contract", 1, "a worker", 60.0)
        assert lease is not None
        return lease
