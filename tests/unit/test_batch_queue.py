"""Which saves share a batch: all that fit, each once and in order, and no two on the same subject."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eventjet.log.publish import BYTES_MAX, EVENTS_MAX, WAITING_MAX, BatchQueue, PendingSave
from eventjet.log.store import BATCH_MAX


def save(*subjects: str, events: int = 2, size: int = 500, name: str = "") -> PendingSave[str]:
    return PendingSave(subjects, events, size, name or "+".join(subjects))


def queue(*saves: PendingSave[str]) -> BatchQueue[str]:
    saves_queue: BatchQueue[str] = BatchQueue()
    for pending in saves:
        saves_queue.put(pending)
    return saves_queue


def names(saves: list[PendingSave[str]]) -> list[str]:
    return [pending.payload for pending in saves]


def test_waiting_saves_share_a_batch_in_their_order() -> None:
    waiting = queue(save("a"), save("b", "c"), save("d"))
    assert names(waiting.next_batch()) == ["a", "b+c", "d"]
    assert waiting.next_batch() == []


def test_a_batch_stays_within_the_limits_of_the_server() -> None:
    events_per_save = EVENTS_MAX
    waiting = queue(*(save(f"s{number}", events=events_per_save) for number in range(BATCH_MAX // events_per_save + 1)))
    assert sum(pending.events for pending in waiting.next_batch()) == BATCH_MAX
    assert len(waiting.next_batch()) == 1
    waiting = queue(save("a", size=BYTES_MAX - 10), save("b", size=11), save("c", size=10))
    assert names(waiting.next_batch()) == ["a", "c"]
    assert names(waiting.next_batch()) == ["b"]


def test_large_saves_and_saves_beyond_the_queue_limit_are_not_accepted() -> None:
    waiting = queue()
    assert waiting.accepts(save("a", events=EVENTS_MAX, size=BYTES_MAX))
    assert not waiting.accepts(save("a", events=EVENTS_MAX + 1))
    assert not waiting.accepts(save("a", size=BYTES_MAX + 1))
    full = queue(*(save(f"s{number}") for number in range(WAITING_MAX)))
    assert not full.accepts(save("a"))


def test_a_discarded_save_is_not_sent() -> None:
    discarded = save("b")
    waiting = queue(save("a"), discarded)
    waiting.discard(discarded)
    waiting.discard(discarded)
    assert names(waiting.next_batch()) == ["a"]


@given(
    st.lists(
        st.tuples(
            st.frozensets(st.sampled_from("abcdef"), min_size=1, max_size=3),
            st.integers(2, EVENTS_MAX),
            st.integers(1, BYTES_MAX),
        ),
        max_size=60,
    )
)
def test_each_save_is_sent_once_within_the_limits_and_the_first_save_first(
    drawn: list[tuple[frozenset[str], int, int]],
) -> None:
    saves = [
        PendingSave(tuple(sorted(subjects)), events, size, str(n)) for n, (subjects, events, size) in enumerate(drawn)
    ]
    waiting = queue(*saves)
    sent: list[str] = []
    while len(waiting):
        first = next(iter(waiting))
        group = waiting.next_batch()
        assert group[0] is first
        assert sum(pending.events for pending in group) <= BATCH_MAX
        assert sum(pending.size for pending in group) <= BYTES_MAX
        touched = [subject for pending in group for subject in pending.subjects]
        assert len(touched) == len(set(touched))
        sent += names(group)
    assert sorted(sent, key=int) == [pending.payload for pending in saves]
    for subject in "abcdef":
        on_subject = [pending.payload for pending in saves if subject in pending.subjects]
        assert [name for name in sent if name in on_subject] == on_subject


def test_two_saves_on_a_subject_are_in_different_batches() -> None:
    waiting = queue(save("a", name="1"), save("a", "b", name="2"), save("c", name="3"))
    assert names(waiting.next_batch()) == ["1", "3"]
    assert names(waiting.next_batch()) == ["2"]


def test_no_save_overtakes_another_save_on_the_same_subject() -> None:
    waiting = queue(save("a", name="1"), save("a", "b", name="2"), save("b", name="3"))
    assert [names(waiting.next_batch()) for _ in range(3)] == [["1"], ["2"], ["3"]]
