"""`eventjet status --watch` closes what it watches when its output takes no more."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from eventjet.cli import status as commands
from eventjet.subscriptions import status
from eventjet.subscriptions.work_status import WorkStatus


class Closed:
    """An output whose reader has gone."""

    def isatty(self) -> bool:
        return False

    def write(self, _: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None: ...


def test_a_reader_that_closes_the_pipe_leaves_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    is_closed = False

    async def endless(*_: Any) -> AsyncGenerator[list[WorkStatus]]:
        nonlocal is_closed
        try:
            while True:
                yield [WorkStatus("balances", 1, "active", 1, 1, 0)]
        finally:
            is_closed = True

    async def watch() -> bool:
        target: Any = SimpleNamespace(app=lambda: None, settings=None)
        with pytest.raises(BrokenPipeError):
            await commands._watch(target, 0.1, as_json=True)
        return is_closed

    monkeypatch.setattr(status, "watched", endless)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert asyncio.run(watch())
