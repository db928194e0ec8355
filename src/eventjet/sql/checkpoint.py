"""The checkpoint: the row that says how far a projection is true, who advances it and where its tables are.

Here is every change of it: its state machine, and the fence that makes each owner's writes its own.

Each cell says what the state becomes: `=` stays, `-` is refused and changes nothing. A transition that *deposes* raises
the epoch and ends the lease, so that whoever owned the checkpoint is fenced at the next write, looks at it anew and
begins another term.

| transition  | new      | building | active | paused | failed   | retired | deposes |
|-------------|----------|----------|--------|--------|----------|---------|---------|
| take        | building | =        | =      | -      | active   | -       | yes     |
| activate    | active   | active   | =      | -      | -        | -       | no      |
| fail        | failed   | failed   | failed | -      | =        | -       | no      |
| note        | =        | =        | =      | =      | =        | =       | no      |
| stand back  | active   | active   | =      | -      | active   | -       | no      |
| pause       | paused   | paused   | paused | -      | -        | -       | yes     |
| resume      | -        | -        | -      | before | -        | -       | yes     |
| retire      | retired  | retired  | retired| retired| retired  | -       | yes     |
| begin anew  | -        | -        | -      | -      | -        | new     | yes     |
| reset       | =        | new      | new    | -      | new      | -       | yes     |
| assign      | =        | =        | =      | =      | =        | -       | no      |
| promote     | active   | active   | =      | =      | =        | -       | yes     |
| displace    | =        | =        | =      | =      | =        | -       | yes     |
| swap in     | active*  | active*  | =      | =      | active*  | -       | yes     |
| depose      | =        | =        | =      | =      | =        | =       | yes     |

`before` is the state in which it was paused. `active*` is building where the revision still is to take the declared
location. `renew`, `release`, `adopt`, `note_proof` and the advance by a batch are notes: they keep the state. Activate,
fail, stand back and notes are the owner's, and find their row only in the epoch in which it took the lease; `take`
finds it only while the lease is free. The position rises with a batch; only beginning anew, a reset and swapping in set
it anew.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, case, func, null, select, text, update

from eventjet.errors import CheckpointFenced
from eventjet.errors.projection import HALF_WRITTEN
from eventjet.sql.own_tables import Clock, projections

NEW, BUILDING, ACTIVE, PAUSED, RETIRED, FAILED = "new", "building", "active", "paused", "retired", "failed"
STATES = (NEW, BUILDING, ACTIVE, PAUSED, FAILED, RETIRED)

DECLARED = ""
"""The location of a revision whose tables are where they are declared."""
UNASSIGNED = "[]"
"""The tables of a revision that has not been given a location yet."""
CODES_MAX = 8
"""Fingerprints of code that a checkpoint keeps: the first one, and the newest."""

_ENSURE = text(
    "insert into eventjet_projection (name, revision, app) values (:name, :revision, :app) on conflict do nothing"
)
_WHILE = "paused while "
"""In the reason of one that is paused, before the state it was in."""

ADVANCE = (
    "update eventjet_projection set position = {0}, event_id = {0}, lease_until = {1} + {0} "
    "where name = {0} and revision = {0} and epoch = {0} and position = {0}"
)
"""The advance by a batch as text, for {0} the driver's mark and {1} the clock; `advance` is the same."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One row of `eventjet_projection`."""

    name: str
    revision: int
    generation: int
    """Counts the rebuilds swapped in."""
    position: int
    event_id: str
    """Id of the event at that position; empty at position 0."""
    log: str
    """Identity of the log it was made from; empty before the first event."""
    epoch: int
    """Rises whenever the owner is deposed; every write of an owner names the epoch it took the lease in."""
    owner: str | None
    lease_until: float
    """Seconds since 1970 by the database's clock; every renewal changes it."""
    lease_s: float
    """How long the lease lasts without a renewal; 0 before the first owner."""
    state: str
    reason: str | None
    location: str = DECLARED
    """Where its tables are: empty where they are declared, else a schema, or a suffix on SQLite."""
    tables: str = UNASSIGNED
    """Their names, as JSON; empty until it has a location."""
    takes_over: bool = False
    """Whether it is to have the declared location once it has caught up with the revision that holds it."""
    identities: str = UNASSIGNED
    """Which tables it is true for, as JSON: see `table_identity`; empty where that was never noted."""
    app: str = ""
    """The app that it belongs to; empty where an older eventjet made it and nobody has worked on it since."""
    code: str = ""
    """Fingerprints of the code that made its rows, separated by commas, the newest last; empty where none is known."""

    @property
    def has_begun(self) -> bool:
        """Whether its tables are true for something."""
        return self.position > 0 or self.log != ""

    def has_rows_of_other_code(self, code: str) -> bool:
        """Whether code with another fingerprint made some of its rows; False where one of them is not known."""
        return self.position > 0 and code != "" and self.code not in ("", code)


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table above."""

    name: str
    states: Mapping[str, str]
    """State → the one it becomes; those that are missing refuse it."""
    deposes: bool = False


_ANY = {state: state for state in STATES}
_LIVING = {state: state for state in STATES if state != RETIRED}

TAKE = Transition("take", {NEW: BUILDING, BUILDING: BUILDING, ACTIVE: ACTIVE, FAILED: ACTIVE}, deposes=True)
ACTIVATE = Transition("activate", dict.fromkeys((NEW, BUILDING, ACTIVE), ACTIVE))
FAIL = Transition("fail", dict.fromkeys((NEW, BUILDING, ACTIVE, FAILED), FAILED))
NOTE = Transition("note", _ANY)
STAND_BACK = Transition("stand back", dict.fromkeys((NEW, BUILDING, ACTIVE, FAILED), ACTIVE))
PAUSE = Transition("pause", dict.fromkeys((NEW, BUILDING, ACTIVE), PAUSED), deposes=True)
RESUME_AS = {state: Transition("resume", {PAUSED: state}, deposes=True) for state in (NEW, BUILDING, ACTIVE)}
RETIRE = Transition("retire", dict.fromkeys(_LIVING, RETIRED), deposes=True)
BEGIN_ANEW = Transition("begin anew", {RETIRED: NEW}, deposes=True)
RESET = Transition("reset", dict.fromkeys((NEW, BUILDING, ACTIVE, FAILED), NEW), deposes=True)
ASSIGN = Transition("assign", _LIVING)
PROMOTE = Transition("promote", _LIVING | {NEW: ACTIVE, BUILDING: ACTIVE}, deposes=True)
DISPLACE = Transition("displace", _LIVING, deposes=True)
SWAP_IN = Transition("swap in", _LIVING | dict.fromkeys((NEW, BUILDING, FAILED), ACTIVE), deposes=True)
SWAP_IN_BESIDE = Transition("swap in", _LIVING | dict.fromkeys((NEW, BUILDING, FAILED), BUILDING), deposes=True)
DEPOSE = Transition("depose", _ANY, deposes=True)

_NOTHING_READ = {"position": 0, "event_id": "", "log": "", "identities": UNASSIGNED, "reason": None, "code": ""}


def ensure(connection: Connection, name: str, revision: int, app: str = "") -> None:
    """Add the row of an app's projection that has none, at position 0; it does not matter who else does so at once."""
    connection.execute(_ENSURE, {"name": name, "revision": revision, "app": app})


