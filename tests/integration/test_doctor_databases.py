"""`eventjet doctor` reports faults of databases: their settings, tables and roles, and databases out of reach."""

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
    Deployment,
    Kind,
    kinds,
    newer,
)
from tests.logs import fresh_name
from tests.tables import execute

pytestmark = pytest.mark.usefixtures("no_java")


@pytest.fixture
async def on_postgres(nats: NatsServer, eventjet_database: str, tmp_path: Path) -> Deployment:
    return await Deployment(Settings(servers=(nats.url,), database=eventjet_database), tmp_path).init()


UNSAFE: set[Kind] = {("database", "settings", FAULT)}
"""The findings for the tests' own PostgreSQL, which does not wait for the disk."""


async def test_postgres_settings_that_may_lose_data_are_reported(on_postgres: Deployment) -> None:
    name = on_postgres.settings.database.rpartition("/")[2]
    assert kinds(await on_postgres.findings()) - ALONE == UNSAFE
    on_postgres.execute(f"alter database {name} set synchronous_commit = off")
    levels = {finding.what: finding.level for finding in await on_postgres.findings() if finding.check == "settings"}
    assert levels == {
        "fsync is off": FAULT,
        "full_page_writes is off": FAULT,
        "synchronous_commit is off": WARNING,
    }


async def test_changed_columns_are_reported(on_postgres: Deployment) -> None:
    await on_postgres.deposit_and_process()
    on_postgres.execute(
        "alter table deposits alter column amount type double precision",
        "delete from deposits",
        "alter table deposits add column note text not null",
    )
    levels = {
        finding.what: finding.level
        for finding in await on_postgres.findings()
        if finding.check == "tables" and finding.level is not OK
    }
    assert levels == {
        "deposits: the column deposits.amount is DOUBLE PRECISION, declared is NUMERIC(12, 2)": FAULT,
        "deposits: the column deposits.note is not declared, and must have a value": FAULT,
    }


async def test_tables_of_an_inactive_revision_are_compared_in_their_own_schema(on_postgres: Deployment) -> None:
    await on_postgres.deposit_and_process()
    await newer(on_postgres)
    assert not [
        finding for finding in await on_postgres.findings() if finding.check == "tables" and finding.level is not OK
    ]
    on_postgres.execute("alter table ej_deposits_r2.deposits add column note text not null")
    assert ("database", "tables", FAULT) in kinds(await on_postgres.findings())


async def test_a_postgres_role_without_permissions_gets_the_missing_ones_named(
    on_postgres: Deployment, eventjet_postgres: PostgresServer
) -> None:
    role = fresh_name("blind")
    execute(eventjet_postgres.url, f"create role {role} login password 'secret-{role}'")
    try:
        own = on_postgres.settings.database
        blind = f"postgresql://{role}:secret-{role}@{own.rpartition('@')[2]}"
        on_postgres.settings = replace(on_postgres.settings, database=blind)
        findings = await on_postgres.findings()
    finally:
        execute(eventjet_postgres.url, f"drop role {role}")
    assert ("database", "checkpoints", UNKNOWN) in kinds(findings) or ("database", "tables", UNKNOWN) in kinds(findings)
    assert any("permission denied for table eventjet" in finding.what for finding in findings)
    assert f"secret-{role}" not in str(findings)


async def test_an_unreachable_database_is_reported_once(deployment: Deployment) -> None:
    await deployment.init()
    deployment.settings = replace(deployment.settings, database="postgresql://ada:secret@127.0.0.1:1/read")
    findings = await deployment.findings()
    assert [(finding.part, finding.check) for finding in findings if finding.level is UNREACHABLE] == [
        ("database", "reach")
    ]
    assert ("read models", "checkpoint", UNKNOWN) in kinds(findings)
    assert "secret" not in str(findings)


@pytest.mark.parametrize(("version", "is_fault"), [("9.6.24", True), ("14.20 (Debian)", False)])
def test_old_database_versions_are_reported(version: str, is_fault: bool) -> None:
    (risk,) = postgres.findings_of({"server_version": version})
    assert risk.level is (FAULT if is_fault else WARNING)
    assert not postgres.findings_of({"server_version": "18.1"})
    levels = {
        version: [risk.level for risk in sqlite.findings_of(version, is_wal=True)]
        for version in ("3.34.1", "3.44.5", "3.44.6", "3.51.3")
    }
    assert levels == {"3.34.1": [FAULT], "3.44.5": [NOTE], "3.44.6": [], "3.51.3": []}
    assert [risk.level for risk in sqlite.findings_of("3.51.3", is_wal=False)] == [WARNING]
