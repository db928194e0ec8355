"""Errors of read models, rebuilds and archives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from eventjet.errors.base import EventjetError
from eventjet.text import cut, shown

HALF_WRITTEN = "may hold half of a batch"
"""Part of the reason in a checkpoint: a worker does not go on with such tables, they have to be rebuilt."""

ANOTHER_LOG = "of another log"
NO_WORKER = "no worker runs for it: start one with `eventjet worker`"
"""The state in `NotCaughtUp` of a read model that was made from a different log than the position belongs to."""

ANOTHER_APP = "of another app"
"""The state in `NotCaughtUp` of a read model that another app keeps in this database under the same name."""

LOST_ROWS = "has lost its rows"
"""Part of the reason in a checkpoint: its position says nothing about the rows of the present table."""


class Table(Protocol):
    """The attribute of a table that messages need."""

    @property
    def name(self) -> str: ...


class Revision(Protocol):
    """The attributes of a resolved projection that messages need."""

    @property
    def name(self) -> str: ...
    @property
    def revision(self) -> int: ...
    @property
    def tables(self) -> Sequence[Table]: ...


class ProjectionError(EventjetError):
    """A read model could not be built or kept up to date."""


class HandlerFailed(ProjectionError):
    """A projection's handler raised; its batch is rolled back."""

    def __init__(self, projection: str, position: int, aggregate_id: str, reason: str) -> None:
        self.projection = projection
        self.position = position
        self.aggregate_id = aggregate_id
        self.reason = reason
        super().__init__(
            f"Projection {projection!r} could not take the event at position {position} of {aggregate_id!r}: {reason}. "
            "Nothing of its batch was written; fix the function, and start what stopped again."
        )


class RowRefused(ProjectionError):
    """A value would not be read back equal from its column."""

    def __init__(self, table: str, column: str, value: Any, reason: str, way_out: str, *, given: str = "") -> None:
        """`way_out` is the sentence that ends the message; `given` is shown instead of the value."""
        self.table = table
        self.column = column
        self.value = value
        self.reason = reason
        super().__init__(f"{table}.{column} cannot hold {given or shown(value)}: {cut(reason)}. {way_out}")


class RowUnreadable(ProjectionError):
    """A row of a read model has a value that its row class cannot have, so no fold can have written it."""

    def __init__(
        self,
        table: str,
        key: tuple[Any, ...],
        column: str,
        reason: str,
        values: Mapping[str, Any],
        *,
        given: str = "",
        has_key: bool = True,
    ) -> None:
        """`given` is shown in the message for the value at fault."""
        self.table = table
        self.key = key
        self.has_key = has_key
        """Whether a fold can have written the key itself."""
        self.column = column
        """The column at fault; empty if each value is valid and the row class refuses them together."""
        self.values = values
        """The values of all fields, as the driver returned them."""
        self.reason = reason
        self.values = values
        what = f"{table}.{column} holds {given}: " if column else ""
        super().__init__(
            f"The row {', '.join(map(shown, key))} of the table {table!r} cannot be read: {what}{cut(reason)}. "
            "Something other than eventjet wrote it. Run `eventjet rebuild`, which makes the read model's rows again."
        )


