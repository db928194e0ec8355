"""The laws of `tests/fuzz` on a few inputs, and on each input that broke one before; `make fuzz` tries more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.fuzz.findings import FINDINGS
from tests.fuzz.targets import TARGETS, Target

BY_NAME = {target.name: target for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_law_of_a_target_holds(target: Target) -> None:
    settings(max_examples=30, derandomize=True, database=None)(given(target.inputs)(target.law))()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FINDINGS.items() for value in values])
def test_an_earlier_finding_does_not_break_its_law(name: str, value: object) -> None:
    BY_NAME[name].law(value)
