"""Decisions of processes record one event, several or none: all are clean in both type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import assert_type

from eventjet import Deadline, Jet, Outcome, Step, after, aggregate, at, do, event, process


@event("s.held")
class Held:
    pass


@aggregate("s")
class S:
    n: int = 0

    def hold(self) -> Held:
        return Held()

    def hold_twice(self) -> list[Held]:
        return [Held(), Held()]

    def evolve(self, event: Held) -> S:
        return replace(self, n=self.n + 1)


@event("p.a")
class A:
    pass


@event("p.b")
class B:
    pass


@process("p")
class P:
    n: int = 0

    def one(self) -> A:
        return A()

    def perhaps(self) -> A | None:
        return None

    def both(self) -> list[A | B]:
        return [A(), B()]

    def pair(self) -> tuple[A, B]:
        return A(), B()

    def any_number(self, count: int) -> Sequence[A] | None:
        return [A()] * count or None

    def mixed(self, count: int) -> A | list[A] | None:
        return A() if count == 1 else [A()] * count or None

    def with_outcome(self, outcome: Outcome[S, Held]) -> list[A | B]:
        return [A(), B()]

    def failed(self, error: ValueError) -> list[B]:
        return [B(), B()]

    def step(self) -> Step[P, A | B] | None:
        match self.n:
            case 0:
                return do(S, "s", S.hold).then(P.both).refused(ValueError, P.failed)
            case 1:
                return do(S, "s", S.hold_twice).then(P.pair)
            case 2:
                return do(S, "s", S.hold).then(P.any_number, 2)
            case 3:
                return do(S, "s", S.hold).then(P.mixed, count=2)
            case 4:
                return do(S, "s", S.hold).then(P.perhaps)
            case 5:
                return do(S, "s", S.hold).then_with(P.with_outcome)
            case _:
                return None

    def deadline(self) -> list[Deadline[P, A | B]]:
        soon, noon = timedelta(seconds=1), datetime(2030, 1, 1, 12, tzinfo=UTC)
        return [
            after(soon, P.one),
            after(soon, P.perhaps),
            after(soon, P.both),
            after(soon, P.pair),
            after(soon, P.any_number, 2),
            at(noon, P.mixed, 2),
            at(noon, P.both),
        ]

    def evolve(self, event: A | B) -> P:
        return replace(self, n=self.n + 1)


async def outcome(jet: Jet) -> P:
    str(await jet.settled(P, "p-1"))
    ended = await jet.settled(P, "p-1", timeout_s=30, until=lambda state: state.n > 2)
    assert_type(ended, P)
    return await jet.settled(P, "p-1")


assert_type(after(timedelta(1), P.both), Deadline[P, A | B])
assert_type(after(timedelta(1), P.any_number, 1), Deadline[P, A])
assert_type(do(S, "s", S.hold).then(P.both), Step[P, A | B])
assert_type(do(S, "s", S.hold).then(P.perhaps), Step[P, A])
