"""Fixtures of many tests here: a database of each kind, an app over an empty log, processes that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from eventjet.spark.session import Started
from tests.integration.by_hand import log_of
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import BALANCES, MOVEMENTS, made
from tests.integration.rebuild_log import Book
from tests.integration.shared_spark import SharedSpark

SPARK = SharedSpark()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Files that want no Spark are to find none; those that do take the session that runs."""
    if SPARK.running is not None and (nextitem is None or not wants_spark(nextitem)):
        SPARK.close()


def wants_spark(item: pytest.Item) -> bool:
    """Whether a test of the same file does."""
    return any("spark" in getattr(one, "fixturenames", ()) for one in item.session.items if one.path == item.path)


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("eventjet_database"))
    return f"sqlite:///{tmp_path}/read.db"


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    """A server of the module's own, for logs of thousands of events."""
    with NatsServer(sync_interval="1m") as server:
        yield server


@pytest.fixture(scope="session")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `viewfs://archives/there` is: a file system of Hadoop's that no path of this machine names."""
    return tmp_path_factory.mktemp("mounted")


@pytest.fixture(scope="module")
def spark(mounted: Path) -> Started:
    """The session that runs: rebuilds and archives use it by themselves."""
    return SPARK.started(mounted)


@pytest.fixture
def book(nats: NatsServer, database: str, tmp_path: Path) -> Book:
    """The app of `rebuild_log` without a log, and a database of each kind."""
    return Book(Settings.load({"servers": nats.url, "database": database}, {}), tmp_path)


@pytest.fixture
def ledger(eventjet_nats: NatsServer, database: str) -> Ledger:
    """The app of `projecting` over an empty log, with its tables."""
    made(database, BALANCES, MOVEMENTS)
    ledger = Ledger(Settings(servers=(eventjet_nats.url,), database=database))
    ledger.create()
    return ledger


@pytest.fixture
def log(eventjet_nats: NatsServer, database: str) -> Ledger:
    """The app of `by_hand` over an empty log, with its tables."""
    return log_of(eventjet_nats, database)


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    """Whatever is entered here ends with the test."""
    with ExitStack() as stack:
        yield stack
