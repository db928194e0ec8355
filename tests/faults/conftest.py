"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from tests.faults.scene import Scene, scene


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("eventjet_database"))
    return f"sqlite:///{tmp_path}/read.db"


@pytest.fixture
def stage(eventjet_nats: NatsServer, database: str, tmp_path: Path) -> Iterator[Scene]:
    """A log that grows and its read models; what is said of it is printed at the end."""
    with scene(eventjet_nats.url, database, tmp_path) as found:
        yield found


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    """Ends what is entered."""
    with ExitStack() as stack:
        yield stack
