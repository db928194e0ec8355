"""The GRANTs of `eventjet nats-config --postgres` let each role do its work. Roles need their own server."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from eventjet.cli.main import main
from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.sql.database import OWNER, READER, grants

pytestmark = pytest.mark.slow
APP = ["--app", "eventjet.examples.bank.app:bank"]


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """Yield host:port/database with the grants, run before `init`; each role's password is its name."""
    with PostgresServer() as server:
        url = server.url.replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("create database bank")
        url = f"{url.rpartition('/')[0]}/bank"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(grants([(None, "balances"), (None, "postings")]).encode())
            for role in (OWNER, READER):
                connection.execute(f"alter role {role} password '{role}'".encode())
        yield url.rpartition("@")[2]


def test_the_owner_creates_and_rebuilds_tables_that_the_reader_reads(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with NatsServer(sync_interval="1m") as nats:
        monkeypatch.setenv("EVENTJET_SERVERS", nats.url)
        monkeypatch.setenv("EVENTJET_DATABASE", f"postgresql://{OWNER}:{OWNER}@{host}")
        assert main(["init", *APP]) == 0
        assert main(["rebuild", "balances", "--engine", "local", *APP]) == 0
        monkeypatch.setenv("EVENTJET_DATABASE", f"postgresql://{READER}:{READER}@{host}")
        assert main(["status", *APP]) == 0
        capsys.readouterr()
        assert main(["pause", "balances", *APP]) == 3
        assert "permission denied" in " ".join(capsys.readouterr().err.split())
    with psycopg.connect(f"postgresql://{READER}:{READER}@{host}", autocommit=True) as connection:
        connection.execute("select count(*) from balances, postings")
        for forbidden in (
            "insert into balances select * from balances",
            "update eventjet_projection set position = 0",
            "delete from eventjet_quarantine",
            "truncate balances",
            "drop table balances",
            "create table mine (n int)",
            "create schema mine",
            f"set role {OWNER}",
        ):
            with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidParameterValue)):
                connection.execute(forbidden.encode())
