"""The laws of `tests/fuzz`, on a few inputs and on every one that broke one before; `make fuzz` goes on from there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.fuzz.findings import FINDINGS
from tests.fuzz.targets import TARGETS, Target

BY_NAME = {one.name: one for one in TARGETS}


@pytest.mark.parametrize("target", TARGETS, ids=lambda one: one.name)
def test_the_law_of_a_target_holds(target: Target) -> None:
    settings(max_examples=30, derandomize=True, database=None)(given(target.inputs)(target.law))()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, all_of in FINDINGS.items() for value in all_of])
def test_what_was_a_finding_is_none_any_more(name: str, value: object) -> None:
    BY_NAME[name].law(value)
