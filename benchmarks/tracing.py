"""What spans and metrics cost a command: `python -m benchmarks.tracing`.

What is compared, on one server that syncs always, over one connection, in one process:

- the time that a caller waits for a command, with one task (the median of a block of commands), and how long a block
  takes with 64 tasks at once, which is the throughput;
- the processor time of this process, all threads, for a command.

Each line is pairs of blocks, one with and one without what it names, one right after the other in an order that
alternates; lines take turns. Printed is the median of the pairs' ratios, and the 95 % interval of that median, by
bootstrap. `nothing` is the same on both sides: how far its interval reaches is how well this machine can tell. The
lines `SDK:` make a span or record a histogram beside each command, with no span of eventjet's: no less is to be had.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import NoOpTracerProvider

from benchmarks.bank import Account, bank
from benchmarks.measure import conditions
from benchmarks.options import parser_of
from benchmarks.postings import CURRENCY, Posting, shares
from eventjet import Jet
from eventjet.dev.nats import NatsServer
from eventjet.observability.otel import Telemetry
from eventjet.observability.tracing import reporting_to

TASKS = (1, 64)
TARGET = 1.03
HEAD = ParentBased(TraceIdRatioBased(0.01))
"""How traces are usually sampled: one request in a hundred, and all that belongs to it."""
LABELS = {"eventjet.aggregate": "account", "eventjet.decision": "deposit", "eventjet.outcome": "done"}
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds: the median that a caller waited, all commands together, and processor time."""

    waited: float
    took: float
    cpu: float


@dataclass(slots=True)
class Line:
    """What is told of each command, and what goes on around it on both sides, or on one alone."""

    name: str
    telemetry: Telemetry | None = None
    around: Around = nullcontext
    beside: Callable[[], None] | None = None
    aims: bool = False
    pairs: list[tuple[Block, Block]] = field(default_factory=list)

    def show(self, tasks: int, count: int) -> None:
        def of(block: Block) -> float:
            return block.waited if tasks == 1 else block.took / count

        walls = [of(with_it) / of(without) for without, with_it in self.pairs]
        cpus = [with_it.cpu / without.cpu for without, with_it in self.pairs]
        us = [statistics.median(pair[side].cpu for pair in self.pairs) / count * 1e6 for side in (0, 1)]
        waits = [statistics.median(of(pair[side]) for pair in self.pairs) * 1e6 for side in (0, 1)]
        missed = "  beyond 1.03" if self.aims and statistics.median(walls) > TARGET else ""
        print(
            f"{tasks:>3}  {self.name:<34} {waits[0]:>5.0f} {waits[1]:>5.0f} µs {interval(walls)}   "
            f"{us[0]:>4.0f} {us[1]:>4.0f} µs {interval(cpus)}{missed}"
        )


def interval(ratios: list[float]) -> str:
    """The median and its 95 % interval."""
    chance = random.Random(len(ratios))
    drawn = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(1_000))
    return f"{statistics.median(ratios):.3f} ({drawn[25]:.3f} to {drawn[974]:.3f})"


async def block(jet: Jet, work: list[list[Posting]], line: Line, *, is_with: bool) -> Block:
    accounts = jet.repository(Account)
    beside = line.beside if is_with else None
    waited: list[float] = []

    async def execute(postings: list[Posting]) -> None:
        for account, is_deposit, tx_id, amount, memo in postings:
            decision = Account.deposit if is_deposit else Account.withdraw
            began = time.perf_counter()
            with line.around():
                if beside is not None:
                    beside()
                await accounts.execute(str(account), decision, tx_id, Decimal(amount), CURRENCY, memo)
            waited.append(time.perf_counter() - began)

    gc.collect()
    began, began_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(execute, work))
    if is_with and line.telemetry is not None:
        line.telemetry.report()
    return Block(statistics.median(waited), time.perf_counter() - began, time.process_time() - began_cpu)


class Providers:
    """What an application sets up, and what its exporters have been given."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self._providers: list[TracerProvider] = []

    def tracers(self, sampler: Sampler) -> TracerProvider:
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(BatchSpanProcessor(self.exporter))
        self._providers.append(provider)
        return provider

    def flush(self) -> None:
        for provider in self._providers:
            provider.force_flush()
        self.exporter.clear()  # what it keeps would only make collections of garbage longer

    def shutdown(self) -> None:
        for provider in self._providers:
            provider.shutdown()


def lines(providers: Providers) -> list[Line]:
    unmeasured, untraced = NoOpMeterProvider(), NoOpTracerProvider()
    always, head = providers.tracers(ALWAYS_ON), providers.tracers(HEAD)
    bare, dropping, web = always.get_tracer("bare"), head.get_tracer("bare"), head.get_tracer("web")

    def measured() -> MeterProvider:
        return MeterProvider([InMemoryMetricReader()])

    seconds = measured().get_meter("bare").create_histogram("seconds")
    recorded = Telemetry.of(always, unmeasured)
    return [
        Line("nothing"),
        Line(
            "requests, 1 in 100 sampled",
            Telemetry.of(head, unmeasured),
            lambda: web.start_as_current_span("POST"),
            aims=True,
        ),
        Line("no request, 1 in 100 sampled", Telemetry.of(head, unmeasured)),
        Line("every span recorded", recorded),
        Line("metrics alone", Telemetry.of(untraced, measured())),
        Line("every span recorded, metrics", Telemetry.of(always, measured())),
        Line("SDK: a span dropped", beside=lambda: dropping.start_span("one").end()),
        Line("SDK: a span recorded", beside=lambda: bare.start_span("one").end()),
        Line("SDK: a histogram recorded", beside=lambda: seconds.record(0.001, LABELS)),
    ]


async def measure(server: str, tasks: int, count: int, rounds: int) -> None:
    providers = Providers()
    all_lines = lines(providers)
    async with bank.connect(servers=server) as jet:
        await jet.init()
        work = shares(count, tasks)
        for line in all_lines:
            await block(jet, work, line, is_with=False)
        gc.freeze()
        for number in range(rounds):
            for line in all_lines:
                done: dict[bool, Block] = {}
                for is_with in (True, False) if number % 2 else (False, True):
                    with ExitStack() as within:
                        if is_with and line.telemetry is not None:
                            within.enter_context(reporting_to(line.telemetry))
                        done[is_with] = await block(jet, work, line, is_with=is_with)
                    providers.flush()
                line.pairs.append((done[False], done[True]))
    gc.unfreeze()
    providers.shutdown()
    for line in all_lines:
        line.show(tasks, count)


def main(count: int, rounds: int) -> None:
    print(f"{conditions()}; {rounds} pairs of {count} commands a line")
    print(f"{'tasks':<5}{'':<35}{'a command: without, with, ratio':<47}processor time")
    for tasks in TASKS:
        with NatsServer(sync_interval="always") as server:
            asyncio.run(measure(server.url, tasks, count, rounds))
    print(conditions())


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=128, help="commands of a block (%(default)s)")
    parser.add_argument("--rounds", type=int, default=100, help="pairs of blocks a line (%(default)s)")
    options = parser.parse_args()
    main(options.count, options.rounds)
