"""`Delivery`: turns a consumer's frames into records and accepts only what follows the record before. Pure."""

from __future__ import annotations

from eventjet.codec.envelope import RawRecord
from eventjet.errors import DeliveryGap
from eventjet.nats.ack import ack_prefix, parse_ack
from eventjet.nats.protocol import Frame

_UNKNOWN = b"\x00"


class Delivery:
    """The deliveries of one consumer from its first one on.

    A record is accepted when it is a first delivery, its consumer sequence is the previous one plus 1, and its position
    is greater than the previous one. Anything else raises `DeliveryGap`, after which the instance is of no use.
    """

    def __init__(
        self,
        stream: str,
        consumer: str,
        sid: bytes,
        position: int,
        pending: int,
        *,
        watch_holes: bool,
        anywhere: bool = False,
    ) -> None:
        self.position = position
        """Of the last record accepted; at first, what came before the consumer's start."""
        self.sequence = 0
        """Consumer sequence of the last record accepted."""
        self.pending = pending
        """Messages after the last record, as the consumer's server knew them when it sent it."""
        self.holes: list[tuple[int, int]] = []
        """(first, last) position of each run that was skipped, when `watch_holes`; emptied by the owner."""
        self.stream = stream
        self.consumer = consumer
        self._sid = sid
        self._watch = watch_holes
        self._anywhere = anywhere
        self._prefix = _UNKNOWN
        self._fields = 1

    def take(self, frames: list[Frame], records: list[RawRecord]) -> list[bytes]:
        """Append the records among `frames`; return the status blocks among them. Ignores other subscriptions."""
        statuses: list[bytes] = []
        append = records.append
        prefix, fields = self._prefix, self._fields
        position, sequence = self.position, self.sequence
        tokens: list[bytes] = []
        for sid, subject, reply, headers, body in frames:
            found = reply.rsplit(b".", fields)  # prefix, delivered, position, sequence, time, pending, maybe more
            if found[0] != prefix:
                if sid != self._sid:
                    continue
                if not reply:
                    statuses.append(headers)
                    continue
                prefix, fields, position = self._learn(reply, position, first=sequence == 0)
                found = reply.rsplit(b".", fields)
            tokens = found
            position += 1
            sequence += 1
            at = int(tokens[2])
            if at < position or int(tokens[3]) != sequence or tokens[1] != b"1":
                raise self._gap(reply, position - 1, sequence - 1)
            if at != position:
                if self._watch:
                    self.holes.append((position, at - 1))
                position = at
            append((at, int(tokens[4]), subject, headers, body))
        self._prefix, self._fields = prefix, fields
        self.position, self.sequence = position, sequence
        if tokens:
            self.pending = int(tokens[5])
        return statuses

    def _learn(self, reply: bytes, position: int, *, first: bool) -> tuple[bytes, int, int]:
        """(prefix, fields after it, previous position) from a first reply, or the first by another server."""
        try:
            ack = parse_ack(reply)
        except ValueError as error:
            raise DeliveryGap(self.consumer, position + 1, f"as something else: {error}") from None
        if (ack.stream, ack.consumer) != (self.stream, self.consumer):
            raise DeliveryGap(self.consumer, ack.position, f"it comes from {ack.consumer!r} of {ack.stream!r}")
        if first and self._anywhere:
            position = ack.position - 1
        prefix = ack_prefix(reply)
        return prefix, reply.count(b".") - prefix.count(b"."), position

    def _gap(self, reply: bytes, position: int, sequence: int) -> DeliveryGap:
        ack = parse_ack(reply)
        if ack.delivered != 1:
            reason = f"as try {ack.delivered}"
        elif ack.sequence != sequence + 1:
            reason = f"as delivery {ack.sequence} after delivery {sequence}"
        else:
            reason = f"after position {position}"
        return DeliveryGap(self.consumer, ack.position, reason)
