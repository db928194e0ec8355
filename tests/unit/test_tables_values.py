"""The values that a column takes, and the normal form in which it returns them."""

from __future__ import annotations

import enum
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import types as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from eventjet.projections.columns import normaliser, unsupported
from eventjet.sql.sqlite import SQLITE, StoredAsText


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


KINDS: dict[str, tuple[sa.TypeEngine[Any], st.SearchStrategy[Any]]] = {
    "text": (sa.Text(), st.text()),
    "short text": (sa.String(3), st.text(max_size=5)),
    "smallint": (sa.SmallInteger(), st.integers(-40_000, 40_000)),
    "integer": (sa.Integer(), st.integers(-(2**32), 2**32)),
    "bigint": (sa.BigInteger(), st.integers()),
    "numeric(12,2)": (sa.Numeric(12, 2), st.decimals() | st.integers()),
    "numeric(5)": (sa.Numeric(5), st.decimals(places=0) | st.integers()),
    "exact numeric": (StoredAsText(sa.Numeric(12, 2), "a.b"), st.decimals(places=2)),
    "numeric": (sa.Numeric(), st.decimals(allow_nan=False, allow_infinity=False)),
    "double": (sa.Double(), st.floats() | st.integers()),
    "boolean": (sa.Boolean(), st.booleans()),
    "instant": (sa.DateTime(timezone=True), st.datetimes(timezones=st.timezones() | st.none())),
    "utc instant": (StoredAsText(sa.DateTime(timezone=True), "a.b"), st.datetimes(timezones=st.just(UTC))),
    "wall time": (sa.DateTime(), st.datetimes()),
    "date": (sa.Date(), st.dates()),
    "uuid": (sa.Uuid(), st.uuids()),
    "json": (
        sa.JSON(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=8,
        ),
    ),
    "jsonb": (JSONB(), st.dictionaries(st.text(), st.integers(), max_size=4)),
    "bytes": (sa.LargeBinary(), st.binary()),
    "enum": (sa.Enum(Colour), st.sampled_from(Colour)),
    "labels": (sa.Enum("red", "blue"), st.sampled_from(["red", "blue", "green"])),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_column_returns_each_value_equal_and_in_its_normal_form(name: str) -> None:
    kind, values = KINDS[name]
    normalise = normaliser(kind)
    dump = SQLITE.dumper(kind) or (lambda value: value)
    load = SQLITE.loader(kind) or (lambda value: value)

    @given(values)
    def law(value: Any) -> None:
        try:
            normal = normalise(value)
        except ValueError:
            return
        assert normal == value or (isinstance(value, datetime) and normal == value.astimezone(UTC))
        assert repr(normalise(normal)) == repr(normal)
        if normal is not None:
            assert repr(load(dump(normal))) == repr(normal)

    law()


REFUSED: list[tuple[sa.TypeEngine[Any], Any, str]] = [
    (sa.Numeric(12, 2), Decimal("0.005"), "2 decimals"),
    (sa.Numeric(12, 2), Decimal(10**10), "12 digits"),
    (sa.Numeric(12, 2), Decimal("NaN"), "finite"),
    (sa.Numeric(12, 2), Decimal("Infinity"), "finite"),
    (sa.Numeric(12, 2), 0.5, "not float"),
    (sa.Numeric(12), Decimal("0.5"), "0 decimals"),
    (sa.Numeric(), Decimal("sNaN"), "finite"),
    (sa.Numeric(), Decimal("1E+200000"), "131072 digits"),
    (sa.String(3), "four", "3 characters"),
    (sa.Text(), "a\0b", "NUL"),
    (sa.Text(), "\ud800", "surrogate"),
    (sa.Text(), 3, "not int"),
    (sa.Integer(), 2**31, "32 bits"),
    (sa.SmallInteger(), -(2**15) - 1, "16 bits"),
    (sa.BigInteger(), 2**63, "64 bits"),
    (sa.Integer(), True, "not bool"),
    (sa.Integer(), 1.0, "not float"),
    (sa.Boolean(), 1, "not int"),
    (sa.Double(), float("nan"), "NaN"),
    (sa.Double(), 2**53 + 1, "round"),
    (sa.Double(), 10**400, "round"),
    (sa.DateTime(timezone=True), datetime(2026, 1, 1), "zone"),  # noqa: DTZ001
    (sa.DateTime(timezone=True), datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), "years"),
    (sa.DateTime(), datetime(2026, 1, 1, tzinfo=UTC), "time zone"),
    (sa.Date(), datetime(2026, 1, 1, tzinfo=UTC), "not datetime"),
    (sa.Uuid(), "5f0c0000-0000-0000-0000-000000000000", "not str"),
    (sa.JSON(), {"a": (1, 2)}, "tuple"),
    (sa.JSON(), {1: 2}, "keys"),
    (sa.JSON(), {"a": float("inf")}, "finite"),
    (sa.JSON(), "\0", "NUL"),
    (sa.JSON(), {"\ud800": 1}, "surrogate"),
    (sa.JSON(), Decimal(1), "Decimal"),
    (sa.LargeBinary(), "text", "not str"),
    (sa.Enum(Colour), "RED", "Colour"),
    (sa.Enum("red", "blue"), "green", "red, blue"),
]


