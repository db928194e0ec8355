"""Servers that live and die with the program that starts them: NATS and PostgreSQL from wheels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventjet.dev.nats import NatsServer
    from eventjet.dev.nats_cluster import NatsCluster
    from eventjet.dev.postgres import PostgresServer

__all__ = ["NatsCluster", "NatsServer", "PostgresServer"]

_HOMES = {
    "NatsCluster": "eventjet.dev.nats_cluster",
    "NatsServer": "eventjet.dev.nats",
    "PostgresServer": "eventjet.dev.postgres",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
