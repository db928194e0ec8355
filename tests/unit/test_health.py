"""When a process of workers is healthy, and which metrics it gives to Prometheus."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eventjet.errors import UsageError
from eventjet.observability.metrics import METRICS, POSITION, STATE, Meter, exposition
from eventjet.subscriptions.health import HealthState, address_of
from eventjet.subscriptions.work_status import StatusSnapshot, WorkStatus, paced

ME, OTHER = "host:1:aa", "host:2:bb"
BEHIND = WorkStatus("balances", 1, "active", 7, 9, 2, 1.5, ME, 1, None, declared=True)


def health_after(*looks: tuple[float, WorkStatus]) -> HealthState:
    health = HealthState(ME, 30, 0.0)
    for now, status in looks:
        health = health.after(now, [status])
    return health


def test_a_process_before_its_first_look_is_starting() -> None:
    health = HealthState(ME, 30, 100.0)
    assert (health.status(101).healthy, health.status(101).reason) == (False, "starting")
    assert health.without("no database").status(102).reason == "no database"
    assert str(health.status(131).reason) == "nothing could be looked at for 31 s: the process hangs"


def test_lagging_without_progress_for_too_long_is_unhealthy() -> None:
    health = health_after((0, BEHIND), (20, BEHIND), (31, BEHIND))
    assert health.status(29).healthy
    status = health.status(31)
    assert not status.healthy
    assert status.reason == "balances: 2 events behind at position 7 without progress for 31 s"
    assert (
        health_after((0, BEHIND), (20, replace(BEHIND, position=8)), (31, replace(BEHIND, position=8)))
        .status(31)
        .healthy
    )


def test_repeatedly_taking_and_losing_a_lease_is_no_progress() -> None:
    waits = replace(BEHIND, owner=None, reason="an event of a newer schema")
    health = health_after((0, BEHIND), (10, waits), (20, BEHIND), (31, waits))
    assert str(health.status(31).reason).endswith("without progress for 31 s: an event of a newer schema")


def test_a_long_wait_is_unhealthy_even_without_lag() -> None:
    waits = replace(BEHIND, position=9, lag_events=0, reason="waiting since noon: its timers are not there")
    assert health_after((0, waits), (20, waits)).status(20).healthy
    assert str(health_after((0, waits), (31, waits)).status(31).reason).endswith("its timers are not there")
    assert health_after((0, waits), (31, waits), (32, replace(waits, reason=None))).status(50).healthy


@pytest.mark.parametrize(
    "status",
    [
        replace(BEHIND, owner=OTHER),
        replace(BEHIND, state="paused", owner=None),
        replace(BEHIND, state="retired", owner=None),
        replace(BEHIND, position=9, lag_events=0),
    ],
    ids=["standing by", "paused", "retired", "nothing to do"],
)
def test_a_projection_of_another_process_is_no_fault_and_restarts_the_time(status: WorkStatus) -> None:
    health = health_after((0, BEHIND), (40, status), (80, status))
    assert health.status(81).healthy
    assert health.after(90, [replace(BEHIND, position=status.position)]).status(90).healthy


def test_a_failed_projection_is_unhealthy_at_once() -> None:
    status = health_after((0, replace(BEHIND, state="failed", owner=None, reason="bad event"))).status(0)
    assert status.reason == "balances: failed: bad event"
    assert status.projections[0]["fault"] == "failed: bad event"


def test_a_process_that_cannot_look_stays_healthy_for_a_while_and_then_says_why() -> None:
    health = health_after((0, BEHIND)).without("The database: gone.")
    assert health.status(10).healthy
    assert health.status(31).reason == "nothing could be looked at for 31 s: The database: gone."


def test_the_rate_and_the_remaining_time_come_from_two_looks() -> None:
    before = StatusSnapshot(10.0, [BEHIND])
    grown = replace(BEHIND, position=107, log_position=209, lag_events=102)
    (paced_status,) = paced(before, StatusSnapshot(12.0, [replace(grown, log_position=29)]))
    assert paced_status.events_per_s == 50
    assert paced_status.eta_s == pytest.approx(102 / 40)
    assert paced(before, StatusSnapshot(12.0, [grown]))[0].eta_s is None  # the log grows faster
    (finished,) = paced(before, StatusSnapshot(12.0, [replace(BEHIND, position=9, lag_events=0)]))
    assert (finished.events_per_s, finished.eta_s) == (1, 0)
    (rebuilt,) = paced(before, StatusSnapshot(12.0, [replace(grown, generation=2)]))
    assert (rebuilt.events_per_s, rebuilt.eta_s) == (None, None)
    assert paced(before, before) == [BEHIND]


def test_the_exposition_has_the_format_of_prometheus() -> None:
    meter = Meter("balances", 1)
    for seconds in (0.001, 0.004, 7.0):
        meter.committed(10, seconds)
    meter.terms["fenced"] += 1
    text = exposition([(POSITION, ("balances", "1"), 1234), (STATE, ("a", "1", 'x"\\\n'), 1)], [meter, Meter("b", 2)])
    lines = text.splitlines()
    assert text.endswith("\n")
    assert 'eventjet_projection_position{projection="balances",revision="1"} 1234' in lines
    assert r'eventjet_projection_state{projection="a",revision="1",state="x\"\\\n"} 1' in lines
    own = 'projection="balances",revision="1"'
    assert f'eventjet_commit_seconds_bucket{{{own},le="0.001"}} 1' in lines
    assert f'eventjet_commit_seconds_bucket{{{own},le="5.0"}} 2' in lines
    assert f'eventjet_commit_seconds_bucket{{{own},le="+Inf"}} 3' in lines
    assert f"eventjet_commit_seconds_count{{{own}}} 3" in lines
    assert f"eventjet_commit_seconds_sum{{{own}}} 7.005" in lines
    assert f"eventjet_events_total{{{own}}} 30" in lines
    assert f'eventjet_terms_total{{{own},reason="fenced"}} 1' in lines
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert types == [metric.name for metric in METRICS]


def test_a_process_without_work_lists_its_metrics() -> None:
    lines = exposition([], []).splitlines()
    assert [line.split()[2:] for line in lines if line.startswith("# TYPE")] == [[m.name, m.kind] for m in METRICS]
    assert all(line.startswith("#") for line in lines)


def test_every_metric_has_a_unique_name_in_the_usual_form() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("eventjet_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:8080", ("127.0.0.1", 8080)), ("[::1]:0", ("::1", 0)), (" localhost:65535 ", ("localhost", 65_535))],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize("text", ["", "8080", ":8080", "localhost", "localhost:", "localhost:x", "localhost:65536"])
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="Write HOST:PORT"):
        address_of(text)
