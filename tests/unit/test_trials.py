"""The check of all trials reports each kind of false answer, and none where all is right."""

from __future__ import annotations

from decimal import Decimal

import pytest

from eventjet.codec.headers import RawRecord
from eventjet.codec.records import Decoder
from tests.faults.tally import Added, tally_app
from tests.faults.trials.commands import LOOKED, REFUSED, STORED, STRANGE, UNKNOWN, Attempt
from tests.faults.trials.verdict import judge_log
from tests.logs import block

APP = tally_app("bank")
DECODE = Decoder(APP.catalog)
ALL_RIGHT = dict.fromkeys(("lost", "twice", "wrong", "stale", "gaps"), 0)


def stored(position: int, number: int, version: int, *, entity: str = "e-1", sign: int = 1) -> RawRecord:
    """Return the event of a command, as the log has it."""
    encoded = APP.catalog.encode(Added(number=version, amount=sign * Decimal(number) / 100))
    headers = block(encoded.type_name, encoded.schema, version)
    return position, 1_750_000_000_000_000_000, f"bank.ledger.{entity}".encode(), headers, encoded.body


def answer_of(
    number: int, answer: str, *positions: int, kind: str = "add", at: float = 0.0, version: int = 0
) -> Attempt:
    return Attempt(number, ("e-1",), kind, at, ended=at + 1, answer=answer, positions=positions, version=version)


LOG = [stored(1, 1, 1), stored(2, 2, 2), stored(3, 2, 3, sign=-1)]
ANSWERS = [answer_of(1, STORED, 1, version=1), answer_of(2, STORED, 3, kind="two", at=2, version=3)]
CASES = {
    "all right": (ANSWERS, LOG, {}),
    "an unknown one that is stored": ([answer_of(1, UNKNOWN), ANSWERS[1]], LOG, {}),
    "an unknown one that is not": ([*ANSWERS, answer_of(9, UNKNOWN)], LOG, {}),
    "not there": ([*ANSWERS, answer_of(9, STORED, 4, at=4, version=4)], LOG, {"lost": 1}),
    "there twice": (ANSWERS, [*LOG, stored(4, 1, 4)], {"twice": 1}),
    "elsewhere": ([answer_of(1, STORED, 7, version=1), ANSWERS[1]], LOG, {"wrong": 1}),
    "refused and there": ([answer_of(1, REFUSED), ANSWERS[1]], LOG, {"wrong": 1}),
    "there in part": (ANSWERS, LOG[:2], {"lost": 0, "wrong": 2}),
    "an error of nobody's": ([*ANSWERS, answer_of(9, STRANGE)], LOG, {"wrong": 1}),
    "looked at the newest": ([*ANSWERS, answer_of(9, LOOKED, kind="nothing", at=4, version=3)], LOG, {}),
    "looked at an old state": ([*ANSWERS, answer_of(9, LOOKED, kind="nothing", at=4, version=1)], LOG, {"stale": 1}),
    "looked while it was stored": ([*ANSWERS, answer_of(9, LOOKED, kind="nothing", at=2, version=1)], LOG, {}),
    "a hole": (ANSWERS[:1], [LOG[0], stored(3, 9, 2)], {"gaps": 1}),
    "a version twice": (ANSWERS[:1], [LOG[0], stored(2, 9, 1)], {"gaps": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_false_answer_is_reported(case: str) -> None:
    answers, log, expected = CASES[case]
    figures = judge_log(answers, log, DECODE)
    assert {name: getattr(figures, name) for name in ALL_RIGHT} == ALL_RIGHT | expected, figures.problems
