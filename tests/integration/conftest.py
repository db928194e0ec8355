"""Fixtures for many tests of this folder: apps over empty logs, and the Spark session."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.spark.session import Started
from tests.integration.by_hand import log_of
from tests.integration.doctored import Deployment
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import BALANCES, MOVEMENTS, database_with
from tests.integration.rebuild_log import Book
from tests.integration.shared_spark import SharedSpark

SPARK = SharedSpark()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close the Spark session before the tests of a file that does not use it."""
    if SPARK.running is not None and (nextitem is None or not shares_spark(nextitem)):
        SPARK.close()


def shares_spark(item: pytest.Item) -> bool:
    """Return whether a test in the item's file uses the Spark session."""
    return any("spark" in getattr(other, "fixturenames", ()) for other in item.session.items if other.path == item.path)


@pytest.fixture(scope="session")
def endpoint(nats: NatsServer) -> Endpoint:
    return Endpoint((nats.url,))


@pytest.fixture(scope="session")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder behind `viewfs://archives/there`, a file system of Hadoop that no local path names."""
    return tmp_path_factory.mktemp("mounted")


@pytest.fixture(scope="module")
def spark(mounted: Path) -> Started:
    """Return the running Spark session, which rebuilds and archives use by themselves."""
    return SPARK.started(mounted)


@pytest.fixture
def book(nats: NatsServer, database: str, tmp_path: Path) -> Book:
    """Return the app of `rebuild_log` without a log, with a database of each kind."""
    return Book(Settings.load({"servers": nats.url, "database": database}, {}), tmp_path)


@pytest.fixture
def postgres_book(nats: NatsServer, eventjet_database: str, tmp_path: Path) -> Book:
    return Book(Settings.load({"servers": nats.url, "database": eventjet_database}, {}), tmp_path)


@pytest.fixture
def ledger(nats: NatsServer, database: str) -> Ledger:
    """Return the app of `projecting` over an empty log, with its tables."""
    database_with(database, BALANCES, MOVEMENTS)
    ledger = Ledger(Settings(servers=(nats.url,), database=database))
    ledger.create()
    return ledger


@pytest.fixture
def log(nats: NatsServer, database: str) -> Ledger:
    """Return the app of `by_hand` over an empty log, with its tables."""
    return log_of(nats, database)


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the doctor from starting a JVM to ask for its version."""
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1")


@pytest.fixture
def deployment(nats: NatsServer, tmp_path: Path) -> Deployment:
    """Return a deployment that has no streams and no tables yet."""
    return Deployment(Settings(servers=(nats.url,), database=f"sqlite:///{tmp_path}/read.db"), tmp_path)
