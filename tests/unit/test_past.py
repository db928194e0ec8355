"""A past as it is published again: what stays of a record, and where batches are cut."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eventjet.archive.republish
from eventjet.archive.reading import ArchiveReader
from eventjet.archive.republish import BATCH_BYTES, BATCH_MAX, HEADERS_ADDED, RestoreBatch, batches, lasting
from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.headers import RawRecord, batch_blocks, header, header_lines, logged_at, recorded_at
from eventjet.codec.subjects import SERVER_MESSAGE_MAX
from eventjet.errors import ArchiveBroken, Refused
from eventjet.log.store import Append, NewEvent, check_save, event_lines, message_size
from tests.archives import archive_of

NS = 1_700_000_000_123_456_789
ID = "Nats-Msg-Id: "
EXPECTED = "Nats-Expected-Last-Subject-Sequence: "


def record(position: int, *lines: str, subject: str = "bank.account.a", body: bytes = b"{}") -> RawRecord:
    block = "NATS/1.0\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n"
    return position, NS + position, subject.encode(), block.encode(), body


def past(*records: RawRecord, last: int | None = None) -> ArchiveReader:
    return archive_of(records, last=last)


def published(batch: RestoreBatch) -> list[RawRecord]:
    """The records as the log holds them after a batch was stored."""
    frames, final = batch.frames("id")
    blocks: list[bytes] = []
    for frame, one in zip(frames.split(b"HPUB ")[1:], batch.records, strict=False):
        start = frame.index(b"NATS/1.0")
        blocks.append(frame[start : start + int(frame.split(b" ")[1])])
        assert frame[start + len(blocks[-1]) :] == one[4] + b"\r\n"
    return [(one[0], NS * 2, one[2], block, one[4]) for one, block in zip(batch.records, [*blocks, final], strict=True)]


def test_headers_keep_their_order_and_what_was_said_to_the_server_goes() -> None:
    (batch,) = batches(
        past(
            record(
                1,
                f"{ID}e1",
                f"{EXPECTED}0",
                "Ej-Type: t",
                "Ej-Schema: 1",
                "Ej-Version: 1",
                "Ej-Meta-nats: Nats-Batch-Id: no",
                "Nats-Batch-Id: b",
                "Nats-Batch-Sequence: 2",
                "Nats-Batch-Commit: 1",
                "Nats-Expected-Last-Sequence: 0",
                "Nats-Expected-Stream: bank",
            )
        ),
        1,
    )
    (block,) = batch.blocks
    assert block == (
        b"NATS/1.0\r\nNats-Msg-Id: e1\r\nNats-Expected-Last-Subject-Sequence: 0\r\nEj-Type: t\r\nEj-Schema: 1\r\n"
        b"Ej-Version: 1\r\nEj-Meta-nats: Nats-Batch-Id: no\r\nEj-Recorded-At: 2023-11-14T22:13:20.123456790Z\r\n\r\n"
    )
    (stored,) = published(batch)
    assert stored[3].endswith(
        b"Nats-Batch-Id: id\r\nNats-Batch-Sequence: 1\r\nNats-Expected-Last-Sequence: 0\r\nNats-Batch-Commit: 1\r\n\r\n"
    )


def test_a_record_without_headers_gets_its_time() -> None:
    (batch,) = batches(past((1, NS, b"bank.account.a", b"", b"x")), 1)
    assert batch.blocks == [b"NATS/1.0\r\nEj-Recorded-At: 2023-11-14T22:13:20.123456789Z\r\n\r\n"]


def test_the_server_is_asked_to_check_the_first_expectation_of_each_subject_in_a_batch() -> None:
    (batch,) = batches(
        past(
            record(5, f"{EXPECTED}0", subject="bank.account.b"),
            record(6, f"{EXPECTED}5", subject="bank.account.b"),
            record(7, f"{EXPECTED}2", subject="bank.account.c"),
            record(8, f"{EXPECTED}6", subject="bank.account.b"),
        ),
        5,
    )
    assert [header(block, EXPECTED[:-2]) for block in batch.blocks] == ["0", None, None, None]


def test_a_chain_that_is_broken_within_a_batch_is_found_before_it_is_sent() -> None:
    with pytest.raises(ArchiveBroken, match="position 3 was written after 1, but 2 came before it"):
        list(batches(past(record(1, f"{EXPECTED}0"), record(2, f"{EXPECTED}1"), record(3, f"{EXPECTED}1")), 1))


@pytest.mark.parametrize(
    ("records", "last", "said"),
    [
        ([record(1), record(3)], 3, "has position 3 where 2 should be"),
        ([record(1), record(2)], 3, "position 3 is not in it"),
    ],
)
def test_a_past_with_a_gap_is_refused(records: list[RawRecord], last: int, said: str) -> None:
    with pytest.raises(ArchiveBroken, match=said):
        list(batches(past(*records, last=last), 1))


@pytest.mark.parametrize(
    "subject", ["$JS.API.STREAM.DELETE.other", "other.account.a", "bank.account", "bank.account.a.b", "$KV.b.a"]
)
def test_a_record_on_another_subject_is_published_nowhere(subject: str) -> None:
    """Who restores may do anything on the server, and must not do what a record of the archive says."""
    with pytest.raises(ArchiveBroken, match=r"position 1 is on .*, no subject of the log 'bank'"):
        next(batches(past(record(1, subject=subject), record(2)), 1))


def test_no_batch_holds_an_id_twice() -> None:
    found = list(batches(past(record(1, f"{ID}x"), record(2, f"{ID}y"), record(3, f"{ID}x"), record(4)), 1))
    assert [(one.first, one.last) for one in found] == [(1, 2), (3, 4)]


def test_batches_are_bounded_in_events_and_in_bytes() -> None:
    small = list(batches(past(*(record(position) for position in range(1, 2 * BATCH_MAX + 2))), 1))
    assert [len(one.records) for one in small] == [BATCH_MAX, BATCH_MAX, 1]
    large = list(batches(past(*(record(position, body=b"x" * 900_000) for position in range(1, 10))), 1))
    assert max(sum(len(one[4]) for one in batch.records) for batch in large) <= BATCH_BYTES
    assert [len(one.records) for one in large] == [4, 4, 1]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 3), st.sampled_from([0, 10, 300])), max_size=40)
)
def test_what_was_published_again_is_published_again_in_the_same_way(drawn: list[tuple[int, bool, int, int]]) -> None:
    places: dict[int, int] = {}
    records: list[RawRecord] = []
    for position, (subject, chained, name, size) in enumerate(drawn, 1):
        lines = [f"{ID}e{name}-{position // 7}"] + ([f"{EXPECTED}{places.get(subject, 0)}"] if chained else [])
        records.append(record(position, *lines, subject=f"bank.account.{subject}", body=b"x" * size))
        places[subject] = position
    if not records:
        return
    with pytest.MonkeyPatch.context() as small:
        small.setattr(eventjet.archive.republish, "BATCH_BYTES", 700)
        small.setattr(eventjet.archive.republish, "BATCH_MAX", 5)
        once = list(batches(past(*records), 1))
        stored = list(chain.from_iterable(map(published, once)))
        twice = list(batches(past(*stored), 1))
    assert [lasting(one) for one in stored] == [lasting(one) for one in records]
    assert [published(one) for one in twice] == [published(one) for one in once]


@pytest.mark.parametrize(
    "told", [(), ("Ej-Recorded-At: 2001-05-01T00:00:00Z",)], ids=["without a time", "with its own"]
)
def test_an_imported_event_keeps_both_of_its_times(told: tuple[str, ...]) -> None:
    imported = record(0, "Ej-Imported: 1", *told)
    _, subject, kept, body = lasting(imported)
    restored = (0, NS + 10**15, subject, kept, body)
    assert (recorded_at(restored), logged_at(restored)) == (recorded_at(imported), logged_at(imported))
    assert logged_at(imported) == recorded_at(record(0)) == logged_at(record(0))
    assert recorded_at(imported) == (datetime(2001, 5, 1, tzinfo=UTC) if told else logged_at(imported))
    assert lasting(restored) == lasting(imported)


@pytest.mark.parametrize("more", [(), (("Ej-Imported", "1"),)], ids=["recorded", "imported"])
def test_the_largest_event_that_a_save_takes_has_room_for_what_a_restore_adds(
    more: tuple[tuple[str, str], ...],
) -> None:
    context = header_lines([("Ej-Meta-k", "v" * 900), *more])

    def save_of(size: int) -> Append:
        encoded = EncodedEvent("t" * 60, 9_999_999, b"x" * size)
        return Append("account", "a", 2**63, 10**9, (NewEvent("x" * 36, encoded, context),))

    size = SERVER_MESSAGE_MAX
    size -= message_size(save_of(size).events[0]) + len("bank.account.a") - SERVER_MESSAGE_MAX
    check_save("bank", [save_of(size)])
    with pytest.raises(Refused):
        check_save("bank", [save_of(size + 1)])
    one = save_of(size)
    largest = (9, NS, b"bank.account.a", batch_blocks([event_lines(one, 0)])[0], one.events[0].encoded.body)
    (batch,) = batches(past(largest), 9)
    _, headers = batch.frames("0" * 16)
    assert 100 < len(headers) - len(largest[3]) <= HEADERS_ADDED
    assert len(headers) + size <= SERVER_MESSAGE_MAX
