"""`Batch`: a piece of the log for one projection; `Parts`: how it is committed when it cannot be committed whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.exc import DBAPIError

from eventjet.codec.reasons import reason_of
from eventjet.domain.recorded import Recorded
from eventjet.errors import HandlerFailed
from eventjet.projections.fold import Offered
from eventjet.sql.dialects import is_about_data


@dataclass(frozen=True, slots=True)
class Batch:
    """What a piece of the log has for one projection; the position advances over other events as well."""

    after: int
    """The position before it: what the checkpoint must say."""
    last: int
    """Its last position: what the checkpoint will say."""
    event_id: str
    """Id of the event at `last`."""
    events: Sequence[Recorded[Any]]
    """Those of the subscription, in order; `Offered` ones where the projection quarantines."""

    @property
    def is_consistent(self) -> bool:
        """Whether it advances, and all its events come after its start."""
        return self.last > self.after and (not self.events or self.events[0].position > self.after)

    def before(self, position: int) -> Batch | None:
        """The part that ends with the last event before `position`; None when there is none."""
        count = sum(event.position < position for event in self.events)
        return self.cut(count)[0] if count else None

    def cut(self, count: int) -> tuple[Batch, Batch | None]:
        """The part that ends with the event number `count`, at least 1, and the rest, if it has events."""
        if count >= len(self.events):
            return self, None
        end = self.events[count - 1]
        first = Batch(self.after, end.position, end.event_id, self.events[:count])
        return first, Batch(end.position, self.last, self.event_id, self.events[count:])


class Parts:
    """The parts of a batch, in order, each to be committed by itself before the next one is asked for.

    At first that is the whole batch. Tell it of a part that failed, and it goes on with what that part is made of, or
    raises what cannot be avoided:

        for part in parts:
            try:
                commit(part)
            except DBAPIError as error:
                parts.refused(part, error)
    """

    def __init__(self, projection: str, batch: Batch, *, private: bool = False) -> None:
        """`private` where something personal is at hand."""
        self._projection = projection
        self._private = private
        self._waiting = [batch]  # the next one last
        self._failure: HandlerFailed | None = None

    def __iter__(self) -> Iterator[Batch]:
        while self._waiting:
            yield self._waiting.pop()
        if self._failure is not None:
            raise self._failure

    def refused(self, part: Batch, error: DBAPIError) -> None:
        """The database refused a part. If that is about data, halve it until the event at fault is alone.

        That event is offered again to be parked where the projection quarantines; elsewhere it is a `HandlerFailed`.
        Raises any other error as it is.
        """
        if not part.events or not is_about_data(error):
            raise error
        first, second = part.cut(max(1, len(part.events) // 2))
        if second is not None:
            self._waiting += [second, first]
            return
        event: Any = part.events[0]
        if not isinstance(event, Offered):
            raise HandlerFailed(self._projection, event.position, event.aggregate_id, self._reason(error)) from error
        if event.error is not None:  # parking itself was refused
            _, aggregate_id = event.aggregate_key
            raise HandlerFailed(self._projection, event.position, aggregate_id, self._reason(error)) from error
        self._waiting.append(replace(part, events=[event.failed(error)]))

    def _reason(self, error: DBAPIError) -> str:
        return reason_of(error, private=self._private)

    def failed(self, part: Batch, error: HandlerFailed) -> None:
        """An event of a part cannot be taken: what precedes it is still to be committed, then the error is raised."""
        before = part.before(error.position)
        if before is None:
            raise error
        self._waiting, self._failure = [before], error
