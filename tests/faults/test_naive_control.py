"""The control: the naive design loses events under the kills that eventjet's workers survive, so the harness bites."""

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
from tests.faults.tally import Line, Seen, Truth, judge, snapshot
from tests.tables import reading

KILLS = int(os.environ.get("EVENTJET_TEST_CONTROL_KILLS", "4"))
STEPS = ("worker.batch_taken", "worker.before_commit", "worker.rows_written", "worker.after_commit")
EVENTS = 150
"""Between two kills."""


def naively_seen(database: str) -> Seen:
    with reading(database) as connection:
        position = connection.scalar(text("select position from naive_checkpoint")) or 0
        found = connection.execute(text("select * from naive_journal order by position"))
        lines = [Line(row[0], row[1], row[2], Decimal(row[3])) for row in found]
    return Seen(position, snapshot(database).totals, position, lines, len(lines))


def prepare(database: str) -> None:
    engine = Database(database).sync_engine()
    with engine.begin() as connection:
        for statement in TABLES:
            connection.exec_driver_sql(statement)
    engine.dispose()


@pytest.mark.timeout(600 + 60 * KILLS)
def test_the_naive_design_is_seen_to_lose(stage: Scene, processes: ExitStack) -> None:
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
    last_one = start()
    last = stage.feed.finish()
    await_it(lambda: naively_seen(database).totals_at >= last, last_one.logged)
    # What was never acknowledged comes again, and is done already.
    await_it(lambda: stage.waiting_for(DURABLE) == (0, 0), last_one.logged)
    last_one.ask_to_end()
    last_one.ended_well()
    verdict = judge(Truth(stage.feed.log), naively_seen(database))
    stage.say(f"control, the naive design (durable, acknowledgements, position in SQL), {KILLS} kills: {verdict}")
    assert verdict.lost > 0
    assert verdict.wrong_rows > 0
