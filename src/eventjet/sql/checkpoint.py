"""The checkpoint: the row that says up to which position a projection is valid, who owns it and where its tables are.

This module has every change of a checkpoint, and the fence that refuses the writes of former owners. Its states and
transitions are those of `domain.position`. The owner's transitions match the row only in the epoch in which the owner
took the lease; `take` matches it only while the lease is free.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, case, func, null, select, text, update

from eventjet.domain.position import (
    ACTIVATE,
    ACTIVE,
    ASSIGN,
    BEGIN_ANEW,
    BUILDING,
    DEPOSE,
    DISPLACE,
    FAIL,
    FAILED,
    NEW,
    NOTE,
    PAUSE,
    PROMOTE,
    RESET,
    RESUME_AS,
    RETIRE,
    STAND_BACK,
    SWAP_IN,
    SWAP_IN_BESIDE,
    TAKE,
    Transition,
)
from eventjet.errors import CheckpointFenced
from eventjet.errors.projection import HALF_WRITTEN
from eventjet.sql.own_tables import Clock, projections
from eventjet.text import with_escapes

DECLARED = ""
"""The location of a revision whose tables are where they are declared."""
UNASSIGNED = "[]"
"""The value of `tables` while a revision has no location yet."""
CODES_MAX = 8
"""Fingerprints of code that a checkpoint keeps: the first, and the newest of the others."""

_ENSURE = text(
    "insert into eventjet_projection (name, revision, app) values (:name, :revision, :app) on conflict do nothing"
)
_PAUSED_WHILE = "paused while "
"""The prefix of the reason of a paused checkpoint, before the state in which it was paused."""

ADVANCE = (
    "update eventjet_projection set position = {0}, event_id = {0}, lease_until = {1} + {0} "
    "where name = {0} and revision = {0} and epoch = {0} and position = {0}"
)
"""The advance by a batch as SQL text, with the driver's placeholder for {0} and the clock for {1}; see `advance`."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint of one revision of a projection: a row of `eventjet_projection`."""

    name: str
    revision: int
    generation: int
    """The number of the table's generation: each rebuild that is swapped in adds 1."""
    position: int
    event_id: str
    """Id of the event at that position; empty at position 0."""
    log: str
    """The stream identity of the log that the rows were made from; empty before the first event."""
    epoch: int
    """Rises whenever the owner is deposed; every write of an owner names the epoch in which it took the lease."""
    owner: str | None
    lease_until: float
    """Seconds since 1970 by the database's clock; every renewal changes it."""
    lease_s: float
    """How long the lease lasts without a renewal; 0 before the first owner."""
    state: str
    reason: str | None
    location: str = DECLARED
    """The location of its tables: empty for the declared one, else a schema, or a suffix of their names on SQLite."""
    tables: str = UNASSIGNED
    """The names of its tables, as JSON; `[]` until it has a location."""
    takes_over: bool = False
    """Whether it takes the declared location once it has caught up with the revision that is there."""
    identities: str = UNASSIGNED
    """The identities of its tables, as JSON (see `locations.identities`); `[]` before they are noted."""
    app: str = ""
    """The app that it belongs to; empty where an older eventjet made it and no worker has owned it since."""
    code: str = ""
    """Fingerprints of the code that made its rows, separated by commas, the newest last; empty where none is known."""

    @property
    def has_begun(self) -> bool:
        """Whether its tables belong to a position of a log."""
        return self.position > 0 or self.log != ""

    def has_rows_of_other_code(self, code: str) -> bool:
        """Whether code with another fingerprint made some of its rows; False where a fingerprint is not known."""
        return self.position > 0 and code != "" and self.code not in ("", code)


_NOTHING_READ = {"position": 0, "event_id": "", "log": "", "identities": UNASSIGNED, "reason": None, "code": ""}


def ensure(connection: Connection, name: str, revision: int, app: str = "") -> None:
    """Add the checkpoint of a projection at position 0 where there is none; several processes may do so at once."""
    connection.execute(_ENSURE, {"name": name, "revision": revision, "app": app})


