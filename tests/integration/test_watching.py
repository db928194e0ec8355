"""Watching the status of projections reports faults."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from eventjet.cli.status import remarks_on
from eventjet.dev.nats import NatsServer
from eventjet.errors import EventjetError
from eventjet.settings import Settings
from eventjet.subscriptions.status import watched
from eventjet.subscriptions.work_status import WorkStatus
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import BALANCES, database_with


async def test_the_last_status_is_not_repeated_while_the_server_is_unreachable(tmp_path: Path) -> None:
    with NatsServer() as server:
        database = f"sqlite:///{tmp_path}/read.db"
        database_with(database, BALANCES)
        ledger = Ledger(Settings(servers=(server.url,), database=database))
        ledger.create()
        statuses = watched(ledger, ledger.settings, 0.05)
        assert isinstance(await anext(statuses), list)
        server.kill()
        for _ in range(3):
            assert isinstance(await anext(statuses), EventjetError)
        server.start()
        async with asyncio.timeout(30):
            while isinstance(await anext(statuses), EventjetError):
                pass
        await statuses.aclose()


def test_remarks_on_several_revisions_name_each_and_its_inactive_tables() -> None:
    first = WorkStatus("stock", 1, "active", 7, 7, 0, 0.0, "a", 1, None, declared=False, location="__r1", quarantined=2)
    second = replace(first, revision=2, declared=True, location="ej_stock_r2", quarantined=0, reason="it waits")
    assert remarks_on([first, second]) == [
        "stock revision 1: 2 events quarantined; see `eventjet quarantine list stock`",
        "stock revision 1: its tables are inactive, in tables whose names end in __r1, and not what readers see",
        "stock revision 1: the app does not declare it, and a worker with other code advances it now; leave it to that",
        "stock revision 2: it waits",
        "stock revision 2: its tables are inactive, in the schema ej_stock_r2, and not what readers see",
    ]
    assert remarks_on([replace(first, owner=None, location="", quarantined=0)]) == [
        (
            "stock: the app does not declare it, so only workers with other code advance it; "
            "`eventjet db unused --drop stock:1` removes it"
        )
    ]
    lost = replace(second, location="", reason=None, owner=None, lost_owner="host:7:ab", lost_s=12.0)
    assert remarks_on([lost]) == ["stock: its worker host:7:ab has not been seen for 12s; none has taken over yet"]
    assert "since the database's clock was set back" in remarks_on([replace(lost, lost_s=None)])[0]
    dropped = replace(first, state="retired", location="", quarantined=0)
    assert "stock revision 1: its tables were dropped, and nothing is left of it but this line" in remarks_on(
        [dropped, second]
    )
    assert remarks_on([replace(dropped, declared=True)]) == [
        "stock: its tables were dropped; `eventjet init` makes them anew, empty"
    ]
    assert remarks_on([replace(second, location="")]) == ["stock: it waits"]