class CheckpointFenced(ProjectionError):
    """Another worker took over the projection, or an operator decided about it; nothing of this batch was written."""

    def __init__(self, projection: str, reason: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(
            f"Projection {projection!r} is no longer this worker's: {reason}. Another worker took it over, or it was "
            "paused, promoted, rebuilt or decided about; this one stands by."
        )


_FROM_THIS_LOG = (
    "bring the right log back, or rebuild the projection from this one (`eventjet rebuild`; a cursor: `eventjet cursor "
    "set`)"
)


class LogRolledBack(ProjectionError):
    """A checkpoint or cursor belongs to another log, or to events that its log no longer has."""

    def __init__(self, projection: str, position: int, reason: str, way_out: str = _FROM_THIS_LOG) -> None:
        self.projection = projection
        self.position = position
        self.reason = reason
        super().__init__(f"{projection!r} stands at position {position}, but {reason}. It cannot go on: {way_out}.")


class NotCaughtUp(ProjectionError):
    """The read model did not reach the position within the timeout, or cannot reach it until an operator acts."""

    def __init__(
        self, projection: str, position: int, reached: int, timeout_s: float, state: str = "", reason: str | None = None
    ) -> None:
        self.projection = projection
        self.position = position
        self.reached = reached
        self.timeout_s = timeout_s
        self.state = state
        """The state in the checkpoint, empty if there is none yet; or `of another log`, or `of another app`."""
        self.reason = reason
        """The reason why the projection failed or waits."""
        because = f" ({' '.join(reason.split()).rstrip('.')})" if reason else ""
        who = f"Projection {projection!r} is"
        if state in _STANDSTILL:
            condition, remedy = _STANDSTILL[state]
            super().__init__(
                f"{who} {condition} at position {reached} and will not reach {position}{because}. {remedy}"
            )
            return
        super().__init__(
            f"{who} at position {reached} and did not reach {position} within {timeout_s:g} s{because}. "
            "Look at `eventjet status`, or wait longer."
        )


_STANDSTILL = {
    "failed": ("stopped by a fault", "Fix that, then start a worker or rebuild it."),
    "paused": ("paused", "Run `eventjet resume` when it may go on."),
    ANOTHER_LOG: ("of another log,", "Rebuild it from this log, or bring the right one back; forget older positions."),
    ANOTHER_APP: ("of another app,", "Give one of them another name, or this app a database of its own."),
    "retired": ("retired", "Ask a process that declares the revision which took its place."),
}


class TableLost(ProjectionError):
    """A table was dropped, or dropped and created again, while the checkpoint still has a position for its rows."""

    def __init__(self, projection: str, revision: int, reason: str) -> None:
        self.projection = projection
        self.revision = revision
        self.reason = reason
        super().__init__(
            f"Revision {revision} of projection {projection!r} {LOST_ROWS}: {reason}. Run `eventjet rebuild "
            f"{projection}`, or `eventjet init --reset {projection}` to let a worker begin with the first event."
        )


class ProjectionStopped(ProjectionError):
    """A projection cannot go on with its tables until somebody repairs what the message names."""

    def __init__(self, projection: str, reason: str, remedy: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(f"Projection {projection!r} cannot go on: {reason}. {remedy}")


class LocationTaken(ProjectionError):
    """A revision has no tables of its own yet, and another revision has the declared tables."""

    def __init__(self, resolved: Revision, holder: int | None) -> None:
        """`holder` is the revision that has the tables.

        It is None for a SQL projection, whose handlers name the tables, so that no other tables can be created.
        """
        self.projection = resolved.name
        self.revision = resolved.revision
        self.holder = holder
        who, names = (
            f"Revision {resolved.revision} of projection {resolved.name!r}",
            [table.name for table in resolved.tables],
        )
        if holder is not None:
            super().__init__(
                f"{who} has no table of its own yet, and revision {holder} holds {', '.join(map(repr, names))}. "
                "Run `eventjet init`: it makes one, to build beside the other."
            )
            return
        super().__init__(
            f"{who} is a SQL projection whose handlers use {', '.join(names)}, and another revision has these; on "
            "SQLite there is no second location for them. Declare tables of other names for it, or leave the revision "
            f"as it was and run `eventjet rebuild {resolved.name}`."
        )


class PromotionRefused(ProjectionError):
    """A revision cannot be activated in the declared table slot, and a retry alone does not help."""

    def __init__(self, resolved: Revision, reason: str) -> None:
        self.projection = resolved.name
        self.revision = resolved.revision
        self.reason = reason
        super().__init__(
            f"Revision {resolved.revision} of projection {resolved.name!r} cannot take the declared location: "
            f"{reason}. "
            f"Fix that; a worker tries again, and `eventjet db promote {resolved.name}` does at once."
        )


class RebuildError(EventjetError):
    """A rebuild stopped; the live read model is untouched."""


class ArchiveBroken(RebuildError):
    """An archive is damaged or incomplete; nothing was built from it."""

    def __init__(self, url: str, reason: str, remedy: str = "") -> None:
        self.url = url
        self.reason = reason
        remedy = remedy or (
            "Take a copy of it; or, where the log still has its events, seal them into an empty folder with "
            "`eventjet archive`."
        )
        super().__init__(f"The archive {url} cannot be used: {reason}. {remedy}")


class LakeRefused(EventjetError):
    """A table of a lakehouse is not what `eventjet lake` may go on with; nothing was written to it."""

    def __init__(self, url: str, table: str, reason: str, remedy: str) -> None:
        self.url = url
        self.table = table
        """Its name; empty where the lake itself cannot be used."""
        self.reason = reason
        self.remedy = remedy
        """What to do, in a sentence."""
        subject = f"The table {table} of the lake {url}" if table else f"The lake {url}"
        super().__init__(f"{subject} cannot be used: {reason}. {remedy}")


class LakeFenced(LakeRefused):
    """Another `eventjet lake sync` or `export` wrote to a table meanwhile; this one stopped, with nothing twice."""

    def __init__(self, url: str, table: str, position: int) -> None:
        self.position = position
        """The position at which this run knew the table."""
        reason = f"another sync or export has written to it since this one read it at position {position:,}"
        super().__init__(url, table, reason, "Let only one run at a time; the next run goes on where the tables are.")


class RebuildRefused(RebuildError):
    """The declaration of a projection, or something in the database, does not allow the rebuild."""

    def __init__(self, projection: str, reason: str, remedy: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(f"Projection {projection!r} cannot be rebuilt: {reason}. {remedy}")


class RowsRefused(RebuildError):
    """A constraint of the database forbids rows that the events of the log produce."""

    def __init__(self, projection: str, reason: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(
            f"The database refused rows of {projection!r} as the log gives them: {reason}. The live table is "
            "untouched. Fix the projection, or the rule of its table, and run the rebuild again; a worker would stop "
            "at the event in question and name it."
        )


class VerificationFailed(RebuildError):
    """The loaded rows are not the folded rows; the rebuilt table was not activated."""

    def __init__(self, projection: str, reason: str) -> None:
        self.projection = projection
        self.reason = reason
        super().__init__(
            f"The rebuild of {projection!r} was not swapped in: {reason}. The live table is untouched; run it again."
        )


class RebuildOvertaken(RebuildError):
    """A rebuild lost its basis while it ran: its lease ended, or an operator decided about the read model."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}. The live table is untouched; run the rebuild again if it is wanted.")
