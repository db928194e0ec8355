"""Runs and their leases: whose shadow is alive, and whose may be cleared away. Time is the database's."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

from sqlalchemy import Connection, Engine, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from eventjet.errors import LeaseEnded
from eventjet.projections.sql_projection import AnyResolved
from eventjet.sql.own_tables import Clock, rebuilds

LEASE_S = 30.0
RENEW_S = 5.0

RUN = re.compile(r"[0-9a-f]{16}")
_SELF = -1
"""The part that stands for the run itself."""


def new_run() -> str:
    """A name that no other run has."""
    return secrets.token_hex(8)


def open_run(connection: Connection, run: str, resolved: AnyResolved) -> None:
    """Announce a run before anything of it exists, so that it can be found and cleared away."""
    until = Clock() + LEASE_S
    connection.execute(
        insert(rebuilds).values(
            run=run, part=_SELF, projection=resolved.name, revision=resolved.revision, lease_until=until
        )
    )


def close_run(connection: Connection, run: str) -> None:
    """Forget a run of which nothing is left."""
    connection.execute(delete(rebuilds).where(rebuilds.c.run == run))


def known_runs(connection: Connection) -> list[tuple[str, bool]]:
    """Every run that left a trace, and whether its lease has ended."""
    ended = rebuilds.c.lease_until < Clock()
    query = select(rebuilds.c.run, ended).where(rebuilds.c.part == _SELF)
    # A run names a schema or a file, so nothing but a name of ours may pass.
    return [(run, bool(over)) for run, over in connection.execute(query) if RUN.fullmatch(run)]


def hold(connection: Connection, run: str) -> None:
    """Extend the lease and lock its row to the end of the transaction; raises `LeaseEnded`.

    Whoever clears a run away deletes its row together with what it made, so a run that has its row has everything.
    """
    until = Clock() + LEASE_S
    own = (rebuilds.c.run == run) & (rebuilds.c.part == _SELF)
    if connection.execute(update(rebuilds).where(own).values(lease_until=until)).rowcount != 1:
        raise LeaseEnded


def release(connection: Connection, run: str) -> None:
    """Let anyone clear away what is left of a run."""
    connection.execute(update(rebuilds).where(rebuilds.c.run == run).values(lease_until=0))


@contextmanager
def renewed(engine: Engine, run: str) -> Generator[None]:
    """Renew the lease in a thread. A renewal that fails is tried again; one that comes too late shows at the swap."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(RENEW_S):
            with suppress(SQLAlchemyError, LeaseEnded), engine.begin() as connection:
                hold(connection, run)

    thread = threading.Thread(target=renew, name="eventjet-rebuild-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(LEASE_S)
