"""An archive on another file system restores the same log."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventjet.archive.republish import lasting
from eventjet.codec.headers import recorded_at
from eventjet.dev.nats import NatsServer
from eventjet.rebuild import AppRef, archive, restore
from eventjet.settings import Settings
from eventjet.spark.session import Started
from tests.integration.restored_bank import bank
from tests.integration.restoring import fill, records_of
from tests.logs import fresh_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REF = AppRef.parse("tests.integration.restored_bank:bank", Path(__file__).parents[2])


@pytest.fixture
def folder(spark: Started) -> str:
    """Return a folder on `viewfs`, which only Spark reaches."""
    return f"viewfs://archives/there/{fresh_name()}"


async def test_a_log_is_archived_and_restored_unchanged(folder: str) -> None:
    with NatsServer(sync_interval="1m") as first, NatsServer(sync_interval="1m") as second:
        await fill(bank, first.url, 900)
        records = records_of(first.url)
        await archive(REF, f"{folder}/past", Settings(servers=(first.url,)), to=700)
        sealed = await archive(REF, f"{folder}/past", Settings(servers=(first.url,)))
        assert len(sealed.sealed) == 1
        report = await restore(REF, f"{folder}/past", Settings(servers=(second.url,)))
        assert (report.events, report.log) == (len(records), sealed.log)
        restored = records_of(second.url)
    assert [lasting(record) for record in restored] == [lasting(record) for record in records]
    assert [recorded_at(record) for record in restored] == [recorded_at(record) for record in records]
