"""Which saves share a batch: all that fit, each once, none starved, and no two on one subject."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eventjet.log.lane import BYTES_MAX, EVENTS_MAX, WAITING_MAX, Lane, Rider
from eventjet.log.store import BATCH_MAX


def rider(*subjects: str, events: int = 2, size: int = 500, name: str = "") -> Rider[str]:
    return Rider(subjects, events, size, name or "+".join(subjects))


def lane(*riders: Rider[str]) -> Lane[str]:
    made: Lane[str] = Lane()
    for one in riders:
        made.put(one)
    return made


def names(riders: list[Rider[str]]) -> list[str]:
    return [one.told for one in riders]


def test_all_that_wait_go_together_in_their_order() -> None:
    waiting = lane(rider("a"), rider("b", "c"), rider("d"))
    assert names(waiting.depart()) == ["a", "b+c", "d"]
    assert waiting.depart() == []


def test_two_saves_on_one_subject_go_one_after_the_other() -> None:
    waiting = lane(rider("a", name="1"), rider("a", "b", name="2"), rider("c", name="3"))
    assert names(waiting.depart()) == ["1", "3"]
    assert names(waiting.depart()) == ["2"]


def test_no_save_passes_one_that_waits_for_the_same_subject() -> None:
    waiting = lane(rider("a", name="1"), rider("a", "b", name="2"), rider("b", name="3"))
    assert [names(waiting.depart()) for _ in range(3)] == [["1"], ["2"], ["3"]]


def test_a_batch_holds_what_the_server_takes() -> None:
    each = EVENTS_MAX
    waiting = lane(*(rider(f"s{number}", events=each) for number in range(BATCH_MAX // each + 1)))
    assert sum(one.events for one in waiting.depart()) == BATCH_MAX
    assert len(waiting.depart()) == 1
    waiting = lane(rider("a", size=BYTES_MAX - 10), rider("b", size=11), rider("c", size=10))
    assert names(waiting.depart()) == ["a", "c"]
    assert names(waiting.depart()) == ["b"]


def test_large_saves_and_those_beyond_the_limit_go_by_themselves() -> None:
    waiting = lane()
    assert waiting.takes(rider("a", events=EVENTS_MAX, size=BYTES_MAX))
    assert not waiting.takes(rider("a", events=EVENTS_MAX + 1))
    assert not waiting.takes(rider("a", size=BYTES_MAX + 1))
    full = lane(*(rider(f"s{number}") for number in range(WAITING_MAX)))
    assert not full.takes(rider("a"))


def test_one_that_left_is_not_sent() -> None:
    gone = rider("b")
    waiting = lane(rider("a"), gone)
    waiting.leave(gone)
    waiting.leave(gone)
    assert names(waiting.depart()) == ["a"]


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
    riders = [Rider(tuple(sorted(subjects)), events, size, str(n)) for n, (subjects, events, size) in enumerate(drawn)]
    waiting = lane(*riders)
    gone: list[str] = []
    while len(waiting):
        first = next(iter(waiting))
        group = waiting.depart()
        assert group[0] is first
        assert sum(one.events for one in group) <= BATCH_MAX
        assert sum(one.size for one in group) <= BYTES_MAX
        touched = [subject for one in group for subject in one.subjects]
        assert len(touched) == len(set(touched))
        gone += names(group)
    assert sorted(gone, key=int) == [one.told for one in riders]
    for subject in "abcdef":
        of_it = [one.told for one in riders if subject in one.subjects]
        assert [name for name in gone if name in of_it] == of_it