def read(connection: Connection, name: str, revision: int) -> Checkpoint | None:
    """Return the checkpoint; None when there is none."""
    return checkpoint_of(connection.execute(select(projections).where(is_row(name, revision))).one_or_none())


def lock(connection: Connection, name: str, revision: int) -> Checkpoint | None:
    """Return the checkpoint and lock it to the end of the transaction; waits for whoever has locked it."""
    query = select(projections).where(is_row(name, revision)).with_for_update()
    return checkpoint_of(connection.execute(query).one_or_none())


def read_all(connection: Connection) -> list[tuple[Checkpoint, float]]:
    """Return every checkpoint with the seconds that its lease still lasts, ordered by name and revision."""
    remaining = (projections.c.lease_until - Clock()).label("left")
    query = select(projections, remaining).order_by(projections.c.name, projections.c.revision)
    return [(Checkpoint(*row[:-1]), float(row[-1])) for row in connection.execute(query)]


def revisions(
    connection: Connection, name: str, *, lock: bool = False, only: Collection[int] | None = None
) -> list[Checkpoint]:
    """Return the checkpoints of a projection's revisions, or of `only` these, in order; `lock` locks them in order."""
    query = select(projections).where(projections.c.name == name).order_by(projections.c.revision)
    if only is not None:
        query = query.where(projections.c.revision.in_(only))
    return [Checkpoint(*row) for row in connection.execute(query.with_for_update() if lock else query)]


def names_of(tables: str) -> list[tuple[str | None, str]]:
    """Return (declared schema, name) of each table that a checkpoint lists in its `tables`."""
    return [(None, entry) if isinstance(entry, str) else (entry[0], entry[1]) for entry in json.loads(tables)]


def is_row(name: str, revision: int) -> ColumnElement[bool]:
    """Return the condition that matches the checkpoint of one revision."""
    return and_(projections.c.name == name, projections.c.revision == revision)


def checkpoint_of(row: Row[Any] | None) -> Checkpoint | None:
    """Return a row with all columns as a `Checkpoint`; None for no row."""
    return None if row is None else Checkpoint(*row)


def take(
    connection: Connection,
    name: str,
    revision: int,
    owner: str,
    ttl_s: float,
    *,
    code: str = "",
    failed_at: int = -1,
    silent: Checkpoint | None = None,
) -> Checkpoint | None:
    """Become the owner if the lease is free; returns None while another worker has it.

    Also notes the fingerprint of the owner's `code`, so that no row is written by code that is not noted.

    A locked row counts as taken. A failed projection is tried again, unless it stands at `failed_at`, where the
    calling process failed already, or its tables are half written. A lease that has not changed since the `silent`
    checkpoint was read counts as expired, whatever the database's clock says.
    """
    free = _free_condition(name, revision, owner, failed_at, silent)
    candidate = select(projections.c.position, projections.c.code).where(free)
    row = connection.execute(candidate.with_for_update(skip_locked=True)).one_or_none()
    if row is None:
        return None
    values = {"owner": owner, "lease_until": Clock() + ttl_s, "lease_s": ttl_s, "reason": None}
    return _change(connection, TAKE, name, revision, **values, code=_with_code(row.code if row.position else "", code))


def is_free(
    connection: Connection,
    name: str,
    revision: int,
    owner: str,
    *,
    failed_at: int = -1,
    silent: Checkpoint | None = None,
) -> bool:
    """Whether `take` would succeed now, or there is no checkpoint yet; locks nothing."""
    free = _free_condition(name, revision, owner, failed_at, silent)
    row = connection.execute(select(free.label("free")).where(is_row(name, revision))).one_or_none()
    return row is None or bool(row.free)


def renew(connection: Connection, checkpoint: Checkpoint, ttl_s: float) -> bool:
    """Extend the lease; False when another epoch has begun."""
    return _change_as_owner(connection, NOTE, checkpoint, lease_until=Clock() + ttl_s) is not None


def release(connection: Connection, checkpoint: Checkpoint) -> bool:
    """End the lease at once; False when another epoch has begun."""
    return _change_as_owner(connection, NOTE, checkpoint, owner=None, lease_until=0) is not None


