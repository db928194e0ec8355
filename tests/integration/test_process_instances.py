"""The instances of a process by stage and age, on a real server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.domain.quarantined import QUARANTINED, Quarantined
from eventjet.errors import UsageError
from eventjet.examples.transfer.accounts import Account
from eventjet.examples.transfer.app import transfers
from eventjet.examples.transfer.transfers import Transfer
from eventjet.jetstream.client import Client, connected
from eventjet.operations import instances
from eventjet.operations.instances import Instances, instances_of, span_of
from eventjet.settings import Settings
from eventjet.subscriptions.cursor_store import Cursors, QuarantinedEntry
from tests.integration.reacting import eventually, working


@asynccontextmanager
async def requested_transfers(*names_and_targets: tuple[str, str]) -> AsyncGenerator[tuple[Settings, Client]]:
    """Start a server with requested transfers to these accounts and no worker; the account `cold` is frozen."""
    with NatsServer(sync_interval="1m") as server:
        settings = Settings.load({"servers": server.url, "database": "sqlite:///none.db"}, environ={})
        async with transfers.connect(settings) as jet, connected(settings) as client:
            await jet.init()
            for name in ("ada", "bob", "cold"):
                await jet.repository(Account).execute(name, Account.open, name)
                await jet.repository(Account).execute(name, Account.deposit, Decimal(1_000))
            await jet.repository(Account).execute("cold", Account.freeze)
            until = datetime.now(UTC) + timedelta(days=1)
            for name, target in names_and_targets:
                repository = jet.repository(Transfer)
                await repository.execute(name, Transfer.request, name, "ada", target, Decimal(1), until=until)
            yield settings, client


def ids(result: Instances) -> list[str]:
    return [instance.id for instance in result.instances]


def counts(result: Instances) -> Sequence[tuple[str, int, int]]:
    return [(stage.stage, stage.instances, stage.open) for stage in result.stages]


async def test_each_instance_has_the_stage_of_its_last_event_and_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instances, "_AT_ONCE", 2)  # several requests
    names = [("t-1", "bob"), ("t-2", "cold"), ("t-3", "bob"), ("a b.*>", "bob"), ("t-5", "bob")]
    async with requested_transfers(*names) as (settings, client):
        result = await instances_of(client, transfers, "transfer")
        assert counts(result) == [("transfer.requested", 5, 5)]
        assert (result.total, result.looked_at, result.matching) == (5, 5, 5)
        assert ids(result) == [name for name, _ in names]  # the longest in its stage first
        assert {instance.waits_for for instance in result.instances} == {"worker"}

        async def only_the_frozen() -> Instances | None:
            """Return the instances once only the frozen one is open."""
            result = await instances_of(client, transfers, "transfer")
            return result if ids(result) == ["t-2"] else None

        async with working(transfers, settings):
            last = await eventually(only_the_frozen)
        assert last is not None
        (frozen,) = last.instances
        assert frozen.waits_for in ("deadline", "worker")
        completed = await instances_of(client, transfers, "transfer", stage="transfer.completed")
        assert {instance.waits_for for instance in completed.instances} == {"nothing"}
        assert len(ids(await instances_of(client, transfers, "transfer", everything=True))) == 5


async def test_a_quarantined_instance_is_open_and_names_the_event() -> None:
    async with requested_transfers(("t-1", "bob"), ("t-2", "bob")) as (_, client):
        cursors = Cursors(client, transfers.name)
        stored = await cursors.read("transfer")
        quarantined = Quarantined(9, "transfer", "t-1", "id", "transfer.requested", QUARANTINED, "it broke", "", None)
        namesake = replace(quarantined, position=10, aggregate="account", aggregate_id="t-2")  # it could not be decoded
        entries = [QuarantinedEntry(event, tries=1, log=stored.cursor.log) for event in (quarantined, namesake)]
        await cursors.write(stored, stored.cursor, to_write=entries)
        result = await instances_of(client, transfers, "transfer")
        first, second = result.instances
        assert (first.id, first.waits_for, first.quarantined) == ("t-1", "quarantine", 9)
        assert (second.id, second.waits_for) == ("t-2", "worker")


async def test_limits_of_a_query_are_kept_and_reported() -> None:
    async with requested_transfers(*((f"t-{n}", "bob") for n in range(7))) as (_, client):
        first = await instances_of(client, transfers, "transfer", limit=2, looked_max=5)
        assert (first.total, first.looked_at, first.matching, ids(first)) == (7, 5, 5, ["t-0", "t-1"])
        assert not first.is_whole
        assert list(instances.remarks_on(first)) == [
            "Looked at 1 to 5 of 7 instances of transfer, 5 of them open.",
            "The 2 that are longest in their stage are listed, of 5.",
        ]
        rest = await instances_of(client, transfers, "transfer", looked_max=5, offset=5)
        assert ids(rest) == ["t-5", "t-6"]
        assert list(instances.remarks_on(rest)) == ["Looked at 6 to 7 of 7 instances of transfer, 2 of them open."]
        assert (await instances_of(client, transfers, "transfer", older_than=timedelta(hours=1))).matching == 0
        assert (await instances_of(client, transfers, "transfer", older_than=span_of("999999d"))).matching == 0
        assert (await instances_of(client, transfers, "transfer", older_than=timedelta(0))).matching == 7
        with pytest.raises(UsageError, match=r"has no stage 'compleeted'.*transfer\.completed"):
            await instances_of(client, transfers, "transfer", stage="compleeted")
        with pytest.raises(UsageError, match="has no process 'transfers'"):
            await instances_of(client, transfers, "transfers")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7_200), ("1d 12h", 129_600)])
def test_a_span_is_a_number_with_a_unit(text: str, seconds: int) -> None:
    assert span_of(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "2", "h", "2 weeks", "-2h", "2h and more"])
def test_other_text_is_no_span(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        span_of(text)
