"""PURE: what whoever looks after a server asks it: its limits, the copies of a stream, the consumers of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from eventjet.jetstream.api import Request, call
from eventjet.nats.protocol import Frame

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Replica:
    """A server that keeps a copy of a stream, other than its leader."""

    name: str
    is_current: bool
    is_offline: bool
    silent_s: float | None
    """How long ago the leader heard of it, None where it never has; it is called offline only much later."""


@dataclass(frozen=True, slots=True)
class ListedConsumer:
    """A consumer that is there."""

    name: str
    is_durable: bool
    """Whether it stays while nobody uses it."""
    waiting: int
    """Pulls that wait at it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much an account may have of something, and has."""

    of: str
    used: int
    most: int


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """What JetStream lets an account have; what is not limited is not told."""

    limits: tuple[Limit, ...]
    needs_max_bytes: bool
    """Whether every stream has to declare how large it may become."""


_LIMITED = (
    ("bytes of storage", "storage", "max_storage"),
    ("streams", "streams", "max_streams"),
    ("consumers", "consumers", "max_consumers"),
)


def account_limits() -> Request[AccountLimits]:
    """Of the account that asks."""
    return _read("INFO", None, _limits_in)


def replicas_of(stream: str) -> Request[list[Replica]]:
    """As the stream's leader knows them; none where there is one copy. Raises `StreamMissing`."""

    def read(info: dict[str, Any]) -> list[Replica]:
        cluster: dict[str, Any] = info.get("cluster") or {}
        copies: list[dict[str, Any]] = cluster.get("replicas") or []
        return [
            Replica(
                str(one["name"]),
                bool(one.get("current")),
                bool(one.get("offline")),
                int(one["active"]) / 1e9 if one.get("active") else None,
            )
            for one in copies
        ]

    return _read(f"STREAM.INFO.{stream}", None, read)


def list_consumers(stream: str, offset: int) -> Request[tuple[list[ListedConsumer], int]]:
    """A page of the stream's consumers, and how many there are in all."""

    def read(found: dict[str, Any]) -> tuple[list[ListedConsumer], int]:
        consumers: list[dict[str, Any]] = found.get("consumers") or []
        listed = [
            ListedConsumer(
                str(one["name"]), not one["config"].get("inactive_threshold"), int(one.get("num_waiting") or 0)
            )
            for one in consumers
        ]
        return listed, int(found.get("total", 0))

    return _read(f"CONSUMER.LIST.{stream}", {"offset": offset}, read)


def _read(subject: str, body: object, read: Callable[[dict[str, Any]], T]) -> Request[T]:
    asked = call(subject, body)

    def parse(frame: Frame) -> T:
        return read(asked.parse(frame))

    return Request(asked.what, asked.subject, asked.payload, parse)


def _limits_in(info: Mapping[str, Any]) -> AccountLimits:
    """An account may have one set of limits, or one for each number of replicas."""
    tiers: Mapping[str, Mapping[str, Any]] = info.get("tiers") or {}
    found = [
        Limit(what if not tier else f"{what} of {tier}", int(part.get(used) or 0), int(part["limits"].get(most) or 0))
        for tier, part in (tiers or {"": info}).items()
        for what, used, most in _LIMITED
    ]
    parts = tiers.values() if tiers else (info,)
    return AccountLimits(
        tuple(limit for limit in found if limit.most > 0),
        any(bool(part["limits"].get("max_bytes_required")) for part in parts),
    )
