"""The fast road to NATS: blocking, picklable, without nats-py and asyncio.

`read_range` gives a range of the log to the local engine, Spark tasks and the archive; `DurablePull` gives its tail to
a worker's thread; `stream_state`, `get_record` and `next_record` ask the leader. All stand on `NatsConnection`, one connection to
an `Endpoint`.
"""

from eventjet.nats.api import StreamState, get_record, next_record, stream_state
from eventjet.nats.connection import NatsConnection
from eventjet.nats.durable_pull import DurablePull
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.faults import (
    ApiRefused,
    ConnectionClosed,
    ConnectionLost,
    DeliveryGap,
    Evicted,
    NoResponders,
    Unauthorized,
)
from eventjet.nats.ranges import ReadOptions, read_range

__all__ = [
    "ApiRefused",
    "ConnectionClosed",
    "ConnectionLost",
    "DeliveryGap",
    "DurablePull",
    "Endpoint",
    "Evicted",
    "NatsConnection",
    "NoResponders",
    "ReadOptions",
    "StreamState",
    "Unauthorized",
    "get_record",
    "next_record",
    "read_range",
    "stream_state",
]
