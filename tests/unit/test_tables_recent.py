"""Rows a writer may remember, and when it must not."""

from __future__ import annotations

from eventjet.projections.recent import RecentRows


def test_only_what_was_committed_is_remembered() -> None:
    recent = RecentRows()
    recent.write({("a",): 1, ("b",): None})
    assert recent.find([("a",)]) == ({}, [("a",)])
    recent.committed()
    assert recent.find([("a",), ("b",), ("c",)]) == ({("a",): 1, ("b",): None}, [("c",)])


def test_what_was_rolled_back_is_forgotten_with_all_the_rest() -> None:
    recent = RecentRows()
    recent.write({("a",): 1})
    recent.committed()
    recent.write({("a",): 2})
    recent.forget()
    recent.committed()
    assert recent.find([("a",)]) == ({}, [("a",)])


def test_a_later_row_hides_an_earlier_one_and_memory_is_bounded() -> None:
    recent = RecentRows(limit=3)
    for number in range(100):
        recent.write({("a",): number, (number,): number})
        recent.committed()
    rows, missing = recent.find([("a",), *((number,) for number in range(100))])
    assert rows[("a",)] == 99
    assert len(rows) <= 8
    assert len(missing) >= 93


def test_a_limit_of_none_remembers_nothing() -> None:
    recent = RecentRows(limit=0)
    recent.write({("a",): 1})
    recent.committed()
    assert recent.find([("a",)]) == ({}, [("a",)])
