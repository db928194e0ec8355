"""An error that goes from one process to another is the same there."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eventjet import errors

ERRORS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.EventjetError)]
GIVEN: dict[str, Any] = {
    "str": "it",
    "str | None": "it",
    "int": 3,
    "int | None": 3,
    "float": 1.5,
    "float | None": 2.5,
    "bool": True,
    "bytes": b"\xff",
    "Any": ("any", 1),
    "Path": Path("nats.log"),
    "Sequence[str]": ("one", "other"),
    "Sequence[Any]": ("one", 2),
    "Mapping[str, str]": {"a": "b"},
    "Mapping[str, Any]": {"a": 1},
    "tuple[Any, ...]": (1, "a"),
    "Revision": SimpleNamespace(name="sales", revision=2, tables=[SimpleNamespace(name="sales_2")]),
}


def made(kind: Any) -> Any:
    told = inspect.signature(kind.__init__).parameters
    if "args" in told:
        return kind("It did not go. Try again.")
    own = [one for one in told.values() if one.name != "self"]
    at = [GIVEN[one.annotation] for one in own if one.kind is not one.KEYWORD_ONLY]
    return kind(*at, **{one.name: GIVEN[one.annotation] for one in own if one.kind is one.KEYWORD_ONLY})


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_that_was_pickled_or_copied_has_its_message_and_its_attributes(kind: Any) -> None:
    error = made(kind)
    error.add_note("a note")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
