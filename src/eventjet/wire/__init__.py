"""The fast road to NATS: blocking, picklable, without nats-py and asyncio.

`read_range` gives a range of the log to the local engine, Spark tasks and the archive; `DurablePull` gives its tail to
a worker's thread; `stream_state`, `get_record` and `next_record` ask the leader. All stand on `Link`, one connection to
an `Endpoint`.
"""

from eventjet.wire.bulk import ReadOptions, read_range
from eventjet.wire.endpoint import Endpoint
from eventjet.wire.faults import (
    ApiRefused,
    DeliveryGap,
    Evicted,
    LinkClosed,
    LinkLost,
    NoResponders,
    Unauthorized,
)
from eventjet.wire.link import Link
from eventjet.wire.pull import DurablePull
from eventjet.wire.stream import StreamState, get_record, next_record, stream_state

__all__ = [
    "ApiRefused",
    "DeliveryGap",
    "DurablePull",
    "Endpoint",
    "Evicted",
    "Link",
    "LinkClosed",
    "LinkLost",
    "NoResponders",
    "ReadOptions",
    "StreamState",
    "Unauthorized",
    "get_record",
    "next_record",
    "read_range",
    "stream_state",
]
