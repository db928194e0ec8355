"""What a log that is stored with `s2` costs and saves: `python -m benchmarks.compression`.

Both subjects take turns, each with a server and a folder of its own: the log is filled, 64 tasks carry out commands on
it, and the whole log is read once. The server syncs every two minutes, so that its work counts and not the disk. The
size is that of the blocks in the folder; `bytes` of the stream's state knows nothing of compression.
"""

from __future__ import annotations

import asyncio
import time
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bank import Account, bank
from benchmarks.log import Filling
from benchmarks.measure import Comparison, Figures, conditions, report
from benchmarks.options import parser_of
from benchmarks.postings import CURRENCY, Posting, shares
from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings

TASKS = 64
EVENTS = 60_000
"""Some 30 MB, so four blocks, of which the server compresses all but the last."""
NONE, S2 = "none", "s2"


def size_of(folder: Path) -> float:
    """Return the megabytes of the log's blocks."""
    return sum(path.stat().st_size for path in folder.rglob(f"streams/{bank.name}/msgs/*.blk")) / 1e6


async def lap(compression: str, count: int, folder: Path) -> tuple[float, float, float]:
    """Return (commands a second, events read a second, megabytes in the folder)."""
    with NatsServer(folder, sync_interval="2m") as server:
        settings = Settings(servers=(server.url,))
        with Filling(server.url, EVENTS, compression=compression) as filling:
            await asyncio.to_thread(filling.to, EVENTS)
        async with bank.connect(settings) as jet:
            await jet.init()
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
    parser = parser_of(__doc__, runs=3)
    parser.add_argument("--count", type=int, default=4_000, help="commands of a lap")
    options = parser.parse_args()
    print(conditions())
    written = Figures("a log with compression: commands by 64 tasks", "cmd/s", higher_is_better=True)
    read = Figures("a log with compression: read", "ev/s", higher_is_better=True)
    size = Figures("a log with compression: size", "MB", higher_is_better=False)
    figures = [written, read, size]
    for _ in range(options.runs):
        for compression in (NONE, S2):
            with TemporaryDirectory() as folder:
                values = asyncio.run(lap(compression, options.count, Path(folder)))
            for each, value in zip(figures, values, strict=True):
                each.add(compression, value)
    report(figures, [Comparison(each, S2, NONE) for each in figures])


if __name__ == "__main__":
    main()
