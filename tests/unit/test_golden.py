"""Golden files: recorded states and events of an earlier release, and their comparison with the present code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eventjet import event, upcaster
from eventjet.codec.catalog import Catalog
from eventjet.testing.golden import Golden


@event("tally.counted")
class Counted:
    by: int


@dataclass(frozen=True)
class Tally:
    total: int = 0


@event("tally.reset")
class Reset:
    pass


@dataclass(frozen=True)
class Counting:
    total: int = 0
    seen: frozenset[str] = frozenset()


def counting(step: int = 1) -> Callable[[Any], Counting]:
    return lambda events: Counting(sum(counted.by for counted in events) * step, frozenset("abc"))


class GoldenCase:
    """A golden file of folds, and runs that compare or write it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "golden" / "tally.json"
        self.kinds: list[type] = [Counted]

    def run(self, fold: Callable[[Any], Any], *, revision: int = 1, write: bool = False) -> None:
        histories = [[Counted(by=2), Counted(by=1)], [Counted(by=2)], [Reset()]][: len(self.kinds) + 1]
        catalog = Catalog([Counted, Reset])
        Golden(self.file, write=write).check_folds(revision, catalog, self.kinds, lambda: histories, fold)


def test_folds_are_compared_with_the_golden_file(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    with pytest.raises(AssertionError, match="is not there yet: run `pytest --write-golden`"):
        case.run(counting())
    case.run(counting(), write=True)
    case.run(counting())


def test_a_changed_fold_at_the_same_revision_is_reported_and_not_overwritten(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(counting(), write=True)
    written = case.file.read_bytes()
    for write in (False, True):
        with pytest.raises(AssertionError) as raised:
            case.run(counting(step=2), write=write)
        message = str(raised.value)
        assert '  tally.counted {"by":2}\n  total was "2" and is "4"\n' in message, (
            "the shortest history, and the field"
        )
        assert "Raise `revision`" in message
    assert case.file.read_bytes() == written


def test_a_golden_file_without_revision_or_with_marks_of_a_merge_is_refused(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(counting(), write=True)
    text = case.file.read_text()
    case.file.write_text(text.replace('"revision": 1, ', ""))
    with pytest.raises(AssertionError, match="is of revision None, declared is 1: run `pytest --write-golden`"):
        case.run(counting(step=2))
    case.file.write_text(f"<<<<<<< HEAD\n{text}")
    for write in (False, True):
        with pytest.raises(AssertionError, match=r"tally\.json is not JSON: .*Restore it as it was committed"):
            case.run(counting(), write=write)


def test_a_raised_revision_needs_new_states_of_the_same_histories(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(counting(), write=True)
    with pytest.raises(AssertionError, match="is of revision 1, declared is 2"):
        case.run(counting(step=2), revision=2)
    case.run(counting(step=2), revision=2, write=True)
    case.run(counting(step=2), revision=2)
    with pytest.raises(AssertionError, match="Raise `revision`"):
        case.run(counting(), revision=2)


def test_a_new_event_needs_a_history_and_the_others_stay(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(counting(), write=True)
    before = case.file.read_text(encoding="utf-8").splitlines()
    case.kinds.append(Reset)
    resetting = lambda events: Counting(sum(getattr(recorded, "by", 0) for recorded in events), frozenset("abc"))  # noqa: E731
    with pytest.raises(AssertionError, match=r"no history with tally\.reset schema 1"):
        case.run(resetting)
    case.run(resetting, write=True)
    after = case.file.read_text(encoding="utf-8").splitlines()
    assert [line.rstrip(",]}") for line in after if "reset" not in line] == [line.rstrip(",]}") for line in before]


def test_a_new_field_of_a_state_is_no_changed_fold(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(lambda events: Tally(total=len(events)), write=True)
    case.run(lambda events: Counting(len(events)))


@event("tally.counted", schema=2)
class CountedOnce:
    by: int
    reason: str


@upcaster("tally.counted", schema=1)
def with_reason(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "reason": ""}


def test_a_stored_schema_that_cannot_be_read_any_more_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "golden" / "app.events.json"
    Golden(file, write=True).check_schemas(Catalog([Counted]), [Counted], lambda kind: Counted(by=1))
    Golden(file, write=False).check_schemas(Catalog([Counted]), [Counted], lambda kind: None)
    newer = Catalog([CountedOnce], [with_reason])
    with pytest.raises(AssertionError, match=r"no example of tally\.counted schema 2"):
        Golden(file, write=False).check_schemas(newer, [CountedOnce], lambda kind: None)
    Golden(file, write=True).check_schemas(newer, [CountedOnce], lambda kind: CountedOnce(by=1, reason="x"))
    Golden(file, write=False).check_schemas(newer, [CountedOnce], lambda kind: None)
    with pytest.raises(AssertionError, match=r"tally\.counted.*schema 1 was stored once"):
        Golden(file, write=False).check_schemas(Catalog([CountedOnce]), [CountedOnce], lambda kind: None)
    Golden(file, write=False).check_schemas(Catalog([], retired=["tally.counted"]), [], lambda kind: None)
