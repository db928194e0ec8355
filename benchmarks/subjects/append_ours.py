"""The bank's postings into JetStream: `python -m benchmarks.subjects.append_ours JOB SERVERS COUNT [REPLICAS]`.

The jobs are `import`, `again` for the second import of the same events, `fill`, and `batches`.
"""

from __future__ import annotations

import asyncio
import sys

from benchmarks.bank import Account, bank
from benchmarks.log import await_acks, bank_records, event_of, fill
from benchmarks.postings import postings
from benchmarks.subjects.clock import Clock
from eventjet import Imported
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.topology import stream_config
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.protocol import publish_frame
from eventjet.settings import Settings

_EXPECTED = b"Nats-Expected-Last-Subject-Sequence: "


async def imported(servers: str, count: int, replicas: int, runs: int) -> None:
    all_postings = list(postings(count))
    async with bank.connect(servers=servers.split(","), replicas=replicas) as jet:
        await jet.init()
        for run in range(runs):
            clock = Clock()
            clock.start()
            events = (Imported(Account, str(posting[0]), event_of(posting)) for posting in all_postings)
            report = await jet.append_many(events, source="bench")
            if run == runs - 1:
                clock.stop(report.skipped if run else report.stored)


def filled(server: str, count: int) -> None:
    clock = Clock()
    clock.start()
    fill(server, count)
    clock.stop(count)


def in_batches(servers: str, count: int, replicas: int) -> None:
    """Store atomic batches of 1,000 that are ready before the clock starts, one after the other."""
    with NatsConnection.open(Endpoint.of(Settings(servers=tuple(servers.split(","))))) as link:
        link.api(f"STREAM.CREATE.{bank.name}", stream_config(bank.name, replicas), timeout_s=30.0)
        reply = f"{link.inbox}.acks"
        sid = link.subscribe(reply)
        records = list(bank_records(count))
        batches = [_batch(records[start : start + 1_000], start, reply.encode()) for start in range(0, count, 1_000)]
        clock = Clock()
        clock.start()
        for batch in batches:
            link.send(batch)
            await_acks(link, sid, 1)
        clock.stop(int(link.api(f"STREAM.INFO.{bank.name}")["state"]["messages"]))


def _batch(records: list[tuple[str, bytes, bytes]], start: int, reply: bytes) -> bytes:
    frames: list[bytes] = []
    subjects: set[str] = set()
    for number, (subject, block, body) in enumerate(records, 1):
        if subject in subjects:  # in a batch only the first message of a subject has an expectation
            before, _, after = block.partition(_EXPECTED)
            block = before + after.partition(b"\r\n")[2]
        subjects.add(subject)
        end = b"Nats-Batch-Commit: 1\r\n\r\n" if number == len(records) else b"\r\n"
        headers = b"%bNats-Batch-Id: %d\r\nNats-Batch-Sequence: %d\r\n%b" % (block[:-2], start, number, end)
        last_reply = reply if number == len(records) else b""
        frames.append(publish_frame(f"{bank.name}.{subject}", body, reply=last_reply, headers=headers))
    return b"".join(frames)


if __name__ == "__main__":
    job, servers, count, *replicas = sys.argv[1:]
    if job in ("import", "again"):
        asyncio.run(imported(servers, int(count), int(replicas[0]) if replicas else 1, 1 + (job == "again")))
    elif job == "fill":
        filled(servers, int(count))
    else:
        in_batches(servers, int(count), int(replicas[0]) if replicas else 1)
