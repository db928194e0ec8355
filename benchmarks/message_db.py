"""Message DB in a database of our own, from the SQL files of its npm package, where `make bench` could install it."""

from __future__ import annotations

import sys
from pathlib import Path

import psycopg

from benchmarks.readmodel import libpq

NODE = Path(sys.prefix) / "node"
"""Where `make bench` installs the peers that come from npm."""

_SQL = NODE / "node_modules" / "@eventide" / "message-db" / "database"
_FUNCTIONS = (
    "message-store-version",
    "hash-64",
    "acquire-lock",
    "category",
    "is-category",
    "id",
    "cardinal-id",
    "stream-version",
    "write-message",
    "get-stream-messages",
    "get-category-messages",
    "get-last-stream-message",
)
_INDEXES = ("messages-id", "messages-stream", "messages-category")


def install(url: str) -> None:
    """In its own order, without the extension it needed before PostgreSQL had `gen_random_uuid`."""
    files = [
        "schema/message-store",
        "types/message",
        "tables/messages",
        *(f"functions/{name}" for name in _FUNCTIONS),
        *(f"indexes/{name}" for name in _INDEXES),
    ]
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f'alter database "{name}" set search_path to message_store, public'.encode())
        connection.execute("set search_path to message_store, public")
        for file in files:
            connection.execute((_SQL / f"{file}.sql").read_bytes())
