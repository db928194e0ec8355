"""The JSON profile at its edges: zones, unions, sets, keys of mappings, generic classes, long numbers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import new_class
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import orjson
import pytest
from pydantic import model_validator

from eventjet import DefinitionError, aggregate, event, upcaster
from eventjet.codec.bodies import BodyCodec
from eventjet.codec.catalog import Catalog
from eventjet.codec.cloud_events import IncomingDecoder
from eventjet.codec.json import differing_fields, dump_json, read_json
from eventjet.codec.shape import shape_of
from eventjet.domain.personal import Personal
from eventjet.errors import UndecodableMessage, UnencodableEvent


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


def test_a_time_that_is_a_key_is_stored_in_utc() -> None:
    catalog = Catalog([Keyed])
    value = Keyed(by_time={datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=2))): 1})
    body = catalog.encode(value).body
    assert orjson.loads(body) == {"by_time": {"2025-12-31T22:00:00Z": 1}}
    resolved = catalog.resolve("edge.keyed", 1)
    assert resolved is not None
    assert resolved.decode(body) == value
    with pytest.raises(UnencodableEvent):
        catalog.encode(Keyed(by_time={datetime(2026, 1, 1): 1}))  # noqa: DTZ001  naive is the point


@pytest.mark.parametrize("amount", [1, 1.0, 2**60, 2.0**60, -(2.0**80), 1e300])
def test_large_floats_in_a_union_with_integers_keep_their_type(amount: float) -> None:
    encoded = Catalog([Numbered]).encode(Numbered(amount=amount))
    assert type(encoded.event.amount) is type(amount)
    assert encoded.event.amount == amount


@pytest.mark.parametrize("fold", [0, 1])
@pytest.mark.parametrize("at", [datetime(2026, 10, 25, 2, 30), datetime(2026, 3, 29, 2, 30)])  # noqa: DTZ001
def test_a_time_that_its_zone_has_twice_or_never_can_be_stored(at: datetime, fold: int) -> None:
    berlin = at.replace(tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)
    encoded = Catalog([Timed]).encode(Timed(at=berlin, others=[berlin]))
    assert encoded.event.at == encoded.event.others[0] == berlin.astimezone(UTC)


def test_the_encoded_event_does_not_change_with_the_original_value() -> None:
    value = Keyed(by_time={datetime(2026, 1, 1, tzinfo=UTC): 1})
    encoded = Catalog([Keyed]).encode(value).event
    value.by_time.clear()
    assert encoded == Keyed(by_time={datetime(2026, 1, 1, tzinfo=UTC): 1})


class Colour(Enum):
    RED = "red"


class Tone(StrEnum):
    HIGH = "high"


class Rank(IntEnum):
    ONE = 1


class Stamp(datetime):
    pass


@dataclass(frozen=True)
class Line:
    sku: str
    count: Any = 1


@dataclass(frozen=True)
class OtherLine:
    sku: str
    count: Any = 1


BERLIN, LONDON = ZoneInfo("Europe/Berlin"), ZoneInfo("Europe/London")
HOUR = timezone(timedelta(hours=1))
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TWICE = datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1)


class Offset(tzinfo):
    """A zone as pytz and dateutil make them, whose offset at other instants is unknown."""

    def utcoffset(self, at: datetime | None) -> timedelta:
        return timedelta(0) if at is None or at.month < 4 else timedelta(hours=1)

    def dst(self, at: datetime | None) -> timedelta:
        return timedelta(0)

    def tzname(self, at: datetime | None) -> str:
        return "GMT"


def stored(kind: Any, value: Any) -> Any:
    """Return the value as readers get it after it was stored in a field."""
    event_class: Any = event("edge.made")(
        type("Made", (), {"__annotations__": {"given": kind}, "__module__": __name__})
    )
    return Catalog([event_class]).encode(event_class(given=value)).event.given


KEPT: list[tuple[Any, Any]] = [
    (time, time(9)),
    (time, time(9, tzinfo=UTC)),
    (time, time(9, tzinfo=HOUR)),
    (dict[time, int], {time(9, tzinfo=HOUR): 1}),
    (frozenset[time], frozenset([time(9), time(9, tzinfo=HOUR)])),
    (datetime, NOON),
    (date | datetime, date(2026, 1, 1)),
    (date | datetime, NOON),
    (int | Decimal, 2**60),
    (int | Decimal, Decimal("1.50")),
    (Tone | str, "high"),
    (Colour | str, "red"),
    (bool | int, 1),
    (bool | int, True),
    (Literal[1, True], True),
    (float | int, 1.0),
    (float | int, -0.0),
    (UUID | str, UUID(int=7)),
    (Any, 2**70),
    (Any, {"a": [1, 1.0, True, None, -0.0, 10**30]}),
    (Line | OtherLine, Line("a")),
    (dict[int, frozenset[Decimal]], {2**60: frozenset([Decimal("1.0"), Decimal(2)])}),
    (timedelta, timedelta(days=-400, microseconds=3)),
    (frozenset[tuple[int, ...]], frozenset([(1,), (2, 3)])),
    (list[int] | None, None),
    (frozenset[str] | None, frozenset()),
    (dict[Decimal | None, int], {Decimal("1.50"): 1}),
    (dict[Rank, int], {Rank.ONE: 1}),
    (dict[date, int], {date(2026, 1, 1): 1}),
    (dict[timedelta, int], {timedelta(days=1): 1}),
    (dict[UUID, int], {UUID(int=10): 1}),
    (str | date, "2026-01-01"),
    (date | str, date(2026, 1, 1)),
    (Rank, Rank.ONE),
]


@pytest.mark.parametrize(("kind", "value"), KEPT)
def test_a_stored_value_comes_back_with_its_type_and_zone(kind: Any, value: Any) -> None:
    restored = stored(kind, value)
    assert restored == value
    assert sorted(repr(restored)) == sorted(repr(value)), "of a set in any order"


REFUSED: list[tuple[Any, Any]] = [
    (time, time(9, tzinfo=BERLIN)),
    (time, time(9, tzinfo=LONDON)),
    (time, time(9, tzinfo=Offset())),
    (time, time(9, tzinfo=timezone(timedelta(hours=1), "CET"))),
    (time, time(2, 30, fold=1)),
    (list[time], [time(9, tzinfo=BERLIN)]),
    (tuple[time, int], (time(9, tzinfo=BERLIN), 1)),
    (frozenset[time], frozenset([time(9, tzinfo=BERLIN)])),
    (dict[time, int], {time(9, tzinfo=BERLIN): 1}),
    (dict[str, time], {"a": time(9, tzinfo=BERLIN)}),
    (time | None, time(9, tzinfo=BERLIN)),
    (time | str, time(9, tzinfo=BERLIN)),
    (Any, NOON),
    (Any, time(9)),
    (datetime | str, NOON.isoformat()),
    (int | Decimal, Decimal(2**60)),
    (Tone | str, Tone.HIGH),
    (list[str | Tone], [Tone.HIGH]),
    (dict[str, str | Tone], {"a": Tone.HIGH}),
    (Colour | str, Colour.RED),
    (Rank | int, Rank.ONE),
    (Any, Rank.ONE),
    (UUID | str, str(UUID(int=7))),
    (bytes | str, "eA=="),
    (Decimal | str, Decimal("1.5")),
    (Line | OtherLine, OtherLine("a")),
    (Line, Line("a", (1,))),
    (Line, Line("a", Rank.ONE)),
    (Any, float("nan")),
    (Any, (1, 2)),
    (Any, {1: 2}),
    (Any, {1, 2}),
    (list, [float("inf")]),
]


@pytest.mark.parametrize(("kind", "value"), REFUSED)
def test_a_value_that_would_come_back_with_another_type_or_zone_is_refused(kind: Any, value: Any) -> None:
    with pytest.raises(UnencodableEvent, match=r"stored: given[.\[:]"):
        stored(kind, value)


INSTANTS = [*map(NOON.astimezone, (BERLIN, LONDON, Offset())), TWICE, Stamp(2026, 1, 1, tzinfo=UTC)]


UNWRITABLE: list[tuple[Any, Any]] = [
    (datetime, datetime(2026, 1, 1)),  # noqa: DTZ001  naive is the point
    (datetime, datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))),
    (str, "\ud800"),
    (Any, object()),
]


@pytest.mark.parametrize(("kind", "value"), UNWRITABLE)
def test_a_value_that_cannot_be_written_is_refused_with_its_field_name(kind: Any, value: Any) -> None:
    with pytest.raises(UnencodableEvent, match=r"stored: given: (?!.*Error (calling|serializing))"):
        stored(kind, value)


@pytest.mark.parametrize("at", INSTANTS)
def test_an_instant_is_read_back_in_utc_in_every_container(at: datetime) -> None:
    utc = at.astimezone(UTC)
    kinds = (datetime, at), (datetime | None, at), (frozenset[datetime], frozenset([at])), (list[datetime], [at])
    for kind, value in kinds:
        restored = stored(kind, value)
        (instant,) = [restored] if isinstance(restored, datetime) else restored
        assert (instant.tzinfo, instant.fold, type(instant)) == (UTC, 0, datetime)
        assert instant == datetime.fromisoformat(utc.isoformat())
    ((key, _),) = stored(dict[datetime, int], {at: 1}).items()
    assert (key.tzinfo, key) == (UTC, datetime.fromisoformat(utc.isoformat()))


def test_the_refusal_of_an_event_with_personal_fields_shows_no_value() -> None:
    @event("edge.personal")
    class Secret:
        name: Personal[str]
        born: time

    with pytest.raises(UnencodableEvent, match="born") as caught:
        Catalog([Secret]).encode(Secret(name="Ada", born=time(4, 21, fold=1)))
    assert "4, 21" not in str(caught.value)


def test_equal_sets_are_written_alike() -> None:
    @event("edge.sets")
    class Sets:
        tags: frozenset[str]
        numbers: set[int]
        mixed: frozenset[int | str]
        inner: tuple[frozenset[Decimal], ...]

    catalog = Catalog([Sets])
    tags, amounts = [str(number) for number in range(50)], [Decimal(1), Decimal(3)]

    def new_sets(step: int) -> Sets:
        inner = (frozenset(amounts[::step]),)
        mixed: list[int | str] = [1, "a"]
        numbers = {*[0, 8, 16][::step]}
        return Sets(tags=frozenset(tags[::step]), numbers=numbers, mixed=frozenset(mixed[::step]), inner=inner)

    value, other = new_sets(1), new_sets(-1)
    assert list(value.numbers) != list(other.numbers), "else nothing is tried here"
    body = catalog.encode(value).body
    assert catalog.encode(other).body == body
    assert orjson.loads(body)["numbers"] == [0, 8, 16]
    assert orjson.loads(body)["tags"] == sorted(tags)


NUMBERS = b"123456789012345678901234567890 -18446744073709551617 -0.0 -0 1.0 1e400 NaN Infinity".split()
OTHERS = [b'"\\ud800"', b'{"a":1,"a":2}', b"[1e400]", b'{"a":NaN}', b"[" * 90 + b"]" * 90, b"\xff"]


@event("edge.grown", schema=2)
class Grown:
    given: Any


@upcaster("edge.grown", schema=1)
def unchanged(body: dict[str, Any]) -> dict[str, Any]:
    return body


@pytest.mark.parametrize("value", [*NUMBERS, *OTHERS])
def test_json_is_read_alike_in_events_upcasters_snapshots_and_messages(value: bytes) -> None:
    catalog = Catalog([Grown], [unchanged])
    body = b'{"given":%b}' % value
    inbox, plain = IncomingDecoder(Grown, "x"), IncomingDecoder(dict[str, Any], "x")
    cloud = b'{"specversion":"1.0","id":"1","source":"s","type":"edge.grown","data":%b}' % body
    newest, older = catalog.resolve("edge.grown", 2), catalog.resolve("edge.grown", 1)
    assert newest is not None
    assert older is not None
    readers: list[Callable[[], Any]] = [
        lambda: newest.decode(body).given,
        lambda: older.decode(body).given,
        lambda: inbox((1, 1, b"s", b"", body)).data.given,
        lambda: inbox((1, 1, b"s", b"", cloud)).data.given,
        lambda: plain((1, 1, b"s", b"", body)).data["given"],
        lambda: plain((1, 1, b"s", b"", cloud)).data["given"],
        lambda: read_json(body)["given"],
    ]
    results = set[str]()
    for read in readers:
        try:
            results.add(repr(read()))
        except (ValueError, UndecodableMessage):
            results.add("refused")
    assert len(results) == 1


@pytest.mark.parametrize("value", [{"a": 2**64}, [-(2**63) - 1], 2**200, {"a": [None, {"b": 10**30}]}, "null", -0.0])
def test_a_value_written_as_json_is_read_back_unchanged(value: Any) -> None:
    assert repr(read_json(dump_json(value))) == repr(value)


@event("edge.counted")
class Counted:
    integers: dict[int, int]
    floats: dict[float, int]
    decimals: dict[Decimal, int]
    bools: dict[bool, int]


COUNTED = Counted(
    integers={1: 1, -5: 2, 0: 3, 2**80: 4},
    floats={1.5: 1, 1e16: 2, 1e-7: 3, 3.0: 4},
    decimals={Decimal("1.50"): 1, Decimal("1E+5"): 2},
    bools={True: 1, False: 2},
)


def test_numbers_as_keys_are_read_back_unchanged() -> None:
    catalog = Catalog([Counted])
    body = catalog.encode(COUNTED).body
    assert catalog.resolve("edge.counted", 1).decode(body) == COUNTED


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"integers": {"%b": 1}}' % key for key in (b"01", b"1_0", b" 1", b"+1", b"1.0", b"-")),
        *(b'{"floats": {"%b": 1}}' % key for key in (b"1_0", b" 1", b"1e999", b"nan", b".5")),
        *(b'{"decimals": {"%b": 1}}' % key for key in (b"1_0", b" 1", b"01", b"1E9999999", b"Infinity")),
        *(b'{"bools": {"%b": 1}}' % key for key in (b"1", b"yes", b"True")),
    ],
)
def test_a_key_that_is_not_the_written_form_of_a_number_is_refused(body: bytes) -> None:
    """Otherwise two keys of an object could become the same key, and a value would be lost."""
    complete = {"integers": {}, "floats": {}, "decimals": {}, "bools": {}, **read_json(body)}
    with pytest.raises(ValueError, match=r"written as|digits alone|true or false"):
        Catalog([Counted]).resolve("edge.counted", 1).decode(dump_json(complete))


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}, [2**64, float("nan")]])
def test_nan_and_infinity_cannot_be_written(value: Any) -> None:
    with pytest.raises(ValueError, match="NaN"):
        dump_json(value)


@pytest.mark.parametrize(
    ("number", "other"), [("18446744073709551616", "18446744073709551617"), ("1", "1.0"), ("1", "true")]
)
def test_an_import_names_a_field_whose_values_differ_only_in_json(number: str, other: str) -> None:
    stored, imported = (b'{"a":%b,"b":1}' % text.encode() for text in (number, other))
    assert differing_fields(stored, imported) == ["a"]


T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Box(Generic[T]):
    value: T


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Literal[1, "x"], "true"), (Literal[1, "x"], "1.0"), (Literal[True], "1"), (Literal[0] | None, "false")],
)
def test_a_number_that_only_equals_the_value_of_a_literal_is_not_read_as_it(kind: Any, text: str) -> None:
    codec = BodyCodec(event("bill.sorted")(type("Sorted", (), {"__annotations__": {"kind": kind}})))
    with pytest.raises(ValueError, match="a member of an enum or of a literal travels as its value, of the same type"):
        codec.decode(b'{"kind":%b}' % text.encode())


def test_a_deque_or_a_defaultdict_that_would_lose_its_limit_or_its_default_is_refused() -> None:
    @event("bill.kept")
    class Kept:
        newest: deque[int]
        sums: defaultdict[str, int]

    codec = BodyCodec(Kept)
    given = Kept(newest=deque([1]), sums=defaultdict(int, a=1))
    assert codec.read_back(given)[1] == given
    with pytest.raises(UnencodableEvent, match="newest: its maxlen 2 would be lost"):
        codec.read_back(Kept(newest=deque([1], 2), sums=defaultdict(int)))
    with pytest.raises(UnencodableEvent, match="sums: it would be read back with the default_factory"):
        codec.read_back(Kept(newest=deque(), sums=defaultdict(lambda: 7)))


def test_a_default_of_bytes_is_exported_as_the_codec_writes_it() -> None:
    @event("edge.padded")
    class Padded:
        given: bytes = b"\xff\xff\xfe"

    body = orjson.loads(Catalog([Padded]).encode(Padded()).body)
    assert body["given"] == shape_of(Padded)["properties"]["given"]["default"] == "///+"


def test_a_generic_event_or_aggregate_is_refused_where_it_is_declared() -> None:
    bases: list[Any] = [Generic[T], Generic[P], Box[int]]
    classes = [new_class("Changed", (base,)) for base in bases]
    fields = ({"__annotations__": {"value": kind}, "__module__": __name__} for kind in (T, list[T], T | None))
    classes += [type("Changed", (), namespace) for namespace in fields]
    for cls in classes:
        with pytest.raises(DefinitionError, match="generic event is not supported"):
            event("edge.changed")(cls)
    with pytest.raises(DefinitionError, match="generic aggregate is not supported"):
        aggregate("edge")(new_class("Setting", (Generic[T],)))


@pytest.mark.parametrize("decorator", [event("box.taken"), aggregate("box")])
@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"slots": True}])
def test_a_class_that_is_a_dataclass_already_is_refused(decorator: Callable[[type], type], options: Any) -> None:
    box = dataclass(type("Box", (), {"__annotations__": {"size": int}}), **options)
    with pytest.raises(DefinitionError, match=r"Box is a dataclass already.*: remove @dataclass from it"):
        decorator(box)


def test_a_generic_value_within_an_event_keeps_its_type() -> None:
    assert stored(Box[Decimal], Box(value=Decimal("1.50"))) == Box(value=Decimal("1.50"))
    with pytest.raises(UnencodableEvent, match="given"):
        stored(Box[Decimal], Box(value=3))


def test_an_annotation_of_an_event_may_name_local_and_later_classes() -> None:
    @dataclass(frozen=True)
    class Local:
        at: datetime

    @event("edge.local")
    class Uses:
        local: Local
        later: Later | None = None
        inner: Uses | None = None

    value = Uses(local=Local(NOON), later=Later(1), inner=Uses(local=Local(NOON)))
    assert Catalog([Uses]).encode(value).event == value


@dataclass(frozen=True)
class Later:
    n: int


def test_an_annotation_that_cannot_be_resolved_is_named() -> None:
    @event("edge.lost")
    class Lost:
        given: Nowhere  # noqa: F821  # pyright: ignore[reportUndefinedVariable]

    with pytest.raises(DefinitionError, match="'Nowhere'"):
        Catalog([Lost])


class Count(IntEnum):
    SINGLE = 1


OTHERWISE: list[tuple[Any, str]] = [
    (date, '"1577836800"'),
    (datetime, '"1577836800"'),
    (datetime, '"-5"'),
    (Count, "true"),
    (Count, "1.0"),
    (UUID, '"urn:uuid:12345678-1234-5678-1234-567812345678"'),
    (UUID, '"{12345678-1234-5678-1234-567812345678}"'),
    (UUID, '"12345678123456781234567812345678"'),
    (dict[Decimal | None, int], '{"1_0": 1}'),
    (dict[int | None, int], '{"01": 1}'),
    (dict[Count, int], '{"01": 1}'),
    (dict[date, int], '{"1577836800": 1}'),
    (dict[datetime, int], '{"2026-01-01T02:00:00+02:00": 1}'),
    (dict[UUID, int], '{"12345678-1234-5678-1234-56781234567A": 1}'),
    (dict[timedelta, int], '{"PT24H": 1}'),
]
"""Texts that pydantic accepts for a value although it is written otherwise."""


@pytest.mark.parametrize(("kind", "text"), OTHERWISE)
def test_a_text_that_pydantic_would_convert_is_refused(kind: Any, text: str) -> None:
    event_class = event("edge.otherwise")(
        new_class("Otherwise", exec_body=lambda body: body.update(__annotations__={"v": kind}))
    )
    with pytest.raises(ValueError, match="v"):
        BodyCodec(event_class).decode(f'{{"v": {text}}}'.encode())


def test_a_key_outside_the_years_1_to_9999_in_utc_is_refused() -> None:
    event_class = event("edge.early")(
        new_class("Early", exec_body=lambda body: body.update(__annotations__={"v": dict[datetime, int]}))
    )
    with pytest.raises(ValueError, match="years 1 to 9999"):
        BodyCodec(event_class).decode(b'{"v": {"0001-01-01T00:00:00+02:00": 1}}')


def test_recursive_events_and_events_with_validators_are_declared() -> None:
    @event("tree.grown")
    class Grown:
        leaves: int = 0

        @model_validator(mode="after")
        def check(self) -> Self:
            return self

    @event("tree.split")
    class Split:
        parts: tuple[Split, ...] = ()

    catalog = Catalog([Grown, Split])
    assert catalog.faults() == []
    assert catalog.encode(Split(parts=(Split(),))).body == b'{"parts":[{"parts":[]}]}'
