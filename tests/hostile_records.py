"""Hostile records: every reader returns something for each, or raises an error that names it.

`records` makes them and `check_record` is the property; more time draws more of them.
"""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any, cast

from hypothesis import strategies as st

from eventjet.archive.republish import lasting
from eventjet.cli.log import line
from eventjet.cli.output import print_json
from eventjet.codec.catalog import Catalog
from eventjet.codec.headers import RawRecord, header_block
from eventjet.codec.records import Decoder
from eventjet.domain.recorded import Recorded
from eventjet.errors import CodecError, UndecodableEvent, UnknownEvent
from eventjet.jetstream.api import direct_record
from eventjet.operations.events import event_view, stored_json
from eventjet.projections.fold import Offered, Offering, quarantined_for

_NUMBERS = st.one_of(
    st.integers(-5, 2**70).map(str),
    st.sampled_from(["", " 1", "+1", "1_0", "0x1", "1e3", "²", "9" * 19, "9" * 20, "1" * 5_000, "00", "007", "-0"]),
)
_TIMES = st.one_of(
    st.sampled_from(
        [
            "0001-01-01T00:00:00+23:59",
            "9999-12-31T23:59:59.999999999-23:59",
            "2026-01-01T00:00:00",
            "2026-W53-7",
            "2026-02-30T00:00:00Z",
            "",
            "nan",
            "1" * 5_000,
        ]
    ),
    st.datetimes().map(lambda at: f"{at.isoformat()}Z"),
)
_ANYTHING = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30)
_NAMES = st.sampled_from(
    [
        *("Nats-Msg-Id", "Nats-Expected-Last-Subject-Sequence", "Ej-Schema", "Ej-Version", "Ej-Command"),
        *("Ej-Correlation", "Ej-Causation", "traceparent", "Ej-Meta-actor", "Ej-Meta-", "Ej-Encoding", "Nats-Stream"),
        *("ej-version", "Ej-Type", ""),
    ]
)
_BODIES = st.one_of(
    st.binary(max_size=80),
    st.sampled_from(
        [
            b'{"pieces":1}',
            b'{"pieces":' + b"1" * 5_000 + b"}",
            b'{"pieces":"' + b"9" * 5_000 + b'"}',
            b"[" * 100_000,
            b"[" * 500 + b"]" * 500,
            b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
            b'{"pieces":1e999}',
            b'{"pieces":"\\ud800"}',
            b'"\\ud800"',
            b"\xff\xfe",
            b"\x00",
        ]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
)
_TOKENS = st.one_of(st.sampled_from(["a", "a-1", "=00", "=C3=A9", "=ED=A0=80", "=zz", "=41", "x" * 300]), _ANYTHING)


@st.composite
def records(draw: st.DrawFn, aggregates: tuple[str, ...], types: tuple[str, ...]) -> RawRecord:
    """Draw any record that the server stores: mostly an event with something wrong, sometimes plain noise."""
    pairs = {
        "Nats-Msg-Id": draw(st.uuids().map(str) | _ANYTHING),
        "Ej-Type": draw(st.sampled_from(types) | _ANYTHING),
        "Ej-Schema": draw(st.just("1") | _NUMBERS),
        "Ej-Version": draw(st.just("1") | _NUMBERS),
        **draw(st.dictionaries(_NAMES, _ANYTHING | _NUMBERS, max_size=3)),
        **draw(st.dictionaries(st.just("Ej-Recorded-At"), _TIMES, max_size=1)),
    }
    for name in draw(st.sets(st.sampled_from(sorted(pairs)), max_size=1)):
        del pairs[name]
    block = header_block(draw(st.permutations(list(pairs.items()))) if draw(st.booleans()) else pairs.items())
    cut = draw(st.sampled_from([0, 0, 0, 2, 4, 5]) | st.integers(0, len(block)))
    block = draw(st.just(block[: len(block) - cut]) | st.just(b"") | st.binary(max_size=60))
    aggregate = draw(st.sampled_from(aggregates) | _ANYTHING)
    subject = f"app.{aggregate}.{draw(_TOKENS)}".encode() + draw(st.just(b"") | st.binary(max_size=2))
    return draw(st.integers(1, 2**63 - 1)), draw(st.integers(0, 2**63 - 1)), subject, block, draw(_BODIES)


class _OfCatalog:
    """The part of a connection that `event_view` uses."""

    def __init__(self, catalog: Catalog) -> None:
        self.decode = Decoder(catalog)
        self.masked = catalog.masked


def check_record(catalog: Catalog, only: tuple[type, ...], record: RawRecord) -> None:
    """Assert that every reader returns something or raises an error that names the position, and nothing else."""
    read = [outcome(Decoder(catalog), record) for _ in range(2)]
    again = outcome(Decoder(catalog).link, record)
    assert type(read[0]) is type(read[1])
    assert isinstance(read[0], Recorded | CodecError | None)
    if not isinstance(read[0], CodecError):
        assert not isinstance(again, CodecError)
    offer = outcome(Offering(catalog, only), record)
    assert isinstance(offer, Offered | UnknownEvent | None)
    if isinstance(offer, Offered) and offer.error is not None:
        quarantined = quarantined_for(offer, offer.error, private=False)
        assert (
            "\0"
            not in f"{quarantined.aggregate}{quarantined.aggregate_id}{quarantined.event_id}{quarantined.event_type}"
        )
    assert lasting((*record[:3], lasting(record)[2], record[4])) == lasting(record)
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
        event = event_view(cast("Any", _OfCatalog(catalog)), record)
        line(event, with_aggregate=True)
        print_json(event, indent=None)
        print_json(stored_json(record[4]))
    direct = direct_record((b"", b"", b"", _as_direct_get(record), record[4]))
    assert direct[0] == record[0]
    if isinstance(read[0], Recorded):
        assert outcome(Decoder(catalog), (*record[:3], direct[3], record[4])) == read[0]


def outcome(read: Any, record: RawRecord) -> Any:
    """Return what a reader returns or raises for a record."""
    try:
        return read(record)
    except (UndecodableEvent, UnknownEvent) as error:
        failure = error
    assert failure.position == record[0]
    assert len(str(failure)) < 2_000
    return failure


def _as_direct_get(record: RawRecord) -> bytes:
    """Return the header block as nats-server 2.15 answers it: its own headers over the last two stored bytes."""
    lines = b"Nats-Stream: app\r\nNats-Subject: app.a.b\r\nNats-Sequence: %d\r\n" % record[0]
    lines += b"Nats-Time-Stamp: 2026-01-01T00:00:00Z\r\n\r\n"
    return record[3][:-2] + lines if len(record[3]) > 2 else b"NATS/1.0\r\n" + lines
