"""A server whose disk was full refuses saves, and stores them again after a restart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.errors import OutcomeUnknown
from eventjet.log.store import EventStore
from eventjet.testing.store_contract import new, write
from tests.stores import fresh_jetstream

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="it mounts a small file system"),
]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def is_full(store: EventStore) -> bool:
    """Write until the server refuses to store."""
    for number in range(10):
        try:
            await store.append([write(f"b-{number}", 0, 0, new(b"x" * 100_000))])
        except OutcomeUnknown:
            return True
    return False


async def test_a_save_after_a_full_disk_reports_that_the_server_needs_a_restart(small_disk: Path) -> None:
    with NatsServer(small_disk) as server:
        async with fresh_jetstream((server.url,)) as store:
            first = await store.append([write("a", 0, 0)])
            ballast = small_disk / "ballast"
            free = os.statvfs(small_disk)
            ballast.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 300_000))
            store._client.timeout_s, store.save_timeout_s = 1.0, 5.0
            assert await is_full(store)
            ballast.unlink()
            with pytest.raises(OutcomeUnknown, match="restarted after a full") as caught:
                await store.append([write("a", first, 1)])
            assert caught.value.is_read_only
            assert await store.last("thing", "a") == first
            server.stop()
            server.start()
            store.save_timeout_s = 60.0
            assert await store.resolve(caught.value.writes) > first
