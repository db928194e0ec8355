"""Archives that `eventjet archive` sealed, restored, archived again and restored again: the same log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eventjet.archive.republish import lasting
from eventjet.codec.headers import RawRecord, recorded_at
from eventjet.dev.nats import NatsServer
from eventjet.rebuild import AppRef, archive, restore
from eventjet.settings import Settings
from eventjet.spark.session import Started
from tests.integration.restored_bank import bank
from tests.integration.restoring import fill, records_of
from tests.logs import fresh_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REF = AppRef.parse("tests.integration.restored_bank:bank", Path(__file__).parents[2])
BATCH_ID = re.compile(rb"Nats-Batch-Id: [^\r]*")


@pytest.fixture
def elsewhere(spark: Started) -> str:
    """A folder as `viewfs` has it, which only Spark reaches."""
    return f"viewfs://archives/there/{fresh_name()}"


def seen(records: list[RawRecord]) -> list[tuple[int, bytes, bytes, bytes]]:
    """What a restore makes, but for its batches' ids."""
    return [(one[0], one[2], BATCH_ID.sub(b"", one[3]), one[4]) for one in records]


async def test_a_log_goes_round_unchanged(elsewhere: str, tmp_path: Path) -> None:
    with NatsServer(sync_interval="1m") as first, NatsServer(sync_interval="1m") as second:
        await fill(bank, first.url, 900)
        records = records_of(first.url)
        await archive(REF, f"{elsewhere}/past", Settings(servers=(first.url,)), to=700)
        sealed = await archive(REF, f"{elsewhere}/past", Settings(servers=(first.url,)))
        assert len(sealed.sealed) == 1
        once = await restore(REF, f"{elsewhere}/past", Settings(servers=(second.url,)))
        assert (once.events, once.log) == (len(records), sealed.log)
        restored = records_of(second.url)
        await archive(REF, str(tmp_path / "again"), Settings(servers=(second.url,)))
    with NatsServer(sync_interval="1m") as third:
        twice = await restore(REF, str(tmp_path / "again"), Settings(servers=(third.url,)))
        again = records_of(third.url)
    assert (twice.events, twice.log) == (once.events, once.log)
    assert [lasting(one) for one in restored] == [lasting(one) for one in records]
    assert seen(again) == seen(restored)
    assert [recorded_at(one) for one in again] == [recorded_at(one) for one in records]
