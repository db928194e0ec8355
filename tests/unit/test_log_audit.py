"""An audit finds nothing in a log that repositories wrote, and names every change that was made to such a log."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventjet.codec.headers import RawRecord, header
from eventjet.codec.records import Decoder
from eventjet.domain.history import FoldedState, fold_history
from eventjet.errors import EventjetError, UndecodableEvent, UnknownEvent
from eventjet.rebuild import Kind, LogFinding
from eventjet.rebuild import log_audit as module
from eventjet.rebuild.log_audit import LogAudit, side_by_side
from tests.hostile_records import records
from tests.logs import block
from tests.unit.written_logs import (
    APP,
    SOME,
    STEPS,
    Account,
    Log,
    Order,
    Step,
    added,
    at,
    changed,
    header_changed,
    unbatched,
    without,
    written,
)

LEFT = "version 3, written after position 8, and version 1 at position 5 comes before it"
"""What the audit says of the event of order 'o 0' at position 10 when position 8 is missing."""


def audited(log: Log, archive: Log = (), *, last: int | None = None, first: int = 1) -> dict[Kind, LogFinding]:
    audit = LogAudit(APP, first=first, last=last if last is not None else log[-1][0], examples=100)
    for record, archived in side_by_side(log, archive):
        audit.take(record, archived)
    return {finding.kind: finding for finding in audit.finish()}


def finding_lines(log: Log, archive: Log = (), *, last: int | None = None, first: int = 1) -> list[str]:
    """Return one line for each example of each finding."""
    return [
        f"{kind} {example.first}-{example.last} {example.subject}: {example.what}"
        for kind, finding in audited(log, archive, last=last, first=first).items()
        for example in finding.examples
    ]


@given(STEPS)
def test_an_audit_finds_nothing_in_a_log_that_repositories_wrote(steps: Sequence[Step]) -> None:
    log = written(steps)
    assert finding_lines(log) == []
    assert finding_lines(log, log) == []


EVERY = ("delete", "swap", "duplicate", "version", "expected", "type", "unknown type", "subject", "body", "id")


@given(STEPS, st.sampled_from(EVERY), st.randoms(use_true_random=False))
def test_an_audit_finds_every_single_change(steps: Sequence[Step], change: str, chance: random.Random) -> None:
    log = written(steps)
    victim = chance.choice(log)
    position, last = victim[0], len(log)
    others = [record for record in log if record[2] == victim[2] and record is not victim]
    if change == "delete":
        assert f"gone {position}-{position} : 1 event" in finding_lines(without(log, position), last=last)
        return
    if change == "swap":
        if not others:
            return
        other = chance.choice(others)
        swapped = at(log, position, lambda _: changed(other, position=position))
        findings = audited(at(swapped, other[0], lambda _: changed(victim, position=other[0])))
    elif change == "duplicate":
        findings = audited(added(log, victim))
    elif change == "expected":
        saves = [record for record in log if header(record[3], "Nats-Expected-Last-Subject-Sequence")]
        victim = chance.choice(saves)
        wrong = chance.choice([n for n in range(last + 2) if n != int(header(victim[3], module.EXPECTED) or 0)])
        findings = audited(at(log, victim[0], lambda record: header_changed(record, module.EXPECTED, str(wrong))))
    else:
        version = int(header(victim[3], "Ej-Version") or 0)
        is_account = victim[2].startswith(b"bank.account")
        edits: dict[str, Callable[[RawRecord], RawRecord]] = {
            "version": lambda record: header_changed(
                record, "Ej-Version", str(version + chance.choice([-1, 1, 7, 10**40]))
            ),
            "type": lambda record: changed(
                header_changed(record, "Ej-Type", "order.placed" if is_account else "account.deposited"),
                body=b'{"pieces":1,"amount":1}',
            ),
            "unknown type": lambda record: header_changed(record, "Ej-Type", "account.nonsense"),
            "subject": lambda record: changed(
                record, subject=b"bank.order.o=20" if is_account else b"bank.account.a-0"
            ),
            "body": lambda record: changed(record, body=record[4][:-1]),
            "id": lambda record: header_changed(record, "Nats-Msg-Id", ""),
        }
        findings = audited(at(log, position, edits[change]))
    assert findings.keys() - {Kind.TIME}


@given(STEPS, st.integers(0, 200), st.integers(0, 200))
def test_events_that_only_the_archive_has_are_named_and_break_no_chain(
    steps: Sequence[Step], first: int, last: int
) -> None:
    log = written(steps)
    deleted = range(1 + first % len(log), 1 + max(first % len(log), last % len(log)) + 1)
    findings = audited(without(log, *deleted), log, last=len(log))
    assert list(findings) == [Kind.ARCHIVED]
    assert findings[Kind.ARCHIVED].positions == len(deleted)


@given(STEPS, st.data())
def test_an_audit_finds_a_fault_exactly_where_folding_fails(steps: Sequence[Step], data: st.DataObject) -> None:
    log = written(steps)
    drawn = data.draw(st.lists(st.sampled_from(log), min_size=1, max_size=len(log)))
    shuffled = [changed(record, position=number) for number, record in enumerate(drawn, 1)]
    decode = Decoder(APP.catalog)
    broken = False
    for subject in {record[2] for record in shuffled}:
        links = (decode.link(record) for record in shuffled if record[2] == subject)
        start: Any = Account() if subject.startswith(b"bank.account") else Order()
        try:
            fold_history(FoldedState(start, 0, 0), links, "", "")
        except EventjetError:
            broken = True
    assert bool({Kind.CHAIN, Kind.UNDECODABLE} & audited(shuffled).keys()) == broken


def test_events_missing_at_the_beginning_of_a_log_are_named() -> None:
    assert finding_lines(SOME[3:], last=10) == [
        "gone 1-3 : 3 events",
        "chain 4-4 bank.account.a-0: version 4, and no event of this aggregate comes before it",
    ]
    assert finding_lines(SOME[3:], SOME[:6], last=10) == ["archived 1-3 bank.account.a-0: 3 events"]
    assert finding_lines(SOME[3:], first=4) == []
    assert finding_lines(SOME[3:], SOME[:6], first=4) == []
    assert finding_lines(SOME[3:], [*SOME[:2], changed(SOME[4], position=3)], first=4) == [
        "chain 4-4 bank.account.a-0: version 4, and version 2 at position 2 comes before it",
        "chain 5-5 bank.order.o=200: version 1, written as its first, and version 1 at position 3 comes before it",
    ]


def test_deleted_events_are_reported_in_runs_with_the_chains_that_they_break() -> None:
    assert finding_lines(without(SOME, 2, 3, 8)) == [
        "gone 2-3 : 2 events",
        "gone 8-8 : 1 event",
        "chain 4-4 bank.account.a-0: version 4, and version 1 at position 1 comes before it",
        f"chain 10-10 bank.order.o=200: {LEFT}",
    ]


def test_a_purged_aggregate_that_began_again_breaks_its_chain_if_the_archive_has_it() -> None:
    purged = [record for record in SOME if record[2] != b"bank.order.o=200"]
    regrown = added(purged, changed(SOME[4], position=0))
    assert finding_lines(regrown) == ["gone 5-5 : 1 event", "gone 8-8 : 1 event"]
    assert finding_lines([*purged, changed(regrown[-1], position=11)], SOME) == [
        "archived 5-5 bank.order.o=200: 1 event",
        "archived 8-8 bank.order.o=200: 1 event",
        "archived 10-10 bank.order.o=200: 1 event",
        "chain 11-11 bank.order.o=200: version 1, written as its first, and version 3 at position 10 comes before it",
    ]


def test_an_archive_that_has_only_some_of_the_missing_events() -> None:
    assert finding_lines(SOME[8:], SOME[:6], last=12) == [
        "gone 7-8 : 2 events",
        "gone 11-12 : 2 events",
        "archived 1-6 : 6 events of several aggregates",
        "chain 9-9 bank.account.a-0: version 7, written after position 7, and version 5 at position 6 comes before it",
        f"chain 10-10 bank.order.o=200: {LEFT}",
    ]


def test_an_empty_log_and_a_log_that_lost_its_end() -> None:
    assert finding_lines([], last=0) == []
    assert finding_lines([], last=7) == ["gone 1-7 : 7 events"]
    assert finding_lines([], SOME, last=7) == [
        "archived 1-7 : 7 events of several aggregates",
        "end 8-10 : 3 events of several aggregates",
    ]
    assert finding_lines(SOME[:8], SOME) == ["end 9-10 : 2 events of several aggregates"]
    assert finding_lines(SOME[:5], SOME[7:], last=5) == [
        "gone 6-7 : 2 events",
        "end 8-10 : 3 events of several aggregates",
    ]


def test_events_that_differ_from_the_archive_are_named() -> None:
    other = at(SOME, 2, lambda record: changed(record, body=b'{"amount":9}'))
    other = at(other, 5, lambda record: header_changed(record, "Nats-Msg-Id", "e-5"))
    assert finding_lines(SOME, other) == [
        "differs 2-2 bank.account.a-0: not the archive's: body",
        f"differs 5-5 bank.order.o=200: the log has the event {header(SOME[4][3], 'Nats-Msg-Id')}, and the archive e-5",
    ]


@given(records(("account", "order"), ("account.opened", "order.placed", "account.closed")))
def test_a_record_of_another_program_is_reported_and_does_not_end_the_audit(drawn: RawRecord) -> None:
    log = added(SOME, changed(drawn, subject=drawn[2].replace(b"app.", b"bank.", 1)))
    findings = audited(log, SOME)
    assert all(len(example.what) <= 300 for finding in findings.values() for example in finding.examples)
    try:
        Decoder(APP.catalog)(log[-1])
    except UndecodableEvent:
        assert findings.keys() & {Kind.UNDECODABLE, Kind.FOREIGN}
    except UnknownEvent:
        assert Kind.UNKNOWN in findings or Kind.UNDECODABLE in findings


def test_an_event_on_the_subject_of_another_aggregate_is_foreign() -> None:
    forged = (0, SOME[-1][1], b"bank.order.o=200", block("account.deposited", version=4), b'{"amount":1000000}')
    assert finding_lines(added(SOME, forged)) == [
        "foreign 11-11 bank.order.o=200: account.deposited is an event of 'account'"
    ]


def test_each_record_on_a_subject_without_a_valid_id_is_reported() -> None:
    odd = (0, SOME[-1][1], b"bank.order.=zz", block("order.placed", version=1), b'{"pieces":1}')
    assert audited(added(SOME, odd, odd))[Kind.UNDECODABLE].count == 2


def batched(log: Log, first: int, last: int, ending: int) -> list[RawRecord]:
    """The log with the records `first` to `last` as one batch that ends at `ending`."""

    def change(record: RawRecord) -> RawRecord:
        number, end = record[0] - first + 1, b"Nats-Batch-Commit: 1\r\n" if record[0] == ending else b""
        fields = b"Nats-Batch-Id: b%d\r\nNats-Batch-Sequence: %d\r\n%b" % (first, number, end)
        return changed(record, headers=unbatched(record[3])[:-2] + fields + b"\r\n")

    # The log's own batches are removed: the range of a test may cut through them.

    def bare(record: RawRecord) -> RawRecord:
        is_own = len(header(record[3], "Nats-Batch-Id") or "") == 32
        return changed(record, headers=unbatched(record[3])) if is_own else record

    return [change(record) if first <= record[0] <= last else bare(record) for record in log]


def test_a_batch_that_is_stored_in_part_is_reported_as_torn() -> None:
    torn = "the end of the batch b2 is not in the log, and 3 of its messages are"
    assert finding_lines(batched(SOME, 2, 4, 4)) == []
    assert finding_lines(batched(SOME, 2, 4, 5)) == [f"torn 4-4 bank.account.a-0: {torn}"]
    assert finding_lines(batched(batched(SOME, 2, 4, 5), 5, 6, 6)) == [f"torn 4-4 bank.account.a-0: {torn}"]
    assert finding_lines(without(batched(SOME, 8, 10, 10), 10), last=10) == ["gone 10-10 : 1 event"]
    assert [line for line in finding_lines(without(batched(SOME, 2, 4, 4), 4)) if line.startswith("torn")] == []


def test_an_unfinished_batch_at_the_end_of_a_growing_log_is_not_torn() -> None:
    log = batched(SOME, 8, 10, 11)
    for grown in (False, True):
        audit = LogAudit(APP, last=10)
        for record in log:
            audit.take(record)
        assert [finding.kind for finding in audit.finish(grown=grown)] == ([] if grown else [Kind.TORN])


def test_retired_events_are_part_of_the_chain() -> None:
    closed = (0, SOME[-1][1], b"bank.account.a-0", block("account.closed", version=8), b"whatever")
    later = (0, SOME[-1][1], b"bank.account.a-0", block("account.opened", version=9), b'{"owner":"x"}')
    assert finding_lines(added(SOME, closed, later)) == []
    assert list(audited(added(SOME, later))) == [Kind.CHAIN]


def test_a_repeated_message_id_is_reported_within_the_window_of_kept_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDS_KEPT", 4)

    def log_of(*ids: str) -> list[RawRecord]:
        return [
            (
                number,
                number,
                f"bank.order.{number}".encode(),
                block("order.placed", version=1, Nats_Msg_Id=message_id),
                b'{"pieces":1}',
            )
            for number, message_id in enumerate(ids, 1)
        ]

    assert finding_lines(log_of("a", "b", "c", "d", "a")) == [
        "id 5-5 bank.order.5: its id a is that of position 1, too"
    ]
    assert finding_lines(log_of("a", "b", "c", "d", "e", "f", "g", "h", "a")) == []
    assert finding_lines(log_of("a", "b", "a", "a")) == [
        "id 3-3 bank.order.3: its id a is that of position 1, too",
        "id 4-4 bank.order.4: its id a is that of position 3, too",
    ]


def test_times_that_run_backwards_are_reported_beyond_the_skew_of_clocks() -> None:
    second = 1_000_000_000
    assert finding_lines(at(SOME, 5, lambda record: changed(record, time_ns=record[1] + 4 * second))) == []
    assert finding_lines(at(SOME, 5, lambda record: changed(record, time_ns=record[1] + 60 * second))) == [
        "time 6-6 bank.account.a-0: 60.0 s earlier than the event before it"
    ]
