"""`eventjet lake` in an object store writes each event once, also when answers are lost, and reports faults."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from eventjet.archive.object_stores import s3_settings
from eventjet.codec.catalog import Catalog
from eventjet.dev.nats import NatsServer
from eventjet.errors import LakeFenced, LakeRefused
from eventjet.lake import status, sync, verify
from eventjet.lake.store import open_store
from tests.forked import run
from tests.integration.archived import book_of
from tests.integration.lake_log import FORMATS, Known, lake_log
from tests.integration.ledger_log import Ledger
from tests.integration.reacting import eventually
from tests.integration.test_lake import fence
from tests.object_store import BUCKET, FAILED, HELD, LOST, SECRET, ObjectStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EVENTS = "events"
URL = f"s3://{BUCKET}/lake"
BOUND_S = 200.0
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Start an object store, and configure a catalog for it."""
    with ObjectStore(tmp_path / "store") as store:
        store.be_alone(monkeypatch, tmp_path)
        monkeypatch.setenv("PYICEBERG_CATALOG__BOOKS__TYPE", "sql")
        monkeypatch.setenv("PYICEBERG_CATALOG__BOOKS__URI", f"sqlite:///{tmp_path}/catalog.db")
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", configuration())
        yield store


def configuration() -> Any:
    """Return the configuration that pyiceberg reads when it is imported."""
    from pyiceberg.utils.config import Config

    return Config()


def options(table_format: str) -> dict[str, Any]:
    return {"table_format": table_format, "catalog": "books" if table_format == "iceberg" else None}


def positions(log: Ledger, table_format: str, name: str = EVENTS) -> list[int]:
    if table_format == "delta":
        rows = DeltaTable(f"{URL}/{name}").to_pyarrow_table()
    else:
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("books", **{f"s3.{name}": value for name, value in s3_settings().items()})
        rows = catalog.load_table(f"{log.name}.{name}").scan().to_arrow()
        catalog.close()
    values: list[int] = rows.column("position").to_pylist()
    return sorted(values)


@pytest.mark.parametrize("table_format", FORMATS)
async def test_a_lake_is_synced_and_verified(nats: NatsServer, store: ObjectStore, table_format: str) -> None:
    log, at = lake_log(nats, 30), options(table_format)
    for to in (10, None):
        await sync(log, URL, log.settings, **at, to=to)
    lake = await status(log, URL, log.settings, **at)
    assert {(table.position, table.behind) for table in lake.tables} == {(30, 0)}
    assert lake.undeclared == ()
    fewer = replace(log, catalog=Catalog([Known]))
    assert (await status(fewer, URL, log.settings, **at)).undeclared == ("order_paid", "order_placed")
    assert (await verify(log, URL, log.settings, **at)).sound
    assert positions(log, table_format) == list(range(1, 31))
    with open_store(URL, table_format, log.name, at["catalog"]) as opened:
        fence(opened)
    (other,) = set(FORMATS) - {table_format}
    with pytest.raises(LakeRefused, match="another format is in its folder"):
        await sync(log, URL, log.settings, **options(other))


@pytest.mark.parametrize("table_format", FORMATS)
async def test_concurrent_syncs_neither_lose_nor_repeat_events(
    nats: NatsServer, store: ObjectStore, table_format: str
) -> None:
    log, at = lake_log(nats, 40), options(table_format)
    tries = [sync(log, URL, log.settings, **at, batch_events=20) for _ in range(2)]
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert [
        outcome for outcome in outcomes if isinstance(outcome, BaseException) and not isinstance(outcome, LakeFenced)
    ] == []
    await sync(log, URL, log.settings, **at)
    assert positions(log, table_format) == list(range(1, 41))
    assert (await verify(log, URL, log.settings, **at)).sound


