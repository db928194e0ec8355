"""The JSON profile, the catalog and the headers: an event is read back as it was stored."""

from __future__ import annotations

from asyncio import CancelledError
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventjet import DefinitionError, Metadata, event, upcaster
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import (
    COMMAND,
    EXPECTED,
    MSG_ID,
    SCHEMA,
    TYPE,
    VERSION,
    RawRecord,
    context_headers,
    header_block,
)
from eventjet.codec.records import Decoder
from eventjet.errors import Refused, UndecodableEvent, UnencodableEvent, UnknownEvent


class Colour(Enum):
    RED = "red"


@event("all.kinds")
class Kinds:
    text: str = ""
    amount: Decimal = Decimal(0)
    count: int = 0
    ratio: float = 0.0
    at: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    day: date = date(2026, 1, 1)
    key: UUID = UUID(int=0)
    raw: bytes = b""
    flag: bool = False
    colour: Colour = Colour.RED
    many: tuple[Decimal, ...] = ()
    maybe: int | None = None
    named: dict[str, int] | None = None


@event("thing.renamed", schema=3, formerly=("thing.titled",))
class Renamed:
    title: str
    by: str
    why: str = ""


@upcaster("thing.renamed", schema=1)
def names_its_author(body: dict[str, object]) -> dict[str, object]:
    return {**body, "by": "nobody"}


@upcaster("thing.renamed", schema=2)
def title_was_name(body: dict[str, object]) -> dict[str, object]:
    return {"title": body["name"], "by": body["by"]}


def catalog() -> Catalog:
    return Catalog([Kinds, Renamed], [names_its_author, title_was_name], ["thing.retired"])


def record(
    body: bytes, *, type_name: str = "all.kinds", schema: str = "1", subject: bytes = b"app.thing.a=2Eb", **more: str
) -> RawRecord:
    pairs = [(MSG_ID, "id-1"), (EXPECTED, "4"), (TYPE, type_name), (SCHEMA, schema), (VERSION, "2")]
    return 5, 1_700_000_000_123_456_789, subject, header_block([*pairs, *more.items()]), body


kinds = st.builds(
    Kinds,
    text=st.text(),
    amount=st.decimals(allow_nan=False, allow_infinity=False),
    count=st.integers(min_value=-(2**200), max_value=2**200),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    at=st.datetimes(timezones=st.timezones()).filter(lambda at: at.utcoffset() is not None),
    day=st.dates(),
    key=st.uuids(),
    raw=st.binary(),
    flag=st.booleans(),
    many=st.lists(st.decimals(allow_nan=False, allow_infinity=False), max_size=3).map(tuple),
    maybe=st.none() | st.integers(),
    named=st.none() | st.dictionaries(st.text(), st.integers(), max_size=3),
)


@pytest.mark.parametrize("kind", [CancelledError, GeneratorExit, SystemExit, KeyError])
async def test_an_upcaster_that_raises_a_base_exception_makes_its_event_undecodable(kind: type[BaseException]) -> None:
    @upcaster("thing.renamed", schema=1)
    def ends(body: dict[str, object]) -> dict[str, object]:
        raise kind

    decode = Decoder(Catalog([Kinds, Renamed], [ends, title_was_name]))
    with pytest.raises(UndecodableEvent, match=kind.__name__):
        decode(record(b'{"name": "a"}', type_name="thing.renamed"))


@given(kinds)
def test_every_event_is_read_back_equal_or_refused(original: Kinds) -> None:
    try:
        encoded = catalog().encode(original)
    except UnencodableEvent:
        # A zone can push a time at the ends of the calendar out of it.
        assert original.at.year in (1, 9999)
        return
    recorded = Decoder(catalog())(record(encoded.body))
    assert recorded is not None
    # In UTC, since Python calls a time that its own zone has twice unequal to every other.
    assert recorded.data == replace(original, at=original.at.astimezone(UTC))


