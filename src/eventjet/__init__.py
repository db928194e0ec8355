"""Event sourcing on NATS JetStream: aggregates, projections in SQL, and rebuilds beside the live read model.

The public names of the library. Each is imported when it is first used, so that `import eventjet` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventjet.lazy import lazy

if TYPE_CHECKING:
    from eventjet.app import App, load_app
    from eventjet.blocking import BlockingBlobs, BlockingCommand, BlockingJet, BlockingRepository
    from eventjet.codec.catalog import Upcaster, upcaster
    from eventjet.commands import Blobs, Command, Committed, Imported, ImportReport, Planned, Repository
    from eventjet.domain.aggregate import aggregate, event
    from eventjet.domain.blob import Blob
    from eventjet.domain.decision import served
    from eventjet.domain.personal import Personal
    from eventjet.domain.process import Deadline, Outcome, Step, after, at, do, listens, process
    from eventjet.domain.reactor import (
        Inbox,
        Incoming,
        Origin,
        PermanentFailure,
        Publication,
        Reaction,
        Reactor,
        Retry,
        Source,
        inbox,
        publication,
        reactor,
    )
    from eventjet.domain.recorded import Metadata, Recorded, with_metadata
    from eventjet.domain.unique import unique
    from eventjet.errors import (
        BlobDamaged,
        BlobMissing,
        CommandFailed,
        ConcurrencyConflict,
        DefinitionError,
        EventjetError,
        Forbidden,
        HistoryBroken,
        NotCaughtUp,
        NotSettled,
        NotUnique,
        OutcomeUnknown,
        Refused,
        StoreUnavailable,
        Unreachable,
        UsageError,
    )
    from eventjet.jet import Jet
    from eventjet.log.store import LogState
    from eventjet.log.topology import Topology
    from eventjet.projections.app_ref import AppRef
    from eventjet.projections.by_state import by_state
    from eventjet.projections.projection import Entries, Projection, entries, projection
    from eventjet.projections.row_table import Key
    from eventjet.projections.sql_projection import SqlProjection
    from eventjet.settings import Settings

__all__ = [
    "App",
    "AppRef",
    "Blob",
    "BlobDamaged",
    "BlobMissing",
    "Blobs",
    "BlockingBlobs",
    "BlockingCommand",
    "BlockingJet",
    "BlockingRepository",
    "Command",
    "CommandFailed",
    "Committed",
    "ConcurrencyConflict",
    "Deadline",
    "DefinitionError",
    "Entries",
    "EventjetError",
    "Forbidden",
    "HistoryBroken",
    "ImportReport",
    "Imported",
    "Inbox",
    "Incoming",
    "Jet",
    "Key",
    "LogState",
    "Metadata",
    "NotCaughtUp",
    "NotSettled",
    "NotUnique",
    "Origin",
    "Outcome",
    "OutcomeUnknown",
    "PermanentFailure",
    "Personal",
    "Planned",
    "Projection",
    "Publication",
    "Reaction",
    "Reactor",
    "Recorded",
    "Refused",
    "Repository",
    "Retry",
    "Settings",
    "Source",
    "SqlProjection",
    "Step",
    "StoreUnavailable",
    "Topology",
    "Unreachable",
    "Upcaster",
    "UsageError",
    "after",
    "aggregate",
    "at",
    "by_state",
    "do",
    "entries",
    "event",
    "inbox",
    "listens",
    "load_app",
    "process",
    "projection",
    "publication",
    "reactor",
    "served",
    "unique",
    "upcaster",
    "with_metadata",
]

__getattr__ = lazy(
    __name__,
    {
        "eventjet.app": "App load_app",
        "eventjet.blocking": "BlockingBlobs BlockingCommand BlockingJet BlockingRepository",
        "eventjet.codec.catalog": "Upcaster upcaster",
        "eventjet.domain.aggregate": "aggregate event",
        "eventjet.domain.blob": "Blob",
        "eventjet.domain.personal": "Personal",
        "eventjet.domain.process": "Deadline Outcome Step after at do listens process",
        "eventjet.domain.reactor": "Inbox Incoming Origin PermanentFailure Publication Reaction Reactor Retry Source "
        "inbox publication reactor",
        "eventjet.domain.recorded": "Metadata Recorded with_metadata",
        "eventjet.domain.decision": "served",
        "eventjet.domain.unique": "unique",
        "eventjet.errors": "BlobDamaged BlobMissing CommandFailed ConcurrencyConflict DefinitionError EventjetError "
        "Forbidden HistoryBroken "
        "NotCaughtUp NotSettled NotUnique OutcomeUnknown Refused StoreUnavailable Unreachable UsageError",
        "eventjet.jet": "Jet",
        "eventjet.projections.app_ref": "AppRef",
        "eventjet.projections.by_state": "by_state",
        "eventjet.projections.projection": "Entries Projection entries projection",
        "eventjet.projections.row_table": "Key",
        "eventjet.projections.sql_projection": "SqlProjection",
        "eventjet.commands": "Blobs Command Committed ImportReport Imported Planned Repository",
        "eventjet.settings": "Settings",
        "eventjet.log.store": "LogState",
        "eventjet.log.topology": "Topology",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
