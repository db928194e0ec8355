"""How a save reacts to each answer of the server, one rule a test; the simulator tries schedules of many answers."""

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


def new_save(*parts: tuple[str, ...], deadline: float = 20.0) -> Save:
    return Save(parts or [("a",)], deadline=deadline, jitter=lambda: 0.5)


def test_an_acknowledged_save_is_stored_at_the_position_of_the_acknowledgement() -> None:
    assert new_save().answered(Acked(7)) == Stored(7)


@pytest.mark.parametrize("code", [10071, 10164])
def test_a_conflict_is_definite_once_another_event_is_seen_in_the_slot(code: int) -> None:
    save = new_save()
    assert save.answered(ErrorReply(400, code, "wrong last sequence: 9")) == Look()
    assert save.looked([ANOTHERS], 0.0) == Conflicted(0)


def test_a_conflict_reply_is_ignored_when_the_slot_has_the_event_of_the_save() -> None:
    for answer in (CONFLICT, RACED):
        save = new_save()
        assert save.answered(answer) == Look()
        assert save.looked([OURS], 0.0) == Stored(7)


def test_a_save_is_sent_again_soon_after_a_conflict_with_an_empty_slot() -> None:
    save = new_save()
    save.answered(CONFLICT)
    assert save.looked([None], 0.0) == Send(0.005)
    assert save.answered(Acked(8)) == Stored(8)


def test_a_conflict_is_definite_when_its_slot_stays_empty_longer_than_a_leader_can_be_stale() -> None:
    save = new_save()
    save.answered(CONFLICT)
    assert isinstance(save.looked([None], 1.0), Send)
    save.answered(CONFLICT)
    # This try was sent early: its refusal may be the deposed leader's.
    assert isinstance(save.looked([None], 1.0 + STALE_LEADER_S), Send)
    save.answered(CONFLICT)
    assert save.looked([None], 1.1 + STALE_LEADER_S) == Conflicted(None)


def test_a_save_waits_for_a_rival_that_is_still_in_process() -> None:
    save = new_save()
    for now in (0.0, 5.0, 10.0):
        assert save.answered(RACED) == Look()
        assert isinstance(save.looked([None], now), Send)
    save.answered(CONFLICT)
    assert isinstance(save.looked([None], 15.0), Send)
    save.answered(RACED)
    assert isinstance(save.looked([None], 19.0), Send)
    assert isinstance(save.looked([None], 20.0), Unknown)


def test_an_empty_slot_decides_nothing_once_an_attempt_had_no_reply() -> None:
    save = new_save()
    save.answered(CONFLICT)
    save.looked([None], 0.0)
    save.answered(NoReply("no answer"))
    save.looked([None], 4.0)
    save.answered(CONFLICT)
    assert isinstance(save.looked([None], 10.0), Send)
    assert isinstance(save.looked([None], 20.0), Unknown)


@pytest.mark.parametrize("code", sorted(REFUSALS))
def test_a_listed_refusal_of_the_first_attempt_is_definite(code: int) -> None:
    assert new_save().answered(ErrorReply(400, code, "no")) == ErrorReply(400, code, "no")


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
def test_any_other_error_reply_leaves_the_outcome_open(answer: ErrorReply) -> None:
    save = new_save()
    assert save.answered(answer) == Look()
    assert isinstance(save.looked([None], 0.0), Send)
    assert save.answered(Acked(3)) == Stored(3)


@pytest.mark.parametrize("text", ["maximum messages exceeded", "maximum bytes exceeded"])
def test_a_refusal_by_a_full_stream_is_definite(text: str) -> None:
    assert new_save().answered(ErrorReply(503, 10077, text)) == ErrorReply(503, 10077, text)


@pytest.mark.parametrize("doubt", [NoReply("no answer"), Acked(3, duplicate=True), CONFLICT])
@pytest.mark.parametrize("answer", [ErrorReply(400, 10054, "too large"), PermissionDenied("denied")])
def test_a_refusal_decides_nothing_about_an_earlier_attempt_in_doubt(
    doubt: NoReply | Acked | ErrorReply, answer: ErrorReply | PermissionDenied
) -> None:
    save = new_save()
    save.answered(doubt)
    save.looked([None], 0.0)
    assert save.answered(answer) == Look()
    assert save.looked([OURS], 0.0) == Stored(7)


def test_a_denied_first_attempt_is_definite() -> None:
    assert new_save().answered(PermissionDenied("denied")) == PermissionDenied("denied")


def test_a_duplicate_is_looked_up_and_sent_again_if_its_slot_is_empty() -> None:
    save = new_save()
    assert save.answered(Acked(3, duplicate=True)) == Look()
    assert isinstance(save.looked([None], 0.0), Send)
    assert save.answered(Acked(3, duplicate=True)) == Look()
    assert save.looked([ANOTHERS], 0.0) == Conflicted(0)


def test_the_position_of_the_last_event_follows_from_any_slot_of_a_batch() -> None:
    for slots in (
        [NextMessage(11, "a"), None],
        [None, NextMessage(13, "c")],
        [NextMessage(11, "a"), NextMessage(13, "c")],
    ):
        save = new_save(("a", "b"), ("c", "d", "e"))
        save.answered(NoReply("no answer"))
        assert save.looked(slots, 0.0) == Stored(15)


