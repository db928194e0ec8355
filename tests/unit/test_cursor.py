"""The transitions of a cursor, as its module documents them, and when an owner may take it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventjet.domain import position
from eventjet.domain.position import ACTIVE, FAILED, PAUSED, STATES, Transition
from eventjet.domain.quarantined import QUARANTINED, Quarantined
from eventjet.errors import CursorDamaged
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import QuarantinedEntry
from eventjet.subscriptions.retry import OwnerWatch

TRANSITIONS: dict[str, tuple[Transition, Callable[[Cursor], Cursor]]] = {
    "pause": (position.PAUSE_CURSOR, Cursor.paused),
    "resume": (position.RESUME_AS[ACTIVE], Cursor.resumed),
    "decide": (position.SET_CURSOR, Cursor.decided),
    "set": (position.SET_CURSOR, lambda before: before.set_to("log", 3, "e3")),
    "divide": (position.SET_CURSOR, lambda before: before.divided("receipts-1-of-4", 1, paused=before.state == PAUSED)),
}
"""The transitions for anybody. Those of the owner need no check: its expected sequence refuses everybody else."""


def cursor(state: str = ACTIVE, owner: str | None = "other") -> Cursor:
    return Cursor(
        "receipts", "reactor", "log", 7, "e7", ((9, 10),), owner, 1, state, "why" if state == FAILED else None
    )


@pytest.mark.parametrize("name", sorted(TRANSITIONS))
@pytest.mark.parametrize("state", [ACTIVE, PAUSED, FAILED])
def test_a_transition_does_what_the_table_says(name: str, state: str) -> None:
    transition, change = TRANSITIONS[name]
    before = cursor(state)
    after = change(before)
    if state in transition.states:
        assert (after.state, after.owner) == (transition.states[state], None)
    else:
        assert after == before


def test_the_table_in_the_docstring_agrees_with_the_transitions() -> None:
    header, _, *rows = [line for line in (position.__doc__ or "").splitlines() if line.startswith("|")]
    states = cells(header)[1:-1]
    assert sorted(states) == sorted(STATES)
    table = {name: (dict(zip(states, middle, strict=True)), deposes) for name, *middle, deposes in map(cells, rows)}
    transitions = {
        candidate.name: candidate for candidate in vars(position).values() if isinstance(candidate, Transition)
    }
    assert table.keys() == transitions.keys() | {"resume"}
    for name, transition in transitions.items():
        row, deposes = table[name]
        assert (deposes == "yes") == transition.deposes, name
        for state in states:
            becomes = transition.states.get(state)
            symbol = "-" if becomes is None else "=" if becomes == state else becomes
            cell = row[state].replace("active*", symbol) if name == "swap in" else row[state]
            assert cell == symbol, (name, state)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_an_owner_can_move_release_and_fail_its_cursor() -> None:
    own_cursor = cursor(FAILED, None).taken("me", 2)
    assert (own_cursor.state, own_cursor.reason, own_cursor.owner, own_cursor.revision, own_cursor.position) == (
        ACTIVE,
        None,
        "me",
        2,
        7,
    )
    moved = own_cursor.moved(9, "e9", ())
    assert (moved.position, moved.event_id, moved.owner) == (9, "e9", "me")
    assert moved.released().owner is None
    assert (moved.failed("because").state, moved.failed("because").reason) == (FAILED, "because")
    assert len(moved.failed("x" * 10_000).reason or "") <= 2_000


def test_the_reason_for_waiting_stays_until_the_cursor_moves_or_is_set() -> None:
    waiting = cursor().taken("me", 1).waiting("the stream is full")
    assert (waiting.state, waiting.reason) == (ACTIVE, "the stream is full")
    assert waiting.taken("other", 1).reason == "the stream is full"
    for after in (waiting.moved(9, "e9", ()), waiting.paused(), waiting.decided(), waiting.set_to("log", 3, "e3")):
        assert after.reason is None
    assert len(waiting.waiting("x" * 10_000).reason or "") <= 2_000


@pytest.mark.parametrize(
    ("before", "silent", "free"),
    [
        (cursor(owner=None), False, True),
        (cursor(owner="me"), False, True),
        (cursor(owner="other"), False, False),
        (cursor(owner="other"), True, True),
        (cursor(PAUSED, None), True, False),
        (cursor(FAILED, None), False, True),
    ],
)
def test_when_a_cursor_is_free_to_take(before: Cursor, silent: bool, free: bool) -> None:
    assert before.is_free(1, "me", silent=silent, failed_at=-1) is free


def test_older_code_and_an_owner_that_failed_there_may_not_take_a_cursor() -> None:
    newer = cursor(owner=None).taken("other", 3).released()
    assert not newer.is_free(2, "me", silent=True, failed_at=-1)
    assert newer.is_free(3, "me", silent=True, failed_at=-1)
    assert not cursor(FAILED, None).is_free(1, "me", silent=False, failed_at=7)
    assert cursor(FAILED, None).is_free(1, "me", silent=False, failed_at=6)


def test_positions_done_beyond_the_cursor_are_known() -> None:
    assert [position for position in range(5, 13) if cursor().is_done(position)] == [5, 6, 7, 9, 10]


@given(
    st.builds(
        Cursor,
        name=st.text(max_size=20),
        kind=st.sampled_from(["reactor", "process"]),
        log=st.text(max_size=20),
        position=st.integers(0, 2**62),
        event_id=st.text(max_size=20),
        done=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple),
        owner=st.none() | st.text(max_size=20),
        revision=st.integers(0, 99),
        state=st.sampled_from(STATES),
        reason=st.none() | st.text(max_size=20),
        waking=st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)),
        began=st.integers(0, 99),
    )
)
def test_a_cursor_is_decoded_as_it_was_encoded(before: Cursor) -> None:
    assert Cursor.decoded(before.encoded()) == before


def test_earlier_and_later_releases_can_read_a_cursor() -> None:
    """Earlier releases know no `waking` and `began`, and refuse names that they do not know."""
    encoded = orjson.loads(cursor().encoded())
    earlier_names = ["name", "kind", "log", "position", "event_id", "done", "owner", "revision", "state", "reason"]
    assert sorted(encoded) == sorted(earlier_names)
    assert Cursor.decoded(orjson.dumps({**encoded, "added_later": {"some": 1}})) == cursor()


def test_a_quarantine_entry_of_a_later_release_can_be_read() -> None:
    entry = QuarantinedEntry(
        Quarantined(7, "account", "ada", "e", "account.opened", QUARANTINED, "why"), 1.5, tries=2, log="log"
    )
    encoded = orjson.loads(entry.encoded())
    encoded["event"] |= {"added_later": 1}
    assert QuarantinedEntry.decoded(orjson.dumps({**encoded, "added_later": {"some": 1}}), 9) == replace(
        entry, sequence=9
    )


def test_a_parked_event_of_an_older_eventjet_is_quarantined() -> None:
    entry = QuarantinedEntry(Quarantined(7, "account", "ada", "e", "account.opened", QUARANTINED, "why"), 1.5)
    older = orjson.loads(entry.encoded())
    older |= {"parked": older.pop("event") | {"resolution": "parked"}, "parked_at": older.pop("quarantined_at")}
    assert QuarantinedEntry.decoded(orjson.dumps(older)) == entry


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{}", b'{"event": 1}', b'{"event": "position"}', b"\xff"])
def test_a_damaged_quarantine_entry_is_refused(body: bytes) -> None:
    with pytest.raises(CursorDamaged, match=re.escape(repr(body[:60]))):
        QuarantinedEntry.decoded(body)


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'{"name": 1}', b"\xff", b'{"done": [[1]]}'])
def test_a_damaged_cursor_is_refused(body: bytes) -> None:
    with pytest.raises(CursorDamaged, match=re.escape(repr(body[:60]))):
        Cursor.decoded(body)


def test_an_owner_is_silent_after_a_lease_without_a_write() -> None:
    now = [0.0]
    watch = OwnerWatch(lambda: now[0])
    assert not watch.is_silent(7, 3.5)
    now[0] = 3.4
    assert not watch.is_silent(7, 3.5)
    now[0] = 3.6
    assert watch.is_silent(7, 3.5)
    assert not watch.is_silent(8, 3.5)
    now[0] = 7.0
    assert not watch.is_silent(8, 3.5)
    now[0] = 7.2
    assert watch.is_silent(8, 3.5)


def test_an_attempt_is_counted_by_its_number_and_not_by_its_writes() -> None:
    counted = cursor().tried(8, 1).tried(8, 1).tried(12, 2).tried(8, 2).tried(8, 1).tried(0, 5)
    assert dict(counted.tries) == {8: 2, 12: 2}
    assert counted.untried({8, 9}).tries == ((12, 2),)


def test_attempts_are_kept_for_open_positions_and_for_quarantine_retries() -> None:
    counted = cursor().tried(3, 1).tried(5, 2).tried(9, 3).tried(12, 4)
    assert dict(counted.moved(9, "e9", ()).tries) == {12: 4}
    assert dict(counted.moved(9, "e9", (), retried={5}).tries) == {5: 2, 12: 4}


def test_a_cursor_names_the_position_where_its_handler_blocks() -> None:
    assert cursor().blocking is None
    assert "blocked the event loop in a try at position 8." in str(cursor().tried(8, 1).blocking)
    both = cursor().tried(8, 1).tried(1_200, 3).blocking
    assert "in 3 tries at position 1,200 (and at 1 more)." in str(both)


@pytest.mark.parametrize("reason", ["no \0 here", "no \ud800 here"])
def test_a_reason_with_characters_that_json_does_not_take_is_stored_with_escapes(reason: str) -> None:
    for after in (cursor().waiting(reason), cursor().failed(reason)):
        stored = Cursor.decoded(after.encoded())
        assert stored == after
        assert re.fullmatch(r"no \\(x00|ud800) here", str(stored.reason))
