"""The word for the condition of a subscription: each follows from facts, and growing lag or no worker is not OK."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eventjet.doctor.report import Report
from eventjet.doctor.subscriptions import check_work
from eventjet.findings import Level
from eventjet.subscriptions.work_status import StatusHistory, StatusSnapshot, WorkStatus, labels

WORKING = WorkStatus("stock", 1, "active", 9, 9, 0, 0.0, "host:1:aa")
BEHIND = replace(WORKING, log_position=500, lag_events=491, lag_s=20.0)
BESIDE = replace(WORKING, location="ej_stock_r2")


@pytest.mark.parametrize(
    ("word", "level", "status", "facts"),
    [
        ("working", Level.OK, WORKING, {}),
        ("working", Level.OK, BEHIND, {"lag_s": 1.5, "lag_per_s": 3.0}),
        ("falling behind", Level.WARNING, BEHIND, {"lag_per_s": 3.0}),
        ("falling behind", Level.WARNING, BEHIND, {"lag_per_s": 3.0, "state": "building"}),
        ("catching up", Level.OK, BEHIND, {"lag_per_s": -3.0}),
        ("building", Level.OK, BEHIND, {"lag_per_s": -3.0, "state": "building"}),
        ("building", Level.NOTE, BEHIND, {"state": "building", "location": "ej_stock_r2"}),
        ("behind", Level.NOTE, BEHIND, {}),
        ("behind", Level.WARNING, BEHIND, {"lag_s": 61.0, "lag_per_s": 0.0}),
        ("standing by", Level.NOTE, BESIDE, {}),
        ("standing by", Level.NOTE, BESIDE, {"reason": "a view depends on the table"}),
        ("waiting", Level.WARNING, WORKING, {"reason": "a newer schema"}),
        ("waiting", Level.WARNING, WORKING, {"reason": "a newer schema", "owner": None}),
        ("quarantined", Level.WARNING, WORKING, {"quarantined": 2}),
        ("falling behind", Level.WARNING, BEHIND, {"lag_per_s": 3.0, "quarantined": 2}),
        ("lag unknown", Level.UNKNOWN, WORKING, {"log_position": 0}),
        ("no worker", Level.NOTE, WORKING, {"owner": None}),
        ("no worker", Level.WARNING, BEHIND, {"owner": None, "lag_per_s": 3.0, "quarantined": 2}),
        ("no worker", Level.WARNING, WORKING, {"owner": None, "lost_owner": "host:2:bb", "reason": "it waits"}),
        ("no worker", Level.WARNING, BEHIND, {"owner": None, "state": "new", "position": 0}),
        ("rebuilding", Level.NOTE, BEHIND, {"owner": None, "rebuilding": True}),
        ("rebuilding", Level.NOTE, BEHIND, {"owner": None, "state": "failed", "rebuilding": True}),
        ("working", Level.OK, WORKING, {"rebuilding": True}),
        ("stopped", Level.FAULT, WORKING, {"owner": None, "state": "failed", "reason": "its table is gone"}),
        ("paused", Level.NOTE, WORKING, {"owner": None, "state": "paused"}),
        ("paused", Level.WARNING, BEHIND, {"owner": None, "state": "paused"}),
        ("not begun", Level.FAULT, BEHIND, {"owner": None, "state": "new", "kind": "reactor"}),
        ("not declared", Level.NOTE, BEHIND, {"owner": None, "declared": False}),
        ("working", Level.OK, WORKING, {"declared": False}),
        ("retired", Level.NOTE, WORKING, {"owner": None, "state": "retired", "declared": False}),
        ("retired", Level.FAULT, WORKING, {"owner": None, "state": "retired"}),
    ],
)
def test_each_word_follows_from_facts(word: str, level: Level, status: WorkStatus, facts: dict[str, Any]) -> None:
    condition = replace(status, **facts).condition
    assert (condition.word, condition.level) == (word, level)


@pytest.mark.parametrize(
    "status",
    [replace(WORKING, log_position=0), replace(WORKING, kind="reactor", log_position=0)],
    ids=lambda status: status.kind,
)
def test_the_doctor_reports_an_unknown_lag_if_the_end_of_the_log_is_unknown(status: WorkStatus) -> None:
    report = Report("read models")
    check_work(report, status)
    assert [(finding.level, finding.check) for finding in report.findings] == [(Level.UNKNOWN, "lag")]


def test_the_trend_covers_the_last_ten_seconds() -> None:
    history = StatusHistory(120.0)
    assert history.statuses() == []
    for at, end in ((0.0, 1_000), (95.0, 400), (100.0, 500)):
        history.add(StatusSnapshot(at, [replace(BEHIND, log_position=end, lag_events=end - 9)]))
    (status,) = history.statuses()
    assert status.lag_per_s == 20.0
    assert status.eta_s is None
    assert status.condition.word == "falling behind"
    assert history.lags("stock", 1) == [(0.0, 991), (95.0, 391), (100.0, 491)]
    assert history.lags("stock", 2) == []
    history.add(StatusSnapshot(300.0, [WORKING]))
    assert [at for at, _ in history.lags("stock", 1)] == [100.0, 300.0]
    (status,) = history.statuses()
    assert status.lag_per_s is not None  # the last two of looks that are far apart are compared


def test_revisions_are_named_if_there_are_several() -> None:
    assert labels([WORKING]) == ["stock"]
    assert labels([WORKING, replace(BESIDE, revision=2)]) == ["stock revision 1", "stock revision 2"]


def test_an_undeclared_cursor_is_left_alone_while_a_worker_of_another_release_has_it() -> None:
    undeclared = replace(WORKING, kind="reactor", declared=False)
    report = Report("reactions")
    for status in (undeclared, replace(undeclared, owner=None)):
        check_work(report, status)
    owned, abandoned = report.findings
    assert (owned.cost, owned.fix) == (
        "a worker with other code handles its events now",
        "leave it while that release runs",
    )
    assert "eventjet cursor drop stock" in abandoned.fix
