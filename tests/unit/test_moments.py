"""Times beyond those of clocks and of 64-bit nanoseconds: the far past is due, the far future is not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import orjson
import pytest

from eventjet import Retry, after, at
from eventjet.codec.commands import canonical
from eventjet.domain.reactor import retry_faults
from eventjet.jetstream.api import direct_since

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
FIRST, LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
EAST, WEST = timezone(timedelta(hours=14)), timezone(-timedelta(hours=12))


def lapse(state: object) -> None:
    """A decision that is never called."""


@pytest.mark.parametrize("delay", [timedelta.min, -timedelta(days=365 * 2030), timedelta(days=-(10**9) + 1)])
def test_a_delay_to_before_all_times_is_due(delay: timedelta) -> None:
    assert after(delay, lapse).due_at(NOON) <= datetime(2, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("delay", [timedelta.max, timedelta(days=365 * 9000)])
def test_a_delay_beyond_all_times_is_not_due(delay: timedelta) -> None:
    assert after(delay, lapse).due_at(NOON) == LAST


@pytest.mark.parametrize("zone", [UTC, EAST, WEST])
def test_the_first_and_the_last_time_of_any_zone_can_be_deadlines(zone: tzinfo) -> None:
    first, last = datetime.min.replace(tzinfo=zone), datetime.max.replace(tzinfo=zone)
    assert at(first, lapse).due_at(NOON) < NOON < at(last, lapse).due_at(NOON)
    assert at(first, lapse).due_at(NOON).utcoffset() == timedelta()


def test_a_zone_without_an_offset_is_refused() -> None:
    class Nowhere(tzinfo):
        def utcoffset(self, _: datetime | None) -> None:
            return None

    with pytest.raises(ValueError, match="no datetime with a time zone"):
        at(datetime(2030, 1, 1, tzinfo=Nowhere()), lapse)


@pytest.mark.parametrize("moment", [FIRST, LAST, datetime.min.replace(tzinfo=EAST), datetime.max.replace(tzinfo=WEST)])
def test_times_in_requests_fit_into_the_nanoseconds_of_the_server(moment: datetime) -> None:
    start = datetime.fromisoformat(orjson.loads(direct_since("log", moment, "log.>").payload)["start_time"])
    assert -(2**63) < start.timestamp() * 1e9 < 2**63


@pytest.mark.parametrize("moment", [datetime.min.replace(tzinfo=EAST), datetime.max.replace(tzinfo=WEST)])
def test_a_command_can_have_any_time_as_argument(moment: datetime) -> None:
    assert canonical(moment)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 10**400, 0, -1, "5"])
@pytest.mark.parametrize("name", ["first_s", "most_s", "timeout_s"])
def test_an_invalid_or_unlimited_pause_is_refused(name: str, seconds: Any) -> None:
    assert retry_faults(Retry(**{name: seconds}), "quarantine")
    assert not retry_faults(Retry(), "quarantine")
