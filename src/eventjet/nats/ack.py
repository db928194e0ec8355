"""Parser of `$JS.ACK` reply subjects: what JetStream knows of a delivery.

Form 1 has 9 tokens, form 2 inserts a domain and an account hash and has 11 or more (ADR-15; servers write form 2 with
`feature_flags { js_ack_fc_v2: true }`, from 2.16 on by default).
"""

from __future__ import annotations

from typing import NamedTuple


class Ack(NamedTuple):
    """One delivery, as its reply subject tells it."""

    domain: str
    """Empty when the server has none, or writes form 1."""
    stream: str
    consumer: str
    delivered: int
    """1 on the first delivery of this message."""
    position: int
    """The stream sequence."""
    sequence: int
    """The consumer sequence: 1, 2, 3 … of this consumer's deliveries."""
    time_ns: int
    pending: int
    """Messages that match the consumer and come after this one, as the consumer's server knew them then."""


def parse_ack(reply: bytes) -> Ack:
    """Take a reply subject apart; raises `ValueError` when it is not one."""
    tokens = reply.split(b".")
    if tokens[:2] != [b"$JS", b"ACK"] or not (len(tokens) == 9 or len(tokens) >= 11):
        raise ValueError(f"{reply[:200]!r} is not a $JS.ACK subject")
    at = 2 if len(tokens) == 9 else 4
    domain = tokens[2].decode() if at == 4 and tokens[2] != b"_" else ""
    delivered, position, sequence, time_ns, pending = map(int, tokens[at + 2 : at + 7])
    return Ack(domain, tokens[at].decode(), tokens[at + 1].decode(), delivered, position, sequence, time_ns, pending)


def ack_prefix(reply: bytes) -> bytes:
    """What comes before the delivery count: the same for all messages of a consumer from one server."""
    tokens = reply.split(b".")
    return b".".join(tokens[: 4 if len(tokens) == 9 else 6])
