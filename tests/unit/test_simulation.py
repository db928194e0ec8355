"""Seeded schedules of faults: the product's rules keep every promise, and each broken rule is caught."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from eventjet.log.outcome import (
    Acked,
    Answer,
    Conflicted,
    ErrorReply,
    NextMessages,
    NoReply,
    PermissionDenied,
    Save,
    Step,
    Stored,
    Unknown,
    shared,
)
from tests.simulation.campaign import run, run_on_all_processors, traced
from tests.simulation.client import Rules
from tests.simulation.stream import Message, Stream

ROOT = Path(__file__).parents[2]
SCHEDULES = int(os.environ.get("EVENTJET_TEST_SCHEDULES", "20000"))
SEEDS_TO_CATCH = 3_000
"""The number of schedules within which a broken rule must show."""

COVERED = {
    "Conflicted after doubt", "Conflicted at once", "Conflicted when resumed", "Conflicted without another's event",
    "ErrorReply at once", "Stored after doubt", "Stored at once",
    "Stored when resumed", "PermissionDenied at once", "Unknown after doubt", "Unknown when resumed",
    "answer lost", "answer of a deposed leader", "batch cut", "busy", "connection lost",
    "decided again on what was told", "denied", "deposed",
    "duplicate", "election", "error 10071", "error 10158", "error 10164", "error 10176", "error 10201", "full",
    "id claimed", "landed late", "pause", "proposal lost", "proposal survived", "replicas 1", "replicas 3",
    "Acked for one of several", "ErrorReply for one of several", "BatchRejected for one of several",
    "NoReply for one of several", "sent alone",
    "repeated and answered", "repeated and decided anew", "repeated with a stale member",
    "request late", "request lost", "restart", "rival buried the slot", "rival won the slot", "sick",
    "slot of a deposed leader", "stale load", "two leaders", "unavailable", "unlisted",
}  # fmt: skip


@pytest.mark.timeout(400)
def test_every_outcome_equals_the_log_in_all_schedules() -> None:
    report = run_on_all_processors(0, SCHEDULES)
    assert report.schedules == SCHEDULES
    assert report.broken == []
    assert {name for name, count in report.counts.items() if count >= SCHEDULES // 2_000} >= COVERED


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed in range(50):
        assert traced(seed) == traced(seed)
    assert traced(1) != traced(2)


def test_a_trace_is_the_same_in_every_process() -> None:
    traces = {
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--trace", "4854"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            check=True,
            timeout=300,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(traces) == 1
    assert traces.pop()


def tail_of(stream: Stream, subject: str, expected: int) -> tuple[int, Message] | None:
    """Return the last message of the subject instead of the slot."""
    position = stream.last.get(subject, 0)
    return (position, stream.log[position - 1]) if position > expected else None


class TrustsDuplicates(Save):
    def answered(self, answer: Answer) -> Step:
        return Stored(answer.position) if isinstance(answer, Acked) else super().answered(answer)


class BelievesAnyConflict(Save):
    def answered(self, answer: Answer) -> Step:
        is_conflict = isinstance(answer, ErrorReply) and answer.code in (10071, 10164)
        return Conflicted() if is_conflict else super().answered(answer)


class BelievesAFirstConflict(Save):
    """Believes conflicts until an attempt is in doubt, so it believes deposed leaders."""

    def answered(self, answer: Answer) -> Step:
        step = super().answered(answer)
        is_conflict = isinstance(answer, ErrorReply) and answer.code in (10071, 10164)
        return Conflicted() if is_conflict and not self._uncertain else step


class GivesUpAfterOneTimeout(Save):
    def answered(self, answer: Answer) -> Step:
        return ErrorReply(0, 0, "timeout") if isinstance(answer, NoReply) else super().answered(answer)


class CallsTheDeadlineFailed(Save):
    def looked(self, slots: NextMessages | None, now: float) -> Step:
        step = super().looked(slots, now)
        return ErrorReply(0, 0, step.cause) if isinstance(step, Unknown) else step


class BelievesAnyRefusal(Save):
    def answered(self, answer: Answer) -> Step:
        step = super().answered(answer)
        if isinstance(answer, ErrorReply) and answer.status == 400 and answer.code not in (10071, 10164, 10176, 10201):
            return answer
        return step


class BelievesADenialAfterDoubt(Save):
    def answered(self, answer: Answer) -> Step:
        return ErrorReply(0, 0, "denied") if isinstance(answer, PermissionDenied) else super().answered(answer)


class GivesUpEarly(Save):
    def looked(self, slots: NextMessages | None, now: float) -> Step:
        step = super().looked(slots, now)
        return Unknown("impatient") if slots is None else step


class SaysTheSlotIsTheLastPosition(Save):
    """Forgets that a batch has other events around the event in the slot."""

    def looked(self, slots: NextMessages | None, now: float) -> Step:
        step = super().looked(slots, now)
        if isinstance(step, Stored):
            return Stored(max(slot.position for slot in slots or () if slot is not None))
        return step


def all_at_the_end(answer: Answer, counts: Sequence[int]) -> list[Answer]:
    """Forget that a batch has events of later saves behind the events of a save."""
    return [answer] * len(counts) if isinstance(answer, Acked) else shared(answer, counts)


def any_refusal_is_that_of_each_save(answer: Answer, counts: Sequence[int]) -> list[Answer]:
    """Forget that the server may have refused a batch because of another save in it."""
    is_conflict = isinstance(answer, ErrorReply) and answer.code in (10071, 10164)
    return [ErrorReply(400, 10170, "a race")] * len(counts) if is_conflict else shared(answer, counts)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (Rules(look=tail_of), "was called Conflicted"),
        (Rules(fresh_ids=True), "times, under different ids|was called Conflicted"),
        (Rules(save=TrustsDuplicates), "was called stored"),
        (Rules(save=BelievesAnyConflict), "was called Conflicted"),
        (Rules(save=BelievesAFirstConflict), "was called Conflicted"),
        (Rules(save=GivesUpAfterOneTimeout), "was called ErrorReply"),
        (Rules(save=CallsTheDeadlineFailed), "was called ErrorReply"),
        (Rules(save=BelievesAnyRefusal), "was called ErrorReply"),
        (Rules(save=BelievesADenialAfterDoubt), "was called ErrorReply"),
        (Rules(save=GivesUpEarly), "before its deadline"),
        (Rules(save=SaysTheSlotIsTheLastPosition), "was called stored at"),
        (Rules(shared=all_at_the_end), "was called stored at"),
        (Rules(shared=any_refusal_is_that_of_each_save), "was called ErrorReply"),
        (Rules(looks_for_commands=False), "is in the log twice"),
        (Rules(looks_at_all_members=False), "is in the log in part"),
        (Rules(believes_the_end=True), "is version"),
    ],
    ids=[
        "the tail is compared instead of the slot",
        "new ids on every try",
        "a duplicate is trusted",
        "a conflict is believed after an unknown try",
        "a first conflict is believed without looking",
        "a timeout is called a failure",
        "the deadline is called a failure",
        "an unlisted refusal is believed",
        "a denial is believed after an unknown try",
        "the deadline is not used",
        "the position of a batch is taken from its slot",
        "the position of a shared batch is taken for that of each save",
        "a conflict of a batch is taken for a refusal of each save",
        "a command is decided again without looking for it",
        "a member that a stale state does not tell is taken for missing",
        "what lies between a rival's event and the end is passed over",
    ],
)
def test_a_broken_rule_is_caught(rules: Rules, says: str) -> None:
    for first in range(0, SEEDS_TO_CATCH, 100):
        for _, broken in run(first, 100, rules).broken:
            if re.search(says, broken):
                return
    pytest.fail(f"no schedule of {SEEDS_TO_CATCH} showed it")
