"""What a save makes of each answer, one rule at a time; schedules of many are the simulator's."""

from __future__ import annotations

import pytest

from eventjet.log.outcome import (
    REFUSALS,
    REJECTED_MAX,
    STALE_LEADER_S,
    Acked,
    BatchRejected,
    Conflicted,
    ErrorReply,
    Look,
    NextMessage,
    NoReply,
    PermissionDenied,
    Save,
    Send,
    Stored,
    Unknown,
    shared,
)

OURS = NextMessage(7, "a")
ANOTHERS = NextMessage(7, "x")
CONFLICT = ErrorReply(400, 10071, "wrong last sequence: 3")
RACED = ErrorReply(400, 10164, "wrong last sequence")


def save(*parts: tuple[str, ...], deadline: float = 20.0) -> Save:
    return Save(parts or [("a",)], deadline=deadline, jitter=lambda: 0.5)


def test_an_acknowledged_try_is_stored_where_the_server_says() -> None:
    assert save().answered(Acked(7)) == Stored(7)


@pytest.mark.parametrize("code", [10071, 10164])
def test_a_conflict_is_believed_once_another_event_is_seen_in_the_slot(code: int) -> None:
    one = save()
    assert one.answered(ErrorReply(400, code, "wrong last sequence: 9")) == Look()
    assert one.looked([ANOTHERS], 0.0) == Conflicted(0)


def test_a_deposed_leader_that_calls_a_stored_event_a_conflict_is_not_believed() -> None:
    for answer in (CONFLICT, RACED):
        one = save()
        assert one.answered(answer) == Look()
        assert one.looked([OURS], 0.0) == Stored(7)


def test_a_conflict_with_an_empty_slot_is_tried_again_soon() -> None:
    one = save()
    one.answered(CONFLICT)
    assert one.looked([None], 0.0) == Send(0.005)
    assert one.answered(Acked(8)) == Stored(8)


def test_a_conflict_whose_slot_stays_empty_longer_than_a_leader_is_stale_is_one() -> None:
    one = save()
    one.answered(CONFLICT)
    assert isinstance(one.looked([None], 1.0), Send)
    one.answered(CONFLICT)
    # This try was sent early: its refusal may be the deposed leader's.
    assert isinstance(one.looked([None], 1.0 + STALE_LEADER_S), Send)
    one.answered(CONFLICT)
    assert one.looked([None], 1.1 + STALE_LEADER_S) == Conflicted(None)


def test_a_rival_that_is_stuck_in_process_is_waited_for() -> None:
    one = save()
    for now in (0.0, 5.0, 10.0):
        assert one.answered(RACED) == Look()
        assert isinstance(one.looked([None], now), Send)
    one.answered(CONFLICT)
    assert isinstance(one.looked([None], 15.0), Send)
    one.answered(RACED)
    assert isinstance(one.looked([None], 19.0), Send)
    assert isinstance(one.looked([None], 20.0), Unknown)


def test_patience_decides_nothing_once_a_try_is_in_doubt() -> None:
    one = save()
    one.answered(CONFLICT)
    one.looked([None], 0.0)
    one.answered(NoReply("no answer"))
    one.looked([None], 4.0)
    one.answered(CONFLICT)
    assert isinstance(one.looked([None], 10.0), Send)
    assert isinstance(one.looked([None], 20.0), Unknown)


@pytest.mark.parametrize("code", sorted(REFUSALS))
def test_a_listed_refusal_of_the_first_try_is_definite(code: int) -> None:
    assert save().answered(ErrorReply(400, code, "no")) == ErrorReply(400, code, "no")


