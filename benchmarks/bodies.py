"""A large body goes in with its event and comes out by its digest: `python -m benchmarks.bodies --megabytes 2000`.

It prints the rates both ways, of one process over one connection, and how much memory this process took at most. The
digest of what came out is compared with that of the file.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import conditions
from benchmarks.options import parser_of
from benchmarks.usage import own_peak_mb
from eventjet import Blob
from eventjet.dev.nats import NatsServer
from tests.blobs import Document, documents

MEGABYTE = 10**6


async def carry(url: str, folder: Path, megabytes: int) -> None:
    source, target = folder / "source", folder / "target"
    with source.open("wb") as file:
        for _ in range(megabytes):
            file.write(random.randbytes(MEGABYTE))
    async with documents("bodies").connect(servers=url) as jet:
        await jet.init()
        documents_of_jet = jet.repository(Document)
        await documents_of_jet.execute("small", Document.file, Blob.of(b"small"))
        before_mb = own_peak_mb()
        began = time.perf_counter()
        blob = await asyncio.to_thread(Blob.from_file, source)
        hashed = time.perf_counter()
        done = await documents_of_jet.execute("large", Document.file, blob)
        stored = time.perf_counter()
        assert done.state.scan is not None
        await jet.blobs.save(done.state.scan, target)
        saved = time.perf_counter()
    after_mb = own_peak_mb()
    assert Blob.from_file(target).digest == blob.digest
    rates = [f"{megabytes / seconds:,.0f} MB/s" for seconds in (hashed - began, stored - hashed, saved - stored)]
    print(f"{megabytes:,} MB: digest {rates[0]}, stored {rates[1]}, read and saved {rates[2]}")
    print(f"memory of the process at most: {after_mb:,.0f} MB, and {before_mb:,.0f} MB after a body of 5 bytes")


def main(megabytes: int) -> int:
    print(conditions())
    with tempfile.TemporaryDirectory() as folder, NatsServer(sync_interval="always") as server:
        asyncio.run(carry(server.url, Path(folder), megabytes))
    return 0


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=2_000)
    sys.exit(main(parser.parse_args().megabytes))
