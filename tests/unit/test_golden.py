"""What an earlier release wrote down of folds and of events, and what is held against it."""

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
    return lambda events: Counting(sum(one.by for one in events) * step, frozenset("abc"))


class GoldenCase:
    """A file of folds, and runs that compare or write it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "golden" / "tally.json"
        self.kinds: list[type] = [Counted]

    def run(self, fold: Callable[[Any], Any], *, revision: int = 1, write: bool = False) -> None:
        histories = [[Counted(by=2), Counted(by=1)], [Counted(by=2)], [Reset()]][: len(self.kinds) + 1]
        catalog = Catalog([Counted, Reset])
        Golden(self.file, write=write).check_folds(revision, catalog, self.kinds, lambda: histories, fold)


def test_folds_are_compared_with_what_was_written_down(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    with pytest.raises(AssertionError, match="is not there yet: run `pytest --write-golden`"):
        case.run(counting())
    case.run(counting(), write=True)
    case.run(counting())


def test_a_fold_that_changed_its_mind_at_the_same_revision_is_found_and_not_written_over(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(counting(), write=True)
    written = case.file.read_bytes()
    for write in (False, True):
        with pytest.raises(AssertionError) as raised:
            case.run(counting(step=2), write=write)
        said = str(raised.value)
        assert '  tally.counted {"by":2}\n  total was "2" and is "4"\n' in said, "the shortest history, and the field"
        assert "Raise `revision`" in said
    assert case.file.read_bytes() == written


def test_a_revision_that_was_raised_asks_for_new_states_of_the_same_histories(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(counting(), write=True)
    with pytest.raises(AssertionError, match="is of revision 1, declared is 2"):
        case.run(counting(step=2), revision=2)
    case.run(counting(step=2), revision=2, write=True)
    case.run(counting(step=2), revision=2)
    with pytest.raises(AssertionError, match="Raise `revision`"):
        case.run(counting(), revision=2)


def test_an_event_that_is_new_is_asked_for_and_what_was_written_stays(tmp_path: Path) -> None:
    case = GoldenCase(tmp_path)
    case.run(counting(), write=True)
    before = case.file.read_text(encoding="utf-8").splitlines()
    case.kinds.append(Reset)
    resetting = lambda events: Counting(sum(getattr(one, "by", 0) for one in events), frozenset("abc"))  # noqa: E731
    with pytest.raises(AssertionError, match=r"no history with tally\.reset schema 1"):
        case.run(resetting)
    case.run(resetting, write=True)
    after = case.file.read_text(encoding="utf-8").splitlines()
    assert [line.rstrip(",]}") for line in after if "reset" not in line] == [line.rstrip(",]}") for line in before]


def test_a_field_that_a_state_gained_is_not_a_change_of_mind(tmp_path: Path) -> None:
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


def test_a_stored_schema_that_is_not_read_any_more_is_found(tmp_path: Path) -> None:
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
