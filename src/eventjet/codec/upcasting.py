"""`@upcaster`: one step from an old schema to the next, composed into chains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Step = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Upcaster:
    """Takes the JSON object of `schema` and returns that of `schema + 1`; pure."""

    name: str
    schema: int
    step: Step

    def __call__(self, body: dict[str, Any], /) -> dict[str, Any]:
        return self.step(body)


def upcaster(name: str, /, *, schema: int) -> Callable[[Step], Upcaster]:
    """Declare how schema `schema` of the event `name` becomes the next one; list it in `App(upcasters=[…])`."""
    return lambda step: Upcaster(name, schema, step)


class Upcasters:
    """All steps of an app, by wire name and schema."""

    def __init__(self, steps: Sequence[Upcaster]) -> None:
        self._steps: Mapping[tuple[str, int], Upcaster] = {(one.name, one.schema): one for one in steps}
        self._given = tuple(steps)

    def chain(self, name: str, schema: int, current: int) -> tuple[Upcaster, ...] | None:
        """The steps from `schema` to `current`; None when one is missing."""
        try:
            return tuple(self._steps[name, number] for number in range(schema, current))
        except KeyError:
            return None

    def faults(self, current: Mapping[str, int]) -> list[str]:
        """Gaps, strays and doubles, each as a sentence; `current` maps wire names to their schemas."""
        found = [
            f"the event {name!r} is at schema {schema} and no @upcaster({name!r}, schema={number}) leads on from "
            f"schema {number}"
            for name, schema in current.items()
            for number in range(1, schema)
            if (name, number) not in self._steps
        ]
        seen: set[tuple[str, int]] = set()
        for one in self._given:
            if (one.name, one.schema) in seen:
                found.append(f"two upcasters are declared for {one.name!r} schema {one.schema}")
            seen.add((one.name, one.schema))
            if one.name not in current:
                found.append(f"an upcaster is declared for {one.name!r}, which no aggregate folds")
            elif not 1 <= one.schema < current[one.name]:
                found.append(
                    f"the upcaster for {one.name!r} schema {one.schema} leads beyond schema {current[one.name]}"
                )
        return found
