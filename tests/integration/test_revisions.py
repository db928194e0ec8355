"""A new revision builds beside the old one and takes over; a rolling deploy with both loses and stops nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import text

from eventjet.dev.nats import NatsServer
from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY
from tests.integration.deploys import DEPLOYS, FOLDS, NEWER, NewerAdded, Worker, deployed
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import BALANCES, MOVEMENTS, Added, Closed, Opened
from tests.integration.revision_log import checkpoints, folded, init, is_past, old_deploy, rows, stands, waits

_ROWS = {
    "postgresql": "json_agg(json_build_array(account_id, owner, amount::text, events, last))::text",
    "sqlite": "json_group_array(json_array(account_id, owner, amount, events, last))",
}


@pytest.fixture
def ledger(eventjet_nats: NatsServer, database: str) -> Ledger:
    return old_deploy(eventjet_nats.url, database)


class Reader:
    """A reader that polls the declared table together with its checkpoint, as an application does."""

    def __init__(self, ledger: Ledger) -> None:
        where = Database(ledger.settings.database)
        self.snapshots: list[tuple[int, int, str]] = []
        """(revision, position, rows) as each single statement showed them."""
        self._engine = where.sync_engine()
        self._query = text(
            f"select (select {_ROWS[where.dialect.name]} from balances), revision, position "
            "from eventjet_projection where name = 'balances' and location = ''"
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.fault: Exception | None = None

    def _run(self) -> None:
        try:
            with self._engine.connect().execution_options(**{READ_ONLY: True}) as connection:
                while not self._stop.is_set():
                    rows_text, revision, position = connection.execute(self._query).one()
                    connection.rollback()
                    if not self.snapshots or self.snapshots[-1][:2] != (revision, position):
                        self.snapshots.append((revision, position, rows_text))
                    time.sleep(0.01)
        except Exception as error:  # noqa: BLE001 - raised where it is checked
            self.fault = error

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(20)
            self._engine.dispose()

    async def has_seen(self, revision: int, states: int) -> bool:
        """Return whether the reader has read that many states of the revision."""
        return sum(snapshot[0] == revision for snapshot in self.snapshots) >= states

    def check(self, ledger: Ledger) -> None:
        """Assert that each read showed the whole fold of its revision at its position, never an older one."""
        assert self.fault is None, self.fault
        positions = [position for _, position, _ in self.snapshots]
        assert positions == sorted(positions)
        assert [revision for revision, _, _ in self.snapshots] == sorted(revision for revision, _, _ in self.snapshots)
        events = iter(ledger.recorded(positions[-1]))
        states: dict[int, dict[str, Any]] = {1: {}, 2: {}}
        at = 0
        for revision, position, rows_text in self.snapshots:
            while at < position:
                event = next(events)
                at = event.position
                if isinstance(event.data, Opened | Added | NewerAdded | Closed):
                    for number, state in states.items():
                        state[event.aggregate_id] = FOLDS[number](state.get(event.aggregate_id), event)
            due = sorted(
                [row.account_id, row.owner, f"{row.amount:.2f}", row.events, row.last]
                for row in states[revision].values()
                if row is not None
            )
            assert sorted(json.loads(rows_text)) == due, f"revision {revision} at {position}"


class Commands:
    """A thread that appends events until the end of the block."""

    def __init__(self, ledger: Ledger, *also: tuple[str, Any]) -> None:
        self._ledger = ledger
        self._also = also
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.last = 0

    def _run(self) -> None:
        seed = 100
        while not self._stop.is_set():
            seed += 1
            self.last = self._ledger.append([*history(20, seed=seed), *self._also])
            time.sleep(0.02)

    @contextmanager
    def arriving(self) -> Iterator[Commands]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(20)


@pytest.mark.slow
async def are_active(ledger: Ledger) -> bool:
    return {checkpoint.state for checkpoint in checkpoints(ledger).values()} == {"active"}


async def test_a_rolling_deploy_of_a_new_fold_loses_and_stops_nothing(ledger: Ledger, processes: ExitStack) -> None:
    ledger.append(history(3_000))
    old = processes.enter_context(Worker("old", ledger)).ready()
    with Commands(ledger).arriving() as commands:
        await stands(ledger, 1, location="")
        await eventually(lambda: is_past(ledger, 1, 3_000), "revision 1 to catch up")
        with Reader(ledger).reading() as reader:
            await eventually(lambda: reader.has_seen(1, 6), "a reader to look at revision 1")
            tables = init(ledger, "fold")
            assert len(tables) == 1
            standby = processes.enter_context(Worker("old", ledger)).ready()
            new = processes.enter_context(Worker("fold", ledger)).ready()
            await stands(ledger, 2, location="")
            before = commands.last
            await eventually(lambda: is_past(ledger, 2, before + 200), "revision 2 to go on")
            await eventually(lambda: is_past(ledger, 1, before + 200), "revision 1 to go on")
            await eventually(lambda: reader.has_seen(2, 6), "a reader to look at revision 2")
    last = commands.last
    await stands(ledger, 1, position=last)
    await stands(ledger, 2, position=last)
    assert rows(ledger, BALANCES) == folded(ledger, 1, last)
    assert rows(ledger, NEWER) == folded(ledger, 2, last)
    await eventually(lambda: are_active(ledger), "all to be active")
    stored = checkpoints(ledger)
    assert stored["balances", 1].location.endswith("r1")
    assert [worker.runs() for worker in (old, standby, new)] == [True, True, True]
    reader.check(ledger)
    # The old deploy ends; the new one goes on alone.
    for worker in (old, standby):
        assert "Traceback" not in worker.drain()
    last = ledger.append(history(100, seed=5))
    await stands(ledger, 2, position=last)
    assert rows(ledger, NEWER) == folded(ledger, 2, last)
    assert "Traceback" not in new.drain()


@pytest.mark.slow
async def test_a_rolling_deploy_of_a_new_event_schema_loses_and_stops_nothing(
    ledger: Ledger, processes: ExitStack
) -> None:
    ledger.append(history(1_000))
    old = processes.enter_context(Worker("old", ledger)).ready()
    await eventually(lambda: is_past(ledger, 1, 1_000), "revision 1 to catch up")
    init(ledger, "schema")
    with Reader(ledger).reading() as reader:
        await eventually(lambda: reader.has_seen(1, 1), "a reader to look at revision 1")
        new = processes.enter_context(Worker("schema", ledger)).ready()
        newer = deployed("schema", ledger.settings, ledger.name)
        also = ("a-1", NewerAdded(amount=Decimal("0.01"), currency="CHF"))
        with Commands(replace(newer, catalog=_Both(newer, ledger)), also).arriving() as commands:
            await stands(ledger, 2, location="")
            before = commands.last
            await eventually(lambda: is_past(ledger, 2, before + 200), "revision 2 to go on")
            await eventually(lambda: waits(ledger), "revision 1 to say what it waits for")
            assert [worker.runs() for worker in (old, new)] == [True, True]
        last = commands.last
        # Movements have one revision, which both list: it waits for nobody once the old deploy is gone.
        old.drain()
        await newer.caught_up(last, DEPLOYS["schema"][1][1])
        await stands(ledger, 2, position=last)
        await eventually(lambda: reader.has_seen(2, 2), "a reader to look at revision 2")
    stored = checkpoints(ledger)
    stopped = stored["balances", 1].position
    assert 1_000 <= stopped < last
    await eventually(lambda: are_active(ledger), "all to be active")
    assert rows(ledger, NEWER) == folded(ledger, 2, last, "schema")
    assert rows(ledger, BALANCES) == folded(ledger, 1, stopped)
    expected = [
        (event.position, event.aggregate_id, event.data.amount)
        for event in newer.recorded(last)
        if isinstance(event.data, NewerAdded)
    ]
    assert rows(ledger, MOVEMENTS) == expected
    reader.check(newer)
    new.drain()


class _Both:
    """Encodes what either deploy records."""

    def __init__(self, newer: Ledger, older: Ledger) -> None:
        self._newer, self._older = newer.catalog, older.catalog

    def encode(self, data: Any) -> Any:
        return (self._newer if isinstance(data, NewerAdded) else self._older).encode(data)
