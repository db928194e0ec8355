"""An error that is pickled or copied keeps its message and attributes."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eventjet import errors

ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EventjetError)]
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


def error_of(kind: Any) -> Any:
    parameters = inspect.signature(kind.__init__).parameters
    if "args" in parameters:
        return kind("It did not go. Try again.")
    own = [parameter for parameter in parameters.values() if parameter.name != "self"]
    at = [GIVEN[parameter.annotation] for parameter in own if parameter.kind is not parameter.KEYWORD_ONLY]
    return kind(
        *at,
        **{
            parameter.name: GIVEN[parameter.annotation] for parameter in own if parameter.kind is parameter.KEYWORD_ONLY
        },
    )


@pytest.mark.parametrize("kind", ERRORS)
def test_a_pickled_or_copied_error_has_its_message_and_attributes(kind: Any) -> None:
    error = error_of(kind)
    error.add_note("a note")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(copied) is kind
        assert (str(copied), copied.args, vars(copied)) == (str(error), error.args, vars(error))
