"""Embedded NATS and PostgreSQL servers from wheels, which end with the program that starts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventjet.lazy import lazy

if TYPE_CHECKING:
    from eventjet.dev.nats import NatsServer
    from eventjet.dev.postgres import PostgresServer

__all__ = ["NatsServer", "PostgresServer"]

__getattr__ = lazy(__name__, {"eventjet.dev.nats": "NatsServer", "eventjet.dev.postgres": "PostgresServer"})