def read(connection: Connection, name: str, revision: int) -> Checkpoint | None:
    """The checkpoint as it stands; None when there is none."""
    return checkpoint_of(connection.execute(select(projections).where(is_row(name, revision))).one_or_none())


def lock(connection: Connection, name: str, revision: int) -> Checkpoint | None:
    """The checkpoint, locked to the end of the transaction; waits for whoever holds it."""
    query = select(projections).where(is_row(name, revision)).with_for_update()
    return checkpoint_of(connection.execute(query).one_or_none())


def read_all(connection: Connection) -> list[tuple[Checkpoint, float]]:
    """Every checkpoint with the seconds its lease still has, by name and revision."""
    left = (projections.c.lease_until - Clock()).label("left")
    query = select(projections, left).order_by(projections.c.name, projections.c.revision)
    return [(Checkpoint(*row[:-1]), float(row[-1])) for row in connection.execute(query)]


def revisions(
    connection: Connection, name: str, *, lock: bool = False, only: Collection[int] | None = None
) -> list[Checkpoint]:
    """The checkpoints of all revisions of a projection, in their order; locked in that order if asked for."""
    query = select(projections).where(projections.c.name == name).order_by(projections.c.revision)
    if only is not None:
        query = query.where(projections.c.revision.in_(only))
    return [Checkpoint(*row) for row in connection.execute(query.with_for_update() if lock else query)]


def names_of(tables: str) -> list[tuple[str | None, str]]:
    """(declared schema, name) of the tables that a checkpoint names."""
    return [(None, one) if isinstance(one, str) else (one[0], one[1]) for one in json.loads(tables)]


def is_row(name: str, revision: int) -> ColumnElement[bool]:
    """The condition for one projection's row."""
    return and_(projections.c.name == name, projections.c.revision == revision)


def checkpoint_of(row: Row[Any] | None) -> Checkpoint | None:
    """A row with all columns, as a value."""
    return None if row is None else Checkpoint(*row)


