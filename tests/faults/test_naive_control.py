"""The control: the naive design loses events under the kills that eventjet's workers survive, so the tests can fail."""

from __future__ import annotations

import os
from contextlib import ExitStack
from decimal import Decimal

import pytest
from sqlalchemy import text

from eventjet.sql.database import Database
from tests.faults.naive import DURABLE, TABLES
from tests.faults.processes import Fault, WorkerProcess, await_it
from tests.faults.scene import Scene
from tests.faults.tally import Line, Tables, Truth, judge, snapshot
from tests.tables import reading

KILLS = int(os.environ.get("EVENTJET_TEST_CONTROL_KILLS", "4"))
STEPS = ("worker.batch_taken", "worker.before_commit", "worker.rows_written", "worker.after_commit")
EVENTS = 150
"""Events between two kills."""


def naive_tables(database: str) -> Tables:
    with reading(database) as connection:
        position = connection.scalar(text("select position from naive_checkpoint")) or 0
        journal = connection.execute(text("select * from naive_journal order by position"))
        lines = [Line(row[0], row[1], row[2], Decimal(row[3])) for row in journal]
    return Tables(position, snapshot(database).totals, position, lines, len(lines))


def prepare(database: str) -> None:
    engine = Database(database).sync_engine()
    with engine.begin() as connection:
        for statement in TABLES:
            connection.exec_driver_sql(statement)
    engine.dispose()


@pytest.mark.timeout(600 + 60 * KILLS)
def test_the_naive_design_loses_events(stage: Scene, processes: ExitStack) -> None:
    database = stage.ledger.settings.database
    prepare(database)

    def start(fault: Fault | None = None) -> WorkerProcess:
        return processes.enter_context(
            WorkerProcess(stage.ledger, stage.folder, fault, module="tests.faults.naive").ready()
        )

    for turn in range(KILLS):
        stage.feed.allow(EVENTS)
        worker = start(Fault(STEPS[turn % len(STEPS)], "kill", 2))
        await_it(worker.reached, worker.logged)
    survivor = start()
    last = stage.feed.finish()
    await_it(lambda: naive_tables(database).totals_at >= last, survivor.logged)
    # Messages that were never acknowledged come again, and are skipped.
    await_it(lambda: stage.waiting_for(DURABLE) == (0, 0), survivor.logged)
    survivor.ask_to_end()
    survivor.ended_well()
    verdict = judge(Truth(stage.feed.log), naive_tables(database))
    stage.say(f"control, the naive design (durable, acknowledgements, position in SQL), {KILLS} kills: {verdict}")
    assert verdict.lost > 0
    assert verdict.wrong_rows > 0
