"""The checkpoint follows its transition table under any sequence of transitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, delete

from eventjet.domain import position
from eventjet.domain.position import ACTIVE, FAILED, NEW, PAUSED, RETIRED, Transition
from eventjet.errors import CheckpointFenced
from eventjet.sql import checkpoint
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from eventjet.sql.own_tables import projections

Step = Callable[[Connection, Checkpoint, Checkpoint], object]
"""A change by a process that read the first checkpoint earlier and the second just now."""


def take(connection: Connection, _: Checkpoint, now: Checkpoint) -> object:
    return checkpoint.take(connection, now.name, now.revision, "a worker", 60.0)


def take_over(connection: Connection, before: Checkpoint, now: Checkpoint) -> object:
    return checkpoint.take(connection, now.name, now.revision, "a standby", 60.0, silent=before)


def advance(connection: Connection, before: Checkpoint, _: Checkpoint) -> object:
    return checkpoint.advance(connection, before, before.position, before.position + 5, "an event", 60.0)


def swap_in(connection: Connection, _: Checkpoint, now: Checkpoint) -> object:
    return checkpoint.swap_in(connection, now, replace(now, position=3, event_id="e"), "another log", '["t"]', "[]")


def assign(connection: Connection, _: Checkpoint, now: Checkpoint) -> object:
    return checkpoint.assign(
        connection, now.name, now.revision, app="bank", location="own", tables='["t"]', takes_over=True
    )


STEPS: dict[str, tuple[Step, Callable[[Checkpoint], list[Transition]], bool]] = {
    "take": (take, lambda _: [position.TAKE], False),
    "take over": (take_over, lambda _: [position.TAKE], False),
    "renew": (lambda c, old, _: checkpoint.renew(c, old, 60.0), lambda _: [position.NOTE], True),
    "release": (lambda c, old, _: checkpoint.release(c, old), lambda _: [position.NOTE], True),
    "adopt": (lambda c, old, _: checkpoint.adopt(c, old, "bank", "log", "[]"), lambda _: [position.NOTE], True),
    "note proof": (lambda c, old, _: checkpoint.note_proof(c, old, "code"), lambda _: [position.NOTE], True),
    "advance": (advance, lambda _: [position.NOTE], True),
    "note": (lambda c, old, _: checkpoint.note_state(c, old, None, "why"), lambda _: [position.NOTE], True),
    "activate": (lambda c, old, _: checkpoint.note_state(c, old, ACTIVE), lambda _: [position.ACTIVATE], True),
    "fail": (lambda c, old, _: checkpoint.note_state(c, old, FAILED, "why"), lambda _: [position.FAIL], True),
    "stand back": (lambda c, old, _: checkpoint.stand_back(c, old), lambda _: [position.STAND_BACK], True),
    "pause": (lambda c, _, now: checkpoint.pause(c, now), lambda _: [position.PAUSE], False),
    "resume": (lambda c, _, now: checkpoint.resume(c, now), lambda _: list(position.RESUME_AS.values()), False),
    "retire": (lambda c, _, now: checkpoint.retire(c, now.name, now.revision), lambda _: [position.RETIRE], False),
    "assign": (assign, lambda now: [position.BEGIN_ANEW if now.state == RETIRED else position.ASSIGN], False),
    "promote": (
        lambda c, _, now: checkpoint.promote(c, now.name, now.revision),
        lambda _: [position.PROMOTE],
        False,
    ),
    "displace": (
        lambda c, _, now: checkpoint.displace(c, now.name, now.revision, "own"),
        lambda _: [position.DISPLACE],
        False,
    ),
    "swap in": (
        swap_in,
        lambda now: [position.SWAP_IN_BESIDE if now.takes_over else position.SWAP_IN],
        False,
    ),
    "reset": (lambda c, _, now: checkpoint.reset(c, now), lambda _: [position.RESET], False),
    "depose": (lambda c, _, now: checkpoint.depose(c, now.name, now.revision), lambda _: [position.DEPOSE], False),
}
"""By name: the change, its allowed transitions, and whether it needs the epoch of the owner."""


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = Database(database).sync_engine()
    create_tables(engine)
    yield engine
    engine.dispose()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.booleans()), max_size=12))
def test_any_sequence_of_changes_follows_the_transition_table(engine: Engine, steps: list[tuple[str, bool]]) -> None:
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(delete(projections))
        checkpoint.ensure(connection, "balances", 1)
        old = now = current_checkpoint(connection)
        for name, is_fresh in steps:
            old = now if is_fresh else old
            check_step(connection, name, old, now)
            now = current_checkpoint(connection)
        transaction.rollback()


def check_step(connection: Connection, name: str, old: Checkpoint, before: Checkpoint) -> None:
    do, named, is_owners = STEPS[name]
    try:
        do(connection, old, before)
    except CheckpointFenced:
        assert current_checkpoint(connection) == before
        return
    after = current_checkpoint(connection)
    allowed = [transition for transition in named(before) if before.state in transition.states]
    if not allowed or (is_owners and old.epoch != before.epoch):
        assert after == before
    if after == before:
        return
    assert after.state in {transition.states[before.state] for transition in allowed}
    assert after.epoch == before.epoch + allowed[0].deposes
    if name == "take over" and before.owner not in (None, "a standby"):
        assert (old.epoch, old.lease_until) == (before.epoch, before.lease_until)
    if allowed[0].deposes and name not in ("take", "take over"):
        assert (after.owner, after.lease_until) == (None, 0)
    if name == "resume":
        assert after.reason is None
    if name not in ("swap in", "reset") and before.state != RETIRED:
        assert after.position >= before.position
    if name not in ("advance", "swap in", "reset", "assign"):
        assert (after.position, after.event_id) == (before.position, before.event_id)


def current_checkpoint(connection: Connection) -> Checkpoint:
    current = checkpoint.read(connection, "balances", 1)
    assert current is not None
    return current


def test_a_resumed_projection_has_its_state_from_before_the_pause(engine: Engine) -> None:
    with engine.begin() as connection:
        checkpoint.ensure(connection, "balances", 1)
        for state in (NEW, "building", ACTIVE):
            paused = checkpoint.pause(connection, current_checkpoint(connection))
            assert paused is not None
            assert paused.state == PAUSED
            resumed = checkpoint.resume(connection, paused)
            assert resumed is not None
            assert resumed.state == state
            taken = checkpoint.take(connection, "balances", 1, "a worker", 60.0)
            assert taken is not None
            if state != NEW:
                checkpoint.note_state(connection, taken, ACTIVE)
