"""Errors of reactors, processes, inboxes and publications, which follow a log with a cursor, and of served commands."""

from __future__ import annotations

from eventjet.errors.base import EventjetError, Unreachable
from eventjet.errors.store import NoResponders

_SHOWN_MAX = 60
_WITH_ITS_ID = "Send it again under the same command id."
_REMEDIES = {
    400: "Change what is asked for: as it is, it is refused each time.",
    409: "Send it again.",
    422: "It is an error of the domain: one that the caller's `served(…)` names comes back as itself.",
    500: "Look there before you send it again.",
    503: _WITH_ITS_ID,
    504: _WITH_ITS_ID,
}
"""Status of an answer → what the caller should do."""
_NO_REMEDY = "See what the service's log says."


class ReactionError(EventjetError):
    """A reactor, process, inbox or publication could not go on."""


class CursorFenced(ReactionError):
    """A cursor was written by another worker, or paused, set or decided about; nothing of this write is stored."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"{name!r} is no longer this worker's: somebody else wrote its cursor. Another worker took it over, or it "
            "was paused, set or decided about; this one stands by."
        )


class CursorMissing(ReactionError, Unreachable):
    """There is no cursor of this name; only `eventjet init` creates it, with its start position."""

    def __init__(self, app: str, name: str) -> None:
        self.name = name
        older = " End a worker of an earlier release instead." if "-" in name else ""
        Unreachable.__init__(
            self,
            f"The cursor of {name!r}",
            f"the app {app!r} has none on this server",
            f"Run `eventjet init` once.{older}",
        )


class CursorDamaged(ReactionError):
    """A value in the key-value bucket of cursors is not what eventjet writes there."""

    def __init__(self, body: bytes, reason: str) -> None:
        self.body = body
        super().__init__(
            f"A value among the cursors cannot be read ({reason}): {body[:_SHOWN_MAX]!r}. Another program or a newer "
            "eventjet wrote it; upgrade, or set the cursor anew with `eventjet cursor set`."
        )


class CommandFailed(EventjetError):
    """A served command was answered with an error that is not among the domain errors it is served with."""

    def __init__(self, kind: str, status: int, detail: str) -> None:
        self.kind = kind
        self.status = status
        self.detail = detail
        reason = f": {detail.rstrip('.')}" if detail else ""
        remedy = _REMEDIES.get(status, _NO_REMEDY)
        super().__init__(f"The service answered {kind} ({status}){reason}. {remedy}")


class NobodyServes(NoResponders, Unreachable):
    """No service listens for a command."""

    def __init__(self, subject: str, app: str, command: str) -> None:
        self.subject = subject
        self.what = self.command = command
        Unreachable.__init__(
            self,
            f"The command {command}",
            f"nobody serves {command} of {app}",
            f"Start `eventjet serve` for the app {app!r}, or see why it cannot be reached.",
        )


class HandlerBlocked(ReactionError):
    """A handler blocked the event loop for longer than one try may take, so nothing could cut it off."""

    def __init__(self, name: str, seconds: float | None = None) -> None:
        self.name = name
        self.seconds = seconds
        """How long it blocked the loop; None where the tries of other sessions had blocked it."""
        how_long = "in each of its tries" if seconds is None else f"for {seconds:g} s"
        super().__init__(
            f"{name} blocked the event loop {how_long}. Call what blocks with `await asyncio.to_thread(…)`."
        )


class NotSettled(ReactionError):
    """A process instance did not come to its end within the timeout."""

    def __init__(
        self, process: str, process_id: str, timeout_s: float | None, version: int, last_event: str, reason: str
    ) -> None:
        self.process = process
        self.process_id = process_id
        self.timeout_s = timeout_s
        """How long it was waited for; None in memory, where nothing is waited for."""
        self.version = version
        """The version of its last event; 0 if it has none."""
        self.last_event = last_event
        """The type of its last event; empty if it has none."""
        self.reason = reason
        """What it waits for, or what keeps workers from it."""
        where = f"is at version {version}, after {last_event}, and" if version else "has not begun and"
        reason = reason.rstrip(".")
        if timeout_s is None:
            super().__init__(f"The process {process} {process_id!r} {where} has not settled: {reason}.")
            return
        super().__init__(
            f"The process {process} {process_id!r} {where} did not settle within {timeout_s:g} s: "
            f"{reason}. See `eventjet process show {process} {process_id}`, or wait longer."
        )


class ReactionFailed(ReactionError):
    """A handler or a step raised an unexpected error, and its reactor, process, inbox or publication stops."""

    def __init__(self, name: str, position: int, aggregate_id: str, reason: str) -> None:
        self.name = name
        self.position = position
        self.aggregate_id = aggregate_id
        self.reason = reason
        super().__init__(
            f"{name!r} could not take the event at position {position} of {aggregate_id!r}: {reason}. "
            "Fix it, and start the worker again."
        )
