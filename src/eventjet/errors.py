"""Every error eventjet raises, drawn once.

    EventjetError
    ├── DefinitionError        the application's declarations do not fit together
    ├── UsageError             a call or an option that cannot be carried out as given
    ├── Unreachable            a component (server, database, JVM, package) cannot be used
    ├── StoreError
    │   ├── ConcurrencyConflict   another writer holds the expected slot
    │   ├── OutcomeUnknown        the deadline passed before the log's answer was known
    │   ├── Refused               the log will not take this, ever, as it stands
    │   ├── Forbidden             these credentials may not do this
    │   ├── StoreUnavailable      the log did not answer in time; nothing was written
    │   └── HistoryBroken         versions or positions are not contiguous
    ├── CodecError
    │   ├── UnknownEvent          no declared event has this wire name and schema
    │   ├── UndecodableEvent      the stored bytes are not this event
    │   ├── UnencodableEvent      this event would not be read back as it was given
    │   └── UpcastGap             a schema has no way to the current one
    ├── ProjectionError
    │   ├── HandlerFailed         the projection's own function raised
    │   ├── RowRefused            a value would not come back from its column as it was given
    │   ├── CheckpointFenced      another worker took the projection over
    │   ├── LogRolledBack         the log under a checkpoint is not the log it was made from
    │   └── NotCaughtUp           the read model did not reach the position in time
    └── RebuildError
        ├── ArchiveBroken         an archive has a gap, a file that was changed, or is of another log
        ├── RebuildRefused        the plan names something a swap cannot carry
        ├── RowsRefused           a rule of the database forbids rows that the log gives
        └── VerificationFailed    what was loaded is not what was folded

Each sets attributes, forms its message in the constructor, and ends by saying what to do. An application's own
errors pass through eventjet untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EventjetError(Exception):
    """The root: catch it to catch whatever eventjet itself raises."""


class DefinitionError(EventjetError):
    """The application's declarations do not fit together; all faults are listed at once."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        lines = "\n".join(f"  - {fault}" for fault in self.faults)
        super().__init__(f"{len(self.faults)} fault(s) in the declarations:\n{lines}")


class UsageError(EventjetError):
    """A call or an option cannot be carried out as given."""


class Unreachable(EventjetError):
    """A component cannot be used: it does not answer, is too old, or is not installed."""

    def __init__(self, component: str, reason: str, remedy: str) -> None:
        self.component = component
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{component}: {reason}. {remedy}")


class StoreError(EventjetError):
    """The log could not do what was asked."""


class ConcurrencyConflict(StoreError):
    """Another writer holds the slot after the expected position; nothing of this save is stored."""

    def __init__(self, subject: str, expected: int) -> None:
        self.subject = subject
        self.expected = expected
        super().__init__(
            f"{subject} moved on: its last event is no longer at position {expected}. Load it again and decide again."
        )


class OutcomeUnknown(StoreError):
    """The deadline passed and the log has not said whether the events are stored; they may yet appear."""

    def __init__(self, subjects: Sequence[str], event_ids: Sequence[str], cause: str, writes: Sequence[Any]) -> None:
        self.subjects = tuple(subjects)
        self.event_ids = tuple(event_ids)
        self.cause = cause
        self.writes = tuple(writes)
        """The save itself, as `Jet.resolve` needs it."""
        super().__init__(
            f"It is not known whether {len(self.event_ids)} event(s) on {', '.join(self.subjects)} are stored "
            f"(last answer: {cause}). Pass this error to `resolve` once the server answers again; "
            "do not decide again before that."
        )


class Refused(StoreError):
    """The log will not take this as it stands; nothing is stored."""

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        self.what = what
        self.reason = reason
        super().__init__(f"{what} was refused: {reason}. {remedy}")


class Forbidden(StoreError):
    """The credentials in use may not do this; nothing is stored."""

    def __init__(self, subject: str, reason: str) -> None:
        self.subject = subject
        self.reason = reason
        super().__init__(f"The server denied {subject}: {reason}. Grant it to these credentials, or use others.")


class StoreUnavailable(StoreError):
    """The log did not answer in time; nothing was written by this call."""

    def __init__(self, what: str, reason: str) -> None:
        self.what = what
        self.reason = reason
        super().__init__(f"{what} had no answer: {reason}. Check that the server is up and try again.")


class HistoryBroken(StoreError):
    """Versions, positions or the chain between events are not contiguous."""

    def __init__(self, subject: str, position: int, reason: str) -> None:
        self.subject = subject
        self.position = position
        self.reason = reason
        super().__init__(
            f"The history of {subject} is broken at position {position}: {reason}. "
            "Nothing was decided on it; compare the stream with its mirror or archive before going on."
        )


class CodecError(EventjetError):
    """Bytes and events do not convert into each other."""


class UnknownEvent(CodecError):
    """No declared event has this wire name and schema."""

    def __init__(self, type_name: str, schema: int, position: int, data: bytes) -> None:
        self.type_name = type_name
        self.schema = schema
        self.position = position
        self.data = data
        super().__init__(
            f"The event at position {position} is {type_name!r} schema {schema}, which this application does not "
            "declare. Deploy the version that declares it, or name it in `retired_events`."
        )


