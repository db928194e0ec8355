"""PURE: all lines that eventjet logs through the standard library's `logging`, each with a stable name and fields.

A log record has both as `record.event` and `record.fields`, for any formatter; `JsonLines` is a formatter with them.
Each field is cut. `docs/reference/metrics.md` says when each is logged; a test checks that it has all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from eventjet.text import cut, printable, utc_text

FIELD_MAX = 1_000
"""Characters of a field, at most."""
TRACE_MAX = 8_000
"""Characters of a traceback, or of a message of another library, at most."""
OTHER = "log"
"""The event name of lines that other libraries log."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One kind of log line: its name, its level, and its text with a placeholder for each field."""

    name: str
    level: int
    text: str

    def log(self, logger: logging.Logger, **fields: Any) -> None:
        """Log a line of this kind with these fields."""
        if logger.isEnabledFor(self.level):
            bounded_fields = {name: _bounded(name, value) for name, value in fields.items()}
            logger.log(
                self.level,
                self.text,
                bounded_fields,
                extra={"event": self.name, "fields": bounded_fields},
                stacklevel=2,
            )


_D, _I, _W, _E = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

STOPPED = LogEvent("eventjet.stopped", _E, "%(name)s is stopped: %(reason)s")
TRYING_AGAIN = LogEvent(
    "eventjet.trying_again", _W, "%(name)s is interrupted, and tries again by itself: %(reason)s%(trace)s"
)
FENCED = LogEvent("eventjet.fenced", _I, "%(reason)s")
QUARANTINED = LogEvent(
    "eventjet.quarantined", _W, "%(name)s: the event at position %(position)d %(how)s%(more)s: %(reason)s"
)
DROPPED = LogEvent(
    "eventjet.dropped", _W, "%(name)s: position %(position)d is dropped: the stream %(stream)s no longer has it"
)
SOURCE_MADE_AGAIN = LogEvent(
    "eventjet.source_made_again",
    _W,
    "%(name)s: its source %(source)s was made again, and from position %(position)d on its messages are of the new "
    "stream. Messages of the old one that had not been gathered are gone: ask who runs it whether there were any. "
    "`eventjet cursor set` goes back where messages have to be handled again.",
)
TRY_FAILED = LogEvent("eventjet.try_failed", _I, "%(name)s: %(whose)s, %(what)s, try %(attempt)d: %(reason)s")
WAITS = LogEvent("eventjet.waits", _W, "%(name)s: %(reason)s")
TOOK_LEASE = LogEvent("eventjet.took_lease", _I, "%(name)s: took the lease at position %(position)d, epoch %(epoch)d")
CODE_CHANGED = LogEvent(
    "eventjet.code_changed",
    _W,
    "%(name)s revision %(revision)d: rows that are there were made by other code, and this code goes on from them. "
    "`eventjet verify %(name)s` tells whether any of them differ, and ends this warning where none does. "
    "`eventjet rebuild %(name)s` makes all of them again by this code; `revision=%(newer)d` in its declaration builds "
    "them beside, while the old code goes on.",
)
TOOK_CURSOR = LogEvent("eventjet.took_cursor", _I, "%(name)s: took the cursor at position %(position)d")
LOOKED_AGAIN = LogEvent("eventjet.looked_again", _I, "%(name)s: all that wait were looked at by revision %(revision)d")
TIMERS_LATE = LogEvent(
    "eventjet.timers_late",
    _W,
    "%(name)s: the server did not fire %(count)d timers at their time, and they are set again. nats-server 2.15.1 "
    "forgets some when the stream of the timers is scaled to more replicas.",
)
CUT_OFF = LogEvent(
    "eventjet.cut_off", _W, "%(name)s did not finish what it had in hand within %(seconds)g s and is cut off"
)
HANDLER_CUT_OFF = LogEvent(
    "eventjet.handler_cut_off", _W, "%(name)s: what was being handled is cut off; its next worker does it again"
)
LOOP_BLOCKED = LogEvent(
    "eventjet.loop_blocked",
    _W,
    "%(name)s blocked the event loop for %(seconds)g s, in which nothing else of this worker went on. Call what blocks "
    "with `await asyncio.to_thread(…)`, and give it a timeout.",
)
GIVEN_UP = LogEvent(
    "eventjet.given_up",
    _W,
    "%(name)s: it was to end, has not within %(seconds)g s, and is given up. Give what the application does on its way "
    "out, in `finally` or behind the `yield` of its deps, a timeout.",
)
SHARES_UNKNOWN = LogEvent(
    "eventjet.shares_unknown", _W, "%(name)s: it is not known how many workers share it: %(reason)s"
)
BESIDE = LogEvent(
    "eventjet.beside",
    _I,
    "%(name)s: readers still see another revision. This one takes over by itself once it has caught up; "
    "`eventjet db promote %(projection)s` lets it take over at once.",
)
BESIDE_FOR_GOOD = LogEvent(
    "eventjet.beside_for_good",
    _I,
    "%(name)s: readers see another revision, and this one does not take over by itself. Where that one is of a newer "
    "release, only stop this worker. `eventjet db promote %(projection)s` with this release gives readers this one.",
)
TAKE_OVER_WAITS = LogEvent("eventjet.take_over_waits", _I, "%(name)s waits to take over: %(reason)s")
TAKE_OVER_REFUSED = LogEvent("eventjet.take_over_refused", _W, "%(reason)s")
TOOK_OVER = LogEvent("eventjet.took_over", _I, "%(name)s took over from revision %(before)s")
EVENT_BY_EVENT = LogEvent(
    "eventjet.event_by_event",
    _W,
    "%(name)s: a call of %(handler)s failed, so the %(count)d events of the batch are taken one by one: %(reason)s",
)
FEATURES_LEFT = LogEvent("eventjet.features_left", _W, "%(name)s: %(features)s stay with the table that leaves")
RUN_PUBLISHED = LogEvent(
    "eventjet.run_published",
    _W,
    "%(name)s, made by a rebuild, is published by %(publications)s FOR ALL TABLES while it catches up",
)
REMAINS_LEFT = LogEvent("eventjet.remains_left", _W, "%(name)s, made by a rebuild, is not removed: %(reason)s")
HTTP = LogEvent("eventjet.http", _I, "health and metrics at http://%(address)s/healthz and /metrics")
REQUEST_BROKE_OFF = LogEvent("eventjet.request_broke_off", _D, "a request from %(client)s broke off")
NOT_FOLDED_AHEAD = LogEvent(
    "eventjet.not_folded_ahead", _D, "the batch after position %(position)d could not be folded ahead: %(reason)s"
)
THREAD_LEFT = LogEvent("eventjet.thread_left", _W, "the thread %(thread)s did not end within %(seconds)g s")
NOTICES_DENIED = LogEvent(
    "eventjet.notices_denied", _W, "%(reason)s Until then whoever waits for a position looks once a second."
)
NO_CONNECTION = LogEvent(
    "eventjet.no_connection", _W, "no connection to NATS could be opened, and it is tried again: %(reason)s%(trace)s"
)
REBUILD_LEASE_WAITS = LogEvent(
    "eventjet.rebuild_lease_waits",
    _W,
    "the lease of the rebuild %(run)s could not be renewed, and it is tried again: %(reason)s",
)
TASK_ENDED = LogEvent(
    "eventjet.task_ended", _E, "%(name)s has ended though nobody stopped it, so the worker ends: %(reason)s%(trace)s"
)
COMMAND_FAILED = LogEvent("eventjet.command_failed", _W, "%(name)s failed: %(reason)s%(trace)s")
UNANSWERED = LogEvent(
    "eventjet.unanswered", _W, "%(name)s: %(reason)s Requests that got no answer since the last such line: %(count)d."
)
LOG_DRIFTED = LogEvent("eventjet.log_drifted", _W, "%(drift)s. %(remedy)s")
ANSWERED_BY_ANOTHER = LogEvent(
    "eventjet.answered_by_another",
    _W,
    "%(who)s answers what is published to %(subject)s for the stream %(stream)s. That answer is not believed. Keep "
    "these subjects from it: deny_imports and deny_exports of the leaf node connection, an account of its own, or "
    "permissions. `eventjet doctor` looks for others.",
)
LOG_UNREADABLE = LogEvent("eventjet.log_unreadable", _W, "%(reason)s")
AGGREGATES_UNKNOWN = LogEvent(
    "eventjet.aggregates_unknown",
    _W,
    "the log %(stream)s is also of aggregates that this application does not declare: %(names)s. If one is called "
    "otherwise now, give it its name back in @aggregate(…). If a newer release records them, deploy that. What nobody "
    "needs any more belongs in `retired_aggregates`.",
)
UNPROVEN_PEER = LogEvent(
    "eventjet.unproven_peer",
    _W,
    "PostgreSQL at %(hosts)s is reached with sslmode=%(mode)s, which does not prove who answers there. "
    "Add ?sslmode=verify-full&sslrootcert=/path/to/ca.pem to the database's URL.",
)
PIPELINE_LEFT_OUT = LogEvent(
    "eventjet.pipeline_left_out", _W, "The pipeline has no dataset for the projection %(projection)s: %(reason)s"
)
NOTE = LogEvent("eventjet.note", _I, "%(text)s")

LOG_EVENTS = tuple(event for event in tuple(globals().values()) if isinstance(event, LogEvent))
"""All log events, in the order of their declarations."""


class JsonLines(logging.Formatter):
    """A formatter for JSON, one object a line: `at`, `level`, `logger`, `event`, `message` and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        entry: dict[str, Any] = {
            "at": utc_text(datetime.fromtimestamp(record.created, UTC), "milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", OTHER),
            "message": cut(record.getMessage(), TRACE_MAX),
            **{name: value for name, value in fields.items() if value not in ("", None)},
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = record.exc_info[0].__qualname__
            entry["trace"] = self.formatException(record.exc_info)[-TRACE_MAX:]
        return json.dumps(entry, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode()


def _bounded(name: str, value: Any) -> Any:
    if isinstance(value, int | float):
        return value
    text = str(value)
    if name == "trace":
        return "\n".join(map(printable, text[-TRACE_MAX:].split("\n")))
    return printable(cut(text, FIELD_MAX))
