"""Every screen of the console by name, with a path that shows data of a stage (`stage.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from tests.ui.stage import ALTERED, POISONED

SCREENS: Mapping[str, str] = {
    "overview": "/",
    "aggregates": "/aggregates?type=account&id=a-00",
    "aggregate": f"/aggregates/one?type=account&id={ALTERED}",
    "time-travel": f"/aggregates/one?type=account&id={ALTERED}&version=3",
    "compared": f"/aggregates/one?type=account&id={ALTERED}&version=2&with=5",
    "event": "/events/one?position=100",
    "log": "/log",
    "models": "/models",
    "model": "/models/one?name=balances",
    "row": f"/models/row?name=balances&key=%5B%22{ALTERED}%22%5D",
    "quarantine": "/quarantine",
    "quarantined": "/quarantine/one?name=balances&position={poison}",
    "processes": "/processes",
    "instances": "/processes/list?name=transfer",
    "process": "/processes/one?name=transfer&id=t-009",
    "jobs": "/jobs",
    "act": "/actions/new?action=pause&name=balances",
    "actions": "/actions",
}
"""`{poison}` stands for the position of the event that the balances cannot apply."""

__all__ = ["POISONED", "SCREENS"]
