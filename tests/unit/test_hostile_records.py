"""For any record in the log, every reader has a result or an error with its position."""

from __future__ import annotations

import pytest
from hypothesis import example, given

from eventjet import event
from eventjet.cli.output import print_json
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import RawRecord, header_block
from eventjet.codec.records import Decoder
from eventjet.domain.identity import decode_id, encode_id
from eventjet.errors import Refused, UndecodableEvent
from eventjet.operations.events import stored_json
from tests.hostile_records import check_record, records


@event("item.counted")
class Counted:
    pieces: int


@event("item.noted")
class Noted:
    text: str


CATALOG = Catalog([Counted, Noted])


def record(**more: str) -> RawRecord:
    pairs = {"Nats-Msg-Id": "m", "Ej-Type": "item.counted", "Ej-Schema": "1", "Ej-Version": "1"}
    pairs |= {name.replace("_", "-"): value for name, value in more.items()}
    return 9, 1_750_000_000_000_000_000, b"app.item.a", header_block(pairs.items()), b'{"pieces":1}'


FAR = record(Ej_Recorded_At="0001-01-01T00:00:00+23:59")


def cut(raw: RawRecord, count: int) -> RawRecord:
    return (*raw[:3], raw[3][:-count], raw[4])


@given(records(("item", "other"), ("item.counted", "item.noted", "item.retired")))
@example(FAR)
@example(cut(FAR, 4))
@example(cut(record(Ej_Command="c"), 3))
@example((*record()[:4], b"[" * 100_000))
@example((*record()[:4], b'{"a":' * 3_000 + b"1" + b"}" * 3_000))
@example(record(Ej_Version="1" * 5_000))
def test_every_reader_has_a_result_or_names_the_record(hostile: RawRecord) -> None:
    check_record(CATALOG, (Counted,), hostile)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (FAR, "Ej-Recorded-At is '0001-01-01T00:00:00\\+23:59'"),
        (cut(record(), 2), "its headers do not end"),
        (cut(record(Ej_Command="c"), 4), "its headers do not end"),
        (cut(record(Ej_Recorded_At="2026-01-01T00:00:00Z"), 4), "its headers do not end"),
        (record(Ej_Version="1" * 5_000), "ValueError"),
        (record(Ej_Version="0"), "its version is 0"),
        (record(Ej_Version="10"), "its version is 10"),
        (record(Ej_Version="+1"), "its version is 1,"),
        ((*record()[:4], b"[" * 100_000), "ValidationError"),
        ((*record()[:2], b"app.item.=00", *record()[3:]), "not the encoding"),
        ((*record()[:2], b"app.\xc3\x84.a", *record()[3:]), "not the name of an aggregate"),
    ],
)
def test_an_unreadable_record_is_refused_with_its_position_and_reason(bad: RawRecord, reason: str) -> None:
    with pytest.raises(UndecodableEvent, match=reason) as raised:
        Decoder(CATALOG)(bad)
    assert raised.value.position == 9


@pytest.mark.parametrize("aggregate_id", ["\0", "a\0b"])
def test_an_id_with_a_nul_is_refused_in_both_directions(aggregate_id: str) -> None:
    with pytest.raises(Refused, match="NUL"):
        encode_id(aggregate_id)
    with pytest.raises(ValueError, match="encoding"):
        decode_id(aggregate_id.replace("\0", "=00"))


@pytest.mark.parametrize("body", [b"[" * 400 + b"]" * 400, b"1" * 5_000, b'["\\ud800"]'])
def test_any_stored_body_can_be_printed(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    print_json(stored_json(body))
    assert capsys.readouterr().out.encode()


@pytest.mark.parametrize("depth", [100, 101])
def test_deeply_nested_json_is_shown_as_text(depth: int) -> None:
    body = b'{"a":' * (depth - 1) + b"[1]" + b"}" * (depth - 1)
    assert isinstance(stored_json(body), dict if depth <= 100 else str)
    assert stored_json(b"[" + b"[]," * 500 + b"{}]") == [*([[]] * 500), {}]
