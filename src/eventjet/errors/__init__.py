"""Every error that eventjet raises, drawn once.

    EventjetError
    ├── DefinitionError        the application's declarations do not fit together
    ├── UsageError             a call or an option cannot be carried out as given
    ├── Unreachable            a component (server, database, JVM, package) cannot be used
    │   ├── ComponentMissing      the wheel of an embedded server is not installed
    │   └── ComponentFailed       an embedded server did not start, or ended
    ├── StoreError
    │   ├── ConcurrencyConflict   another writer holds the expected slot
    │   ├── OutcomeUnknown        the deadline passed before the log's answer was known
    │   ├── Refused               the log will not take this, ever, as it stands
    │   ├── Forbidden             these credentials may not do this
    │   │   └── Unauthorized         the server does not let these credentials in
    │   ├── StoreUnavailable      the log did not answer in time; nothing was written
    │   │   ├── ConnectionLost       the connection broke or went silent
    │   │   ├── ConnectionClosed     this process closed the connection
    │   │   └── NoResponders         nobody listens on the subject
    │   ├── HistoryBroken         versions or positions are not contiguous
    │   ├── ApiRefused            JetStream answered with an error
    │   │   └── StreamMissing        there is no stream of this name
    │   ├── Evicted               the consumer was deleted, moved or shut down during a pull
    │   └── DeliveryGap           a delivery does not follow the one before it
    ├── CodecError
    │   ├── UnknownEvent          no declared event has this wire name and schema
    │   ├── UndecodableEvent      the stored bytes are not this event
    │   └── UnencodableEvent      this event would not be read back as it was given
    ├── ProjectionError
    │   ├── HandlerFailed         the projection's own function raised
    │   ├── TransactionEnded      a handler ended the transaction of its batch
    │   ├── RowRefused            a value would not come back from its column as it was given
    │   ├── CheckpointFenced      another worker took the projection over
    │   ├── LogRolledBack         the log under a checkpoint is not the log it was made from
    │   ├── TableOccupied         a projection that has not begun finds rows in its table
    │   ├── StillHeld             aggregates are held back in a quarantine that is no longer declared
    │   ├── LocationTaken         a revision has no tables yet, and another one holds the declared ones
    │   ├── NamedByHandlers       SQL by hand cannot work with tables of other names
    │   ├── PromotionRefused      a revision cannot take the declared location
    │   └── NotCaughtUp           the read model did not reach the position in time
    ├── RebuildError
    │   ├── ArchiveBroken         an archive has a gap, a file that was changed, or is of another log
    │   ├── RebuildRefused        the plan names something a swap cannot carry
    │   ├── RowsRefused           a rule of the database forbids rows that the log gives
    │   ├── VerificationFailed    what was loaded is not what was folded
    │   ├── LeaseEnded            the run stood still for so long that its shadow may be gone
    │   ├── QuarantineChanged     somebody decided about parked events during the run
    │   └── RevisionDropped       the revision was dropped during the run
    └── DemoFailed             something did not happen as `eventjet demo` promises

Each sets attributes, forms its message in the constructor, and ends by saying what to do. An application's own
errors pass through eventjet untouched.
"""

from __future__ import annotations

from eventjet.errors.base import (
    ComponentFailed,
    ComponentMissing,
    DefinitionError,
    DemoFailed,
    EventjetError,
    Unreachable,
    UsageError,
)
from eventjet.errors.codec import CodecError, UndecodableEvent, UnencodableEvent, UnknownEvent
from eventjet.errors.projection import (
    CheckpointFenced,
    HandlerFailed,
    LocationTaken,
    LogRolledBack,
    NamedByHandlers,
    NotCaughtUp,
    ProjectionError,
    PromotionRefused,
    RowRefused,
    StillHeld,
    TableOccupied,
    TransactionEnded,
)
from eventjet.errors.rebuild import (
    ArchiveBroken,
    LeaseEnded,
    QuarantineChanged,
    RebuildError,
    RebuildRefused,
    RevisionDropped,
    RowsRefused,
    VerificationFailed,
)
from eventjet.errors.store import (
    ApiRefused,
    ConcurrencyConflict,
    ConnectionClosed,
    ConnectionLost,
    DeliveryGap,
    Evicted,
    Forbidden,
    HistoryBroken,
    NoResponders,
    OutcomeUnknown,
    Refused,
    StoreError,
    StoreUnavailable,
    StreamMissing,
    Unauthorized,
)

__all__ = [
    "ApiRefused",
    "ArchiveBroken",
    "CheckpointFenced",
    "CodecError",
    "ComponentFailed",
    "ComponentMissing",
    "ConcurrencyConflict",
    "ConnectionClosed",
    "ConnectionLost",
    "DefinitionError",
    "DeliveryGap",
    "DemoFailed",
    "EventjetError",
    "Evicted",
    "Forbidden",
    "HandlerFailed",
    "HistoryBroken",
    "LeaseEnded",
    "LocationTaken",
    "LogRolledBack",
    "NamedByHandlers",
    "NoResponders",
    "NotCaughtUp",
    "OutcomeUnknown",
    "ProjectionError",
    "PromotionRefused",
    "QuarantineChanged",
    "RebuildError",
    "RebuildRefused",
    "Refused",
    "RevisionDropped",
    "RowRefused",
    "RowsRefused",
    "StillHeld",
    "StoreError",
    "StoreUnavailable",
    "StreamMissing",
    "TableOccupied",
    "TransactionEnded",
    "Unauthorized",
    "UndecodableEvent",
    "UnencodableEvent",
    "UnknownEvent",
    "Unreachable",
    "UsageError",
    "VerificationFailed",
]