@pytest.mark.parametrize(("kind", "value", "reason"), REFUSED, ids=lambda value: repr(value)[:40])
def test_a_value_that_a_column_would_change_is_refused(kind: sa.TypeEngine[Any], value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        normaliser(kind)(value)


def test_equal_values_have_the_same_normal_form() -> None:
    money = normaliser(sa.Numeric(12, 2))
    assert [str(money(value)) for value in (1, Decimal("1.0"), Decimal("1E+1"), Decimal("-0"))] == [
        "1.00",
        "1.00",
        "10.00",
        "0.00",
    ]
    assert str(normaliser(sa.Numeric())(Decimal("1E+3"))) == "1000"
    assert repr(normaliser(sa.Double())(-0.0)) == "0.0"
    assert repr(normaliser(sa.JSON())({"b": 1e300, "a": [-0.0]})) == repr({"a": [0.0], "b": int(1e300)})
    elsewhere = datetime(2026, 7, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert repr(normaliser(sa.DateTime(timezone=True))(elsewhere)) == repr(datetime(2026, 7, 1, 0, tzinfo=UTC))


def test_subclasses_of_plain_values_become_plain() -> None:
    class Name(str):
        __slots__ = ()

    assert type(normaliser(sa.Text())(Name("a"))) is str
    assert type(normaliser(sa.Integer())(enum.IntEnum("N", "A")(1))) is int
    assert type(normaliser(sa.LargeBinary())(bytearray(b"a"))) is bytes


UNSUPPORTED: list[sa.TypeEngine[Any]] = [
    sa.Interval(),
    sa.Time(),
    sa.CHAR(3),
    sa.REAL(),
    sa.Float(24),
    sa.Float(asdecimal=True),
    sa.Numeric(12, 2, asdecimal=False),
    sa.Uuid(as_uuid=False),
    ARRAY(sa.Integer),
    sa.Numeric(12, 2).with_variant(sa.Float(), "sqlite"),
    sa.PickleType(),
]


@pytest.mark.parametrize("kind", UNSUPPORTED, ids=repr)
def test_a_type_that_rounds_pads_or_differs_between_databases_is_unsupported(kind: sa.TypeEngine[Any]) -> None:
    assert unsupported(kind)


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS.values()] + [sa.JSON().with_variant(JSONB(), "postgresql")])
def test_every_type_that_is_stored_exactly_is_supported(kind: sa.TypeEngine[Any]) -> None:
    assert unsupported(kind) is None


def test_a_time_as_text_in_sqlite_sorts_by_time() -> None:
    dump = SQLITE.dumper(sa.DateTime(timezone=True))
    assert dump is not None
    early, late = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    assert dump(early) < dump(late)
