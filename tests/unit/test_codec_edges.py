"""The JSON profile where types meet: keys of mappings, and numbers in unions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import orjson
import pytest

from eventjet import event
from eventjet.codec.catalog import Catalog
from eventjet.errors import UnencodableEvent


@event("edge.keyed")
class Keyed:
    by_time: dict[datetime, int]


@event("edge.numbered")
class Numbered:
    amount: int | float


@event("edge.timed")
class Timed:
    at: datetime
    others: list[datetime]


def test_a_time_is_in_utc_as_a_key_too() -> None:
    catalog = Catalog([Keyed])
    made = Keyed(by_time={datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=2))): 1})
    body = catalog.encode(made).body
    assert orjson.loads(body) == {"by_time": {"2025-12-31T22:00:00Z": 1}}
    resolved = catalog.resolve("edge.keyed", 1)
    assert resolved is not None
    assert resolved.decode(body) == made
    with pytest.raises(UnencodableEvent):
        catalog.encode(Keyed(by_time={datetime(2026, 1, 1): 1}))  # noqa: DTZ001  naive is the point


@pytest.mark.parametrize("amount", [1, 1.0, 2**60, 2.0**60, -(2.0**80), 1e300])
def test_large_floats_beside_integers_are_read_back(amount: float) -> None:
    encoded = Catalog([Numbered]).encode(Numbered(amount=amount))
    assert type(encoded.event.amount) is type(amount)
    assert encoded.event.amount == amount


@pytest.mark.parametrize("fold", [0, 1])
@pytest.mark.parametrize("at", [datetime(2026, 10, 25, 2, 30), datetime(2026, 3, 29, 2, 30)])  # noqa: DTZ001
def test_a_time_that_its_zone_has_twice_or_never_can_be_stored(at: datetime, fold: int) -> None:
    berlin = at.replace(tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)
    encoded = Catalog([Timed]).encode(Timed(at=berlin, others=[berlin]))
    assert encoded.event.at == encoded.event.others[0] == berlin.astimezone(UTC)


def test_what_is_folded_is_what_will_be_read_back() -> None:
    made = Keyed(by_time={datetime(2026, 1, 1, tzinfo=UTC): 1})
    again = Catalog([Keyed]).encode(made).event
    made.by_time.clear()
    assert again == Keyed(by_time={datetime(2026, 1, 1, tzinfo=UTC): 1})