@pytest.mark.parametrize("fault", [LOST, FAILED])
@pytest.mark.parametrize("table_format", FORMATS)
async def test_a_lost_answer_to_a_write_neither_repeats_rows_nor_stops_a_sync(
    nats: NatsServer, store: ObjectStore, table_format: str, fault: str
) -> None:
    log, at = lake_log(nats, 30), options(table_format)
    store.tell(fault=fault, paths=["_delta_log", "/metadata/"])
    report = await sync(log, URL, log.settings, **at, batch_events=15)
    assert len(store.tell()["faults"]) > 4
    assert report.position == 30
    assert positions(log, table_format) == list(range(1, 31))
    assert (await verify(log, URL, log.settings, **at)).sound


async def test_a_table_that_a_concurrent_sync_has_created_keeps_its_position(
    nats: NatsServer, store: ObjectStore
) -> None:
    log = lake_log(nats, 20)
    store.tell(fault=HELD, paths=[f"{EVENTS}/_delta_log/{0:020d}.json"])
    first = asyncio.create_task(sync(log, URL, log.settings))
    await eventually(lambda: asyncio.to_thread(lambda: store.tell()["faults"]))
    await sync(log, URL, log.settings)
    store.tell(fault=None)
    with pytest.raises(LakeFenced):
        await first
    await sync(log, URL, log.settings)
    assert positions(log, "delta") == list(range(1, 21))


async def test_a_store_that_would_overwrite_a_commit_is_refused(nats: NatsServer, store: ObjectStore) -> None:
    log = lake_log(nats, 5)
    store.tell(conditional=False)
    with pytest.raises(LakeRefused, match=r"AWS_ENDPOINT_URL=http://127\.0\.0\.1:\d+ writes an object again"):
        await sync(log, URL, log.settings)
    assert [path.name for path in store.folder.rglob("*") if path.is_file()] == ["_eventjet_conditional_write"]


@pytest.mark.parametrize("table_format", FORMATS)
@pytest.mark.parametrize(
    ("url", "environ", "words"),
    [
        (URL, {"AWS_ACCESS_KEY_ID": "another"}, ("refuses the credentials", "AWS_ACCESS_KEY_ID")),
        ("s3://nowhere/lake", {}, ("no such bucket",)),
        (URL, {"AWS_ENDPOINT_URL": NOBODY}, (f"AWS_ENDPOINT_URL={NOBODY} does not answer",)),
    ],
)
async def test_a_fault_of_the_store_is_reported_with_its_cause(
    nats: NatsServer,
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    table_format: str,
    url: str,
    environ: dict[str, str],
    words: tuple[str, ...],
) -> None:
    log = lake_log(nats, 5)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for work in (sync, status, verify):
        if table_format == "iceberg" and work is not sync:
            continue  # without a table, only the catalog is read
        with pytest.raises(LakeRefused) as refused:
            await work(log, url, log.settings, **options(table_format))
        text = str(refused.value)
        assert [word for word in (*words, url) if word not in text] == [], text
        assert SECRET not in text


async def test_a_killed_sync_is_resumed(nats: NatsServer, store: ObjectStore, tmp_path: Path) -> None:
    book = book_of(nats, tmp_path / "app")
    last = book.fill(60, seed=1)
    command = ["lake", "sync", URL, "--batch-events", "20", "--app", f"{book.ref.module}:app"]
    for step in ("lake.created:kill:2", "lake.read:kill:2", "lake.committed:kill:3", None):
        more = {"EVENTJET_FAILPOINT": step} if step else {}
        environ = {**os.environ, "EVENTJET_SERVERS": nats.url, **more}
        ended = run(
            "eventjet.cli", [*command, "--app-dir", str(tmp_path / "app")],
            folder=tmp_path, environ=environ, timeout_s=BOUND_S,
        )  # fmt: skip
        assert ended.returncode == (-signal.SIGKILL if step else 0), ended.stderr
    assert positions(book, "delta") == list(range(1, last + 1))
    assert (await verify(book.ref, URL, book.settings)).sound
