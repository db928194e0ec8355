"""Every reader of a log finds the same faults of chains, and those that folding a whole history finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventjet.codec import records as module
from eventjet.codec.headers import EXPECTED, RawRecord, header, number_of
from eventjet.codec.records import Chain, Decoder, chained
from eventjet.domain.history import FoldedState, fold_history
from eventjet.errors import CodecError, HistoryBroken, UndecodableEvent
from tests.unit.written_logs import (
    APP,
    SOME,
    STEPS,
    Account,
    Deposited,
    Opened,
    Order,
    Placed,
    Step,
    added,
    at,
    changed,
    header_changed,
    without,
    written,
)


class Past:
    """A log for look-ups of earlier records that counts the look-ups."""

    def __init__(self, log: Iterable[RawRecord]) -> None:
        self.log = {record[0]: record for record in log}
        self.asked: list[Sequence[int]] = []
        self.searched = 0

    def at(self, positions: Sequence[int]) -> list[RawRecord | None]:
        self.asked.append(positions)
        return [self.log.get(position) for position in positions]

    def before(self, subject: bytes, position: int) -> RawRecord | None:
        self.searched += 1
        own = [record for record in self.log.values() if record[2] == subject and record[0] < position]
        return max(own, default=None)


def faults(
    log: Sequence[RawRecord],
    skipped: Mapping[int, str] | None = None,
    only: Collection[type] | None = None,
    *,
    start: int = 1,
    remembered: int = 100,
    chunk: int = 5,
    past: Past | None = None,
) -> dict[int, str]:
    """Return the fault that a reader from `start` on finds, by position."""
    catalog = APP.catalog.of_log(skipped or {})
    own = None if only is None else catalog.aggregates_of(only)
    decode = Decoder(catalog, only, Chain(past or Past(log), catalog.skipped, own, remembered))
    fault_at: dict[int, str] = {}
    records = [record for record in log if record[0] >= start]
    for begin in range(0, len(records), chunk):
        decode.expect(records[begin : begin + chunk])
        for record in records[begin : begin + chunk]:
            try:
                decode(record)
            except UndecodableEvent as error:
                fault_at[record[0]] = error.reason
            except CodecError:
                pass
    return fault_at


MUTATIONS = ("version", "expected", "copy", "untaken", "retired", "no version", "no expectation", "of another")


def mutated(log: Sequence[RawRecord], chance: random.Random, kinds: Sequence[str]) -> list[RawRecord]:
    """Return the log after changes by a publisher whose expectations the server checks."""
    edits: dict[str, Callable[[RawRecord], RawRecord]] = {
        "version": lambda record: header_changed(record, "Ej-Version", str(chance.randint(0, 5))),
        "expected": lambda record: of_another(header_changed(record, EXPECTED, str(chance.randrange(record[0])))),
        "copy": lambda record: of_another(record) if chance.random() < 0.5 else unexpecting(record),
        "untaken": lambda record: header_changed(record, "Ej-Type", "order.placed"),
        "retired": lambda record: header_changed(record, "Ej-Type", "account.closed"),
        "no version": lambda record: changed(record, headers=b"NATS/1.0\r\nNats-Msg-Id: x\r\n\r\n"),
        "no expectation": unexpecting,
        "of another": of_another,
    }
    needs = {"version": "Ej-Version", "expected": EXPECTED, "untaken": "Ej-Type", "retired": "Ej-Type"}
    for kind in kinds:
        victim = chance.choice(log)
        if kind in needs and header(victim[3], needs[kind]) is None:
            continue
        log = added(log, edits[kind](victim)) if kind == "copy" else at(log, victim[0], edits[kind])
    return list(log)


def of_another(record: RawRecord) -> RawRecord:
    """Return the record with an expectation of another subject, which the server checked there."""
    return changed(record, headers=record[3][:-2] + EXPECTED.encode() + b"-Subject: bank.x\r\n\r\n")


def unexpecting(record: RawRecord) -> RawRecord:
    lines = [line for line in record[3].split(b"\r\n") if not line.startswith(EXPECTED.encode() + b":")]
    return changed(record, headers=b"\r\n".join(lines))


CHANGES = st.lists(st.sampled_from(MUTATIONS), max_size=4)
CHANCE = st.randoms(use_true_random=False)


@given(STEPS)
def test_a_log_that_repositories_wrote_has_no_fault_and_needs_no_look_up(steps: Sequence[Step]) -> None:
    log = written(steps)
    past = Past(log)
    assert faults(log, past=past) == {}
    assert past.asked == []
    assert past.searched == 0


@given(STEPS, CHANGES, CHANCE, st.booleans(), st.data())
def test_every_reader_finds_the_same_faults(
    steps: Sequence[Step], kinds: Sequence[str], chance: random.Random, gaps: bool, data: st.DataObject
) -> None:
    log = mutated(written(steps), chance, kinds)
    skipped = dict.fromkeys(chance.sample([record[0] for record in log], min(len(log), chance.randint(0, 2))), "")
    if gaps:
        log = without(log, *(record[0] for record in log if chance.random() < 0.2)) or log
    only = data.draw(st.sampled_from([None, {Opened, Deposited}, {Opened}, {Placed}]))
    all_faults = faults(log, skipped, only)
    start = data.draw(st.integers(1, log[-1][0]))
    remembered, chunk = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 7))
    expected = {position: fault for position, fault in all_faults.items() if position >= start}
    assert faults(log, skipped, only, start=start, remembered=remembered, chunk=chunk) == expected


@given(STEPS, CHANGES, CHANCE)
def test_folding_a_history_ends_at_the_first_fault_that_readers_find(
    steps: Sequence[Step], kinds: Sequence[str], chance: random.Random
) -> None:
    log = mutated(written(steps), chance, kinds)
    skipped = dict.fromkeys(chance.sample([record[0] for record in log], min(len(log), chance.randint(0, 2))), "")
    fault_at = faults(log, skipped)
    decode = Decoder(APP.catalog.of_log(skipped))
    for subject in {record[2] for record in log}:
        own = [record for record in log if record[2] == subject]
        initial: Any = Account() if subject.startswith(b"bank.account") else Order()
        end = None
        try:
            fold_history(FoldedState(initial, 0, 0), map(decode.link, own), "", "")
        except HistoryBroken as error:
            end = error.position
            if header(log[end - 1][3], "Ej-Type") == "account.closed":
                continue  # readers of events pass over retired events, whatever is wrong with them
        except CodecError:
            continue  # the history ends before its chain can be judged
        assert min((record[0] for record in own if record[0] in fault_at), default=None) == end


def test_a_repeated_version_is_found_by_a_reader_that_begins_there() -> None:
    log = at(SOME, 4, lambda record: header_changed(record, "Ej-Version", "3"))
    assert list(faults(log)) == [4, 6]
    assert faults(log, start=4)[4] == "version 3, and version 3 at position 3 comes before it"
    assert list(faults(log, start=6)) == [6]
    assert faults(log, start=7) == {}


def test_records_that_are_skipped_or_not_selected_keep_their_place_in_the_chain() -> None:
    assert faults(SOME, only={Opened}) == {}
    assert faults(SOME, only={Placed}, start=8) == {}
    skipped = {4: "its body is broken"}
    assert faults(SOME, skipped) == {}
    assert faults(SOME, skipped, start=6) == {}
    stray = added(SOME[:4], (0, SOME[3][1], SOME[3][2], b"", b"stray"))
    later = added(stray, header_changed(SOME[5], EXPECTED, "5"))
    assert faults(later, {5: "stray"}, start=6) == {}
    assert faults(later, {5: "stray"}) == {}


def test_earlier_records_are_looked_up_in_one_request_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [("open", number, 1) for number in range(4)] + [("deposit", number, 1) for number in range(4)]
    log = written(steps)
    past = Past(log)
    assert faults(log, start=5, chunk=100, past=past) == {}
    assert past.asked == [[1, 2, 3, 4]]
    past = Past(log)
    monkeypatch.setattr(module, "_FETCHED_MAX", 2)
    assert faults(log, start=5, chunk=100, past=past) == {}
    assert past.asked == [[1, 2], [3, 4]]


def test_a_reader_of_events_does_not_report_the_gaps_of_deleted_events() -> None:
    log = without(SOME, 3, 8)
    for start in range(1, 11):
        assert faults(log, start=start) == {}


def test_a_reader_reports_no_fault_that_a_missing_beginning_could_explain() -> None:
    log = [unexpecting(record) for record in SOME[5:]]
    assert faults(log) == {}
    assert list(faults(at(log, 9, lambda record: header_changed(record, "Ej-Version", "6")))) == [9]


def test_an_expectation_of_another_subject_is_no_proof_of_the_chain() -> None:
    """The server compares the last message of the subject that the header names."""
    expectation = b"Nats-Expected-Last-Subject-Sequence-Subject: bank.order.*\r\n\r\n"
    forged = (
        changed(header_changed(SOME[3], EXPECTED, "4"), headers=b"") if EXPECTED.encode() in SOME[3][3] else SOME[3]
    )
    headers = b"NATS/1.0\r\nNats-Msg-Id: f\r\nNats-Expected-Last-Subject-Sequence: 3\r\nEj-Type: account.deposited\r\n"
    forged = changed(
        SOME[3], headers=headers + b"Ej-Schema: 1\r\nEj-Version: 4\r\n" + expectation, body=b'{"amount":1}'
    )
    log = added(SOME, forged)
    expected = "version 4, written after position 3, and version 7 at position 9 comes before it"
    assert faults(log) == faults(log, start=11) == {11: expected}


def test_a_decoder_without_a_log_accepts_the_version_of_each_record() -> None:
    log = at(SOME, 4, lambda record: header_changed(record, "Ej-Version", "3"))
    decode = chained(APP.catalog, None, None)
    decode.expect(log)
    assert all(decode(record) is not None for record in log)


def test_an_event_after_a_skipped_position_must_have_the_next_version() -> None:
    wrong = at(SOME, 6, lambda record: header_changed(record, "Ej-Version", "4"))
    assert number_of(wrong[5][3], EXPECTED) == 4
    for start in (1, 6):
        assert list(faults(wrong, {4: "broken"}, start=start))[:1] == [6]
