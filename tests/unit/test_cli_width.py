"""Every listing fits a terminal of 80 columns without losing a part of its values."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len

from eventjet.cli.log import line
from eventjet.cli.main import app, commands_of, main
from eventjet.cli.output import Fields, show, warn_in_notes
from eventjet.cli.quarantine import event_blocks, list_blocks
from eventjet.cli.setup import unused_blocks
from eventjet.cli.status import doctor_blocks, status_blocks
from eventjet.cli.subscriptions import deadline_table, process_fields
from eventjet.doctor.examine import Examined
from eventjet.findings import Finding, Level
from eventjet.operations.processes import ProcessView
from eventjet.operations.quarantine import QuarantinedEvent
from eventjet.sql.quarantine import Listed, Shown
from eventjet.sql.revisions import Unused
from eventjet.subscriptions.work_status import WorkStatus

WIDTH = 80
NAME = "the_balances_of_all_customers_of_every_branch_and_of_those_that_left_us"
IDS = {
    "one word": "a" * 200,
    "wide characters": "顧客" * 33,
    "with blanks": "the savings account of " + "ada " * 44,
}
POSITION = 123_456_789_012
WORKER = "worker-7d9f8b6c5d-x2x4z.a-rather-long-name-of-a-node.example.com-1234567"
REASON = "HandlerFailed: " + "ValueError about " * 12


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


@pytest.fixture(params=IDS.values(), ids=IDS)
def aggregate_id(request: pytest.FixtureRequest) -> str:
    return request.param


def fits(out: str, *whole: str) -> None:
    """Check that no line is wider than the terminal and that all letters of `whole` are in the output."""
    wide = [line for line in out.splitlines() if cell_len(line) > WIDTH]
    assert not wide, "\n".join(wide)
    missing = Counter("".join(whole)) - Counter(out)
    assert not "".join(missing).strip(), out


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: capsys.readouterr().out


def test_status(printed: Callable[[], str]) -> None:
    status = WorkStatus(
        NAME, 1_000, "building", POSITION, POSITION, POSITION, 9e9, WORKER, 12, None, True, events_per_s=9e6, eta_s=9e9
    )
    show(
        status_blocks(
            "bank", [status, replace(status, kind="publication", quarantined=3), replace(status, reason=REASON)]
        )
    )
    fits(printed(), NAME, f"{POSITION:,}", REASON)


def listed(aggregate_id: str) -> Listed:
    return Listed(
        NAME,
        12,
        POSITION,
        "account",
        aggregate_id,
        "id-" + "9" * 60,
        NAME + ".opened",
        "quarantined",
        REASON,
        1.0,
        None,
        7,
    )


def test_quarantine_list(aggregate_id: str, printed: Callable[[], str]) -> None:
    for everything in (False, True):
        show(list_blocks([listed(aggregate_id)], {NAME: 11}, everything))
        fits(printed(), aggregate_id, REASON, str(POSITION))


def test_quarantine_show(aggregate_id: str, printed: Callable[[], str]) -> None:
    details = Shown(listed(aggregate_id), "Traceback:\n  File x\n", None, POSITION)
    show(event_blocks(QuarantinedEvent(details, NAME, {"note": aggregate_id}, "", ())))
    fits(printed(), aggregate_id, aggregate_id, REASON)


def test_deadlines_list(aggregate_id: str, printed: Callable[[], str]) -> None:
    row = {"process": NAME, "id": aggregate_id, "until": "2026-11-24T10:00:00Z"}
    show(deadline_table([{**row, "due": False}, {**row, "due": True}]))
    fits(printed(), aggregate_id, NAME, "2026-11-24T10:00:00Z")


def test_process_show(aggregate_id: str, printed: Callable[[], str]) -> None:
    view = ProcessView(
        NAME, aggregate_id, 3, {"note": REASON}, f'account {aggregate_id}: withdraw("4")', quarantined=None, paused=True
    )
    show(Fields(list(process_fields(view))))
    fits(printed(), aggregate_id, REASON)


def test_db_unused(printed: Callable[[], str]) -> None:
    tables = tuple(f"a_schema.{NAME}_{number}" for number in range(3))
    show(unused_blocks([], [], [Unused(NAME, 999, "building", "", tables, POSITION, POSITION, WORKER, None)], []))
    fits(printed(), NAME, f"{POSITION:,}", *tables)


def test_history_and_tail(aggregate_id: str) -> None:
    event: dict[str, Any] = {
        "position": POSITION,
        "recorded_at": "2026-11-24T10:00:00Z",
        "aggregate": "account",
        "aggregate_id": aggregate_id,
        "version": 123_456,
        "type": "account." + NAME,
        "schema": 12,
        "data": {"note": aggregate_id, "amount": "1"},
        "fault": REASON,
    }
    for named in (False, True):
        fits(line(event, with_aggregate=named), REASON, str(POSITION), *([aggregate_id] if named else []))


def test_doctor(printed: Callable[[], str]) -> None:
    findings = (
        Finding(
            "Server", "stream", level, f"the stream {NAME * 2} is {REASON}", REASON, "Run `eventjet init --repair`."
        )
        for level in Level
    )
    show(doctor_blocks(Examined("bank", tuple(findings), 3)))
    fits(printed(), NAME, REASON)


@pytest.mark.parametrize("command", ["", *(name for name, _ in commands_of(app))])
def test_help(command: str, printed: Callable[[], str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    fits(printed(), command)


def test_a_warning_of_a_command_without_a_log_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)  # restored after the test
    warn_in_notes()
    last_resort = logging.lastResort
    assert last_resort is not None
    last_resort.handle(logging.LogRecord("eventjet", logging.WARNING, "", 0, "%s, " * 20, ("a reason",) * 20, None))
    lines = capsys.readouterr().err.splitlines()
    assert (len(lines) > 1, max(map(len, lines)) <= WIDTH) == (True, True)
    try:
        raise ValueError("x" * 100)
    except ValueError:
        last_resort.handle(logging.LogRecord("eventjet", logging.ERROR, "", 0, "it failed", (), sys.exc_info()))
    assert capsys.readouterr().err.splitlines()[-1] == f"ValueError: {'x' * 100}"