@pytest.mark.parametrize(
    "answer",
    [
        ErrorReply(status, code, text)
        for status, code, text in [
            (0, 0, ""),
            (400, 10176, "atomic publish batch is incomplete"),
            (400, 10201, "atomic publish contains duplicate message id"),
            (400, 19999, "of a later version"),
            (408, 10055, "of a later version"),
            (409, 10158, "duplicate message id is in process"),
            (429, 10210, "too many batches"),
            (500, 10009, "JetStream cluster can not handle request"),
            (503, 10008, "JetStream system temporarily unavailable"),
            (503, 10077, "no space left on device"),
            (503, 10077, "write blk: disk quota exceeded"),
            (503, 10077, "context deadline exceeded"),
        ]
    ],
    ids=lambda answer: f"{answer.code}-{answer.text}",
)
def test_any_other_error_leaves_the_outcome_open(answer: ErrorReply) -> None:
    one = save()
    assert one.answered(answer) == Look()
    assert isinstance(one.looked([None], 0.0), Send)
    assert one.answered(Acked(3)) == Stored(3)


@pytest.mark.parametrize("text", ["maximum messages exceeded", "maximum bytes exceeded"])
def test_a_full_stream_refuses_for_good(text: str) -> None:
    assert save().answered(ErrorReply(503, 10077, text)) == ErrorReply(503, 10077, text)


@pytest.mark.parametrize("doubt", [NoReply("no answer"), Acked(3, duplicate=True), CONFLICT])
@pytest.mark.parametrize("answer", [ErrorReply(400, 10054, "too large"), PermissionDenied("denied")])
def test_a_refusal_after_a_doubtful_try_says_nothing_about_that_try(
    doubt: NoReply | Acked | ErrorReply, answer: ErrorReply | PermissionDenied
) -> None:
    one = save()
    one.answered(doubt)
    one.looked([None], 0.0)
    assert one.answered(answer) == Look()
    assert one.looked([OURS], 0.0) == Stored(7)


def test_a_denied_first_try_is_forbidden() -> None:
    assert save().answered(PermissionDenied("denied")) == PermissionDenied("denied")


def test_a_duplicate_is_looked_up_and_sent_again_when_its_slot_is_empty() -> None:
    one = save()
    assert one.answered(Acked(3, duplicate=True)) == Look()
    assert isinstance(one.looked([None], 0.0), Send)
    assert one.answered(Acked(3, duplicate=True)) == Look()
    assert one.looked([ANOTHERS], 0.0) == Conflicted(0)


def test_the_position_of_the_last_event_follows_from_any_slot_of_a_batch() -> None:
    for slots in (
        [NextMessage(11, "a"), None],
        [None, NextMessage(13, "c")],
        [NextMessage(11, "a"), NextMessage(13, "c")],
    ):
        one = save(("a", "b"), ("c", "d", "e"))
        one.answered(NoReply("no answer"))
        assert one.looked(slots, 0.0) == Stored(15)


def test_a_batch_without_its_end_is_never_called_stored_and_never_sent_again() -> None:
    one = save(("a", "b"))
    one.answered(NoReply("no answer"))
    torn = NextMessage(7, "a", is_torn=True)
    for now in (0.0, 5.0, 19.0):
        assert isinstance(one.looked([torn], now), Look)
    assert one.looked([torn], 20.0) == Unknown("the log holds only a part of them", is_torn=True)
    assert one.looked([OURS], 21.0) == Stored(8)


def test_ours_in_any_slot_outweighs_anothers_in_an_earlier_one() -> None:
    one = save(("a",), ("b",))
    one.answered(NoReply("no answer"))
    assert one.looked([NextMessage(3, "x"), NextMessage(8, "b")], 0.0) == Stored(8)


def test_a_save_that_cannot_read_its_slot_learns_from_sending() -> None:
    one = save()
    one.answered(NoReply("no answer"))
    assert isinstance(one.looked(None, 0.0), Look)
    assert isinstance(one.looked(None, 0.1), Send)


def test_a_conflict_whose_slot_cannot_be_read_stays_open() -> None:
    one = save()
    now = 0.0
    step = one.answered(CONFLICT)
    while not isinstance(step, Unknown):
        step = one.looked(None, now) if isinstance(step, Look) else one.answered(CONFLICT)
        now += 0.3
    assert now >= 20.0


