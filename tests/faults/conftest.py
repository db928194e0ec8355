"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from tests.faults.among import AMONG
from tests.faults.scene import Scene, scene


@pytest.fixture
def stage(eventjet_nats: NatsServer, database: str, tmp_path: Path) -> Iterator[Scene]:
    """A log that grows and its read models; what is said of it is printed at the end."""
    with scene(eventjet_nats.url, database, tmp_path) as found:
        yield found


@pytest.fixture(params=AMONG)
def among(request: pytest.FixtureRequest) -> int:
    """How many processes fold: for a worker that is far behind, or for a rebuild."""
    found: int = request.param
    return found


@pytest.fixture
def said(record_property: Callable[[str, object], None]) -> Iterator[list[str]]:
    """What a run has counted, for the report of `make faults`."""
    lines: list[str] = []
    yield lines
    for line in lines:
        print(line)  # noqa: T201
        record_property("said", line)
