"""Writers of an aggregate make room for each other: the product's repository in simulated time."""

from __future__ import annotations

import pytest

from eventjet.commands import contention
from eventjet.commands.cache import NEWEST, OLD, Cache
from eventjet.commands.contention import ContentionBackoff
from eventjet.domain.history import Commands, FoldedState
from tests.simulation.rivals import Costs, Measurement, compete

SECONDS = 6.0
LEAST, WORST_S = 5, 5.0


@pytest.fixture(scope="module")
def alone() -> Measurement:
    """Measure a single connection on a single aggregate."""
    return compete(1, 1, SECONDS)


def are_fair(measured: Measurement, alone: Measurement) -> bool:
    return (
        not measured.failed
        and measured.rate >= alone.rate / 2
        and measured.worst_s <= WORST_S
        and min(map(len, measured.waits_s)) >= LEAST
    )


@pytest.mark.parametrize("connections", [16, 64])
def test_many_connections_on_an_aggregate_all_get_their_turn(connections: int, alone: Measurement) -> None:
    measured = compete(connections, 1, SECONDS)
    assert measured.recorded == measured.commands
    assert are_fair(measured, alone)


def test_no_command_of_128_connections_fails() -> None:
    measured = compete(128, 1, SECONDS)
    assert not measured.failed
    assert measured.recorded == measured.commands
    assert min(map(len, measured.waits_s)) >= 1


def test_slow_replicas_do_not_starve_a_connection() -> None:
    costs = Costs(agree=0.002)
    measured = compete(16, 1, SECONDS, costs=costs)
    assert measured.recorded == measured.commands
    assert measured.rate >= compete(1, 1, SECONDS, costs=costs).rate / 2
    assert min(map(len, measured.waits_s)) >= LEAST


@pytest.mark.parametrize(
    ("rule", "broken", "connections", "seconds"),
    [("TURN", 1_000_000, 64, SECONDS), ("WIDER_SAVES", 0, 16, SECONDS / 2), ("PAUSE_MAX_S", 0.01, 16, SECONDS / 2)],
    ids=["a winner goes on for ever", "pauses do not grow with the rivals", "pauses are short however many there are"],
)
def test_a_broken_rule_makes_contention_unfair(
    rule: str, broken: float, connections: int, seconds: float, alone: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use only as many connections and as much time as needed: without the rules they race at every save."""
    assert are_fair(compete(connections, 1, seconds), alone)
    monkeypatch.setattr(contention, rule, broken)
    assert not are_fair(compete(connections, 1, seconds), alone)


def test_states_that_others_change_are_read_before_a_save() -> None:
    measured = compete(4, 50, SECONDS)
    assert measured.recorded == measured.commands
    assert measured.lost < measured.commands / 10


def test_states_that_no_other_connection_changes_are_not_read_again() -> None:
    measured = compete(1, 50, SECONDS)
    assert measured.lost == measured.looked == 0


def test_without_reads_saves_of_changed_states_lose_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "observe", lambda *_, **__: None)
    measured = compete(4, 50, SECONDS)
    assert measured.recorded == measured.commands
    assert measured.lost > measured.commands / 4


def test_a_connection_that_is_alone_again_stops_pausing() -> None:
    backoff = ContentionBackoff(staleness=0.5)
    for lost in range(20):
        backoff.record_conflict(lost, 0.5)
    assert backoff.window_s > 0.1
    now, waited = 0.0, 0
    for _ in range(200):
        now += 0.001
        pause_s = backoff.delay_s(now)
        if pause_s:
            now += pause_s
            waited += 1
            backoff.record_quiet()
        backoff.observe(False)
        backoff.record_success(0.001, now, 0.5)
    assert backoff.is_calm
    assert waited < 10


def test_the_first_lost_race_costs_no_pause_and_later_pauses_have_a_limit() -> None:
    backoff = ContentionBackoff()
    assert backoff.record_conflict(0, 0.9) == 0.0
    pauses = [backoff.record_conflict(lost, 0.9) for lost in range(1, 1_000)]
    assert min(pauses) > 0.0
    assert max(pauses) <= 1.5 * contention.PAUSE_MAX_S


def state(position: int, commands: Commands | None = None) -> FoldedState[None]:
    return FoldedState(None, position, position, commands=commands or Commands())


def test_a_cached_state_is_confirmed_after_stale_ones() -> None:
    cache = Cache[None]()
    cache.put("a", state(1))
    assert cache.assume_newest("a") is not None
    assert cache.drop("a")
    cache.observe("a", is_stale=True)
    cache.put("a", state(2))
    assert cache.assume_newest("a") is None
    assert cache.get("a") is not None
    cache.put("b", state(1))
    assert cache.assume_newest("b") is not None  # nothing is known of other aggregates yet
    for name in "cdef":
        cache.observe(name, is_stale=True)
    assert cache.assume_newest("b") is None
    for _ in range(8):
        cache.put("b", state(1))
        cache.observe_read("b", is_stale=False)
    assert cache.assume_newest("b") is not None


def test_a_state_read_after_a_lost_race_is_used_once() -> None:
    cache = Cache[None]()
    cache.put("a", state(1), NEWEST)
    assert cache.newest("a") is not None
    assert cache.newest("a") is None
    cache.put("a", state(2), OLD)
    assert cache.newest("a") is None
    assert cache.assume_newest("a") is None
    assert cache.get("a") == state(2)


def test_cached_states_are_dropped_by_the_bytes_of_their_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.domain.history.COMMANDS_MAX", 2)
    monkeypatch.setattr("eventjet.commands.cache.MARKS_BYTES_MAX", 10_000)
    cache = Cache[None]()
    for number in range(10):
        commands = Commands()
        for version in range(1, 20):
            commands.add(f"{number}/{version}", version)
        assert 10_000 / 4 < commands.marks_bytes < 10_000 / 2
        cache.put(f"a{number}", state(1, commands))
    assert cache.get("a0") is None
    assert cache.get("a8") is not None
    assert cache.get("a9") is not None
    monkeypatch.setattr("eventjet.commands.cache.MARKS_BYTES_MAX", 1)
    cache.put("b", state(1, commands))
    assert [cache.get(name) is None for name in ("a8", "a9", "b")] == [True, True, False]


def test_a_command_id_without_a_mark_recorded_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.domain.history.COMMANDS_MAX", 3)
    commands = Commands()
    for version in range(1, 1_001):
        commands.add(f"c{version}", version)
    assert all(commands.may_have(f"c{version}") for version in range(1, 1_001))
    assert not any(commands.may_have(f"d{version}") for version in range(1, 1_001))
    assert commands.find("c1") is None
    began_late = Commands({"c5": (5, 5)}, complete=False)
    assert began_late.may_have("c1")
    assert began_late.marks_bytes == 0


def test_a_state_with_too_many_marks_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.domain.history.COMMANDS_MAX", 2)
    monkeypatch.setattr("eventjet.domain.history.MARKS_MAX", 10)
    commands = Commands()
    for version in range(1, 13):
        commands.add(f"c{version}", version)
    assert not commands.may_have("d")
    commands.add("c13", 13)
    assert commands.may_have("d")
    assert commands.marks_bytes == 0