def test_past_the_deadline_it_is_unknown_and_never_failed() -> None:
    one = save(deadline=5.0)
    assert one.answered(NoReply("no answer within 4 s")) == Look()
    assert one.looked([None], 5.0) == Unknown("no answer within 4 s")
    assert one.looked(None, 5.1) == Unknown("no answer within 4 s")


def test_a_slot_seen_after_the_deadline_still_answers() -> None:
    for slot, told in ((OURS, Stored(7)), (ANOTHERS, Conflicted(0))):
        one = save(deadline=5.0)
        one.answered(NoReply("no answer"))
        assert one.looked([slot], 6.0) == told


def test_no_pause_reaches_beyond_the_deadline() -> None:
    one = save(deadline=20.0)
    now = 0.0
    while True:
        one.answered(NoReply("no answer"))
        step = one.looked([None], now)
        if isinstance(step, Unknown):
            break
        assert isinstance(step, Send)
        assert step.after_s > 0
        now += step.after_s
        assert now <= 20.0


def test_a_resumed_save_looks_before_it_sends_and_believes_no_refusal() -> None:
    one = save()
    assert one.resume() == Look()
    assert isinstance(one.looked([None], 0.0), Send)
    assert one.answered(ErrorReply(400, 10054, "too large")) == Look()


def test_an_acknowledged_batch_tells_each_of_its_saves_its_own_position() -> None:
    assert shared(Acked(20), [2, 3, 5]) == [Acked(12), Acked(15), Acked(20)]
    assert shared(Acked(20), [7]) == [Acked(20)]


@pytest.mark.parametrize("code", [10071, 10164, 10201])
def test_a_conflict_of_a_batch_may_be_that_of_any_of_its_saves(code: int) -> None:
    answer = ErrorReply(400, code, "wrong last sequence: 3")
    assert shared(answer, [2]) == [answer]
    told = shared(answer, [2, 2])
    assert told == [BatchRejected(f"error {code}: wrong last sequence: 3", is_conflict=True)] * 2
    one = save()
    assert one.answered(told[0]) == Look()
    assert one.looked([ANOTHERS], 0.0) == Conflicted(0)
    one = save()
    one.answered(told[0])
    assert one.looked([OURS], 0.0) == Stored(7)


@pytest.mark.parametrize(
    "answer", [PermissionDenied("no"), ErrorReply(400, min(REFUSALS), "no"), ErrorReply(400, 10199, "no")]
)
def test_a_refusal_of_a_batch_is_no_refusal_of_its_saves_and_each_learns_its_own(
    answer: PermissionDenied | ErrorReply,
) -> None:
    told = shared(answer, [2, 2])[0]
    one = save()
    assert one.answered(told) == Look()
    step = one.looked([None], 0.0)
    assert isinstance(step, Send)
    assert step.alone
    assert one.answered(answer) == answer


@pytest.mark.parametrize("answer", [NoReply("none"), ErrorReply(429, 10210, "many"), ErrorReply(400, 10176, "part")])
def test_what_leaves_a_batch_in_doubt_leaves_each_of_its_saves_in_doubt(answer: NoReply | ErrorReply) -> None:
    assert shared(answer, [2, 2]) == [answer, answer]


def test_a_save_that_shared_batches_that_were_refused_goes_by_itself_in_the_end() -> None:
    one = save()
    alone: list[bool] = []
    for _ in range(REJECTED_MAX):
        assert one.answered(BatchRejected("another's", is_conflict=True)) == Look()
        step = one.looked([None], 0.0)
        assert isinstance(step, Send)
        alone.append(step.alone)
    assert alone == [False] * (REJECTED_MAX - 1) + [True]


def test_a_conflict_of_a_batch_does_not_make_an_empty_slot_a_conflict() -> None:
    one = save()
    for number in range(10):
        assert one.answered(BatchRejected("another's", is_conflict=True)) == Look()
        assert isinstance(one.looked([None], number * STALE_LEADER_S / 2), Send)
