"""`Batch`, the events of a stretch of the log for one projection, and `Parts`, which divides a batch that fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.exc import DBAPIError

from eventjet.codec.reasons import reason_of
from eventjet.domain.recorded import Recorded
from eventjet.errors import HandlerFailed
from eventjet.projections.fold import Offered
from eventjet.sql.database import is_about_data


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of a stretch of the log that one projection takes; the stretch covers other events as well."""

    after: int
    """The position before the batch, at which the checkpoint must stand."""
    last: int
    """The last position of the batch, at which the checkpoint will stand."""
    event_id: str
    """Id of the event at `last`."""
    events: Sequence[Recorded[Any]]
    """The events of the subscription, in the order of the log; `Offered` records where the projection quarantines."""

    @property
    def is_consistent(self) -> bool:
        """Whether the batch advances the position and its events come after its start."""
        return self.last > self.after and (not self.events or self.events[0].position > self.after)

    def before(self, position: int) -> Batch | None:
        """Return the part that ends with the last event before `position`; None when there is no such event."""
        count = sum(event.position < position for event in self.events)
        return self.cut(count)[0] if count else None

    def cut(self, count: int) -> tuple[Batch, Batch | None]:
        """Return the part with the first `count` events (at least 1), and the rest; None when no events are left."""
        if count >= len(self.events):
            return self, None
        end = self.events[count - 1]
        first = Batch(self.after, end.position, end.event_id, self.events[:count])
        return first, Batch(end.position, self.last, self.event_id, self.events[count:])


class Parts:
    """The parts of a batch, in order; the caller commits each part before it asks for the next.

    The first part is the whole batch. Report a part that failed, and the iteration goes on with smaller parts of it, or
    raises the error that cannot be avoided:

        for part in parts:
            try:
                commit(part)
            except DBAPIError as error:
                parts.refused(part, error)
    """

    def __init__(self, projection: str, batch: Batch, *, private: bool = False) -> None:
        """Start with the whole batch; `private` keeps personal data out of the reasons of errors."""
        self._projection = projection
        self._private = private
        self._waiting = [batch]  # a stack: the next part is last
        self._failure: HandlerFailed | None = None

    def __iter__(self) -> Iterator[Batch]:
        while self._waiting:
            yield self._waiting.pop()
        if self._failure is not None:
            raise self._failure

    def refused(self, part: Batch, error: DBAPIError) -> None:
        """Divide a part that the database refused because of its data, until the event at fault is alone.

        Where the projection quarantines, that event is offered again with its error and so gets quarantined; elsewhere
        this raises `HandlerFailed`. Raises an error that is not about data unchanged.
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
        if event.error is not None:  # the database refused the quarantine's row
            _, aggregate_id = event.aggregate_key
            raise HandlerFailed(self._projection, event.position, aggregate_id, self._reason(error)) from error
        self._waiting.append(replace(part, events=[event.failed(error)]))

    def _reason(self, error: DBAPIError) -> str:
        return reason_of(error, private=self._private)

    def failed(self, part: Batch, error: HandlerFailed) -> None:
        """Commit only what precedes an event that cannot be handled, then raise its error; at once if nothing does."""
        preceding = part.before(error.position)
        if preceding is None:
            raise error
        self._waiting, self._failure = [preceding], error
