"""The bytes on the wire stay: events, keys, headers and exported shapes of every leaf type are as in these files.

The files were written by the release that first had them. Only a deliberate change of the format may replace them:
`EVENTJET_WRITE_GOLDEN=1 pytest tests/contracts/test_wire_golden.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from eventjet import Metadata, event
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import (
    EXPECTED,
    IMPORTED,
    MSG_ID,
    SCHEMA,
    TYPE,
    VERSION,
    batch_blocks,
    context_headers,
    header_block,
    header_lines,
    logged_at,
    metadata_of,
    recorded_at,
    skip_body,
    skip_subject,
)
from eventjet.codec.records import Decoder
from eventjet.codec.shape import shape_of
from eventjet.codec.subjects import subject_of
from eventjet.contracts.samples import sample_bodies

FOLDER = Path(__file__).parent / "golden"
IS_WRITING = os.environ.get("EVENTJET_WRITE_GOLDEN") == "1"
NOON = datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
UID = UUID("0197f3a0-0000-7000-8000-000000000001")


class Colour(Enum):
    RED = "red"
    TWO = 2


class Rank(IntEnum):
    ONE = 1
    TWO = 2


class Tone(StrEnum):
    HIGH = "high"


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal = Decimal("1.50")


class Model(BaseModel, frozen=True):
    at: datetime
    size: int = 3


class Pair(NamedTuple):
    left: int
    right: Decimal


class Open(TypedDict):
    name: str
    day: date


@event("leaf.text")
class Texts:
    plain: str
    short: Annotated[str, Field(min_length=1, max_length=4)]
    like: Annotated[str, Field(pattern="^a+$")] = "a"


@event("leaf.numbers")
class Numbers:
    whole: int
    large: int
    bounded: Annotated[int, Field(ge=0, le=100)]
    ratio: float
    flag: bool
    nothing: None = None


@event("leaf.decimals")
class Decimals:
    amount: Decimal
    bounded: Annotated[Decimal, Field(gt=0, max_digits=9, decimal_places=2)]
    scientific: Decimal


@event("leaf.times")
class Times:
    at: datetime
    day: date
    clock: time
    zoned: time
    span: timedelta
    back: timedelta


@event("leaf.other", schema=3, formerly=("leaf.once",))
class Others:
    key: UUID
    raw: bytes
    colour: Colour
    two: Colour
    rank: Rank
    tone: Tone
    way: Literal["up", "down", 3]
    anything: Any


@event("leaf.containers")
class Containers:
    texts: list[str]
    amounts: tuple[Decimal, ...]
    pair: tuple[int, datetime]
    tags: frozenset[str]
    days: frozenset[date]
    by_name: Mapping[str, Decimal]
    by_day: dict[date, int]
    by_number: dict[int, str]
    by_amount: dict[Decimal, bool]
    by_flag: dict[bool, bytes]
    by_time: dict[datetime, timedelta]
    lines: Sequence[Line]
    rows: list[Pair]


@event("leaf.nested")
class Nested:
    line: Line
    maybe: Line | None
    none: Decimal | None
    model: Model
    typed: Open
    either: int | Line
    text_or_time: str | None = None
    days: list[int] = Field(default_factory=lambda: [1])


EVENTS: tuple[Any, ...] = (
    Texts(plain='a "quoted" Ä\n\x7f 😀', short="abcd"),
    Texts(plain="", short="x", like="aaa"),
    Numbers(whole=-7, large=2**53 + 1, bounded=100, ratio=1.5, flag=True),
    Numbers(whole=2**53, large=-(10**30), bounded=0, ratio=1e300, flag=False),
    Decimals(amount=Decimal("12.50"), bounded=Decimal("0.01"), scientific=Decimal("1E+3")),
    Decimals(amount=Decimal("-0.00"), bounded=Decimal(7), scientific=Decimal("1E-30")),
    Times(
        at=NOON,
        day=date(1999, 12, 31),
        clock=time(9, 30),
        zoned=time(9, 30, 1, 4, tzinfo=timezone(timedelta(hours=2))),
        span=timedelta(days=1, hours=2, microseconds=5),
        back=timedelta(seconds=-1.5),
    ),
    Times(
        at=datetime(2026, 1, 31, 14, tzinfo=timezone(timedelta(hours=2))),
        day=date(1, 1, 1),
        clock=time(0, 0, 0, 1),
        zoned=time(23, 59, tzinfo=UTC),
        span=timedelta(),
        back=timedelta(days=-400),
    ),
    Others(
        key=UID,
        raw=b"\x00\xff?",
        colour=Colour.RED,
        two=Colour.TWO,
        rank=Rank.TWO,
        tone=Tone.HIGH,
        way=3,
        anything={"b": [1, 2.5, None, True, "x"], "a": {}},
    ),
    Containers(
        texts=["b", "a"],
        amounts=(Decimal("1.0"), Decimal(2)),
        pair=(1, NOON),
        tags=frozenset({"b", "a", "c"}),
        days=frozenset({date(2026, 1, 2), date(2025, 1, 2)}),
        by_name={"b": Decimal("1.10"), "a": Decimal(0)},
        by_day={date(2026, 1, 2): 1},
        by_number={-3: "x", 10**20: "y"},
        by_amount={Decimal("1.50"): True},
        by_flag={True: b"1", False: b""},
        by_time={NOON: timedelta(minutes=3)},
        lines=[Line(sku="s"), Line(sku="t", price=Decimal("0.1"))],
        rows=[Pair(1, Decimal("2.0"))],
    ),
    Nested(
        line=Line(sku="s"),
        maybe=None,
        none=None,
        model=Model(at=NOON),
        typed=Open(name="n", day=date(2026, 1, 2)),
        either=5,
    ),
    Nested(
        line=Line(sku="s", price=Decimal("1E+3")),
        maybe=Line(sku="m"),
        none=Decimal("0.5"),
        model=Model(at=NOON, size=2**60),
        typed=Open(name="n", day=date(2026, 1, 2)),
        either=Line(sku="e"),
        text_or_time="2026-01-02",
        days=[],
    ),
)
METADATA = (
    (None, Metadata(), None),
    ("order-9", Metadata(), "deposit:6f1c"),
    ("a b/Ä%\n", Metadata(actor="clerk 3", correlation="c", causation="e"), None),
    (None, Metadata(traceparent="00-1", extra={"channel": "web", "note": "ä=1"}), None),
)


def golden(name: str, written: Any) -> Any:
    """Return the content of the file of this name; write it first when that is requested."""
    file = FOLDER / name
    if IS_WRITING:
        file.write_text(json.dumps(written, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def block_of(number: int) -> bytes:
    command_id, metadata, request = METADATA[number]
    pairs = [
        (MSG_ID, str(UID)),
        *([(EXPECTED, str(number))] if number % 2 else []),
        (TYPE, "leaf.text"),
        (SCHEMA, "1"),
        (VERSION, str(number + 1)),
        *context_headers(command_id, metadata, request),
    ]
    return header_block(pairs)


def test_bodies_are_written_unchanged_and_read_back() -> None:
    catalog = Catalog([type(sample) for sample in EVENTS])
    encoded = [catalog.encode(sample) for sample in EVENTS]
    written = [[entry.type_name, entry.schema, entry.body.decode()] for entry in encoded]
    assert written == golden("bodies.json", written)
    for sample, (name, schema, body) in zip(EVENTS, golden("bodies.json", written), strict=True):
        resolved = catalog.resolve(name, schema)
        assert resolved is not None
        assert resolved.decode(body.encode()) == sample


@pytest.mark.parametrize("number", range(len(METADATA)))
def test_headers_are_written_unchanged_and_read_back(number: int) -> None:
    block = block_of(number)
    written = [block_of(each).decode() for each in range(len(METADATA))]
    assert written == golden("headers.json", written)
    command_id, metadata, _ = METADATA[number]
    assert metadata_of(block) == (command_id, metadata)
    catalog = Catalog({Texts: "leaf"})
    record = (number + 1, 10**18, subject_of("app", "leaf", "a 1").encode(), block, b'{"plain":"","short":"x"}')
    recorded = Decoder(catalog)(record)
    assert recorded is not None
    assert (recorded.aggregate_id, recorded.version, recorded.data.short) == ("a 1", number + 1, "x")
    assert (recorded.event_id, recorded.command_id, recorded.metadata) == (str(UID), command_id, metadata)
    assert recorded.recorded_at == recorded_at(record) == logged_at(record)


def test_subjects_batches_and_skip_markers_are_written_unchanged() -> None:
    blocks = [
        [line.split(": ") for line in block.decode().split("\r\n")[1:-2]]
        for block in batch_blocks([header_lines([(MSG_ID, number)]) for number in "12"])
    ]
    (batch,) = {value for block in blocks for name, value in block if name == "Nats-Batch-Id"}
    written = {
        "subject": [subject_of("app", "leaf", each) for each in ("a-1", "a b", "Ä.*", "=")],
        "batch": [[[name, value.replace(batch, "ID")] for name, value in block] for block in blocks],
        "marker": [skip_subject("app", 17), skip_body(17, 'a "reason"').decode()],
        "imported": IMPORTED,
    }
    assert written == golden("names.json", written)


def test_shapes_and_samples_are_exported_unchanged() -> None:
    written = {kind.__name__: shape_of(kind) for kind in dict.fromkeys(map(type, EVENTS))}
    assert written == golden("shapes.json", written)
    tried = {name: sample_bodies(written[name]) for name in ("Numbers", "Decimals", "Times", "Containers")}
    assert tried == golden("samples.json", tried)