def adopt(connection: Connection, checkpoint: Checkpoint, app: str, log: str, identities: str) -> bool:
    """Note the app, its log, and the identities of the tables made from it; False when another epoch has begun."""
    return _change_as_owner(connection, NOTE, checkpoint, app=app, log=log, identities=identities) is not None


def note_proof(connection: Connection, compared: Checkpoint, code: str) -> bool:
    """Note that this code makes all rows, as a comparison proved for the checkpoint in the state `compared`.

    Notes nothing and returns False when other code may have written since. It has not where the epoch is the same and
    the owner has this code, or where nobody owns the checkpoint and its position is the same.
    """
    row = projections.c
    conditions = [row.epoch == compared.epoch, row.generation == compared.generation, row.code == compared.code]
    if compared.code.rpartition(",")[2] != code:
        conditions += [row.owner.is_(None), row.position == compared.position]
    return _change(connection, NOTE, compared.name, compared.revision, *conditions, code=code) is not None


def note_state(
    connection: Connection, checkpoint: Checkpoint, state: str | None, reason: str | None = None
) -> int | None:
    """Note a reason and the state active or failed (None keeps the state); the lease continues.

    Returns the checkpoint's position, or None when another epoch has begun.
    """
    transition = {None: NOTE, ACTIVE: ACTIVATE, FAILED: FAIL}[state]
    reason = None if reason is None else with_escapes(reason)  # it may have the words of an application's error
    changed = _change_as_owner(connection, transition, checkpoint, reason=reason)
    return None if changed is None else changed.position


def stand_back(connection: Connection, checkpoint: Checkpoint) -> bool:
    """Note that the revision no longer is to take the declared location; False when another epoch has begun."""
    return _change_as_owner(connection, STAND_BACK, checkpoint, takes_over=False) is not None


def advance(connection: Connection, checkpoint: Checkpoint, after: int, last: int, event_id: str, ttl_s: float) -> bool:
    """Advance by a batch that follows `after` and ends at `last`; False in another epoch or at another position."""
    values = {"position": last, "event_id": event_id, "lease_until": Clock() + ttl_s}
    condition = and_(projections.c.epoch == checkpoint.epoch, projections.c.position == after)
    return _change(connection, NOTE, checkpoint.name, checkpoint.revision, condition, **values) is not None


def pause(connection: Connection, checkpoint: Checkpoint) -> Checkpoint | None:
    """Pause the projection until it is resumed; None when its state does not allow that. The row must be locked."""
    return _change(connection, PAUSE, checkpoint.name, checkpoint.revision, reason=_PAUSED_WHILE + checkpoint.state)


def resume(connection: Connection, checkpoint: Checkpoint) -> Checkpoint | None:
    """Resume a projection, whose row is locked, as it was, or building if that is unknown; None if not paused."""
    state = (checkpoint.reason or "").removeprefix(_PAUSED_WHILE)
    transition = RESUME_AS.get(state, RESUME_AS[BUILDING])
    return _change(connection, transition, checkpoint.name, checkpoint.revision, reason=None)


def retire(connection: Connection, name: str, revision: int) -> None:
    """Note that the tables are dropped; declared again, it begins anew. Raises `CheckpointFenced`."""
    values = {"location": DECLARED, "tables": UNASSIGNED, "takes_over": False, "reason": None}
    _change_or_raise(connection, RETIRE, name, revision, **values)


def assign(
    connection: Connection, name: str, revision: int, *, app: str, location: str, tables: str, takes_over: bool
) -> Checkpoint:
    """Set the app and the location of a revision's tables; a retired revision begins anew there."""
    values = {"app": app, "location": location, "tables": tables, "takes_over": takes_over}
    checkpoint = _change(connection, BEGIN_ANEW, name, revision, **values, **_NOTHING_READ)
    return checkpoint or _change_or_raise(connection, ASSIGN, name, revision, **values)


def reset(connection: Connection, checkpoint: Checkpoint) -> Checkpoint | None:
    """Set the checkpoint back to position 0, for empty tables; None when its state does not allow that."""
    return _change(connection, RESET, checkpoint.name, checkpoint.revision, **_NOTHING_READ)


