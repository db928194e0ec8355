"""A mirror between two regions works with the roles of `eventjet nats-config --mirror`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from eventjet import App, Reaction, Recorded, reactor
from eventjet.errors import Forbidden, Unreachable
from eventjet.examples.bank.account import Account, Opened
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.examples.bank.read_models import balances
from eventjet.operations import mirrors, promotion
from eventjet.operations.roles import Role, accounts, roles_of
from eventjet.rebuild import rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.locations import create_tables
from tests.blobs import Document
from tests.integration.reacting import eventually, until, working
from tests.two_regions import Regions, two_regions

PATIENT_S = 120.0
GREETED: list[str] = []


@reactor("greeting", start="beginning")
async def greeting(event: Recorded[Opened], to: Reaction[object]) -> None:
    GREETED.append(event.aggregate_id)


AGGREGATES = [Account, Document]
UPCASTERS = [withdrawn_has_a_reason]
WHOLE = App("bank", aggregates=AGGREGATES, upcasters=UPCASTERS, projections=[balances], reactors=[greeting])
READING = App("bank", aggregates=AGGREGATES, upcasters=UPCASTERS, projections=[balances])
ACTING = App("bank", aggregates=AGGREGATES, upcasters=UPCASTERS, reactors=[greeting])


def configuration_of(roles: tuple[Role, ...]) -> str:
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    return f"{passwords}SYS_PASSWORD: sys\n{accounts('bank', roles)}"


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[Regions]:
    roles = roles_of("bank", ("account", "document"), ["balances-r1"], ["greeting"], objects=True, mirror=True)
    with two_regions(tmp_path, "bank", accounts=configuration_of(roles), user="mirror", account="BANK") as regions:
        yield regions


async def test_a_mirror_is_created_read_and_promoted_with_its_roles(regions: Regions, tmp_path: Path) -> None:
    def settings_of(role: str) -> Settings:
        return replace(regions.settings(tmp_path), user=role, password=role, inbox_prefix=f"_INBOX_{role}")

    async with WHOLE.connect(settings_of("admin").for_log()) as jet:
        await jet.init()
    create_tables(Database(settings_of("admin").database).sync_engine(), WHOLE.projections.values())
    created = await asyncio.to_thread(mirrors.create, "bank", settings_of("admin"), 1)
    assert created == ["OBJ_bank_objects", "KV_bank_cursors", "bank"]
    async with (
        WHOLE.connect(settings_of("writer").for_log()) as jet,
        working(READING, settings_of("worker")),
        working(ACTING, settings_of("actor")),
    ):
        blob = await jet.blobs.put(b"x" * 400_000, media_type="text/plain", name="scan")
        await jet.repository(Document).execute("d-1", Document.file, blob)
        result = await jet.repository(Account).execute("a-1", Account.open, "ada")
        await jet.caught_up("balances", position=result.position, timeout_s=PATIENT_S)
        await until(lambda: GREETED == ["a-1"])
    async with WHOLE.connect(settings_of("reader")) as jet:
        assert [event.position async for event in jet.tail()] == [1, 2]
    assert (await rebuild(READING, ["balances"], settings_of("rebuild"), engine="local")).position == 2
    assert (await verify(READING, "balances", settings_of("rebuild"), engine="local")).differences == 0
    for role in ("admin", "reader"):
        status = await asyncio.to_thread(mirrors.status, "bank", settings_of(role))
        assert (status.last, status.fault, status.unreachable, status.crosses) == (2, None, None, False)
    with pytest.raises(Forbidden):
        await asyncio.to_thread(mirrors.create, "bank", settings_of("mirror"), 1)
    with pytest.raises((Forbidden, Unreachable), match="denied"):
        await asyncio.to_thread(promotion.promote, WHOLE, settings_of("reader"))

    promoted = await asyncio.to_thread(promotion.promote, WHOLE, settings_of("admin"))
    assert (promoted.end, promoted.sealed, promoted.moved, promoted.unknown) == (2, True, 2, ())
    west = [
        replace(settings_of(role).for_reads(), database=settings_of(role).database)
        for role in ("writer", "worker", "actor")
    ]
    async with WHOLE.connect(west[0]) as jet, working(READING, west[1]), working(ACTING, west[2]):
        assert await jet.blobs.read(blob, max_bytes=1 << 20) == b"x" * 400_000
        result = await jet.repository(Account).execute("a-1", Account.deposit, Decimal(1))
        assert result.position == 3
        await jet.repository(Account).execute("a-2", Account.open, "bob")
        await jet.caught_up("balances", token=result.token, timeout_s=PATIENT_S)
        await until(lambda: GREETED == ["a-1", "a-2"])


async def test_an_app_without_reactors_and_bodies_is_mirrored_and_promoted_by_admin(tmp_path: Path) -> None:
    app = App("bank", aggregates=[Account], upcasters=UPCASTERS)
    roles = roles_of("bank", ("account",), (), mirror=True)
    with two_regions(tmp_path, "bank", accounts=configuration_of(roles), user="mirror", account="BANK") as regions:
        settings = replace(regions.settings(tmp_path), user="admin", password="admin", inbox_prefix="_INBOX_admin")
        async with app.connect(settings.for_log()) as jet:
            await jet.init()
        assert await asyncio.to_thread(mirrors.create, "bank", settings, 1) == ["bank"]
        writer = replace(settings, user="writer", password="writer", inbox_prefix="_INBOX_writer")
        async with app.connect(writer.for_log()) as jet:
            await jet.repository(Account).execute("a-1", Account.open, "ada")

        async def is_mirrored() -> bool:
            return (await asyncio.to_thread(mirrors.status, "bank", settings)).last == 1

        await eventually(is_mirrored)
        promoted = await asyncio.to_thread(promotion.promote, app, settings)
        assert (promoted.end, promoted.sealed, promoted.unknown) == (1, True, ())