def take(
    connection: Connection,
    name: str,
    revision: int,
    owner: str,
    ttl_s: float,
    *,
    code: str = "",
    stumbled_at: int = -1,
    silent: Checkpoint | None = None,
) -> Checkpoint | None:
    """Become the owner if the lease is free. None while another worker holds it.

    The fingerprint of the owner's `code` is noted with it, so that no row is written by code that is not noted.

    A row that is locked counts as held. One that failed is tried again, unless the process that asks `stumbled_at` the
    very position or its tables are half written. A lease that still is as the `silent` checkpoint has it counts as
    over, whatever the clock says.
    """
    free = _free(name, revision, owner, stumbled_at, silent)
    candidate = select(projections.c.position, projections.c.code).where(free)
    now = connection.execute(candidate.with_for_update(skip_locked=True)).one_or_none()
    if now is None:
        return None
    taken = {"owner": owner, "lease_until": Clock() + ttl_s, "lease_s": ttl_s, "reason": None}
    return _change(connection, TAKE, name, revision, **taken, code=_with_code(now.code if now.position else "", code))


def is_free(
    connection: Connection,
    name: str,
    revision: int,
    owner: str,
    *,
    stumbled_at: int = -1,
    silent: Checkpoint | None = None,
) -> bool:
    """Whether `take` would succeed now, or there is no row yet; found out without locking anything."""
    free = _free(name, revision, owner, stumbled_at, silent)
    row = connection.execute(select(free.label("free")).where(is_row(name, revision))).one_or_none()
    return row is None or bool(row.free)


def renew(connection: Connection, held: Checkpoint, ttl_s: float) -> bool:
    """Extend the lease; False when another epoch has begun."""
    return _own(connection, NOTE, held, lease_until=Clock() + ttl_s) is not None


def release(connection: Connection, held: Checkpoint) -> bool:
    """Let go of the lease at once; False when another epoch has begun."""
    return _own(connection, NOTE, held, owner=None, lease_until=0) is not None


def adopt(connection: Connection, held: Checkpoint, app: str, log: str, identities: str) -> bool:
    """Remember the app, its log, and the tables that are made from it; False when another epoch has begun."""
    return _own(connection, NOTE, held, app=app, log=log, identities=identities) is not None


def note_proof(connection: Connection, seen: Checkpoint, code: str) -> bool:
    """Note that all rows are what this code makes, as they were when the checkpoint was `seen`.

    False, and nothing is noted, when other code may have written since: unless the owner has been the same all the
    time and has this code, or there is none and nothing was written.
    """
    row = projections.c
    where = [row.epoch == seen.epoch, row.generation == seen.generation, row.code == seen.code]
    if seen.code.rpartition(",")[2] != code:
        where += [row.owner.is_(None), row.position == seen.position]
    return _change(connection, NOTE, seen.name, seen.revision, *where, code=code) is not None


def settle(connection: Connection, held: Checkpoint, state: str | None, reason: str | None = None) -> int | None:
    """Note a reason and that it is active or failed (None keeps its state), and keep the lease.

    Returns the position it stands at, or None when another epoch has begun.
    """
    found = _own(connection, {None: NOTE, ACTIVE: ACTIVATE, FAILED: FAIL}[state], held, reason=reason)
    return None if found is None else found.position


def stand_back(connection: Connection, held: Checkpoint) -> bool:
    """Give up wanting the declared location; False when another epoch has begun."""
    return _own(connection, STAND_BACK, held, takes_over=False) is not None


def advance(connection: Connection, held: Checkpoint, after: int, last: int, event_id: str, ttl_s: float) -> bool:
    """Move by a batch that follows `after` and ends at `last`; False in another epoch, or when it stands elsewhere."""
    moved = {"position": last, "event_id": event_id, "lease_until": Clock() + ttl_s}
    where = and_(projections.c.epoch == held.epoch, projections.c.position == after)
    return _change(connection, NOTE, held.name, held.revision, where, **moved) is not None


def pause(connection: Connection, found: Checkpoint) -> Checkpoint | None:
    """Let nobody advance it until it is resumed; None when its state does not allow that. The row must be locked."""
    return _change(connection, PAUSE, found.name, found.revision, reason=_WHILE + found.state)


def resume(connection: Connection, found: Checkpoint) -> Checkpoint | None:
    """Let it go on from the state it was paused in; None when it is not paused. The row must be locked.

    Building becomes active by itself, so it is the state to take when in doubt.
    """
    before = (found.reason or "").removeprefix(_WHILE)
    transition = RESUME_AS.get(before, RESUME_AS[BUILDING])
    return _change(connection, transition, found.name, found.revision, reason=None)


def retire(connection: Connection, name: str, revision: int) -> None:
    """Its tables are gone; declared again, it begins anew. Raises `CheckpointFenced` when it is retired already."""
    gone = {"location": DECLARED, "tables": UNASSIGNED, "takes_over": False, "reason": None}
    _must(connection, RETIRE, name, revision, **gone)


