"""What names the fold processes of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fold_processes import MARK, all_ended
from tests.logs import fresh_name


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What names the fold processes of a test; none of them, and no descriptor, is left afterwards."""
    name = fresh_name("fold")
    monkeypatch.setenv(MARK, name)
    before = descriptors()
    yield name
    assert all_ended(name)
    assert descriptors() == before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
