"""Pytest fixtures for applications: real embedded servers, one of each a session.

Loaded by pytest by itself, so nothing is imported here before a fixture is asked for. The servers are shared: a test
that must be alone takes a stream (an app name) or a database of its own, as `eventjet_database` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

_UNSET = 'The configuration option "asyncio_default_fixture_loop_scope" is unset'

if TYPE_CHECKING:
    from eventjet.dev.nats import NatsServer
    from eventjet.dev.postgres import PostgresServer


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-golden`, of `eventjet.testing`'s laws."""
    parser.getgroup("eventjet").addoption(
        "--write-golden",
        action="store_true",
        help="Write down how events fold and look today, for `AggregateLaws` and `CodecLaws` of later releases.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Where nobody configured pytest-asyncio, which came with eventjet, say nothing of the setting that it misses."""
    if config.pluginmanager.has_plugin("asyncio") and config.getini("asyncio_mode") != "auto":
        warnings.filterwarnings("ignore", _UNSET, pytest.PytestDeprecationWarning)


@pytest.fixture(scope="session")
def eventjet_nats() -> Iterator[NatsServer]:
    """A NATS server with JetStream, on a free port of 127.0.0.1; `eventjet_nats.url` is where to connect."""
    from eventjet.dev.nats import NatsServer

    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def eventjet_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server that does not wait for the disk; `create_database` gives a test one of its own."""
    from eventjet.dev.postgres import PostgresServer

    with PostgresServer(durable=False) as server:
        yield server


@pytest.fixture
def eventjet_database(eventjet_postgres: PostgresServer) -> Iterator[str]:
    """The URL of an empty PostgreSQL database that only this test uses; dropped after it."""
    name = f"test_{uuid4().hex}"
    yield eventjet_postgres.create_database(name)
    eventjet_postgres.drop_database(name)
