"""An archive that is published again: what is kept of each record, and how batches are divided."""

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
    """Return the records as the log has them after it stored a batch."""
    frames, final = batch.frames("id")
    blocks: list[bytes] = []
    for frame, batch_record in zip(frames.split(b"HPUB ")[1:], batch.records, strict=False):
        start = frame.index(b"NATS/1.0")
        blocks.append(frame[start : start + int(frame.split(b" ")[1])])
        assert frame[start + len(blocks[-1]) :] == batch_record[4] + b"\r\n"
    return [
        (batch_record[0], NS * 2, batch_record[2], block, batch_record[4])
        for batch_record, block in zip(batch.records, [*blocks, final], strict=True)
    ]


def test_headers_keep_their_order_and_lose_those_for_the_server() -> None:
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


def test_a_record_without_headers_gets_a_header_with_its_time() -> None:
    (batch,) = batches(past((1, NS, b"bank.account.a", b"", b"x")), 1)
    assert batch.blocks == [b"NATS/1.0\r\nEj-Recorded-At: 2023-11-14T22:13:20.123456789Z\r\n\r\n"]


def test_only_the_first_expectation_of_each_subject_in_a_batch_is_sent() -> None:
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


def test_a_broken_chain_within_a_batch_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ArchiveBroken, match="position 3 was written after 1, but 2 came before it"):
        list(batches(past(record(1, f"{EXPECTED}0"), record(2, f"{EXPECTED}1"), record(3, f"{EXPECTED}1")), 1))


@pytest.mark.parametrize(
    ("records", "last", "reason"),
    [
        ([record(1), record(3)], 3, "has position 3 where 2 should be"),
        ([record(1), record(2)], 3, "position 3 is not in it"),
    ],
)
def test_an_archive_with_a_gap_is_refused(records: list[RawRecord], last: int, reason: str) -> None:
    with pytest.raises(ArchiveBroken, match=reason):
        list(batches(past(*records, last=last), 1))


@pytest.mark.parametrize(
    "subject", ["$JS.API.STREAM.DELETE.other", "other.account.a", "bank.account", "bank.account.a.b", "$KV.b.a"]
)
def test_a_record_on_a_subject_outside_the_log_is_refused(subject: str) -> None:
    """A restore may do anything on the server, so a record of the archive must not choose the subject."""
    with pytest.raises(ArchiveBroken, match=r"position 1 is on .*, no subject of the log 'bank'"):
        next(batches(past(record(1, subject=subject), record(2)), 1))


def test_no_batch_has_a_message_id_twice() -> None:
    cut = list(batches(past(record(1, f"{ID}x"), record(2, f"{ID}y"), record(3, f"{ID}x"), record(4)), 1))
    assert [(batch.first, batch.last) for batch in cut] == [(1, 2), (3, 4)]


def test_batches_have_a_limit_of_events_and_of_bytes() -> None:
    small = list(batches(past(*(record(position) for position in range(1, 2 * BATCH_MAX + 2))), 1))
    assert [len(batch.records) for batch in small] == [BATCH_MAX, BATCH_MAX, 1]
    large = list(batches(past(*(record(position, body=b"x" * 900_000) for position in range(1, 10))), 1))
    assert max(sum(len(batch_record[4]) for batch_record in batch.records) for batch in large) <= BATCH_BYTES
    assert [len(batch.records) for batch in large] == [4, 4, 1]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 3), st.sampled_from([0, 10, 300])), max_size=40)
)
def test_publishing_a_restored_log_again_gives_the_same_batches(drawn: list[tuple[int, bool, int, int]]) -> None:
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
    assert [lasting(stored_record) for stored_record in stored] == [lasting(stored_record) for stored_record in records]
    assert [published(batch) for batch in twice] == [published(batch) for batch in once]


@pytest.mark.parametrize(
    "time_lines", [(), ("Ej-Recorded-At: 2001-05-01T00:00:00Z",)], ids=["without a time", "with its own"]
)
def test_a_restored_import_keeps_its_own_time_and_its_time_in_the_log(time_lines: tuple[str, ...]) -> None:
    imported = record(0, "Ej-Imported: 1", *time_lines)
    _, subject, headers, body = lasting(imported)
    restored = (0, NS + 10**15, subject, headers, body)
    assert (recorded_at(restored), logged_at(restored)) == (recorded_at(imported), logged_at(imported))
    assert logged_at(imported) == recorded_at(record(0)) == logged_at(record(0))
    assert recorded_at(imported) == (datetime(2001, 5, 1, tzinfo=UTC) if time_lines else logged_at(imported))
    assert lasting(restored) == lasting(imported)


@pytest.mark.parametrize("more", [(), (("Ej-Imported", "1"),)], ids=["recorded", "imported"])
def test_the_largest_event_of_a_save_leaves_room_for_the_headers_of_a_restore(
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
    save = save_of(size)
    largest = (9, NS, b"bank.account.a", batch_blocks([event_lines(save, 0)])[0], save.events[0].encoded.body)
    (batch,) = batches(past(largest), 9)
    _, headers = batch.frames("0" * 16)
    assert 100 < len(headers) - len(largest[3]) <= HEADERS_ADDED
    assert len(headers) + size <= SERVER_MESSAGE_MAX
