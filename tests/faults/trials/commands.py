"""`Commands`: writers that run `execute` all at once while something fails, and record the answers.

Every command has a number, and its events carry it as their amount: the log itself shows which command is in it, how
often, and where.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from decimal import Decimal

from eventjet import Committed, Jet
from eventjet.commands import Repository
from eventjet.errors import ConcurrencyConflict, EventjetError, OutcomeUnknown, SaveTorn, StoreError
from eventjet.settings import Settings
from tests.faults.proxy import NatsProxy
from tests.faults.tally import Tally, tally_app

STORED, UNKNOWN, REFUSED, LOOKED, STRANGE = "stored", "unknown", "refused", "looked", "strange"
"""The answers to a command. `strange`: an error that is none of eventjet's."""
OF_ONE_CONNECTION = 3
"""Writers of a connection."""
STARTS_S = 300.0
ENDS_S = 300.0
BACKOFF_S = 0.05


class EnoughError(Exception):
    """A decision's own refusal, with the number of additions that it saw."""

    def __init__(self, additions: int) -> None:
        self.seen = additions
        super().__init__(f"{additions} are enough")


def refuse(state: Tally) -> None:
    raise EnoughError(state.additions)


def nothing(state: Tally) -> None:
    """Record nothing."""


@dataclass(slots=True)
class Attempt:
    """A command, and its answer."""

    number: int
    entities: tuple[str, ...]
    kind: str
    """`add`, `two` (two events), `both` (two aggregates in one save), `nothing` or `refuse`."""
    began: float
    command_id: str | None = None
    ended: float = 0.0
    answer: str = ""
    error: str = ""
    positions: tuple[int, ...] = ()
    """The positions of the last event of each aggregate."""
    version: int = 0
    unknown: OutcomeUnknown | None = None
    had_unknown: bool = False

    @property
    def amount(self) -> Decimal:
        return Decimal(self.number) / 100

    @property
    def events(self) -> int:
        return {"add": 1, "two": 2, "both": 2}.get(self.kind, 0)


