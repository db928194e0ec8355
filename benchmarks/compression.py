"""What a log that is stored with `s2` costs and saves: `python -m benchmarks.compression`.

Both subjects take turns, each with a server that syncs always and a folder of its own: deposits by 64 tasks, then one
reading of the whole log. The size is that of the stream's blocks in the folder; `bytes` of the stream's state does not
know of compression.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bank import Account, bank
from benchmarks.measure import Comparison, Figures, conditions, keep, show
from benchmarks.postings import CURRENCY, Posting, shares
from eventjet.dev.nats import NatsServer
from eventjet.jetstream.api import stream_info, update_stream
from eventjet.settings import Settings

TASKS = 64
NONE, S2 = "none", "s2"


def size_of(folder: Path) -> float:
    """Return the megabytes of the log's blocks."""
    return sum(path.stat().st_size for path in folder.rglob(f"streams/{bank.name}/msgs/*.blk")) / 1e6


async def lap(compression: str, count: int, folder: Path) -> tuple[float, float, float]:
    """Return (commands a second, events read a second, megabytes in the folder)."""
    with NatsServer(folder) as server:
        async with bank.connect(Settings(servers=(server.url,))) as jet:
            await jet.init()
            assert jet.client is not None
            state = await jet.client.ask(stream_info(bank.name))
            await jet.client.ask(update_stream({**state.config, "compression": compression}))
            accounts = jet.repository(Account)

            async def deposit(work: list[Posting]) -> None:
                for account, _, tx_id, amount, memo in work:
                    await accounts.execute(str(account), Account.deposit, tx_id, Decimal(amount), CURRENCY, memo)

            began = time.perf_counter()
            await asyncio.gather(*map(deposit, shares(count, TASKS)))
            commands = count / (time.perf_counter() - began)
            began, events = time.perf_counter(), 0
            async for _ in jet.tail():
                events += 1
            rate = events / (time.perf_counter() - began)
    return commands, rate, await asyncio.to_thread(size_of, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40_000, help="commands of a lap")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    print(conditions())
    written = Figures("a log with compression: commands by 64 tasks", "cmd/s", higher_is_better=True)
    read = Figures("a log with compression: read", "ev/s", higher_is_better=True)
    size = Figures("a log with compression: size", "MB", higher_is_better=False)
    for _ in range(given.runs):
        for compression in (NONE, S2):
            with TemporaryDirectory() as folder:
                figures = asyncio.run(lap(compression, given.count, Path(folder)))
            for each, value in zip((written, read, size), figures, strict=True):
                each.add(compression, value)
    for each in (written, read, size):
        each.show()
    comparisons = [Comparison(each, S2, NONE) for each in (written, read, size)]
    show(comparisons)
    keep([written, read, size], comparisons)


if __name__ == "__main__":
    main()
