"""Which saves share a batch: all that fit, each once, none starved, and no two on one subject."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eventjet.log.publish import BYTES_MAX, EVENTS_MAX, WAITING_MAX, BatchQueue, PendingSave
from eventjet.log.store import BATCH_MAX


def save(*subjects: str, events: int = 2, size: int = 500, name: str = "") -> PendingSave[str]:
    return PendingSave(subjects, events, size, name or "+".join(subjects))


def queue(*saves: PendingSave[str]) -> BatchQueue[str]:
    made: BatchQueue[str] = BatchQueue()
    for each in saves:
        made.put(each)
    return made


def names(saves: list[PendingSave[str]]) -> list[str]:
    return [each.payload for each in saves]


def test_all_that_wait_go_together_in_their_order() -> None:
    waiting = queue(save("a"), save("b", "c"), save("d"))
    assert names(waiting.next_batch()) == ["a", "b+c", "d"]
    assert waiting.next_batch() == []


def test_a_batch_holds_what_the_server_takes() -> None:
    each = EVENTS_MAX
    waiting = queue(*(save(f"s{number}", events=each) for number in range(BATCH_MAX // each + 1)))
    assert sum(each.events for each in waiting.next_batch()) == BATCH_MAX
    assert len(waiting.next_batch()) == 1
    waiting = queue(save("a", size=BYTES_MAX - 10), save("b", size=11), save("c", size=10))
    assert names(waiting.next_batch()) == ["a", "c"]
    assert names(waiting.next_batch()) == ["b"]


def test_large_saves_and_those_beyond_the_limit_go_by_themselves() -> None:
    waiting = queue()
    assert waiting.accepts(save("a", events=EVENTS_MAX, size=BYTES_MAX))
    assert not waiting.accepts(save("a", events=EVENTS_MAX + 1))
    assert not waiting.accepts(save("a", size=BYTES_MAX + 1))
    full = queue(*(save(f"s{number}") for number in range(WAITING_MAX)))
    assert not full.accepts(save("a"))


def test_one_that_left_is_not_sent() -> None:
    gone = save("b")
    waiting = queue(save("a"), gone)
    waiting.discard(gone)
    waiting.discard(gone)
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
def test_each_goes_once_within_the_limits_and_the_first_goes_first(
    drawn: list[tuple[frozenset[str], int, int]],
) -> None:
    saves = [
        PendingSave(tuple(sorted(subjects)), events, size, str(n)) for n, (subjects, events, size) in enumerate(drawn)
    ]
    waiting = queue(*saves)
    gone: list[str] = []
    while len(waiting):
        first = next(iter(waiting))
        group = waiting.next_batch()
        assert group[0] is first
        assert sum(each.events for each in group) <= BATCH_MAX
        assert sum(each.size for each in group) <= BYTES_MAX
        touched = [subject for each in group for subject in each.subjects]
        assert len(touched) == len(set(touched))
        gone += names(group)
    assert sorted(gone, key=int) == [each.payload for each in saves]
    for subject in "abcdef":
        of_it = [each.payload for each in saves if subject in each.subjects]
        assert [name for name in gone if name in of_it] == of_it


def test_two_saves_on_one_subject_go_one_after_the_other() -> None:
    waiting = queue(save("a", name="1"), save("a", "b", name="2"), save("c", name="3"))
    assert names(waiting.next_batch()) == ["1", "3"]
    assert names(waiting.next_batch()) == ["2"]


def test_no_save_passes_one_that_waits_for_the_same_subject() -> None:
    waiting = queue(save("a", name="1"), save("a", "b", name="2"), save("b", name="3"))
    assert [names(waiting.next_batch()) for _ in range(3)] == [["1"], ["2"], ["3"]]
