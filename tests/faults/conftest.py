"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from tests.faults.scene import Scene, scene


@pytest.fixture
def stage(eventjet_nats: NatsServer, database: str, tmp_path: Path) -> Iterator[Scene]:
    """A log that grows and its read models; what is said of it is printed at the end."""
    with scene(eventjet_nats.url, database, tmp_path) as found:
        yield found
