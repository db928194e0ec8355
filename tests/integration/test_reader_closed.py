"""A reader whose session ends while the reader is opened leaves nothing open."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.errors import CheckpointFenced
from eventjet.projections.fold import reader as reader_of
from eventjet.settings import Settings
from eventjet.subscriptions.reader import EventReader, Source
from eventjet.subscriptions.retry import opened, renewing
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import BALANCES, CATALOG

_TIMES = 10


@pytest.fixture
def ledger(eventjet_nats: NatsServer, tmp_path: Path) -> Ledger:
    ledger = Ledger(Settings(servers=(eventjet_nats.url,), database=f"sqlite:///{tmp_path}/read.db"))
    ledger.create()
    return ledger


def opening(ledger: Ledger) -> Coroutine[Any, Any, EventReader]:
    decoder = partial(reader_of, CATALOG, BALANCES, ())
    return EventReader.open(Source(ledger.endpoint, ledger.name, "durable"), 0, decoder, 10)


def resource_warnings(work: Callable[[int], Coroutine[Any, Any, None]]) -> list[str]:
    """Run work in several loops, one after the other, and return the resource warnings."""
    gc.collect()
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always", ResourceWarning)
        for number in range(_TIMES):
            asyncio.run(work(number))
        gc.collect()
    return [str(warning.message) for warning in records]


def test_a_reader_whose_session_is_cancelled_as_its_loop_ends_leaves_nothing_open(ledger: Ledger) -> None:
    async def cancel_while_opening(number: int) -> None:
        task = asyncio.create_task(opening(ledger))
        await asyncio.sleep(number * 0.001)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, EventReader):
            await outcome.close()

    assert resource_warnings(cancel_while_opening) == []


def test_a_reader_that_is_open_as_the_lease_is_lost_leaves_nothing_open(ledger: Ledger) -> None:
    async def lose_lease(_: int) -> None:
        async def renew() -> None:
            while not is_open.done():
                await asyncio.sleep(0)
            raise CheckpointFenced("balances", "another worker has it")

        async def open_reader() -> EventReader:
            reader = await opened(stack, opening(ledger))
            is_open.set_result(None)
            return reader

        is_open = asyncio.get_running_loop().create_future()
        with pytest.raises(CheckpointFenced):
            async with AsyncExitStack() as stack:
                await renewing(open_reader(), renew, 0.0)

    assert resource_warnings(lose_lease) == []
