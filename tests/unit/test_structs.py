"""One law of decoding: what is read without pydantic is what pydantic reads, object for object and error for error."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import FunctionType
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypeAlias, TypeVar
from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator

from eventjet import event, upcaster
from eventjet.codec.bodies import BodyCodec, readable
from eventjet.codec.catalog import Catalog
from eventjet.codec.json import dump_json, read_json
from eventjet.codec.structs import RESTS, struct_decoder
from eventjet.domain.personal import Personal


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Tone(StrEnum):
    HIGH = "high"
    LOW = "low"


class Rank(IntEnum):
    ONE = 1
    TWO = 2


Customer = NewType("Customer", str)
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal
    count: int = 1


@dataclass(frozen=True)
class Box(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    town: Personal[str]
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    by: str


@dataclass(frozen=True, slots=True)
class Far(Kept):
    lines: tuple[Line, ...] = ()


texts = st.text(max_size=8)
decimals = st.decimals(allow_nan=False, allow_infinity=False) | st.decimals(-1000, 1000, places=2)
integers = st.integers(-(2**53), 2**53) | st.integers(-3, 3)
floats = st.floats(allow_nan=False, allow_infinity=False)
moments = st.datetimes(timezones=st.just(UTC)).map(lambda at: at.replace(fold=0))
clocks = (st.times() | st.times(timezones=st.just(timezone(timedelta(hours=2))))).map(lambda at: at.replace(fold=0))
lines = st.builds(Line, texts, decimals, st.integers(-5, 5))
places = st.builds(Place, town=texts, since=st.none() | moments)

Fields: TypeAlias = dict[str, tuple[Any, st.SearchStrategy[Any]]]
FIELDS: Fields = {
    "text": (str, st.text()),
    "named": (Customer, texts),
    "personal": (Personal[str], texts),
    "short": (Annotated[str, Field(min_length=1, max_length=4)], st.text(min_size=1, max_size=4)),
    "whole": (int, integers),
    "counted": (Annotated[int, Field(ge=0, lt=100)], st.integers(0, 99)),
    "ratio": (float, floats),
    "share": (Annotated[float, Field(ge=0, le=1)], st.floats(0, 1)),
    "flag": (bool, st.booleans()),
    "nothing": (None, st.none()),
    "amount": (Decimal, decimals),
    "positive": (Annotated[Decimal, Field(gt=0, le=Decimal("1000.5"))], st.decimals("0.01", "1000.5", places=2)),
    "at": (datetime, moments),
    "day": (date, st.dates()),
    "key": (UUID, st.uuids()),
    "raw": (bytes, st.binary(max_size=12)),
    "colour": (Colour, st.sampled_from(Colour)),
    "tone": (Tone, st.sampled_from(Tone)),
    "rank": (Rank, st.sampled_from(Rank)),
    "way": (Literal["up", "down"], st.sampled_from(["up", "down"])),
    "maybe": (int | None, st.none() | integers),
    "maybe_amount": (Decimal | None, st.none() | decimals),
    "maybe_line": (Line | None, st.none() | lines),
    "list_of_text": (list[str], st.lists(texts, max_size=3)),
    "bounded": (Annotated[list[int], Field(min_length=1, max_length=2)], st.lists(st.just(7), min_size=1, max_size=2)),
    "amounts": (tuple[Decimal, ...], st.lists(decimals, max_size=3).map(tuple)),
    "lines": (tuple[Line, ...], st.lists(lines, max_size=3).map(tuple)),
    "set_of_text": (set[str], st.sets(texts, max_size=3)),
    "set_of_amounts": (frozenset[Decimal], st.frozensets(decimals, max_size=3)),
    "set_of_ratios": (frozenset[float], st.frozensets(floats, max_size=3)),
    "by_name": (dict[str, int], st.dictionaries(texts, st.integers(-9, 9), max_size=3)),
    "place": (Place, places),
    "matrix": (list[list[Decimal | None]], st.lists(st.lists(st.none() | decimals, max_size=2), max_size=2)),
}
"""By the name of the field: what it is annotated with, and its values."""


class Point(NamedTuple):
    x: int
    y: int


LEFT_TO_PYDANTIC: Fields = {
    "pair": (tuple[int, str], st.tuples(st.integers(-9, 9), texts)),
    "priced": (tuple[str, Decimal], st.tuples(texts, decimals)),
    "far": (Far, st.builds(Far, texts, st.lists(lines, max_size=2).map(tuple))),
    "either": (int | str, st.integers(-9, 9) | texts),
    "matched": (Annotated[str, Field(pattern="^a+$")], st.just("aa")),
    "stepped": (Annotated[int, Field(multiple_of=5)], st.just(5)),
    "spelled": (Annotated[Decimal, Field(max_digits=4)], st.just(Decimal("1.5"))),
    "lasting": (timedelta, st.timedeltas()),
    "clock": (time, clocks),
    "tone_or_text": (Tone | str, texts),
    "number": (int | float, st.integers(-9, 9) | floats),
    "set_of_either": (frozenset[int | str], st.frozensets(st.integers(-9, 9) | texts, max_size=3)),
    "generic": (Box[Decimal], st.builds(Box, decimals)),
    "anything": (Any, st.just({"a": [1, 2**70]})),
    "amounts_by_name": (dict[str, Decimal], st.dictionaries(texts, decimals, max_size=3)),
    "lines_by_name": (dict[str, list[Line]], st.dictionaries(texts, st.lists(lines, max_size=2), max_size=2)),
    "point": (Point, st.builds(Point, st.integers(-9, 9), st.integers(-9, 9))),
    "by_time": (dict[datetime, int], st.dictionaries(moments, st.integers(-9, 9), max_size=2)),
    "either_kind": (Line | Place, lines | places),
}


def declared(**annotated: Any) -> Any:
    made = type("Made", (), {"__annotations__": annotated, "__module__": __name__})
    return event("made.up")(made)


def outcome(read: Callable[[bytes], Any], body: bytes) -> tuple[str, Any]:
    if isinstance(read, FunctionType):
        cells = dict(zip(read.__code__.co_freevars, read.__closure__ or (), strict=True))
        if "rest" in cells:
            cells["rest"].cell_contents = 0  # or one body that only pydantic reads would leave it the next ones
    try:
        return "read", read(body)
    except Exception as error:  # noqa: BLE001 - whatever it is, both are to raise it
        return type(error).__qualname__, str(error)


def spelled(value: Any) -> Any:
    """The value with the types of all that is in it, so that 1, 1.0 and True differ and 0.0 and -0.0 do."""
    kind: Any = type(value)
    if is_dataclass(value):
        assert not isinstance(value, type)
        return kind, [(one.name, spelled(getattr(value, one.name))) for one in fields(value)]
    if isinstance(value, dict):
        return kind, [(spelled(key), spelled(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return kind, [spelled(each) for each in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(spelled(each)) for each in value)
    if isinstance(value, datetime):
        return kind, repr(value), type(value.tzinfo), value.fold
    if isinstance(value, float):
        return kind, struct.pack("d", value)
    return kind, repr(value)


def assert_lawful(codec: BodyCodec, body: bytes) -> None:
    (quick, one), (full, other) = outcome(codec.decode, body), outcome(codec.validate, body)
    assert (quick, spelled(one)) == (full, spelled(other)), body
    if quick == "read":
        assert one == other or one != one


ALL = {name: declared(**{name: kind}) for name, (kind, _) in (FIELDS | LEFT_TO_PYDANTIC).items()}
CODECS = {name: BodyCodec(cls) for name, cls in ALL.items()}
TOGETHER = declared(**{name: kind for name, (kind, _) in FIELDS.items()})
TOGETHER_CODEC = BodyCodec(TOGETHER)


@pytest.mark.parametrize("name", FIELDS)
@given(st.data())
def test_a_stored_body_is_read_without_pydantic(name: str, data: st.DataObject) -> None:
    cls, codec = ALL[name], CODECS[name]
    body, _ = codec.read_back(cls(**{name: data.draw(FIELDS[name][1])}))

    def refused(body: bytes) -> Any:
        raise AssertionError(body)

    quick = struct_decoder(readable(cls), refused)
    assert spelled(quick(body)) == spelled(codec.validate(body))


@given(st.builds(TOGETHER, **{name: values for name, (_, values) in FIELDS.items()}))
def test_fields_of_all_kinds_are_read_together(made: Any) -> None:
    body, again = TOGETHER_CODEC.read_back(made)
    assert spelled(again) == spelled(made)
    assert_lawful(TOGETHER_CODEC, body)


@pytest.mark.parametrize("name", LEFT_TO_PYDANTIC)
@given(st.data())
def test_what_is_not_proven_is_left_to_pydantic(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    assert codec.decode is codec.validate
    made = ALL[name](**{name: data.draw(LEFT_TO_PYDANTIC[name][1])})
    assert spelled(codec.read_back(made)[1]) == spelled(made)


_NUMBERS = st.from_regex(r"-?[0-9]{1,25}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True).map(str.encode)
_WORDS = st.sampled_from(
    [
        *b"NaN -Infinity tru nul +1 01 - 1. .5 -0 -0.0 1e400 null true false {} [] 1 1.0 0".split(),
        *(b'""', b"", b"1" * 4_301, b"9" * 400, b"[" * 250 + b"]" * 250),
    ]
)
_LISTED = """
1 +1 1_000 1e5 1E+5 -0 0.10 NaN -sNaN12 Infinity -inf 9007199254740993 -9007199254740993 9007199254740992
09007199254740993 1e999999999999999999999 red RED Colour.RED high up aaaaa 2026-01-01T00:00:00Z
2026-01-01T00:00:00.123456Z 2026-01-01t00:00:00z 2026-01-01T00:00:00.123Z 1700000000
2026-01-01T00:00:00.1234567Z 2026-01-01T00:00:00,123456Z 2026-01-01T24:00:00Z 2026-01-01T00:00:60Z
2026-02-30T00:00:00Z 0000-01-01T00:00:00Z 9999-12-31T23:59:59.999999Z 2026-01-01T00:00:00+00:00
2026-01-01T00:00:00+02:00 2026-01-01T00:00:00 2026-01-01T00:00Z 2026-W01-1T00:00:00Z 20260101T000000Z
2026-01-01T000000.1Z 2026-01-01T00:00:00.000000z 2026-01-01T00:00:00.000000 2026-01-01 20260101 2026-1-1
2026-01-32 0001-01-01 0000-01-01 -2026-01-01 12345678-1234-5678-1234-567812345678
12345678123456781234567812345678 {12345678-1234-5678-1234-567812345678} ABCDEFAB-1234-5678-1234-56781234567F
urn:uuid:12345678-1234-5678-1234-567812345678 1234567-81234-5678-1234-567812345678 eA== eA eA= eB== _-8= /+8=
====
"""
"""Numbers, times, days, ids, bytes and names: as they are written here, as others may, and as nobody should."""
_SPELLINGS = st.sampled_from([*_LISTED.split(), "\u0661", "", " 1", "1 ", "2026-01-01 00:00:00Z", "e A==", "eA==\n"])
_TEXTS = (_SPELLINGS | st.text(max_size=6)).map(orjson.dumps)
_ESCAPES = st.sampled_from(
    [
        *(rb'"\ud800"', rb'"\ude00\ud83d"', rb'"\ud83d\ude00"', rb'"\u0031"', rb'"\x"', rb'"\/"'),
        *(b'"\xff"', b'"\x01"', b'"\xed\xa0\x80"'),
    ]
)
_FLAT = _NUMBERS | _WORDS | _TEXTS | _ESCAPES
_JSON = st.recursive(
    _FLAT,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: b"[" + b",".join(each) + b"]")
        | st.lists(
            st.tuples(_TEXTS | st.sampled_from([b'"sku"', b'"price"', b'"town"', b'"by"']), inner), max_size=3
        ).map(lambda each: b"{" + b",".join(key + b":" + value for key, value in each) + b"}")
    ),
    max_leaves=4,
)
_BYTES = st.sampled_from(
    [
        *(bytes([one]) for one in b'"\\{}[]:,.-+eE019 \n\t\x00\x0b\x7f\xff\xc3u_TZ=a'),
        *(b"\xef\xbb\xbf", b'""', b'"x":1,'),
    ]
)


@st.composite
def hostile(draw: st.DrawFn, name: str) -> bytes:
    """A body that somebody else wrote for the event with the field `name`, or that was damaged."""
    cls, codec = ALL[name], CODECS[name]
    stored, _ = codec.read_back(cls(**{name: draw(FIELDS[name][1])}))
    value, told = stored.partition(b":")[2][:-1], f'"{name}"'.encode()
    match draw(st.integers(0, 6)):
        case 0:
            return b"{%b:%b}" % (told, draw(_JSON))
        case 1:
            return b"{%b:%b,%b:%b}" % (told, draw(_JSON), told, draw(st.just(value) | _JSON))
        case 2:
            return b"{%b:%b,%b:%b}" % (told, value, draw(_TEXTS), draw(_JSON))
        case 3:
            return draw(_JSON)
        case 4:
            return draw(st.sampled_from([b" ", b"\n\t\r ", b"\xef\xbb\xbf", b"x", b"\x0b"])) + stored + draw(_BYTES)
        case 5:
            return stored.decode().encode(draw(st.sampled_from(["utf-16", "utf-16-le", "utf-32"])))
        case _:
            body = stored
            for _ in range(draw(st.integers(1, 3))):
                at, gone = draw(st.integers(0, len(body))), draw(st.integers(0, 2))
                body = body[:at] + draw(_BYTES | st.just(b"")) + body[at + gone :]
            return body


@pytest.mark.parametrize("name", FIELDS)
@given(st.data())
def test_a_hostile_body_comes_to_the_same(name: str, data: st.DataObject) -> None:
    assert_lawful(CODECS[name], data.draw(hostile(name)))


@upcaster("made.grown", schema=1)
def grown(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "amount": body.get("price"), "note": "old"}


@event("made.grown", schema=2)
class Grown:
    amount: Decimal
    note: str
    many: tuple[int, ...] = ()


@given(_JSON | st.builds(lambda value: b'{"price":%b}' % value, _JSON), st.booleans())
def test_an_upcast_body_comes_to_the_same(body: bytes, is_plain: bool) -> None:
    resolved = Catalog([Grown], [grown]).resolve("made.grown", 1)
    assert resolved is not None
    codec = resolved.event.codec

    def full(body: bytes) -> Any:
        return codec.validate(dump_json(grown(read_json(body))))

    body = b'{"price":"1.50"}' if is_plain else body
    (quick, one), (told, other) = outcome(resolved.decode, body), outcome(full, body)
    assert (quick, spelled(one)) == (told, spelled(other))
    assert not is_plain or one == Grown(amount=Decimal("1.50"), note="old")


def test_fields_that_are_missing_have_their_defaults_and_others_are_left_out() -> None:
    codec = BodyCodec(Grown)
    for body in (b'{"amount":"1","note":""}', b'{"amount":"1","note":"","later":[1]}', b'{"note":"","many":[]}', b"{}"):
        assert_lawful(codec, body)
    assert codec.decode(b'{"amount":"1","note":"","later":[1]}') == Grown(amount=Decimal(1), note="")


def test_each_object_has_its_own_of_what_a_factory_makes() -> None:
    @event("made.lists")
    class Lists:
        many: list[str] = field(default_factory=list[str])

    decode = BodyCodec(Lists).decode
    one, other = decode(b"{}"), decode(b"{}")
    one.many.append("x")
    assert other.many == []


def test_a_log_of_an_older_form_is_read_without_trying_each_body() -> None:
    read: list[bytes] = []

    def reading(body: bytes) -> Any:
        read.append(body)
        return full(body)

    full = BodyCodec(Grown).validate
    decode = struct_decoder(readable(Grown), reading)
    usual, older = b'{"amount":"1","note":""}', b'{"amount":"1","note":"","gone":1}'
    for body in (usual, older, *[usual] * RESTS, usual):
        assert decode(body) == Grown(amount=Decimal(1), note="")
    assert read == [older, *[usual] * RESTS]


def test_a_class_that_is_made_in_a_way_of_its_own_is_left_to_pydantic() -> None:
    @event("made.after")
    class After:
        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("below zero")

    @event("made.validated")
    class Validated:
        x: int

        @field_validator("x")
        @classmethod
        def doubled(cls, value: int) -> int:
            return 2 * value

    for cls in (After, Validated):
        codec = BodyCodec(cls)
        assert codec.decode is codec.validate
    with pytest.raises(ValueError, match="below zero"):
        BodyCodec(After).decode(b'{"x":-1}')
    assert BodyCodec(Validated).decode(b'{"x":2}').x == 4


def test_what_was_read_quickly_is_as_frozen_as_any_other() -> None:
    one = CODECS["text"].decode(b'{"text":"a"}')
    assert type(one) is ALL["text"]
    with pytest.raises(FrozenInstanceError):
        one.text = "b"
    assert pickle.loads(pickle.dumps(BodyCodec(Grown).decode(b'{"amount":"1","note":""}'))) == Grown(
        amount=Decimal(1), note=""
    )
