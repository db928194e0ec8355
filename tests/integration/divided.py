"""What the tests of divided workers share: an app that fold processes can import, and a worker that stays far behind.

The app of the process that tests is `app`, set by `stage`; a fold process that imports this module finds the same one
by its environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table

from eventjet.domain.recorded import Recorded
from eventjet.observability import logs
from eventjet.projections.projection import projection
from eventjet.projections.resolve import ResolvedProjection, resolve
from eventjet.settings import Settings
from eventjet.sql.checkpoint import Checkpoint, read
from eventjet.subscriptions.context import WorkerOptions
from tests.among import SEVERAL
from tests.fold_processes import MARK, fold_processes
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import BALANCES, CATALOG, MOVEMENTS, Opened, balances, rows_of
from tests.integration.quarantined import PARKING
from tests.slow_alone import slow_alone
from tests.tables import reading

KIND = "EVENTJET_TEST_KIND"
OPTIONS = WorkerOptions(batch_max=20, lease_s=2.0, poll_s=0.1, processes=SEVERAL[0])
"""Far behind is 80 events."""
BURST = 400


@dataclass(frozen=True, slots=True)
class Owner:
    owner: str
    accounts: int


def owner_of(event: Recorded[Opened]) -> str:
    return event.data.owner


@projection(
    "owners",
    table=Table("owners", MetaData(), Column("owner", String(20), primary_key=True), Column("accounts", Integer)),
    key=owner_of,
)
def owners(row: Owner | None, event: Recorded[Opened]) -> Owner | None:
    return Owner(event.data.owner, row.accounts + 1 if row else 1)


OWNERS = resolve(owners, CATALOG)
NEXT = resolve(replace(balances, revision=2), CATALOG)
"""The next revision of the balances, which has the same rows."""
KINDS: dict[str, dict[str, ResolvedProjection]] = {
    "plain": {"balances": BALANCES, "movements": MOVEMENTS},
    "parking": {"balances": PARKING},
    "owners": {"owners": OWNERS},
    "next": {"balances": NEXT, "movements": MOVEMENTS},
}


def app_of(settings: Settings, name: str, kind: str) -> Ledger:
    return Ledger(settings, name, projections=dict(KINDS[kind]))


app: Ledger | None = None
if MARK in os.environ and KIND in os.environ:
    app = app_of(Settings(), os.environ[MARK], os.environ[KIND])


@dataclass
class Stage:
    """One app, its log, and what its worker tells."""

    ledger: Ledger
    told: list[logging.LogRecord]
    last: int = 0
    """The last position of the log."""
    positions: list[int] = field(default_factory=list[int])
    """Of the checkpoint, as they were seen."""

    def events(self, event: logs.LogEvent) -> list[dict[str, Any]]:
        """The fields of all lines of a kind so far."""
        return [vars(one)["fields"] for one in list(self.told) if vars(one).get("event") == event.name]

    @property
    def divisions(self) -> list[dict[str, Any]]:
        return self.events(logs.DIVIDED)

    def fold_processes(self) -> list[int]:
        return fold_processes(self.ledger.name)

    def fill(self, count: int = BURST, seed: int = 7) -> int:
        self.last = self.ledger.append(history(count, seed=seed))
        return self.last

    def checkpoint(self, name: str = "balances", revision: int = 1) -> Checkpoint:
        with reading(self.ledger.settings.database) as connection:
            found = read(connection, name, revision)
        assert found is not None
        return found

    def rows(self, resolved: ResolvedProjection = BALANCES) -> list[Any]:
        with reading(self.ledger.settings.database) as connection:
            return rows_of(connection, resolved)

    @contextmanager
    def growing(self, resolved: ResolvedProjection = BALANCES) -> Generator[None]:
        """The log grows as long as this lasts, so that the worker is far behind all the time; not without bounds."""
        stop = threading.Event()

        def grow() -> None:
            seed = 100
            while not stop.wait(0.1):
                position = self.checkpoint(resolved.name, resolved.revision).position
                self.positions.append(position)
                if position > self.last - BURST:
                    seed += 1
                    self.fill(seed=seed)

        thread = threading.Thread(target=grow)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(60)
            assert not thread.is_alive()

    async def divided(self, times: int = 1) -> None:
        """Until the work was divided so often."""

        async def is_divided() -> bool:
            return len(self.divisions) >= times

        await eventually(is_divided, f"the work to be divided {times} times")

    async def moves_on(self, resolved: ResolvedProjection = BALANCES) -> None:
        """Until there is a later checkpoint."""
        before = self.checkpoint(resolved.name, resolved.revision)

        async def is_later() -> bool:
            now = await asyncio.to_thread(self.checkpoint, resolved.name, resolved.revision)
            return (now.epoch, now.position) > (before.epoch, before.position) and now.position > before.position

        await eventually(is_later, "a batch")

    async def alone(self) -> None:
        """Until no fold process is left."""

        async def is_alone() -> bool:
            return not await asyncio.to_thread(self.fold_processes)

        await eventually(is_alone, "the fold processes to end")


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def stage_of(ledger: Ledger, kind: str, patch: pytest.MonkeyPatch, alone_s: float = 0.001) -> Generator[Stage]:
    """The app of this kind over the ledger's log, for workers of this process; afterwards no fold process is left.

    Such a worker takes `alone_s` for an event alone, longer than its log takes to grow by one.
    """
    made = app_of(ledger.settings, ledger.name, kind)
    made.projections = {
        name: replace(one, declared=slow_alone(one.declared, alone_s)) for name, one in made.projections.items()
    }
    patch.setenv(MARK, made.name)
    patch.setenv(KIND, kind)
    patch.setattr("tests.integration.divided.app", made)
    lines, logger = Lines(), logging.getLogger("eventjet")
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        stage = Stage(made, lines.records)
        yield stage
        assert stage.fold_processes() == []
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