def test_the_json_of_an_event_is_readable_in_other_languages() -> None:
    example = Kinds(
        amount=Decimal("1234567890123456789012345.678"),
        count=2**53 + 1,
        at=datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=timezone(timedelta(hours=2))),
        raw=b"\xff\x00\xfe",
        many=(Decimal("0.10"),),
        maybe=-(2**53),
    )
    body = orjson.loads(catalog().encode(example).body)
    assert body["amount"] == "1234567890123456789012345.678"
    assert body["count"] == "9007199254740993"
    assert body["maybe"] == -9007199254740992
    assert body["at"] == "2026-01-02T01:04:05.678901Z"
    assert body["raw"] == "/wD+"
    assert body["many"] == ["0.10"]
    assert (body["day"], body["colour"], body["flag"]) == ("2026-01-01", "red", False)


@pytest.mark.parametrize(
    "bad",
    [
        {"ratio": float("nan")},
        {"ratio": float("inf")},
        {"text": "\ud800"},
        {"at": datetime(2026, 1, 1)},  # noqa: DTZ001  naive is the point
    ],
)
def test_a_value_that_json_does_not_preserve_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UnencodableEvent, match="survive JSON"):
        catalog().encode(Kinds(**bad))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bad", [{"amount": 1.1}, {"count": "3"}, {"text": 3}, {"flag": 1}, {"amount": "1"}])
def test_an_event_refuses_values_of_other_types(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        Kinds(**bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "body",
    [
        b'{"amount": 1.1}',
        b'{"amount": "NaN"}',
        b'{"count": 1.5}',
        b'{"count": "12"}',
        b'{"raw": "?"}',
        b'{"at": "2026-01-01T00:00:00"}',
        b"{",
        b"[]",
        b"\xff\xfe",
        b"",
    ],
)
def test_an_undecodable_body_is_refused_with_its_position_and_bytes(body: bytes) -> None:
    with pytest.raises(UndecodableEvent) as caught:
        Decoder(catalog())(record(body))
    assert (caught.value.position, caught.value.data) == (5, body)


@pytest.mark.parametrize(
    ("type_name", "schema", "body", "says"),
    [
        ("thing.renamed", "3", b'{"by":"x"}', "title: Field required. If a newer release recorded it, deploy that."),
        (
            "thing.renamed",
            "3",
            b"{}",
            "Otherwise give `title` a default, or raise `schema` and write an upcaster. Only if",
        ),
        ("all.kinds", "1", b'{"count":"12"}', "count: it is stored as text and declared as int"),
        ("all.kinds", "1", b"{", "Inspect it with `eventjet tail`"),
        ("all.kinds", "1", b"[]", "Inspect it with `eventjet tail`"),
    ],
)
def test_an_undecodable_event_suggests_a_change_of_its_class_first(
    type_name: str, schema: str, body: bytes, says: str
) -> None:
    with pytest.raises(UndecodableEvent) as caught:
        Decoder(catalog())(record(body, type_name=type_name, schema=schema))
    assert says in str(caught.value)


def test_unknown_fields_are_ignored_on_reading() -> None:
    recorded = Decoder(catalog())(record(b'{"text":"x","later":1}'))
    assert recorded is not None
    assert recorded.data == Kinds(text="x")


@pytest.mark.parametrize(
    ("type_name", "schema", "body"),
    [
        ("thing.renamed", "1", b'{"name":"x"}'),
        ("thing.titled", "2", b'{"name":"x","by":"nobody"}'),
        ("thing.renamed", "3", b'{"title":"x","by":"nobody"}'),
    ],
)
def test_older_schemas_and_former_names_are_upcast(type_name: str, schema: str, body: bytes) -> None:
    recorded = Decoder(catalog())(record(body, type_name=type_name, schema=schema))
    assert recorded is not None
    assert recorded.data == Renamed(title="x", by="nobody")
    assert recorded.aggregate_id == "a.b"


@pytest.mark.parametrize(
    ("type_name", "schema"), [("thing.renamed", "4"), ("never.heard", "1"), ("thing.renamed", "0")]
)
def test_an_unknown_event_is_refused_with_its_position_and_bytes(type_name: str, schema: str) -> None:
    with pytest.raises(UnknownEvent, match="position 5") as caught:
        Decoder(catalog())(record(b"{}", type_name=type_name, schema=schema))
    assert caught.value.data == b"{}"


def test_a_retired_event_is_skipped() -> None:
    assert Decoder(catalog())(record(b"?", type_name="thing.retired")) is None


@pytest.mark.parametrize(
    "bad",
    [
        record(b"{}", schema="one"),
        record(b"{}", subject=b"app.thing"),
        record(b"{}", subject=b"app.thing.a.b"),
        record(b"{}", subject=b"app.thing.=ZZ"),
        record(b"{}", subject=b"app.thing.\xff"),
        (5, 1, b"app.thing.a", b"", b"{}"),
        (5, 1, b"app.thing.a", header_block([(TYPE, "all.kinds"), (SCHEMA, "1")]), b"{}"),
        (5, 1, b"app.thing.a", header_block([(TYPE, "all.kinds"), (SCHEMA, "1"), (VERSION, "x")]), b"{}"),
        record(b"{}", **{"Ej-Encoding": "aes"}),
        record(b"{}", **{"Ej-Recorded-At": "yesterday"}),
    ],
)
def test_a_foreign_message_is_an_undecodable_event(bad: RawRecord) -> None:
    with pytest.raises(UndecodableEvent):
        Decoder(catalog())(bad)


@pytest.mark.parametrize("more", [{}, {COMMAND: "c", "Ej-Encoding": "json", "Nats-Stream": "app"}])
@given(st.data())
def test_headers_in_any_order_give_the_same_record(more: dict[str, str], data: st.DataObject) -> None:
    usual = record(b"{}", **more)
    decoder = Decoder(catalog())
    first, *lines = usual[3].split(b"\r\n")[:-2]
    turned = (*usual[:3], b"\r\n".join([first, *data.draw(st.permutations(lines)), b"", b""]), usual[4])
    assert decoder(turned) == decoder(usual) == decoder(turned)
    assert decoder.link(turned) == decoder.link(usual)


def test_a_decoder_of_some_events_skips_others_without_decoding() -> None:
    assert Decoder(catalog(), only=[Renamed])(record(b"not even json")) is None


keys = st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True).filter(lambda key: key != "actor")


