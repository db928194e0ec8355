"""`@publication`: chosen events told to others, as public ones. Declarations only. PURE.

What an app records is nobody's contract but its own; what it publishes is.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from eventjet.domain.aggregate import event_info
from eventjet.domain.reactor import Start, start_faults
from eventjet.domain.recorded import Recorded
from eventjet.domain.subscription import recorded_events_of, resolved_hint, shown_name, union_members
from eventjet.errors import DefinitionError

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)

_STREAM = re.compile(r"[A-Za-z0-9_-]{1,200}")
_LISTS = (list, tuple, Sequence)


@dataclass(frozen=True, slots=True)
class Publication(Generic[E_contra]):
    """What `@publication` makes of a translation."""

    name: str
    translate: Callable[[Recorded[E_contra]], Any]
    """One public event, several, or None for an event that is not told."""
    stream: str
    """The stream that is published into; an operator's."""
    source: str
    """The `source` of its CloudEvents: a URI."""
    start: Start = "new"

    @property
    def events(self) -> tuple[type, ...]:
        """Its subscription; raises `DefinitionError` for a translation that does not say it."""
        return recorded_events_of(self.translate)

    @property
    def public(self) -> tuple[type, ...]:
        """The classes that it may publish; raises `DefinitionError` where they are not said."""
        found: dict[type, None] = {}
        for member in union_members(resolved_hint(self.translate, "return")):
            origin = typing.get_origin(member)
            members = union_members(typing.get_args(member)[0]) if origin in _LISTS else (member,)
            found |= dict.fromkeys(one for one in members if one is not Ellipsis)
        return tuple(found)

    def faults(self, is_known: Callable[[type], bool]) -> list[str]:
        """What is wrong with it in an app that folds the events that are known."""
        translate = self.translate
        faults = start_faults(self.start)
        if inspect.iscoroutinefunction(translate) or inspect.isgeneratorfunction(translate):
            faults.append(f"{shown_name(translate)} is async or a generator; return the public events")
        if _STREAM.fullmatch(self.stream) is None:
            faults.append(f"its stream {self.stream!r} is not a stream's name")
        if not self.source:
            faults.append("its source is empty; name a URI, as CloudEvents want it")
        try:
            unknown = [one for one in self.events if not is_known(one)]
            faults += [f"{shown_name(translate)} takes {shown_name(one)}, which no aggregate folds" for one in unknown]
            for one in self.public:
                event_info(one)
        except DefinitionError as error:
            faults += error.faults
        return faults


class Publishing(Protocol):
    """Declares a publication."""

    def __call__(self, translate: Callable[[Recorded[E]], object], /) -> Publication[E]: ...


def publication(name: str, /, *, stream: str, source: str, start: Start = "new") -> Publishing:
    """Declare which events are told to others, and as what: a pure function of one recorded event.

    They go to `<stream>.<name>.<id>` as CloudEvents 1.0 in JSON, exactly once and in the order of the log.

    ```python
    @event("bank.customer-joined")
    class Joined:
        name: str

    @publication("customers", stream="public", source="https://bank.example/customers")
    def customers(event: Recorded[Opened]) -> Joined:
        return Joined(name=event.data.owner)

    (told,) = [customers.translate(one) for one in on("a-1", Opened(owner="ada"))]
    assert told == Joined(name="ada")
    ```
    """

    def declare(translate: Any, /) -> Publication[Any]:
        return Publication(name, translate, stream, source, start)

    return declare
