"""Pytest fixtures for applications: real embedded servers, one of each kind for a test session.

Pytest loads this module at every start, so it imports nothing heavy before a fixture is requested. The tests of a
session share the servers: a test that must be alone uses a stream (an app name) or a database of its own, as
`eventjet_database` does.
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
    """Add the option `--write-golden`, which the laws of `eventjet.testing` read."""
    parser.getgroup("eventjet").addoption(
        "--write-golden",
        action="store_true",
        help="Write down how events fold and look today, for `AggregateLaws` and `CodecLaws` of later releases.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hide pytest-asyncio's warning about an unset loop scope: the extra `testing` brings pytest-asyncio along."""
    if config.pluginmanager.has_plugin("asyncio") and config.getini("asyncio_mode") != "auto":
        warnings.filterwarnings("ignore", _UNSET, pytest.PytestDeprecationWarning)


@pytest.fixture(scope="session")
def eventjet_nats() -> Iterator[NatsServer]:
    """Yield a NATS server with JetStream on a free port of 127.0.0.1; clients connect to `eventjet_nats.url`."""
    from eventjet.dev.nats import NatsServer

    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def eventjet_postgres() -> Iterator[PostgresServer]:
    """Yield a PostgreSQL server that does not wait for the disk; `create_database` makes a database for one test."""
    from eventjet.dev.postgres import PostgresServer

    with PostgresServer(durable=False) as server:
        yield server


@pytest.fixture
def eventjet_database(eventjet_postgres: PostgresServer) -> Iterator[str]:
    """Yield the URL of an empty PostgreSQL database that only this test uses; it is dropped after the test."""
    name = f"test_{uuid4().hex}"
    yield eventjet_postgres.create_database(name)
    eventjet_postgres.drop_database(name)
