"""eventjet's own tables are created and upgraded on both databases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from eventjet.errors import Unreachable
from eventjet.sql import migrations, own_tables
from eventjet.sql.database import Database
from eventjet.sql.locations import check_tables, create_tables
from tests import forked
from tests.integration.projecting import BALANCES, MOVEMENTS


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = Database(database).sync_engine()
    yield engine
    engine.dispose()


def differences(engine: Engine) -> list[object]:
    """Return the changes that autogenerate would make to reach `own_tables`."""
    with engine.connect() as connection:
        # Alembic does not know an empty default of SQLite again; the statements there are compared below.
        defaults = engine.dialect.name == "postgresql"
        options = {"version_table": migrations.VERSION_TABLE, "compare_server_default": defaults, "compare_type": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), own_tables.metadata))


def test_the_expected_revision_is_the_newest_one() -> None:
    assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_heads() == [migrations.HEAD]


def test_the_migrated_tables_are_the_declared_ones(engine: Engine) -> None:
    with engine.begin() as connection:
        upgraded = migrations.upgrade(connection)
        assert (upgraded.before, upgraded.after) == (None, migrations.HEAD)
        assert set(upgraded.tables) == {*own_tables.metadata.tables, migrations.VERSION_TABLE}
        assert migrations.upgrade(connection) == migrations.Upgraded(migrations.HEAD, migrations.HEAD)
    assert differences(engine) == []


def test_the_first_revision_creates_its_original_tables() -> None:
    """Revision 0001 must create `revision_0001.sql`, with which every existing database began."""
    script = ScriptDirectory(str(Path(migrations.__file__).parent)).get_revision("0001")
    tables = script.module.metadata.sorted_tables
    ddl = [CreateTable(table) for table in tables] + [CreateIndex(index) for table in tables for index in table.indexes]
    statements = [str(statement.compile(dialect=postgresql.dialect())).replace("\t", "    ") for statement in ddl]
    written = (
        "\n\n".join("\n".join(map(str.rstrip, statement.strip().splitlines())) + ";" for statement in statements) + "\n"
    )
    assert written == Path(__file__).with_name("revision_0001.sql").read_text()


def test_parked_events_of_an_older_eventjet_are_quarantined(engine: Engine) -> None:
    row = "'balances', 1, {}, 'account', 'ada', '{}', 7.5"
    columns = "projection, revision, position, aggregate, aggregate_id, resolution"
    with engine.begin() as connection:
        migrations.upgrade(connection)
        connection.execute(text("alter table eventjet_quarantine rename column quarantined_at to parked_at"))
        for position, resolution in ((1, "parked"), (2, "blocked")):
            values = row.format(position, resolution)
            connection.execute(text(f"insert into eventjet_quarantine ({columns}, parked_at) values ({values})"))
        connection.execute(text("update eventjet_alembic_version set version_num = '0002'"))
        assert migrations.upgrade(connection).after == migrations.HEAD
        upgraded = "select position, resolution, quarantined_at from eventjet_quarantine order by position"
        assert connection.execute(text(upgraded)).all() == [(1, "quarantined", 7.5), (2, "blocked", 7.5)]
    assert differences(engine) == []


def test_an_undeclared_column_is_a_difference(engine: Engine) -> None:
    with engine.begin() as connection:
        migrations.upgrade(connection)
        connection.execute(text("alter table eventjet_projection add column stray text"))
    assert "stray" in str(differences(engine))


def test_tables_of_an_older_eventjet_are_refused_until_they_are_upgraded(engine: Engine) -> None:
    with engine.begin() as connection:
        migrations.upgrade(connection)
        connection.execute(text("update eventjet_alembic_version set version_num = '0000'"))
    with (
        pytest.raises(Unreachable, match=r"at revision 0000.*Run `eventjet db upgrade`"),
        engine.connect() as connection,
    ):
        check_tables(connection, [])


def tables_made(database: str) -> int:
    return len(create_tables(Database(database).sync_engine()))


def test_concurrent_processes_create_the_tables_once(database: str) -> None:
    context = forked.context()
    barrier = context.Barrier(6, timeout=100)
    with ProcessPoolExecutor(6, mp_context=context, initializer=barrier.wait) as pool:
        futures = [pool.submit(tables_made, database) for _ in range(6)]
        assert sorted(future.result(100) for future in futures) == [0, 0, 0, 0, 0, 5]


def test_looking_at_current_tables_does_not_import_alembic(engine: Engine, database: str) -> None:
    create_tables(engine)
    script = (
        "import sys; from eventjet.sql.database import Database;"
        "from eventjet.sql.locations import create_tables;"
        "assert create_tables(Database(sys.argv[1]).sync_engine()) == []; assert 'alembic' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", script, database], capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr


def test_a_database_of_a_newer_eventjet_is_refused(engine: Engine) -> None:
    create_tables(engine, [BALANCES, MOVEMENTS])
    with engine.begin() as connection:
        connection.execute(text("update eventjet_alembic_version set version_num = '9999'"))
    with pytest.raises(Unreachable, match=r"revision '9999', which this version.*upgrade eventjet here too"):
        create_tables(engine)
    with pytest.raises(Unreachable, match="upgrade eventjet here too"), engine.connect() as connection:
        check_tables(connection, [BALANCES])


def test_an_empty_database_is_refused_with_its_own_advice(engine: Engine) -> None:
    with pytest.raises(Unreachable, match="Run `eventjet init` once"), engine.connect() as connection:
        check_tables(connection, [])