def assign(
    connection: Connection, name: str, revision: int, *, app: str, location: str, tables: str, takes_over: bool
) -> Checkpoint:
    """Give it its app, and the location that its tables will be in; a retired one begins anew there."""
    given = {"app": app, "location": location, "tables": tables, "takes_over": takes_over}
    begun = _change(connection, BEGIN_ANEW, name, revision, **given, **_NOTHING_READ)
    return begun or _must(connection, ASSIGN, name, revision, **given)


def reset(connection: Connection, found: Checkpoint) -> Checkpoint | None:
    """Nothing is read yet, and its tables are empty; None when its state does not allow that."""
    return _change(connection, RESET, found.name, found.revision, **_NOTHING_READ)


def promote(connection: Connection, name: str, revision: int) -> None:
    """It has the declared location from here on, and is what readers see."""
    reason = case((projections.c.state.in_((NEW, BUILDING)), null()), else_=projections.c.reason)
    _must(connection, PROMOTE, name, revision, location=DECLARED, takes_over=False, reason=reason)


def displace(connection: Connection, name: str, revision: int, location: str) -> None:
    """Another revision has the declared location from here on, and this one its own."""
    _must(connection, DISPLACE, name, revision, location=location, takes_over=False)


def swap_in(
    connection: Connection, live: Checkpoint, own: Checkpoint, log: str, tables: str, identities: str
) -> Checkpoint:
    """The live checkpoint says what the rebuilt one does; raises `CheckpointFenced` for a retired one."""
    takeable = projections.c.state.in_((NEW, BUILDING, FAILED))
    return _must(
        connection,
        SWAP_IN_BESIDE if live.takes_over else SWAP_IN,
        live.name,
        live.revision,
        position=own.position,
        event_id=own.event_id,
        app=own.app,
        log=log,
        tables=tables,
        identities=identities,
        code=own.code,
        generation=projections.c.generation + 1,
        reason=case((takeable, null()), else_=projections.c.reason),
    )


def depose(connection: Connection, name: str, revision: int) -> None:
    """Begin another term: whoever owns it is fenced, and the next owner looks at everything anew."""
    _must(connection, DEPOSE, name, revision)


def _with_code(noted: str, code: str) -> str:
    """The fingerprints noted, with this one as the last of them; an empty one is not known, and not noted."""
    codes = [one for one in noted.split(",") if one not in ("", code)] + [code] * bool(code)
    return ",".join(codes if len(codes) <= CODES_MAX else [codes[0], *codes[1 - CODES_MAX :]])


def _free(name: str, revision: int, owner: str, stumbled_at: int, silent: Checkpoint | None) -> ColumnElement[bool]:
    row = projections.c
    unowned = (row.lease_until < Clock()) | row.owner.is_(None) | (row.owner == owner)
    if silent is not None:
        unowned |= (row.epoch == silent.epoch) & (row.lease_until == silent.lease_until)
    whole = ~func.coalesce(row.reason, "").contains(HALF_WRITTEN)
    failed_elsewhere = and_(row.position != stumbled_at, whole)
    takeable = row.state.in_(TAKE.states) & ((row.state != FAILED) | failed_elsewhere)
    return and_(is_row(name, revision), unowned, takeable)


def _own(connection: Connection, transition: Transition, held: Checkpoint, **values: Any) -> Checkpoint | None:
    """Change what the owner holds; None when another epoch has begun."""
    where = projections.c.epoch == held.epoch
    return _change(connection, transition, held.name, held.revision, where, **values)


def _must(connection: Connection, transition: Transition, name: str, revision: int, **values: Any) -> Checkpoint:
    changed = _change(connection, transition, name, revision, **values)
    if changed is None:
        raise CheckpointFenced(name, f"its checkpoint is gone, or does not allow to {transition.name} it")
    return changed


def _change(
    connection: Connection, transition: Transition, name: str, revision: int, *where: ColumnElement[bool], **values: Any
) -> Checkpoint | None:
    """Carry a transition out; None when the state or `where` refuses it. Deposing is written here and nowhere else."""
    state = projections.c.state
    moved = {before: after for before, after in transition.states.items() if before != after}
    changed: dict[str, Any] = {"state": case(moved, value=state, else_=state)} if moved else {}
    if transition.deposes:
        changed |= {"epoch": projections.c.epoch + 1, "owner": None, "lease_until": 0}
    allowed = state.in_(transition.states)
    statement = update(projections).where(is_row(name, revision), allowed, *where).values(**{**changed, **values})
    return checkpoint_of(connection.execute(statement.returning(projections)).one_or_none())