class UndecodableEvent(CodecError):
    """The stored bytes are not the event their headers announce."""

    def __init__(self, type_name: str, position: int, data: bytes, reason: str) -> None:
        self.type_name = type_name
        self.position = position
        self.data = data
        self.reason = reason
        super().__init__(
            f"The event at position {position} ({type_name!r}, {len(data)} bytes) cannot be decoded: {reason}. "
            "Inspect it with `eventjet tail`, then upcast it or quarantine it."
        )


class UnencodableEvent(CodecError):
    """This event would not be read back as it was given, so it is not sent."""

    def __init__(self, event: Any, reason: str) -> None:
        self.event = event
        self.reason = reason
        super().__init__(
            f"{type(event).__name__} cannot be stored: {reason}. Give its fields values that survive JSON."
        )


class UpcastGap(CodecError):
    """A stored schema has no chain of upcasters to the current one."""

    def __init__(self, type_name: str, schema: int, current: int) -> None:
        self.type_name = type_name
        self.schema = schema
        self.current = current
        super().__init__(
            f"{type_name!r} is at schema {current}, and no upcaster leads on from schema {schema}. "
            f"Declare `@upcaster({type_name!r}, schema={schema})`."
        )


class ProjectionError(EventjetError):
    """A read model could not be made or kept."""


class HandlerFailed(ProjectionError):
    """The projection's own function raised; its batch is rolled back."""

    def __init__(self, projection: str, position: int, aggregate_id: str, reason: str) -> None:
        self.projection = projection
        self.position = position
        self.aggregate_id = aggregate_id
        self.reason = reason
        super().__init__(
            f"Projection {projection!r} could not take the event at position {position} of {aggregate_id!r}: {reason}. "
            "Nothing of its batch was written; mend the function, and start what stopped again."
        )


class RowRefused(ProjectionError):
    """A value would not come back equal from its column."""

    def __init__(self, table: str, column: str, value: Any, reason: str) -> None:
        self.table = table
        self.column = column
        self.value = value
        self.reason = reason
        super().__init__(
            f"{table}.{column} cannot hold {value!r}: {reason}. Widen the column or round in the projection."
        )


class CheckpointFenced(ProjectionError):
    """Another worker has the projection, or somebody decided about it; nothing of this batch was written."""

    def __init__(self, projection: str, reason: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(
            f"Projection {projection!r} is no longer this worker's: {reason}. Another worker took it over, or it was "
            "paused, promoted, rebuilt or decided about; this one stands by."
        )


class LogRolledBack(ProjectionError):
    """The log under a checkpoint is not the log it was made from."""

    def __init__(self, projection: str, position: int, reason: str) -> None:
        self.projection = projection
        self.position = position
        self.reason = reason
        super().__init__(
            f"Projection {projection!r} stands at position {position}, but {reason}. It was stopped; "
            "bring the right log back, or rebuild the projection from this one."
        )


class NotCaughtUp(ProjectionError):
    """The read model did not reach the position within the time given, or cannot until somebody does something."""

    def __init__(
        self,
        projection: str,
        position: int,
        reached: int,
        timeout_s: float,
        state: str = "",
        reason: str | None = None,
    ) -> None:
        self.projection = projection
        self.position = position
        self.reached = reached
        self.timeout_s = timeout_s
        self.state = state
        """As the checkpoint says; empty where there is none yet."""
        self.reason = reason
        """Why it failed or waits."""
        because = f" ({' '.join(reason.split()).rstrip('.')})" if reason else ""
        who = f"Projection {projection!r} is"
        if state in _STANDSTILL:
            said, remedy = _STANDSTILL[state]
            super().__init__(f"{who} {said} at position {reached} and will not reach {position}{because}. {remedy}")
            return
        super().__init__(
            f"{who} at position {reached} and did not reach {position} within {timeout_s:g} s{because}. "
            "Look at `eventjet status`, or wait longer."
        )


_STANDSTILL = {
    "failed": ("stopped by a fault", "Mend that, then start a worker or rebuild it."),
    "paused": ("paused", "Run `eventjet resume` when it may go on."),
    "retired": ("retired", "Ask a process that declares the revision which took its place."),
}


class RebuildError(EventjetError):
    """A rebuild stopped; the live read model is untouched."""


class ArchiveBroken(RebuildError):
    """An archive cannot be trusted as it stands; nothing was made from it."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(
            f"The archive {url} cannot be used: {reason}. Make it again with `eventjet archive`, or go without it."
        )


class RebuildRefused(RebuildError):
    """The plan names something a swap cannot carry."""

    def __init__(self, projection: str, reason: str, remedy: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(f"Projection {projection!r} cannot be rebuilt: {reason}. {remedy}")


class RowsRefused(RebuildError):
    """A rule of the database forbids rows that the log gives."""

    def __init__(self, projection: str, reason: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(
            f"The database refused rows of {projection!r} as the log gives them: {reason}. The live table is "
            "untouched. Mend the projection, or the rule of its table, and run the rebuild again; a worker would stop "
            "at the event in question and name it."
        )


class VerificationFailed(RebuildError):
    """What was loaded is not what was folded; the shadow was not swapped in."""

    def __init__(self, projection: str, reason: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(
            f"The rebuild of {projection!r} was not swapped in: {reason}. The live table is untouched; run it again."
        )
