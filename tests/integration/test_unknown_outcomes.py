"""Saves whose answers are lost on purpose report what the log of a real server contains."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from eventjet.codec.catalog import EncodedEvent
from eventjet.codec.headers import MSG_ID, header
from eventjet.dev.nats import NatsServer
from eventjet.domain.identity import new_event_id
from eventjet.errors import ConcurrencyConflict, OutcomeUnknown
from eventjet.jetstream.client import connect
from eventjet.log.jetstream import JetStreamStore
from eventjet.log.store import Append, NewEvent
from eventjet.settings import Settings
from tests.faults.proxy import PASS, Fate, NatsProxy, Publish
from tests.stores import fresh_jetstream

FORCED = int(os.environ.get("EVENTJET_TEST_UNKNOWNS", "100"))
"""How many unknown outcomes are forced; a fifth of them by pausing the server."""
WORKERS = 20
REQUEST_S = 0.3
SAVE_S = 20.0
PAUSED_S = 0.7

Rival = Callable[["Work"], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that leaves a save without its answer."""

    name: str
    fate: Fate
    first: Rival | None = None
    """The action of a rival before the message is forwarded."""
    then: Rival | None = None
    """The action of a rival after the message is stored."""
    inside: bool = False
    """Whether the fault hits the first message of a batch instead of its commit."""


async def bury(work: Work) -> None:
    """Append another event, so that the event of the save is no longer the last of its subject."""
    last = await work.direct.last("thing", work.ids[0])
    if last > work.expected:  # otherwise the server refused the batch, because it had too many open ones
        await work.rival(last)


async def win(work: Work) -> None:
    """Append a rival's event at the expected position."""
    await work.rival(work.expected)


FAULTS = (
    Fault("acknowledgement lost", Fate(answer="lose")),
    Fault("acknowledgement lost, slot buried", Fate(answer="lose"), then=bury),
    Fault("cut after it was stored", Fate(answer="cut")),
    Fault("cut after it was stored, slot buried", Fate(answer="cut"), then=bury),
    Fault("credentials expired after it was stored", Fate(answer="expire")),
    Fault("credentials expired after it was stored, slot buried", Fate(answer="expire"), then=bury),
    Fault("request lost", Fate(request="lose")),
    Fault("request lost, slot won by a rival", Fate(request="lose"), first=win),
    Fault("cut before it arrived", Fate(request="cut")),
    Fault("cut before it arrived, slot won by a rival", Fate(request="cut"), first=win),
    Fault("late, while the next try is under way", Fate(late_s=REQUEST_S * 1.2)),
    Fault("late, slot won by a rival", Fate(late_s=REQUEST_S * 1.5), first=win),
    Fault("cut within a batch", Fate(request="cut"), inside=True),
    Fault("a hole in a batch", Fate(request="lose"), inside=True),
)


@dataclass(slots=True)
class Verdict:
    """The outcome that a save reported, and its events."""

    fault: str
    event_ids: list[str]
    outcome: str
    position: int = 0


@dataclass(slots=True)
class Work:
    """A save under way."""

    direct: JetStreamStore
    ids: list[str]
    expected: int
    events: int
    fault: Fault | None = None

    def writes(self) -> list[Append]:
        version = 1 if self.expected else 0
        first = Append("thing", self.ids[0], self.expected, version, tuple(event() for _ in range(self.events)))
        return [first, *(Append("thing", aggregate_id, 0, 0, (event(),)) for aggregate_id in self.ids[1:])]

    async def rival(self, expected: int) -> None:
        await self.direct.append([Append("thing", self.ids[0], expected, 9, (event(),))])


@dataclass(slots=True)
class Worker:
    """A client with its own connection through its own proxy."""

    number: int
    direct: JetStreamStore
    store: JetStreamStore
    proxy: NatsProxy
    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    unknown: OutcomeUnknown | None = None
    _work: Work | None = None

    async def work(self, count: int) -> Work:
        """Return the next save: of one event, a batch, or two aggregates, which are new or have events."""
        name = f"{self.number}-{count}"
        expected = 0
        if count % 2:
            expected = await self.direct.append([Append("thing", name, 0, 0, (event(),))])
        shape = count % 3
        return Work(self.direct, [name] if shape < 2 else [name, f"{name}-b"], expected, 3 if shape == 1 else 1)

    def fate(self, publish: Publish) -> Fate:
        """Return the fault of the current save once, and none for everything else."""
        work = self._work
        if work is None or work.fault is None or not publish.subject.startswith(f"{self.store.app}."):
            return PASS
        fault = work.fault
        if fault.inside == bool(publish.reply):
            return PASS
        self._work = None
        return Fate(
            fault.fate.request,
            fault.fate.late_s,
            fault.fate.answer,
            None if fault.first is None else lambda: win(work),
            None if fault.then is None else lambda: bury(work),
        )

    async def save(self, work: Work) -> Verdict:
        """Save, and record the reported outcome."""
        self._work = work
        writes = work.writes()
        ids = [new.event_id for write in writes for new in write.events]
        verdict = Verdict(work.fault.name if work.fault else "paused", ids, "stored")
        try:
            verdict.position = await self.store.append(writes)
        except ConcurrencyConflict:
            verdict.outcome = "conflict"
        except OutcomeUnknown as unknown:
            verdict.outcome = "unknown"
            self.unknown = unknown
        self.verdicts.append(verdict)
        return verdict


