"""The role of `eventjet nats-config` for rebuilds suffices for a rebuild, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.errors import Forbidden
from eventjet.jetstream.connection import NatsConnection
from eventjet.nats.endpoint import Endpoint
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from tests.integration.rebuild_log import ALL, Book, remains
from tests.integration.roles import ADMIN, INBOX, with_rebuild_role

FORBIDDEN = [
    "bank.account.a-1",
    *(f"$JS.API.STREAM.{verb}.bank" for verb in ("UPDATE", "DELETE", "PURGE", "MSG.DELETE", "SNAPSHOT", "CREATE")),
    *(f"$JS.API.{verb}.other" for verb in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET", "STREAM.PURGE")),
    "$JS.API.DIRECT.GET.bank",
    "$JS.API.STREAM.NAMES",
    "$JS.API.INFO",
    "$JS.API.CONSUMER.CREATE.bank",
    "$JS.API.CONSUMER.CREATE.bank.balances-r1.bank.account.a-1",
    "$JS.API.CONSUMER.CREATE.other.mine",
    "$JS.API.CONSUMER.DURABLE.CREATE.bank.mine",
    "$JS.API.CONSUMER.RESET.bank.mine",
    "$JS.API.CONSUMER.MSG.NEXT.other.mine",
    "$JS.API.CONSUMER.DELETE.other.mine",
    *(f"$JS.API.CONSUMER.{verb}.bank.balances-r1" for verb in ("CREATE", "DELETE", "MSG.NEXT", "INFO", "RESET")),
    "$JS.ACK.bank.balances-r1.1.1.1.1.0",
    "$KV.bank_snapshots.account.a-1",
    "$JS.API.DIRECT.GET.KV_bank_snapshots",
]


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m", config=with_rebuild_role("bank", "secret")) as server:
        with NatsConnection.open(Endpoint((server.url,), user=ADMIN, password=ADMIN)) as link:
            link.api("STREAM.CREATE.bank", {"name": "bank", "subjects": ["bank.*.*"]})
        yield server


@pytest.mark.parametrize("subject", FORBIDDEN)
def test_the_role_may_not_use_subjects_that_a_rebuild_does_not_need(nats: NatsServer, subject: str) -> None:
    with NatsConnection.open(Endpoint((nats.url,), user="rebuild", password="secret", inbox_prefix=INBOX)) as link:
        link.publish(subject, b"{}", reply=f"{link.inbox}.x")
        with pytest.raises(Forbidden):
            link.receive(60.0)


@pytest.mark.parametrize("subject", ["bank.>", "$JS.ACK.>", "$JS.API.>", ">", "_INBOX.>"])
def test_the_role_may_subscribe_only_to_its_own_inbox(nats: NatsServer, subject: str) -> None:
    with NatsConnection.open(Endpoint((nats.url,), user="rebuild", password="secret", inbox_prefix=INBOX)) as link:
        link.subscribe(subject)
        with pytest.raises(Forbidden):
            link.receive(60.0)


async def test_the_role_suffices_for_a_rebuild_and_a_verification(tmp_path: Path) -> None:
    with NatsServer(sync_interval="1m", config=with_rebuild_role("*", "secret")) as server:
        options = {"servers": server.url, "database": f"sqlite:///{tmp_path}/read.db"}
        book = Book(Settings.load({**options, "user": ADMIN, "password": ADMIN}, {}), tmp_path)
        last = book.fill(1_000)
        rebuild_settings = replace(book.settings, user="rebuild", password="secret", inbox_prefix=INBOX)
        report = await rebuild(book.ref, ALL, rebuild_settings, engine="local")
        assert (report.events, book.rows()) == (1_000, book.folded(last))
        assert (await verify(book.ref, "balances", rebuild_settings, engine="local")).differences == 0
        assert remains(book.where) == []
