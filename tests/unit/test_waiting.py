"""Waiting for positions: which revision counts, what wakes a waiter, shared look-ups, unreachable positions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from eventjet.codec.subjects import notice, notice_subject, read_notice
from eventjet.domain.decision import Committed
from eventjet.errors import NotCaughtUp, TableLost, Unreachable, UsageError
from eventjet.jet import position_in
from eventjet.nats.protocol import Frame
from eventjet.sql.waiting import RevisionStatus, Waiting, serving
from tests.integration.projecting import BALANCES, MOVEMENTS

LONG_S = 30.0
LOG, OTHER = "0b6f3c1e-5d2a-4f0e-9a64-2f6a1c8e7d11", "another"


@dataclass
class Desk:
    """Checkpoints that a test sets, and notices that it sends."""

    standing: dict[str, list[RevisionStatus]] = field(default_factory=dict[str, list[RevisionStatus]])
    looks: int = 0
    at_once: int = 0
    looking_max: int = 0
    subjects: list[str] = field(default_factory=list[str])
    handlers: dict[str, Callable[[Frame], object]] = field(default_factory=dict[str, Callable[[Frame], object]])
    fault: Exception | None = None

    async def look(self) -> Mapping[str, Sequence[RevisionStatus]]:
        self.looks += 1
        self.at_once += 1
        self.looking_max = max(self.looking_max, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.fault is not None:
            raise self.fault
        return {name: list(statuses) for name, statuses in self.standing.items()}

    async def listen(self, subject: str, on_notice: Callable[[Frame], object]) -> None:
        self.subjects.append(subject)
        self.handlers[subject] = on_notice

    def waiting(self) -> Waiting:
        return Waiting("bank", self.look, self.listen, slow_s=LONG_S)

    def at(self, position: int, state: str = "active", revision: int = 1, **more: str) -> None:
        self.standing["balances"] = [RevisionStatus(revision, position, state, **more)]

    def tell(self, revision: int, position: int, projection: str = "balances") -> None:
        subject = notice_subject("bank", projection)
        self.handlers[subject]((b"1", subject.encode(), b"", b"", notice(revision, position)))

    async def looked(self, times: int) -> None:
        """Wait until that many looks have ended and their waiters have been woken."""
        async with asyncio.timeout(LONG_S):
            while self.looks < times or self.at_once:
                await asyncio.sleep(0.001)
        for _ in range(5):
            await asyncio.sleep(0)


def test_a_notice_is_read_back_and_other_bytes_are_ignored() -> None:
    assert notice(2, 1234) == b"2 1234"
    assert read_notice(notice(2, 1234)) == (2, 1234)
    assert read_notice(b"2 1234 and whatever a later version adds") == (2, 1234)
    for bad in (b"", b"7", b"a b", b"1 -1", b"1 \xff", b"1 " + b"9" * 300):
        assert read_notice(bad) is None


def test_a_token_names_its_app_its_position_and_its_log() -> None:
    assert Committed(None, (), 1234, 1, "bank", LOG).token == f"bank:1234@{LOG}"
    assert position_in(f"bank:1234@{LOG}", "bank") == (1234, LOG)
    assert position_in(" bank:0\t", "bank") == (0, "")


@pytest.mark.parametrize(
    "token",
    ["", "bank", "bank:", "bank:-1", "bank:01", "bank:1.0", "bank:1\n", "bank:\u0661", "bank:" + "9" * 19, "x" * 999],
)
def test_a_malformed_token_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="is not a token"):
        position_in(token, "bank")


def test_the_token_of_another_app_is_refused() -> None:
    with pytest.raises(UsageError, match="is of the app 'shop', and this connection is of 'bank'"):
        position_in("shop:7", "bank")


OWN, OLD, NEXT = RevisionStatus(2, 50, "active"), RevisionStatus(1, 100, "active"), RevisionStatus(3, 60, "active")


@pytest.mark.parametrize(
    ("statuses", "served"),
    [
        ([], RevisionStatus(2)),
        ([OWN], OWN),
        ([OLD, OWN], OWN),
        ([OLD, RevisionStatus(2, 50, "building", location="ej_2")], OLD),
        ([RevisionStatus(2, 50, "building", location="ej_2")], RevisionStatus(2, 50, "building", location="ej_2")),
        ([OLD], OLD),
        ([RevisionStatus(1, 100, "retired"), OWN], OWN),
        ([RevisionStatus(2, 50, "retired"), NEXT], NEXT),
        (
            [RevisionStatus(2, 50, "retired"), RevisionStatus(3, 60, "building", location="x")],
            RevisionStatus(2, 50, "retired"),
        ),
        ([RevisionStatus(2, 50, "failed", "because"), NEXT], RevisionStatus(2, 50, "failed", "because")),
    ],
)
def test_the_revision_that_keeps_the_declared_table_counts(
    statuses: list[RevisionStatus], served: RevisionStatus
) -> None:
    assert serving(statuses, 2) == served


async def test_a_position_that_is_reached_already_needs_a_single_look() -> None:
    desk = Desk()
    desk.at(7)
    waiting = desk.waiting()
    await waiting.caught_up(BALANCES, 7, 0)
    assert (desk.looks, desk.subjects) == (1, ["_EJ.bank.projected.balances"])
    await waiting.close()


async def test_a_projection_that_lost_its_table_reaches_no_position() -> None:
    desk = Desk()
    desk.at(7, "failed", reason=str(TableLost("balances", 1, "'balances' is not in the database")))
    waiting = desk.waiting()
    with pytest.raises(NotCaughtUp, match="has lost its rows: 'balances' is not in the database"):
        await waiting.caught_up(BALANCES, 5, LONG_S)
    await waiting.close()


async def test_a_notice_wakes_a_waiter_and_the_checkpoint_decides() -> None:
    desk = Desk()
    desk.at(7)
    waiting = desk.waiting()
    waiter = asyncio.create_task(waiting.caught_up(BALANCES, 9, LONG_S))
    await desk.looked(1)
    desk.tell(1, 9)  # too early: the checkpoint does not say so yet
    await desk.looked(2)
    assert not waiter.done()
    desk.at(9)
    desk.tell(1, 10)
    await waiter
    assert desk.looks == 3
    await waiting.close()


async def test_a_notice_of_a_lower_position_or_another_revision_wakes_no_waiter() -> None:
    desk = Desk()
    desk.standing["balances"] = [RevisionStatus(1, 7, "active"), RevisionStatus(2, 3, "building", location="beside")]
    waiting = desk.waiting()
    waiter = asyncio.create_task(waiting.caught_up(BALANCES, 9, LONG_S))
    await desk.looked(1)
    desk.tell(1, 8)
    desk.tell(2, 9)
    desk.handlers[desk.subjects[0]]((b"1", desk.subjects[0].encode(), b"", b"", b"nonsense"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert desk.looks == 1
    desk.at(9)
    desk.tell(1, 9)
    await waiter
    await waiting.close()


async def test_a_thousand_waiters_share_subscriptions_and_looks() -> None:
    desk = Desk()
    waiting = desk.waiting()
    tasks = [asyncio.create_task(waiting.caught_up(BALANCES, number, LONG_S)) for number in range(1, 1001)]
    tasks += [asyncio.create_task(waiting.caught_up(MOVEMENTS, 1, LONG_S))]
    await desk.looked(1)
    for position in range(100, 1001, 100):
        desk.at(position)
        desk.standing["movements"] = [RevisionStatus(1, position, "active")]
        desk.tell(1, position)
        async with asyncio.timeout(LONG_S):
            while sum(task.done() for task in tasks) < position + 1:
                desk.tell(1, position, "movements")
                await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert sorted(desk.subjects) == ["_EJ.bank.projected.balances", "_EJ.bank.projected.movements"]
    assert desk.looking_max == 1
    assert desk.looks < 100
    await waiting.close()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("failed", r"'balances' is stopped by a fault at position 7 and will not reach 8 \(bad event\)"),
        ("paused", r"is paused at position 7 and will not reach 8 \(bad event\). Run `eventjet resume`"),
        ("retired", "is retired at position 7"),
    ],
)
async def test_a_position_that_cannot_be_reached_is_refused_at_once(state: str, message: str) -> None:
    desk = Desk()
    desk.at(7, state, reason="bad event.")
    waiting = desk.waiting()
    await waiting.caught_up(BALANCES, 7, 0)
    async with asyncio.timeout(LONG_S / 2):
        with pytest.raises(NotCaughtUp, match=message) as raised:
            await waiting.caught_up(BALANCES, 8, LONG_S)
    assert (raised.value.state, raised.value.reached) == (state, 7)
    await waiting.close()


async def test_a_position_of_another_log_is_never_reached() -> None:
    desk = Desk()
    desk.at(7, log=OTHER)
    waiting = desk.waiting()
    for position in (0, 7, 8):
        with pytest.raises(NotCaughtUp, match=f"of another log, at position 7 .*{OTHER}, and .*{LOG}") as raised:
            await waiting.caught_up(BALANCES, position, LONG_S, LOG)
        assert raised.value.state == "of another log"
    await waiting.caught_up(BALANCES, 7, 0, OTHER)
    await waiting.caught_up(BALANCES, 7, 0)  # without the id of a log
    desk.at(0, "building")
    with pytest.raises(NotCaughtUp, match="did not reach 1 within"):
        await waiting.caught_up(BALANCES, 1, 0.05, LOG)
    await waiting.close()


async def test_a_timeout_names_the_last_position_and_its_reason() -> None:
    desk = Desk()
    desk.at(7, reason="an event of a schema that a newer deploy knows")
    waiting = desk.waiting()
    with pytest.raises(NotCaughtUp, match=r"at position 7 and did not reach 8 within 0.05 s \(an event of a schema"):
        await waiting.caught_up(BALANCES, 8, 0.05)
    with pytest.raises(NotCaughtUp, match="'movements' is at position 0"):
        await waiting.caught_up(MOVEMENTS, 1, 0)
    await waiting.close()


async def test_a_failed_look_raises_a_separate_error_for_each_waiter() -> None:
    desk = Desk()
    waiting = desk.waiting()
    tasks = [asyncio.create_task(waiting.caught_up(BALANCES, 1, LONG_S)) for _ in range(3)]
    await desk.looked(1)
    desk.fault = Unreachable("The database", "it is gone", "Start it.")
    desk.tell(1, 1)
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(error) for error in errors] == ["The database: it is gone. Start it."] * 3
    assert len({id(error) for error in errors}) == 3
    desk.fault = None
    desk.at(1)
    await waiting.caught_up(BALANCES, 1, LONG_S)
    await waiting.close()


async def test_a_task_that_is_cancelled_leaves_the_others_waiting() -> None:
    desk = Desk()
    waiting = desk.waiting()
    first, second = (asyncio.create_task(waiting.caught_up(BALANCES, 1, LONG_S)) for _ in range(2))
    await desk.looked(1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    desk.at(1)
    desk.tell(1, 1)
    await second
    await waiting.close()


async def test_waiters_get_an_error_when_the_connection_closes() -> None:
    desk = Desk()
    waiting = desk.waiting()
    waiter = asyncio.create_task(waiting.caught_up(BALANCES, 1, LONG_S))
    await desk.looked(1)
    await waiting.close()
    with pytest.raises(Unreachable, match="The connection: it is closed"):
        await waiter
    with pytest.raises(Unreachable, match="it is closed"):
        await waiting.caught_up(BALANCES, 1, 1)


class SlowDesk(Desk):
    """A desk whose first look reads the checkpoints and then waits before it returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.began = asyncio.Event()
        self.answered = asyncio.Event()

    async def look(self) -> Mapping[str, Sequence[RevisionStatus]]:
        statuses = await super().look()
        if self.looks == 1:
            self.began.set()
            await self.answered.wait()
        return statuses


async def test_closing_can_be_cancelled_while_the_last_look_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.sql.waiting._LAST_QUERY_S", 0.0)
    desk = SlowDesk()
    waiting = desk.waiting()
    waiter = asyncio.create_task(waiting.caught_up(BALANCES, 1, LONG_S))
    await desk.began.wait()
    task = waiting._task
    assert task is not None
    closing = asyncio.create_task(waiting.close())
    async with asyncio.timeout(LONG_S):
        while not task.cancelling():
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    with pytest.raises(Unreachable):
        await waiter


async def test_a_notice_during_a_look_is_not_lost() -> None:
    desk = SlowDesk()
    desk.at(300)
    waiting = desk.waiting()
    waiter = asyncio.create_task(waiting.caught_up(BALANCES, 301, LONG_S))
    await desk.began.wait()
    desk.at(301)
    desk.tell(1, 301)
    desk.answered.set()
    # Far sooner than the slow look.
    async with asyncio.timeout(LONG_S / 3):
        await waiter
    assert desk.looks == 2
    await waiting.close()
