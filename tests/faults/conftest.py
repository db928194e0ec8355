"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from tests.faults.scene import Scene, scene


@pytest.fixture
def stage(eventjet_nats: NatsServer, database: str, tmp_path: Path) -> Iterator[Scene]:
    """A log that grows and its read models; its summary is printed at the end."""
    with scene(eventjet_nats.url, database, tmp_path) as running:
        yield running


@pytest.fixture(params=["postgresql", "sqlite"])
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """A function that makes another empty database on each call."""

    def make() -> str:
        name = f"test_{uuid4().hex}"
        if request.param == "sqlite":
            return f"sqlite:///{tmp_path}/{name}.db"
        server: PostgresServer = request.getfixturevalue("eventjet_postgres")
        request.addfinalizer(lambda: server.drop_database(name))
        return server.create_database(name)

    return make


@pytest.fixture
def report_lines(record_property: Callable[[str, object], None]) -> Iterator[list[str]]:
    """Lines with the counts of a run, for the report of `make faults`."""
    lines: list[str] = []
    yield lines
    for line in lines:
        print(line)  # noqa: T201
        record_property("said", line)
