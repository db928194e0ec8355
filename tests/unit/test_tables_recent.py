"""Rows a writer may remember, and when it must not."""

from __future__ import annotations

from eventjet.writers.fold_writer import RecentRows


def test_only_what_was_committed_is_remembered() -> None:
    recent = RecentRows()
    assert recent.find([("a",)], before={("a",): 1}) == ({("a",): 1}, [])
    assert recent.find([("a",)]) == ({}, [("a",)])
    recent.remember({("a",): 1, ("b",): None})
    assert recent.find([("a",), ("b",), ("c",)]) == ({("a",): 1, ("b",): None}, [("c",)])


def test_what_comes_before_hides_what_was_committed() -> None:
    recent = RecentRows()
    recent.remember({("a",): 1, ("b",): 1})
    assert recent.find([("a",), ("b",)], before={("a",): None}) == ({("a",): None, ("b",): 1}, [])


def test_a_later_row_hides_an_earlier_one_and_memory_is_bounded() -> None:
    recent = RecentRows(limit=3)
    for number in range(100):
        recent.remember({("a",): number, (number,): number})
    rows, missing = recent.find([("a",), *((number,) for number in range(100))])
    assert rows[("a",)] == 99
    assert len(rows) <= 8
    assert len(missing) >= 93


def test_a_limit_of_none_remembers_nothing_but_what_is_not_committed_yet() -> None:
    recent = RecentRows(limit=0)
    recent.remember({("a",): 1})
    assert recent.find([("a",), ("b",)], before={("b",): 2}) == ({("b",): 2}, [("a",)])
