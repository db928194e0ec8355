"""`Commands`: writers that run `execute` all at once while something fails, and note what they were told.

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
"""What a command can be told. `strange`: an error that is none of eventjet's."""
OF_ONE_CONNECTION = 3
"""Writers."""
STARTS_S = 60.0
ENDS_S = 60.0
BACKOFF_S = 0.05


class EnoughError(Exception):
    """A decision's own refusal, with what it saw."""

    def __init__(self, seen: int) -> None:
        self.seen = seen
        super().__init__(f"{seen} are enough")


def refuse(state: Tally) -> None:
    raise EnoughError(state.additions)


def nothing(state: Tally) -> None:
    """Records nothing."""


@dataclass(slots=True)
class Said:
    """One command, and what it was told."""

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
    """Of the last event of each aggregate."""
    version: int = 0
    unknown: OutcomeUnknown | None = None
    was_unknown: bool = False

    @property
    def amount(self) -> Decimal:
        return Decimal(self.number) / 100

    @property
    def events(self) -> int:
        return {"add": 1, "two": 2, "both": 2}.get(self.kind, 0)


@dataclass(slots=True)
class Commands:
    """In a `with` block writers write from a thread of their own, some of them over each connection.

    So saves of several events share batches, and connections are rivals.
    """

    settings: Settings
    app: str
    seed: int
    writers: int = 8
    entities: int = 20
    proxied: bool = False
    """Whether all go through one proxy, `proxy`."""
    pause_s: float = 0.0
    """Between two commands of a writer."""
    settles_s: float = 90.0
    """How long what is unknown in the end may take."""
    said: list[Said] = field(default_factory=list[Said])
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

    def finish(self) -> list[Said]:
        """End the writers and settle what is unknown: by `resolve`, or by giving the same command again."""
        self._ending.set()
        assert self._thread is not None
        self._thread.join(ENDS_S)
        assert not self._thread.is_alive(), "a writer does not end"
        self.check()
        unknown = [one for one in self.said if one.answer == UNKNOWN]
        if unknown:
            asyncio.run(self._settled(unknown))
        return self.said

    def check(self) -> None:
        """Raise what ended the writers."""
        if self._failure is not None:
            raise self._failure

    @property
    def acked(self) -> int:
        """Saves that were called stored, so far."""
        return sum(one.answer == STORED for one in list(self.said))

    def refusals(self) -> str:
        """The names of the errors so far, each with its count."""
        counts = Counter(one.error for one in list(self.said) if one.error)
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no errors"

    def await_acks(self, more: int, timeout_s: float = 60.0) -> float:
        """Wait until so many more saves were called stored; returns the seconds it took."""
        began, wanted = time.monotonic(), self.acked + more
        while self.acked < wanted:
            self.check()
            assert time.monotonic() - began < timeout_s, f"{self.acked} saves of {wanted} within {timeout_s:g} s"
            time.sleep(0.01)
        return time.monotonic() - began

    def await_silence(self, seconds: float = 2.0, timeout_s: float = 60.0) -> bool:
        """Wait until no save was called stored for so long; whether that came."""
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
            jets = [await stack.enter_async_context(one) for one in opened]
            self._started.set()
            await asyncio.gather(*(self._write(jets[number % connections], number) for number in range(self.writers)))

    async def _write(self, jet: Jet, writer: int) -> None:
        chance = random.Random(f"{self.seed}/{writer}")
        tallies = jet.repository(Tally)
        count = 0
        while not self._ending.is_set():
            count += 1
            said = self._next(chance, count * self.writers + writer)
            self.said.append(said)
            await _told(said, lambda said=said: _done(jet, tallies, said))
            said.ended = time.monotonic()
            if said.error:
                await asyncio.sleep(BACKOFF_S)
            # The other writers' turn: a command that is answered at once gives none.
            await asyncio.sleep(self.pause_s)

    def _next(self, chance: random.Random, number: int) -> Said:
        (kind,) = chance.choices(("add", "two", "both", "nothing", "refuse"), (50, 15, 10, 15, 10))
        entities = chance.sample(range(self.entities), 2 if kind == "both" else 1)
        named = kind in ("add", "two") and chance.random() < 0.5
        return Said(
            number,
            tuple(f"e-{entity}" for entity in entities),
            kind,
            time.monotonic(),
            f"{self.app}-{number}" if named else None,
        )

    async def _settled(self, unknown: Sequence[Said]) -> None:
        chance = random.Random(f"{self.seed}/settle")
        deadline = time.monotonic() + self.settles_s
        async with tally_app(self.app).connect(self.settings) as jet:
            tallies = jet.repository(Tally)
            for one in unknown:
                again = one.command_id is not None and chance.random() < 0.5
                while one.answer == UNKNOWN and time.monotonic() < deadline:
                    if again:
                        await _told(one, lambda one=one: _done(jet, tallies, one))
                    else:
                        await _told(one, lambda one=one: _resolved(jet, one))
                    if isinstance(one.unknown, SaveTorn):
                        break  # it stays so
                    if one.error not in ("", "ConcurrencyConflict", "OutcomeUnknown"):
                        # Nobody answered, which says nothing of the save before.
                        one.answer = UNKNOWN
                        await asyncio.sleep(BACKOFF_S)


async def _told(said: Said, ask: Callable[[], Awaitable[None]]) -> None:
    said.error = ""
    try:
        await ask()
    except EnoughError as refusal:
        said.answer, said.version = LOOKED, refusal.seen
    except OutcomeUnknown as unknown:
        said.answer, said.error, said.unknown, said.was_unknown = UNKNOWN, "OutcomeUnknown", unknown, True
    except (StoreError, EventjetError) as error:
        said.answer, said.error = REFUSED, type(error).__name__
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        said.answer, said.error = STRANGE, f"{type(error).__name__}: {error}"


async def _done(jet: Jet, tallies: Repository[Tally, object], said: Said) -> None:
    entity = said.entities[0]
    done: Sequence[Committed[Tally, object]]
    if said.kind == "both":
        done = await jet.transact(*(tallies.decide(one, Tally.add, said.amount) for one in said.entities))
    elif said.kind in ("nothing", "refuse"):
        seen = await tallies.execute(entity, nothing if said.kind == "nothing" else refuse)
        said.answer, said.version = LOOKED, seen.version
        return
    else:
        decide = Tally.add if said.kind == "add" else Tally.add_two
        if said.command_id is None:
            done = [await tallies.execute(entity, decide, said.amount)]
        else:
            done = [await tallies.command(said.command_id).execute(entity, decide, said.amount)]
    said.answer, said.version = STORED, done[-1].version
    said.positions = tuple(one.position for one in done)


async def _resolved(jet: Jet, said: Said) -> None:
    assert said.unknown is not None
    try:
        last = await jet.resolve(said.unknown)
    except ConcurrencyConflict:
        said.answer, said.error = REFUSED, "ConcurrencyConflict"
        return
    said.answer = STORED
    said.positions = (last - 1, last) if said.kind == "both" else (last,)
