"""eventjet's own tables: made and upgraded, and left alone by an application's Alembic, on both databases."""

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
    """What autogenerate would change to make the database as `own_tables` says."""
    with engine.connect() as connection:
        # Alembic does not know an empty default of SQLite again; the statements there are compared below.
        defaults = engine.dialect.name == "postgresql"
        options = {"version_table": migrations.VERSION_TABLE, "compare_server_default": defaults, "compare_type": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), own_tables.metadata))


def test_the_newest_revision_is_the_one_that_is_looked_for() -> None:
    assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_heads() == [migrations.HEAD]


def test_the_migrated_tables_are_the_declared_ones(engine: Engine) -> None:
    with engine.begin() as connection:
        done = migrations.upgrade(connection)
        assert (done.before, done.after) == (None, migrations.HEAD)
        assert set(done.tables) == {*own_tables.metadata.tables, migrations.VERSION_TABLE}
        assert migrations.upgrade(connection) == migrations.Upgraded(migrations.HEAD, migrations.HEAD)
    assert differences(engine) == []


def test_each_revision_makes_what_it_made_on_its_day() -> None:
    """`revision_0001.sql` is what 0001 makes, and every database that is there began with it."""
    script = ScriptDirectory(str(Path(migrations.__file__).parent)).get_revision("0001")
    tables = script.module.metadata.sorted_tables
    made = [CreateTable(table) for table in tables] + [
        CreateIndex(index) for table in tables for index in table.indexes
    ]
    statements = [str(one.compile(dialect=postgresql.dialect())).replace("\t", "    ") for one in made]
    written = "\n\n".join("\n".join(map(str.rstrip, one.strip().splitlines())) + ";" for one in statements) + "\n"
    assert written == Path(__file__).with_name("revision_0001.sql").read_text()


def test_a_difference_would_be_seen(engine: Engine) -> None:
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


def test_many_processes_at_once_make_the_tables_once(database: str) -> None:
    context = forked.context()
    together = context.Barrier(6, timeout=100)
    with ProcessPoolExecutor(6, mp_context=context, initializer=together.wait) as pool:
        made = [pool.submit(tables_made, database) for _ in range(6)]
        assert sorted(one.result(100) for one in made) == [0, 0, 0, 0, 0, 5]


def test_looking_at_current_tables_does_not_import_alembic(engine: Engine, database: str) -> None:
    create_tables(engine)
    script = (
        "import sys; from eventjet.sql.database import Database;"
        "from eventjet.sql.locations import create_tables;"
        "assert create_tables(Database(sys.argv[1]).sync_engine()) == []; assert 'alembic' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script, database], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_database_of_a_newer_eventjet_is_left_to_that_one(engine: Engine) -> None:
    create_tables(engine, [BALANCES, MOVEMENTS])
    with engine.begin() as connection:
        connection.execute(text("update eventjet_alembic_version set version_num = '9999'"))
    with pytest.raises(Unreachable, match=r"revision '9999', which this version.*upgrade eventjet here too"):
        create_tables(engine)
    with pytest.raises(Unreachable, match="upgrade eventjet here too"), engine.connect() as connection:
        check_tables(connection, [BALANCES])


def test_an_empty_database_is_told_from_an_old_one(engine: Engine) -> None:
    with pytest.raises(Unreachable, match="Run `eventjet init` once"), engine.connect() as connection:
        check_tables(connection, [])