@dataclass(slots=True)
class Commands:
    """Writers that write from a thread of their own within a `with` block, some of them over each connection.

    So saves of several events share batches, and connections compete.
    """

    settings: Settings
    app: str
    seed: int
    writers: int = 8
    entities: int = 20
    proxied: bool = False
    """Whether all connections go through one proxy, `proxy`."""
    pause_s: float = 0.0
    """The pause between two commands of a writer."""
    settles_s: float = 90.0
    """How long it may take to settle the saves that are unknown at the end."""
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    proxy: NatsProxy | None = None
    _ending: threading.Event = field(default_factory=threading.Event)
    _started: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _failure: BaseException | None = None

    def __enter__(self) -> Commands:
        self._thread = threading.Thread(target=self._run, name="commands", daemon=True)
        self._thread.start()
        assert self._started.wait(STARTS_S), "the writers did not start"
        self.check()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(ENDS_S)

    def finish(self) -> list[Attempt]:
        """End the writers and settle unknown saves: by `resolve`, or by giving the same command again."""
        self._ending.set()
        assert self._thread is not None
        self._thread.join(ENDS_S)
        assert not self._thread.is_alive(), "a writer does not end"
        self.check()
        unknown = [attempt for attempt in self.attempts if attempt.answer == UNKNOWN]
        if unknown:
            asyncio.run(self._settled(unknown))
        return self.attempts

    def check(self) -> None:
        """Raise the error that ended the writers."""
        if self._failure is not None:
            raise self._failure

    @property
    def acked(self) -> int:
        """Return the number of saves that were called stored, so far."""
        return sum(attempt.answer == STORED for attempt in list(self.attempts))

    def refusals(self) -> str:
        """Return the names of the errors so far, each with its count."""
        counts = Counter(attempt.error for attempt in list(self.attempts) if attempt.error)
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no errors"

    def await_acks(self, more: int, timeout_s: float = 60.0) -> float:
        """Wait until so many more saves were called stored; return the seconds it took."""
        began, wanted = time.monotonic(), self.acked + more
        while self.acked < wanted:
            self.check()
            assert time.monotonic() - began < timeout_s, f"{self.acked} saves of {wanted} within {timeout_s:g} s"
            time.sleep(0.01)
        return time.monotonic() - began

    def await_silence(self, seconds: float = 2.0, timeout_s: float = 60.0) -> bool:
        """Wait until no save was called stored for so long; return whether that came."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            before = self.acked
            time.sleep(seconds)
            if self.acked == before:
                return True
        return False

    def _run(self) -> None:
        try:
            asyncio.run(self._write_all())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._failure = error
        finally:
            self._started.set()

    async def _write_all(self) -> None:
        async with AsyncExitStack() as stack:
            settings = self.settings
            if self.proxied:
                self.proxy = await stack.enter_async_context(NatsProxy(settings.servers[0]))
                settings = settings.with_overrides({"servers": (self.proxy.url,)})
            connections = -(-self.writers // OF_ONE_CONNECTION)
            opened = [tally_app(self.app).connect(settings) for _ in range(connections)]
            jets = [await stack.enter_async_context(connection) for connection in opened]
            self._started.set()
            await asyncio.gather(*(self._write(jets[number % connections], number) for number in range(self.writers)))

    async def _write(self, jet: Jet, writer: int) -> None:
        chance = random.Random(f"{self.seed}/{writer}")
        tallies = jet.repository(Tally)
        count = 0
        while not self._ending.is_set():
            count += 1
            attempt = self._next(chance, count * self.writers + writer)
            self.attempts.append(attempt)
            await _answered(attempt, lambda attempt=attempt: _executed(jet, tallies, attempt))
            attempt.ended = time.monotonic()
            if attempt.error:
                await asyncio.sleep(BACKOFF_S)
            # The other writers' turn: a command that is answered at once gives up none.
            await asyncio.sleep(self.pause_s)

    def _next(self, chance: random.Random, number: int) -> Attempt:
        (kind,) = chance.choices(("add", "two", "both", "nothing", "refuse"), (50, 15, 10, 15, 10))
        entities = chance.sample(range(self.entities), 2 if kind == "both" else 1)
        named = kind in ("add", "two") and chance.random() < 0.5
        return Attempt(
            number,
            tuple(f"e-{entity}" for entity in entities),
            kind,
            time.monotonic(),
            f"{self.app}-{number}" if named else None,
        )

    async def _settled(self, unknown: Sequence[Attempt]) -> None:
        chance = random.Random(f"{self.seed}/settle")
        deadline = time.monotonic() + self.settles_s
        async with tally_app(self.app).connect(self.settings) as jet:
            tallies = jet.repository(Tally)
            for attempt in unknown:
                again = attempt.command_id is not None and chance.random() < 0.5
                while attempt.answer == UNKNOWN and time.monotonic() < deadline:
                    if again:
                        await _answered(attempt, lambda attempt=attempt: _executed(jet, tallies, attempt))
                    else:
                        await _answered(attempt, lambda attempt=attempt: _resolved(jet, attempt))
                    if isinstance(attempt.unknown, SaveTorn):
                        break  # it stays so
                    if attempt.error not in ("", "ConcurrencyConflict", "OutcomeUnknown"):
                        # Nobody answered, which says nothing of the save before.
                        attempt.answer = UNKNOWN
                        await asyncio.sleep(BACKOFF_S)


async def _answered(attempt: Attempt, ask: Callable[[], Awaitable[None]]) -> None:
    attempt.error = ""
    try:
        await ask()
    except EnoughError as refusal:
        attempt.answer, attempt.version = LOOKED, refusal.seen
    except OutcomeUnknown as unknown:
        attempt.answer, attempt.error, attempt.unknown, attempt.had_unknown = UNKNOWN, "OutcomeUnknown", unknown, True
    except (StoreError, EventjetError) as error:
        attempt.answer, attempt.error = REFUSED, type(error).__name__
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        attempt.answer, attempt.error = STRANGE, f"{type(error).__name__}: {error}"


async def _executed(jet: Jet, tallies: Repository[Tally, object], attempt: Attempt) -> None:
    entity = attempt.entities[0]
    committed: Sequence[Committed[Tally, object]]
    if attempt.kind == "both":
        committed = await jet.transact(
            *(tallies.decide(entity, Tally.add, attempt.amount) for entity in attempt.entities)
        )
    elif attempt.kind in ("nothing", "refuse"):
        loaded = await tallies.execute(entity, nothing if attempt.kind == "nothing" else refuse)
        attempt.answer, attempt.version = LOOKED, loaded.version
        return
    else:
        decide = Tally.add if attempt.kind == "add" else Tally.add_two
        if attempt.command_id is None:
            committed = [await tallies.execute(entity, decide, attempt.amount)]
        else:
            committed = [await tallies.command(attempt.command_id).execute(entity, decide, attempt.amount)]
    attempt.answer, attempt.version = STORED, committed[-1].version
    attempt.positions = tuple(save.position for save in committed)


async def _resolved(jet: Jet, attempt: Attempt) -> None:
    assert attempt.unknown is not None
    try:
        last = await jet.resolve(attempt.unknown)
    except ConcurrencyConflict:
        attempt.answer, attempt.error = REFUSED, "ConcurrencyConflict"
        return
    attempt.answer = STORED
    attempt.positions = (last - 1, last) if attempt.kind == "both" else (last,)