def print_figures(capsys: pytest.CaptureFixture[str], lines: Sequence[str]) -> None:
    """Print these figures if many unknown outcomes are forced."""
    if FORCED > 100:
        with capsys.disabled():
            sys.stdout.write("\n" + "\n".join(lines) + "\n")


def event() -> NewEvent:
    return NewEvent(new_event_id(), EncodedEvent("thing.happened", 1, b"{}"))


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m") as server:
        yield server


@asynccontextmanager
async def working(server: NatsServer, count: int, *, save_s: float = SAVE_S) -> AsyncGenerator[list[Worker]]:
    """Yield workers on a new stream."""
    async with AsyncExitStack() as stack:
        direct = await stack.enter_async_context(fresh_jetstream((server.url,)))
        workers: list[Worker] = []
        for number in range(count):
            proxy = await stack.enter_async_context(NatsProxy(server.url))
            settings = Settings(servers=(proxy.url,))
            client = await connect(settings)
            client.timeout_s = REQUEST_S
            stack.push_async_callback(client.close)
            store = JetStreamStore(direct.app, client, save_timeout_s=save_s)
            stack.push_async_callback(store.settle)
            worker = Worker(number, direct, store, proxy)
            proxy.choose = worker.fate
            workers.append(worker)
        yield workers


async def positions_of(records: AsyncIterator[tuple[int, int, bytes, bytes, bytes]]) -> dict[str, list[int]]:
    """Return the positions of each event id in the log."""
    positions: dict[str, list[int]] = {}
    async for record in records:
        positions.setdefault(header(record[3], MSG_ID) or "", []).append(record[0])
    return positions


async def assert_all_equal_the_log(workers: Sequence[Worker]) -> Counter[str]:
    """Assert that every outcome equals the log; return the number of outcomes by fault."""
    log_positions = await positions_of(workers[0].direct.records())
    counts: Counter[str] = Counter()
    for verdict in (verdict for worker in workers for verdict in worker.verdicts):
        positions = [log_positions.get(event_id, []) for event_id in verdict.event_ids]
        wrong = f"{verdict.fault}: said {verdict.outcome} at {verdict.position}, and the log has it at {positions}"
        if verdict.outcome == "stored":
            first = verdict.position - len(positions) + 1
            assert positions == [[first + index] for index in range(len(positions))], wrong
        else:
            assert verdict.outcome == "conflict", wrong
            assert positions == [[]] * len(positions), wrong
        counts[f"{verdict.fault}: {verdict.outcome}"] += 1
    return counts


@pytest.mark.timeout(600)
async def test_a_save_without_its_answer_reports_what_the_log_contains(
    server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    forced = FORCED - FORCED // 5

    async def save_some(worker: Worker) -> None:
        for count in range(worker.number, forced, WORKERS):
            work = await worker.work(count)
            fault = FAULTS[(count + count // len(FAULTS)) % len(FAULTS)]
            if fault.inside and work.events == len(work.ids) == 1:
                work.events = 3
            work.fault = fault
            await worker.save(work)

    async with working(server, WORKERS) as workers:
        await asyncio.gather(*map(save_some, workers))
        await asyncio.sleep(REQUEST_S)  # the late copies
        counts = await assert_all_equal_the_log(workers)
    assert counts.total() == forced
    for fault in FAULTS:
        expected = "conflict" if fault.first is win else "stored"
        assert counts[f"{fault.name}: {expected}"] >= forced // (2 * len(FAULTS))
        assert counts[f"{fault.name}: {'stored' if expected == 'conflict' else 'conflict'}"] == 0
    print_figures(
        capsys,
        [
            f"{forced} unknown outcomes, all as in the log:",
            *sorted(f"{count:5} {outcome}" for outcome, count in counts.items()),
        ],
    )


@pytest.mark.timeout(600)
async def test_saves_during_a_pause_of_the_server_report_what_the_log_contains(
    server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = max(1, FORCED // 5 // WORKERS)
    async with working(server, WORKERS) as workers:
        for count in range(rounds):
            works = [await worker.work(count) for worker in workers]
            server.pause()
            try:
                saves = [asyncio.ensure_future(worker.save(work)) for worker, work in zip(workers, works, strict=True)]
                await asyncio.sleep(PAUSED_S)
            finally:
                server.resume()
            await asyncio.gather(*saves)
        counts = await assert_all_equal_the_log(workers)
    assert counts == {"paused: stored": rounds * WORKERS}
    print_figures(capsys, [f"{counts.total()} saves during {rounds} pauses of the server, all stored once"])


async def test_saves_after_their_deadline_are_unknown_and_resolved_from_the_log(server: NatsServer) -> None:
    async with working(server, WORKERS, save_s=REQUEST_S) as workers:
        works = [await worker.work(count) for count, worker in enumerate(workers)]
        for worker, work in zip(workers, works, strict=True):
            # Some saves never reach the server, some lose their slot to a rival, and some arrive late.
            work.fault = (FAULTS[4], FAULTS[9], None)[worker.number % 3]
        server.pause()
        try:
            verdicts = await asyncio.gather(*map(Worker.save, workers, works))
        finally:
            server.resume()
        assert {verdict.outcome for verdict in verdicts} == {"unknown"}
        for worker, verdict in zip(workers, verdicts, strict=True):
            assert worker.unknown is not None
            assert list(worker.unknown.event_ids) == verdict.event_ids
            verdict.outcome = "stored"
            try:
                verdict.position = await worker.direct.resolve(worker.unknown.writes)
            except ConcurrencyConflict:
                verdict.outcome = "conflict"
        await assert_all_equal_the_log(workers)
