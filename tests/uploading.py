"""`python -m tests.uploading APP URL SEED`: file documents with large bodies until somebody kills it."""

from __future__ import annotations

import asyncio
import random
import sys
from hashlib import sha256

from eventjet import Blob
from tests.blobs import Document, documents

SHARED = 5
"""How many bodies all processes have in common."""


def body_of(number: int, size: int) -> bytes:
    """Return the same body for the same arguments: random bytes of a sixteenth of the size, sixteen times."""
    return random.Random(number).randbytes(size // 16) * 16


async def upload(app: str, url: str, seed: int) -> None:
    chance = random.Random(seed)
    async with documents(app).connect(servers=url) as jet:
        repository = jet.repository(Document)
        for number in range(10_000):
            is_shared = chance.random() < 0.5
            own = int.from_bytes(sha256(f"{seed} {number}".encode()).digest()[:6])
            content = body_of(chance.randrange(SHARED) if is_shared else own, 1 << chance.randrange(12, 23))
            await repository.execute(f"d-{seed}-{number}", Document.file, Blob.of(content))
            print(number, flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(upload(sys.argv[1], sys.argv[2], int(sys.argv[3])))