@given(
    st.text(min_size=1, max_size=60),
    st.builds(Metadata, *[st.none() | st.text(min_size=1, max_size=60) for _ in range(4)]),
    st.dictionaries(keys, st.text(min_size=1, max_size=30), max_size=3),
)
def test_metadata_survives_headers(command_id: str, drawn: Metadata, extra: dict[str, str]) -> None:
    metadata = Metadata(drawn.correlation, drawn.causation, drawn.actor, drawn.traceparent, extra)
    pairs = context_headers(command_id, metadata)
    assert all(value.isascii() and value.isprintable() for _, value in pairs)
    recorded = Decoder(catalog())(record(b"{}", **dict(pairs)))
    assert recorded is not None
    assert (recorded.command_id, recorded.metadata) == (command_id, metadata)


@pytest.mark.parametrize(
    "bad",
    [
        Metadata(actor=""),
        Metadata(actor="\ud800"),
        Metadata(correlation="x" * 2_000),
        Metadata(extra={"Bad Key": "x"}),
        Metadata(extra={"actor": "x"}),
    ],
)
def test_metadata_that_headers_cannot_carry_is_refused(bad: Metadata) -> None:
    with pytest.raises(Refused):
        context_headers(None, bad)


def test_an_imported_event_has_the_time_of_its_header() -> None:
    recorded = Decoder(catalog())(record(b"{}", **{"Ej-Recorded-At": "2020-01-01T02:00:00+02:00", COMMAND: "c"}))
    assert recorded is not None
    assert recorded.recorded_at == datetime(2020, 1, 1, tzinfo=UTC)


def test_all_faults_of_a_catalog_are_reported() -> None:
    @event("thing.other", formerly=("thing.titled",))
    class Twin:
        x: int = 0

    @upcaster("never.heard", schema=1)
    def stray(body: dict[str, object]) -> dict[str, object]:
        return body

    faults = Catalog([Renamed, Twin], [title_was_name, title_was_name, stray], ["thing.titled"]).faults()
    text = "\n".join(faults)
    for part in ("both have the wire name", "schema=1) leads on", "two upcasters", "which no aggregate", "retired"):
        assert part in text


def test_a_class_that_is_no_event_is_refused() -> None:
    with pytest.raises(DefinitionError, match="is not an event"):
        Catalog([int])
