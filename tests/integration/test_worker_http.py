"""Health and metrics of real workers over HTTP, on both databases."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import socket
import urllib.error
import urllib.request
import warnings
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from eventjet.dev.nats import NatsServer
from eventjet.dev.postgres import PostgresServer
from eventjet.errors import Unreachable
from eventjet.observability.metrics import METRICS
from eventjet.settings import Settings
from eventjet.sql.revisions import pause
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.health import HealthStatus, serving
from tests.integration.ledger_log import Ledger, eventually, history
from tests.integration.projecting import BALANCES, MOVEMENTS, Added, Noted, database_with
from tests.logs import block
from tests.tables import execute

QUICK = WorkerOptions(lease_s=1.5, poll_s=0.1, look_s=0.1, stalled_s=1.0)
STEADY = replace(QUICK, lease_s=30.0, stalled_s=30.0)


class Page:
    """The HTTP answers of a worker."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> tuple[int, str, Mapping[str, str]]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(), dict(error.headers)

    async def health(self) -> tuple[int, dict[str, Any]]:
        status, body, _ = await asyncio.to_thread(self.get, "/healthz")
        return status, json.loads(body)

    async def metrics(self) -> dict[str, float]:
        status, body, headers = await asyncio.to_thread(self.get, "/metrics")
        assert status == 200
        assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = [line.rpartition(" ") for line in body.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    async def is_healthy(self) -> bool:
        return (await self.health())[0] == 200


@asynccontextmanager
async def worker_page(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, *names: str, options: WorkerOptions = QUICK
) -> AsyncGenerator[Page]:
    """Run a worker with a page, and yield the page once the worker is ready."""
    caplog.set_level(logging.INFO, "eventjet")
    caplog.clear()
    async with ledger.working(*names, options=options, http=("127.0.0.1", 0)):
        (url,) = re.findall(r"http://[\d.:]+", caplog.text)
        yield Page(url)


async def test_a_worker_that_keeps_up_is_healthy_and_has_metrics(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    events = [item for item in history(300) if not isinstance(item[1], Noted)]
    last = ledger.append(events)
    async with worker_page(ledger, caplog, options=STEADY) as page:
        await ledger.caught_up(last)
        await ledger.caught_up(last, MOVEMENTS)

        async def has_metrics() -> bool:
            metrics = await page.metrics()
            return metrics.get(f"eventjet_projection_position{labels}") == last and metrics.get(active) == 1

        labels = '{projection="balances",revision="1"}'
        active = 'eventjet_projection_state{projection="balances",revision="1",state="active"}'
        await eventually(has_metrics, "the position, and the state that is noted after it")
        status, verdict = await page.health()
        assert (status, verdict["healthy"], verdict["reason"]) == (200, True, None)
        assert [(projection["name"], projection["held"]) for projection in verdict["projections"]] == [
            ("balances", True),
            ("movements", True),
        ]
        metrics = await page.metrics()
        assert metrics[f"eventjet_events_total{labels}"] == last
        assert metrics[f"eventjet_commit_seconds_count{labels}"] == metrics[f"eventjet_batches_total{labels}"] > 0
        assert (
            metrics[f"eventjet_projection_lag_events{labels}"]
            == metrics[f"eventjet_projection_lag_seconds{labels}"]
            == 0
        )
        assert metrics["eventjet_log_position"] == last
        names = {re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name) for name in metrics}
        assert {metric.name for metric in METRICS if not metric.name.startswith("eventjet_follower_")} == names
        assert (await asyncio.to_thread(page.get, "/nothing"))[0] == 404


async def test_a_failed_projection_makes_its_worker_unhealthy(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    bad = ledger.append([("a-1", Added(amount=Decimal("0.005")))])
    async with worker_page(ledger, caplog, "balances", options=STEADY) as page:

        async def says_why() -> bool:
            return str((await page.health())[1]["reason"]).startswith("balances: failed: ")

        await eventually(says_why, "the fault")
        status, verdict = await page.health()
        assert status == 503
        assert f"position {bad}" in verdict["reason"]
        metrics = await page.metrics()
        assert metrics['eventjet_projection_state{projection="balances",revision="1",state="failed"}'] == 1
        assert metrics['eventjet_terms_total{projection="balances",revision="1",reason="failed"}'] == 1
        assert metrics["eventjet_worker_healthy"] == 0


async def test_a_projection_without_progress_is_unhealthy_until_it_is_paused(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.append(history(10))
    # The projection waits for a newer deploy: it does not fail and does not advance.
    ledger.append_raw([("a-1", block("ledger.added", schema=2), b"{}")])
    async with worker_page(ledger, caplog, "balances", options=replace(QUICK, backoff_s=(0.1, 0.2))) as page:

        async def says_why() -> bool:
            status, verdict = await page.health()
            return status == 503 and "without progress" in str(verdict["reason"]) and "schema 2" in verdict["reason"]

        await eventually(says_why, "the reason")
        await pause(ledger.settings.database, [("balances", 1)])
        await eventually(page.is_healthy, "health")


async def test_a_standby_is_healthy_while_another_works(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    last = ledger.append(history(100))
    async with ledger.working("balances", options=STEADY):
        await ledger.caught_up(last)
        async with worker_page(ledger, caplog, "balances", options=STEADY) as page:
            await eventually(page.is_healthy, "health")
            _, verdict = await page.health()
            assert [(projection["held"], projection["position"]) for projection in verdict["projections"]] == [
                (False, last)
            ]


async def test_a_worker_without_its_database_reports_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with NatsServer() as nats, PostgresServer(durable=False) as postgres:
        database_with(postgres.url, BALANCES)
        ledger = Ledger(Settings(servers=(nats.url,), database=postgres.url))
        ledger.create()
        async with worker_page(ledger, caplog, "balances") as page:
            await eventually(page.is_healthy, "health")
            postgres.kill()

            async def says_why() -> bool:
                status, verdict = await page.health()
                return status == 503 and "The database postgresql" in str(verdict["reason"])

            await eventually(says_why, "the reason")
            assert str(make_url(postgres.url).password) not in str(await page.health())
            postgres.start()
            await eventually(page.is_healthy, "health")


async def test_a_read_only_database_is_the_reason_of_a_projection_without_progress(
    eventjet_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    with PostgresServer(durable=False) as postgres:
        database_with(postgres.url, BALANCES)
        ledger = Ledger(Settings(servers=(eventjet_nats.url,), database=postgres.url))
        ledger.create()
        name = make_url(postgres.url).database
        ledger.append(history(20))

        async def status_has_reason() -> bool:
            return "default_transaction_read_only is on for everybody" in str((await ledger.status()).reason)

        async with ledger.working("balances"):
            pass
        ledger.append(history(20))
        execute(postgres.url, f"alter database {name} set default_transaction_read_only = on")
        async with worker_page(ledger, caplog, "balances") as page:

            async def says_why() -> bool:
                status, verdict = await page.health()
                return status == 503 and "read_only" in str(verdict["reason"])

            await eventually(says_why, "the reason")
            await eventually(status_has_reason, "the reason of the status")
            execute(
                postgres.url,
                "set transaction read write",
                f"alter database {name} set default_transaction_read_only = off",
            )
            await eventually(page.is_healthy, "health")
            assert (await ledger.status()).reason is None


async def test_a_locked_table_is_the_reason_until_it_is_free(
    eventjet_nats: NatsServer, eventjet_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    database_with(eventjet_database, BALANCES)
    ledger = Ledger(Settings(servers=(eventjet_nats.url,), database=eventjet_database))
    ledger.create()

    async def status_has_reason() -> bool:
        return str((await ledger.status()).reason).startswith("waiting since")

    async with worker_page(ledger, caplog, "balances", options=replace(QUICK, backoff_s=(0.02, 0.1))) as page:
        await ledger.caught_up(ledger.append(history(20)))
        with ledger.where.sync_engine().begin() as other:
            other.exec_driver_sql("lock table balances in share mode")
            last = ledger.append(history(20, seed=8))
            await eventually(status_has_reason, "the reason of the status")

            async def says_why() -> bool:
                status, verdict = await page.health()
                return status == 503 and "waiting since" in str(verdict["reason"])

            await eventually(says_why, "the reason")
        await ledger.caught_up(last)
        await eventually(page.is_healthy, "health")

        async def is_cleared() -> bool:
            return (await ledger.status()).reason is None

        await eventually(is_cleared, "no reason")


class Fixed:
    """A page with fixed content."""

    def status(self) -> HealthStatus:
        return HealthStatus(True, None, ())

    def metrics(self) -> str:
        return ""

    async def keep(self) -> None:
        await asyncio.Event().wait()


async def test_an_address_in_use_is_refused() -> None:
    async with serving(("127.0.0.1", 0), Fixed()) as (_, port):
        with pytest.raises(Unreachable, match=rf"The address 127.0.0.1:{port}: nothing can listen there .*in use"):
            async with serving(("127.0.0.1", port), Fixed()):
                pass
    with pytest.raises(Unreachable, match="nothing can listen there"):
        async with serving(("nowhere.invalid", 0), Fixed()):
            pass


def test_a_worker_that_is_cancelled_as_it_begins_to_listen_leaves_no_socket_open() -> None:
    async def cancelled_after(turns: int) -> None:
        async def listen() -> None:
            async with serving(("127.0.0.1", 0), Fixed()):
                await asyncio.Event().wait()

        task = asyncio.create_task(listen())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})

    gc.collect()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        for turns in range(1, 20):
            asyncio.run(cancelled_after(turns))
        gc.collect()
    assert [str(warning.message) for warning in warned] == []


async def test_silent_connections_do_not_block_others_for_long() -> None:
    async with serving(("127.0.0.1", 0), Fixed()) as (_, port):
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        page = Page(f"http://127.0.0.1:{port}")

        async def answers() -> bool:
            try:
                return await page.is_healthy()
            except OSError:
                return False

        await eventually(answers, "an answer", timeout_s=20)
        for connection in silent:
            connection.close()