def test_a_batch_without_its_end_is_neither_stored_nor_sent_again() -> None:
    save = new_save(("a", "b"))
    save.answered(NoReply("no answer"))
    torn = NextMessage(7, "a", is_torn=True)
    for now in (0.0, 5.0, 19.0):
        assert isinstance(save.looked([torn], now), Look)
    assert save.looked([torn], 20.0) == Unknown("the log holds only a part of them", is_torn=True)
    assert save.looked([OURS], 21.0) == Stored(8)


def test_an_own_event_in_any_slot_outweighs_a_foreign_event_in_an_earlier_slot() -> None:
    save = new_save(("a",), ("b",))
    save.answered(NoReply("no answer"))
    assert save.looked([NextMessage(3, "x"), NextMessage(8, "b")], 0.0) == Stored(8)


def test_a_save_that_cannot_read_its_slot_is_sent_again() -> None:
    save = new_save()
    save.answered(NoReply("no answer"))
    assert isinstance(save.looked(None, 0.0), Look)
    assert isinstance(save.looked(None, 0.1), Send)


def test_a_conflict_whose_slot_cannot_be_read_stays_unknown() -> None:
    save = new_save()
    now = 0.0
    step = save.answered(CONFLICT)
    while not isinstance(step, Unknown):
        step = save.looked(None, now) if isinstance(step, Look) else save.answered(CONFLICT)
        now += 0.3
    assert now >= 20.0


def test_the_outcome_is_unknown_and_not_failed_after_the_deadline() -> None:
    save = new_save(deadline=5.0)
    assert save.answered(NoReply("no answer within 4 s")) == Look()
    assert save.looked([None], 5.0) == Unknown("no answer within 4 s")
    assert save.looked(None, 5.1) == Unknown("no answer within 4 s")


def test_a_slot_that_is_read_after_the_deadline_still_decides() -> None:
    for slot, outcome in ((OURS, Stored(7)), (ANOTHERS, Conflicted(0))):
        save = new_save(deadline=5.0)
        save.answered(NoReply("no answer"))
        assert save.looked([slot], 6.0) == outcome


def test_no_pause_between_attempts_ends_after_the_deadline() -> None:
    save = new_save(deadline=20.0)
    now = 0.0
    while True:
        save.answered(NoReply("no answer"))
        step = save.looked([None], now)
        if isinstance(step, Unknown):
            break
        assert isinstance(step, Send)
        assert step.after_s > 0
        now += step.after_s
        assert now <= 20.0


def test_a_resumed_save_looks_before_it_sends_and_accepts_no_refusal() -> None:
    save = new_save()
    assert save.resume() == Look()
    assert isinstance(save.looked([None], 0.0), Send)
    assert save.answered(ErrorReply(400, 10054, "too large")) == Look()


def test_each_save_of_an_acknowledged_batch_has_its_own_position() -> None:
    assert shared(Acked(20), [2, 3, 5]) == [Acked(12), Acked(15), Acked(20)]
    assert shared(Acked(20), [7]) == [Acked(20)]


@pytest.mark.parametrize("code", [10071, 10164, 10201])
def test_a_conflict_of_a_batch_may_belong_to_any_of_its_saves(code: int) -> None:
    answer = ErrorReply(400, code, "wrong last sequence: 3")
    assert shared(answer, [2]) == [answer]
    answers = shared(answer, [2, 2])
    assert answers == [BatchRejected(f"error {code}: wrong last sequence: 3", is_conflict=True)] * 2
    save = new_save()
    assert save.answered(answers[0]) == Look()
    assert save.looked([ANOTHERS], 0.0) == Conflicted(0)
    save = new_save()
    save.answered(answers[0])
    assert save.looked([OURS], 0.0) == Stored(7)


@pytest.mark.parametrize(
    "answer", [PermissionDenied("no"), ErrorReply(400, min(REFUSALS), "no"), ErrorReply(400, 10199, "no")]
)
def test_a_refused_batch_makes_each_of_its_saves_go_alone(
    answer: PermissionDenied | ErrorReply,
) -> None:
    answer_to_save = shared(answer, [2, 2])[0]
    save = new_save()
    assert save.answered(answer_to_save) == Look()
    step = save.looked([None], 0.0)
    assert isinstance(step, Send)
    assert step.alone
    assert save.answered(answer) == answer


@pytest.mark.parametrize("answer", [NoReply("none"), ErrorReply(429, 10210, "many"), ErrorReply(400, 10176, "part")])
def test_an_answer_that_leaves_a_batch_in_doubt_leaves_each_save_in_doubt(answer: NoReply | ErrorReply) -> None:
    assert shared(answer, [2, 2]) == [answer, answer]


def test_a_save_whose_shared_batches_were_refused_is_finally_sent_alone() -> None:
    save = new_save()
    alone: list[bool] = []
    for _ in range(REJECTED_MAX):
        assert save.answered(BatchRejected("another's", is_conflict=True)) == Look()
        step = save.looked([None], 0.0)
        assert isinstance(step, Send)
        alone.append(step.alone)
    assert alone == [False] * (REJECTED_MAX - 1) + [True]


def test_a_conflict_of_a_batch_does_not_make_an_empty_slot_a_conflict() -> None:
    save = new_save()
    for number in range(10):
        assert save.answered(BatchRejected("another's", is_conflict=True)) == Look()
        assert isinstance(save.looked([None], number * STALE_LEADER_S / 2), Send)
