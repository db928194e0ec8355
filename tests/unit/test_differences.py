"""Two states side by side: what changed is told field by field, and what is personal is hidden on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eventjet import Personal
from eventjet.domain.history import FoldedState
from eventjet.domain.personal import MASK
from eventjet.operations.aggregates import ROWS_MAX, compare_states, difference

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=15,
)


def told(before: Any, after: Any) -> dict[str, str]:
    return {field.path: field.change for field in compare_states(before, after, before, after).fields}


def test_each_kind_of_change_has_its_word() -> None:
    before = {"kept": 1, "gone": 2, "other": 3, "deep": {"same": 1, "new": 1}, "list": [1, 2], "whole": {"a": 1}}
    after = {"kept": 1, "other": 4, "deep": {"same": 1, "new": 2}, "list": [1, 3, 4], "whole": {"a": 1}, "came": None}
    assert told(before, after) == {
        "kept": "same",
        "gone": "removed",
        "other": "changed",
        "deep.same": "same",
        "deep.new": "changed",
        "list[0]": "same",
        "list[1]": "changed",
        "list[2]": "added",
        "whole": "same",
        "came": "added",
    }


def test_one_and_true_are_not_the_same() -> None:
    assert told({"a": 1}, {"a": True}) == {"a": "changed"}


@given(JSON, JSON)
def test_something_changed_where_two_states_differ_and_nothing_where_they_do_not(one: Any, other: Any) -> None:
    assert compare_states({"it": one}, {"it": one}, {"it": one}, {"it": one}).changed == 0
    if one != other:
        # What differs only by its order, or by an empty container, is told whole.
        assert compare_states({"it": one}, {"it": other}, {"it": one}, {"it": other}).changed > 0


def test_of_more_fields_than_are_shown_those_that_changed_are() -> None:
    before = {f"f{number}": 0 for number in range(1_000)}
    seen = compare_states(before, before | {"f777": 1}, before, before | {"f777": 1})
    assert [(field.path, field.change) for field in seen.fields] == [("f777", "changed")]
    assert seen.cut == 999
    assert len(compare_states(before, dict.fromkeys(before, 1), before, before).fields) == ROWS_MAX


@dataclass(frozen=True, slots=True)
class Customer:
    email: Personal[str] = ""
    orders: int = 0


def test_a_personal_field_is_told_to_have_changed_and_hidden() -> None:
    seen = difference(FoldedState(Customer("ada@example.com"), 1, 1), FoldedState(Customer("eve@example.com", 1), 2, 2))
    assert [(field.path, field.before, field.after, field.change) for field in seen.fields] == [
        ("email", MASK, MASK, "changed"),
        ("orders", 0, 1, "changed"),
    ]
    assert "example.com" not in repr(seen)
