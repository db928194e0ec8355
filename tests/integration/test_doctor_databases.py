"""What `eventjet doctor` says of databases: their settings, tables, roles, and those that are away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.settings import Settings
from eventjet.sql import postgres, sqlite
from tests.integration.doctored import (
    ALONE,
    FAULT,
    NOTE,
    OK,
    UNKNOWN,
    UNREACHABLE,
    WARNING,
    Kind,
    Sick,
    kinds,
    newer,
)
from tests.logs import fresh_name
from tests.tables import execute

pytestmark = pytest.mark.usefixtures("no_java")


@pytest.fixture
async def on_postgres(nats: NatsServer, eventjet_database: str, tmp_path: Path) -> Sick:
    return await Sick(Settings(servers=(nats.url,), database=eventjet_database), tmp_path).made()


UNSAFE: set[Kind] = {("database", "settings", FAULT)}
"""The tests' own PostgreSQL does not wait for the disk."""


async def test_settings_of_postgres_that_lose_or_slow_are_told(on_postgres: Sick) -> None:
    name = on_postgres.settings.database.rpartition("/")[2]
    assert kinds(await on_postgres.found()) - ALONE == UNSAFE
    on_postgres.execute(f"alter database {name} set synchronous_commit = off")
    told = {one.what: one.level for one in await on_postgres.found() if one.check == "settings"}
    assert told == {
        "fsync is off": FAULT,
        "full_page_writes is off": FAULT,
        "synchronous_commit is off": WARNING,
    }


async def test_columns_that_were_changed_are_told(on_postgres: Sick) -> None:
    await on_postgres.begun()
    on_postgres.execute(
        "alter table deposits alter column amount type double precision",
        "delete from deposits",
        "alter table deposits add column note text not null",
    )
    told = {one.what: one.level for one in await on_postgres.found() if one.check == "tables" and one.level is not OK}
    assert told == {
        "deposits: the column deposits.amount is DOUBLE PRECISION, declared is NUMERIC(12, 2)": FAULT,
        "deposits: the column deposits.note is not declared, and must have a value": FAULT,
    }


async def test_a_revision_aside_is_compared_where_it_is(on_postgres: Sick) -> None:
    await on_postgres.begun()
    await newer(on_postgres)
    assert not [one for one in await on_postgres.found() if one.check == "tables" and one.level is not OK]
    on_postgres.execute("alter table ej_deposits_r2.deposits add column note text not null")
    assert ("database", "tables", FAULT) in kinds(await on_postgres.found())


async def test_a_role_of_postgres_that_may_see_nothing_is_told_what_it_lacks(
    on_postgres: Sick, eventjet_postgres: PostgresServer
) -> None:
    role = fresh_name("blind")
    execute(eventjet_postgres.url, f"create role {role} login password 'secret-{role}'")
    try:
        own = on_postgres.settings.database
        blind = f"postgresql://{role}:secret-{role}@{own.rpartition('@')[2]}"
        on_postgres.settings = replace(on_postgres.settings, database=blind)
        found = await on_postgres.found()
    finally:
        execute(eventjet_postgres.url, f"drop role {role}")
    assert ("database", "checkpoints", UNKNOWN) in kinds(found) or ("database", "tables", UNKNOWN) in kinds(found)
    assert any("permission denied for table eventjet" in one.what for one in found)
    assert f"secret-{role}" not in str(found)


async def test_a_database_that_is_away_is_said_once(sick: Sick) -> None:
    await sick.made()
    sick.settings = replace(sick.settings, database="postgresql://ada:secret@127.0.0.1:1/read")
    found = await sick.found()
    assert [(one.part, one.check) for one in found if one.level is UNREACHABLE] == [("database", "reach")]
    assert ("read models", "checkpoint", UNKNOWN) in kinds(found)
    assert "secret" not in str(found)


@pytest.mark.parametrize(("version", "is_fault"), [("9.6.24", True), ("14.20 (Debian)", False)])
def test_old_databases_are_told(version: str, is_fault: bool) -> None:
    (risk,) = postgres.findings_of({"server_version": version})
    assert risk.level is (FAULT if is_fault else WARNING)
    assert not postgres.findings_of({"server_version": "18.1"})
    levels = {
        version: [risk.level for risk in sqlite.findings_of(version, is_wal=True)]
        for version in ("3.34.1", "3.44.5", "3.44.6", "3.51.3")
    }
    assert levels == {"3.34.1": [FAULT], "3.44.5": [NOTE], "3.44.6": [], "3.51.3": []}
    assert [risk.level for risk in sqlite.findings_of("3.51.3", is_wal=False)] == [WARNING]