def promote(connection: Connection, name: str, revision: int) -> None:
    """Note that the revision has the declared location from now on, so that readers see its tables."""
    reason = case((projections.c.state.in_((NEW, BUILDING)), null()), else_=projections.c.reason)
    _change_or_raise(connection, PROMOTE, name, revision, location=DECLARED, takes_over=False, reason=reason)


def displace(connection: Connection, name: str, revision: int, location: str) -> None:
    """Note that the revision's tables moved to its own `location`, since another revision takes the declared one."""
    _change_or_raise(connection, DISPLACE, name, revision, location=location, takes_over=False)


def swap_in(
    connection: Connection, live: Checkpoint, rebuilt: Checkpoint, log: str, tables: str, identities: str
) -> Checkpoint:
    """Give the `live` checkpoint what the `rebuilt` one has, and count it; raises `CheckpointFenced`."""
    takeable = projections.c.state.in_((NEW, BUILDING, FAILED))
    return _change_or_raise(
        connection,
        SWAP_IN_BESIDE if live.takes_over else SWAP_IN,
        live.name,
        live.revision,
        position=rebuilt.position,
        event_id=rebuilt.event_id,
        app=rebuilt.app,
        log=log,
        tables=tables,
        identities=identities,
        code=rebuilt.code,
        generation=projections.c.generation + 1,
        reason=case((takeable, null()), else_=projections.c.reason),
    )


def depose(connection: Connection, name: str, revision: int) -> None:
    """End the lease session: the owner is fenced, and the next owner reads everything again."""
    _change_or_raise(connection, DEPOSE, name, revision)


def _with_code(noted: str, code: str) -> str:
    """Return the noted fingerprints with `code` as the last; an empty (unknown) fingerprint is not noted."""
    codes = [fingerprint for fingerprint in noted.split(",") if fingerprint not in ("", code)]
    if code:
        codes.append(code)
    if len(codes) > CODES_MAX:
        codes = [codes[0], *codes[1 - CODES_MAX :]]
    return ",".join(codes)


def _free_condition(
    name: str, revision: int, owner: str, failed_at: int, silent: Checkpoint | None
) -> ColumnElement[bool]:
    row = projections.c
    unowned = (row.lease_until < Clock()) | row.owner.is_(None) | (row.owner == owner)
    if silent is not None:
        unowned |= (row.epoch == silent.epoch) & (row.lease_until == silent.lease_until)
    is_intact = ~func.coalesce(row.reason, "").contains(HALF_WRITTEN)
    failed_elsewhere = and_(row.position != failed_at, is_intact)
    takeable = row.state.in_(TAKE.states) & ((row.state != FAILED) | failed_elsewhere)
    return and_(is_row(name, revision), unowned, takeable)


def _change_as_owner(
    connection: Connection, transition: Transition, checkpoint: Checkpoint, **values: Any
) -> Checkpoint | None:
    """Carry out a transition for the owner; None when another epoch has begun or the state refuses it."""
    condition = projections.c.epoch == checkpoint.epoch
    return _change(connection, transition, checkpoint.name, checkpoint.revision, condition, **values)


def _change_or_raise(
    connection: Connection, transition: Transition, name: str, revision: int, **values: Any
) -> Checkpoint:
    checkpoint = _change(connection, transition, name, revision, **values)
    if checkpoint is None:
        raise CheckpointFenced(name, f"its checkpoint is gone, or does not allow to {transition.name} it")
    return checkpoint


def _change(
    connection: Connection,
    transition: Transition,
    name: str,
    revision: int,
    *conditions: ColumnElement[bool],
    **values: Any,
) -> Checkpoint | None:
    """Carry out a transition; None when state or `conditions` refuse it. Only this function deposes an owner."""
    state = projections.c.state
    next_states = {before: after for before, after in transition.states.items() if before != after}
    updates: dict[str, Any] = {"state": case(next_states, value=state, else_=state)} if next_states else {}
    if transition.deposes:
        updates |= {"epoch": projections.c.epoch + 1, "owner": None, "lease_until": 0}
    allowed = state.in_(transition.states)
    statement = update(projections).where(is_row(name, revision), allowed, *conditions).values(**{**updates, **values})
    return checkpoint_of(connection.execute(statement.returning(projections)).one_or_none())
