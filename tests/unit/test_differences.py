"""The comparison of two states: changes field by field, with personal values hidden."""

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


def changes(before: Any, after: Any) -> dict[str, str]:
    return {field.path: field.change for field in compare_states(before, after, before, after).fields}


def test_each_kind_of_change_has_a_name() -> None:
    before = {"kept": 1, "gone": 2, "other": 3, "deep": {"same": 1, "new": 1}, "list": [1, 2], "whole": {"a": 1}}
    after = {"kept": 1, "other": 4, "deep": {"same": 1, "new": 2}, "list": [1, 3, 4], "whole": {"a": 1}, "came": None}
    assert changes(before, after) == {
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


def test_1_and_true_are_different_values() -> None:
    assert changes({"a": 1}, {"a": True}) == {"a": "changed"}


@given(JSON, JSON)
def test_a_change_is_reported_exactly_when_two_states_differ(value: Any, other_value: Any) -> None:
    assert compare_states({"it": value}, {"it": value}, {"it": value}, {"it": value}).changed == 0
    if value != other_value:
        # A value that differs only in its order, or by an empty container, is reported whole.
        assert compare_states({"it": value}, {"it": other_value}, {"it": value}, {"it": other_value}).changed > 0


def test_changed_fields_are_shown_first_when_there_are_too_many() -> None:
    before = {f"f{number}": 0 for number in range(1_000)}
    comparison = compare_states(before, before | {"f777": 1}, before, before | {"f777": 1})
    assert [(field.path, field.change) for field in comparison.fields] == [("f777", "changed")]
    assert comparison.cut == 999
    assert len(compare_states(before, dict.fromkeys(before, 1), before, before).fields) == ROWS_MAX


@dataclass(frozen=True, slots=True)
class Customer:
    email: Personal[str] = ""
    orders: int = 0


def test_a_change_of_a_personal_field_is_reported_without_its_values() -> None:
    comparison = difference(
        FoldedState(Customer("ada@example.com"), 1, 1), FoldedState(Customer("eve@example.com", 1), 2, 2)
    )
    assert [(field.path, field.before, field.after, field.change) for field in comparison.fields] == [
        ("email", MASK, MASK, "changed"),
        ("orders", 0, 1, "changed"),
    ]
    assert "example.com" not in repr(comparison)
