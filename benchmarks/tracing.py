"""What spans cost a command: `python -m benchmarks.tracing`.

Commands with OpenTelemetry (sampled always, a batch processor, an exporter in memory, metrics read once) and without it
take turns in one process, on one server that syncs always, over one connection: block by block, in an order that
alternates, so that a machine that is slower for a second is so for both. Printed is the median of the blocks' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.bank import Account, bank
from benchmarks.measure import conditions
from benchmarks.postings import CURRENCY, Posting, shares
from eventjet import Jet
from eventjet.dev.nats import NatsServer
from eventjet.observability.otel import Telemetry
from eventjet.observability.tracing import telling

TASKS = (1, 64)
TARGET = 1.03


async def block(jet: Jet, work: list[list[Posting]]) -> tuple[float, float]:
    """Seconds that these commands take, and those of this process's CPU."""
    accounts = jet.repository(Account)

    async def one(postings: list[Posting]) -> None:
        for account, is_deposit, tx_id, amount, memo in postings:
            decision = Account.deposit if is_deposit else Account.withdraw
            await accounts.execute(str(account), decision, tx_id, Decimal(amount), CURRENCY, memo)

    gc.collect()
    began, began_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(one, work))
    return time.perf_counter() - began, time.process_time() - began_cpu


async def measure(server: str, tasks: int, count: int, blocks: int) -> None:
    exporter = InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(exporter))
    meters = MeterProvider([InMemoryMetricReader()])
    telemetry = Telemetry.of(tracers, meters)
    ratios: list[float] = []
    spans = 0
    rates: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    async with bank.connect(servers=server) as jet:
        await jet.init()
        work = shares(count, tasks)
        await block(jet, work)
        for number in range(blocks):
            taken: dict[bool, float] = {}
            for traced in (True, False) if number % 2 else (False, True):
                within: AbstractContextManager[None] = telling(telemetry) if traced else nullcontext()
                with within:
                    taken[traced], cpu_s = await block(jet, work)
                cpu[traced].append(cpu_s / count * 1e6)
                tracers.force_flush()
                spans += len(exporter.get_finished_spans())
                exporter.clear()  # what it keeps would only make collections of garbage longer
                rates[traced].append(count / taken[traced])
            ratios.append(taken[True] / taken[False])
    tracers.force_flush()
    tracers.shutdown()
    meters.shutdown()
    low, middle, high = statistics.quantiles(ratios, n=4)
    verdict = "" if middle <= TARGET else f"  beyond {TARGET}"
    print(
        f"{tasks:>3} tasks: {statistics.median(rates[False]):,.0f}/s without, {statistics.median(rates[True]):,.0f}/s "
        f"with; time with / without: median {middle:.3f} ({low:.3f} to {high:.3f}, {len(ratios)} pairs of {count}); "
        f"{spans:,} spans; CPU {statistics.median(cpu[False]):.0f} and {statistics.median(cpu[True]):.0f} µs a command"
        f"{verdict}"
    )


def main(count: int, blocks: int) -> None:
    print(conditions())
    for tasks in TASKS:
        with NatsServer(sync_interval="always") as server:
            asyncio.run(measure(server.url, tasks, count, blocks))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=128, help="commands of a block (%(default)s)")
    parser.add_argument("--blocks", type=int, default=200, help="pairs of blocks (%(default)s)")
    given = parser.parse_args()
    main(given.count, given.blocks)
