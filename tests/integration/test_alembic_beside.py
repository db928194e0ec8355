"""An application's Alembic environment and eventjet share a database, and leave each other's tables alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.config import main
from sqlalchemy import Connection, inspect, text

from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests import forked
from tests.integration.by_hand import LEDGER
from tests.integration.projecting import BALANCES, MOVEMENTS

ROOT = Path(__file__).parents[2]

INI = """
[alembic]
script_location = %(here)s/scripts
"""

MAKO = """
from alembic import op
import sqlalchemy as sa
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}

def upgrade():
    ${upgrades if upgrades else "pass"}

def downgrade():
    ${downgrades if downgrades else "pass"}
"""

ENV = """
import os
from types import SimpleNamespace

from alembic import context
from sqlalchemy import Column, Integer, MetaData, NullPool, String, Table, create_engine

from eventjet.alembic import include_object
from tests.integration.by_hand import LEDGER
from tests.integration.projecting import BALANCES, MOVEMENTS, metadata as read_models

app = SimpleNamespace(projections={one.name: one for one in (BALANCES, MOVEMENTS, LEDGER)})
target_metadata = MetaData()
if os.environ.get("SHARED"):
    for table in read_models.tables.values():
        table.to_metadata(target_metadata)
customers = Table("customers", target_metadata, Column("id", Integer, primary_key=True), Column("name", String(40)))
if os.environ.get("MORE"):
    Table("orders", target_metadata, Column("id", Integer, primary_key=True))
    customers.append_column(Column("city", String(40)))
filtered = {} if os.environ.get("UNFILTERED") else None

with create_engine(os.environ["URL"], poolclass=NullPool).connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=target_metadata,
        include_schemas=True,
        include_name=lambda name, type_, parents: type_ != "schema" or name is None or name.startswith("ej_"),
        **({"include_object": include_object(app, connection)} if filtered is None else filtered),
    )
    with context.begin_transaction():
        context.run_migrations()
"""


class Application:
    """A folder with an Alembic environment, run by Alembic's entry point."""

    def __init__(self, folder: Path, url: str, environ: dict[str, str]) -> None:
        (folder / "scripts" / "versions").mkdir(parents=True)
        (folder / "alembic.ini").write_text(INI)
        (folder / "scripts" / "script.py.mako").write_text(MAKO)
        (folder / "scripts" / "env.py").write_text(ENV)
        driver = url.replace("postgresql://", "postgresql+psycopg://")
        self.folder = folder
        self.where = Database(url)
        self.environ = {**environ, "URL": driver, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}

    def alembic(self, *arguments: str, **more: str) -> None:
        """Run the program `alembic` in this process, which saves its imports."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"URL": self.environ["URL"], **more}.items():
                patch.setenv(name, value)
            main(["--config", str(self.folder / "alembic.ini"), *arguments])

    def revision(self, name: str, **more: str) -> str:
        """Return the body of `upgrade` that autogenerate writes."""
        self.alembic("revision", "--autogenerate", "-m", name, **more)
        (script,) = (self.folder / "scripts" / "versions").glob(f"*_{name}.py")
        source = script.read_text()
        return source[source.index("def upgrade") : source.index("def downgrade")]

    def read(self, query: Callable[[Connection], object]) -> object:
        engine = self.where.sync_engine()
        with engine.begin() as connection:
            return query(connection)

    def tables(self) -> set[str]:
        names = self.read(lambda connection: set(inspect(connection).get_table_names()))
        assert isinstance(names, set)
        return names

    def eventjet(self, *arguments: str) -> str:
        environ = {**self.environ, "EVENTJET_DATABASE": self.where.url}
        done = forked.run("eventjet.cli", arguments, folder=Path.cwd(), environ=environ, timeout_s=100)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(params=["postgresql", "sqlite"])
def application(request: pytest.FixtureRequest, tmp_path: Path) -> Application:
    url = f"sqlite:///{tmp_path}/read.db"
    if request.param == "postgresql":
        url = str(request.getfixturevalue("eventjet_database"))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
    application = Application(tmp_path, url, environ)
    create_tables(application.where.sync_engine(), [BALANCES, MOVEMENTS, LEDGER])
    return application


READ_MODELS = {"balances", "movements", "accounts", "lines", "totals"}
EVENTJET_TABLES = {*READ_MODELS, "eventjet_projection", "eventjet_rebuild", "eventjet_quarantine", "eventjet_action"}


@pytest.mark.parametrize("shared", ["", "1"], ids=["own metadata", "shared metadata"])
def test_autogenerate_includes_only_the_applications_tables(application: Application, shared: str) -> None:
    first = application.revision("first", SHARED=shared)
    assert "create_table('customers'" in first
    assert not [name for name in (*EVENTJET_TABLES, "drop_", "eventjet", "ix_balances") if name in first]
    application.alembic("upgrade", "head", SHARED=shared)
    assert {"customers", *EVENTJET_TABLES} <= application.tables()
    assert "op." not in application.revision("nothing", SHARED=shared)
    application.alembic("upgrade", "head", SHARED=shared)
    more = application.revision("more", SHARED=shared, MORE="1")
    assert "create_table('orders'" in more
    assert "add_column('customers'" in more
    assert more.count("op.") == 2


def test_without_the_filter_autogenerate_would_drop_the_read_models(application: Application) -> None:
    written = application.revision("first", UNFILTERED="1")
    assert "drop_table('balances')" in written
    assert "drop_table('eventjet_projection')" in written


def test_each_upgrade_leaves_the_other_tables_alone(application: Application) -> None:
    application.revision("first")
    application.alembic("upgrade", "head")
    application.read(lambda connection: connection.execute(text("insert into customers values (1, 'ada')")))
    for table in (*sorted(EVENTJET_TABLES - READ_MODELS), "eventjet_alembic_version"):
        application.read(lambda connection, table=table: connection.execute(text(f"drop table {table}")))
    output = application.eventjet("db", "upgrade")
    assert "created  table eventjet_alembic_version" in output
    assert "at revision 0003 (before: none)" in output
    assert "(was there already)" in application.eventjet("db", "upgrade")
    assert application.read(lambda connection: connection.scalar(text("select name from customers"))) == "ada"
    assert application.read(lambda connection: connection.scalar(text("select version_num from alembic_version")))
    application.alembic("downgrade", "base")
    assert "customers" not in application.tables()
    assert application.tables() >= EVENTJET_TABLES


def test_tables_of_revisions_that_the_app_no_longer_declares_are_left_alone(application: Application) -> None:
    application.revision("first")
    application.alembic("upgrade", "head")

    def make(connection: Connection) -> None:
        connection.execute(text("create table old_balances (id integer primary key)"))
        connection.execute(text("create table stray (id integer primary key)"))
        connection.execute(text("""insert into eventjet_projection (name, revision, tables)
                                   values ('balances', 7, '["old_balances"]')"""))  # fmt: skip
        if application.where.dialect.name == "postgresql":
            connection.execute(text("create schema ej_balances_r7"))
            connection.execute(text("create table ej_balances_r7.balances (id integer primary key)"))
        else:
            connection.execute(text("create table balances__r7 (id integer primary key)"))

    application.read(make)
    written = application.revision("second")
    assert written.count("op.") == 1
    assert "drop_table('stray')" in written
