"""`eventjet lake` as a program: what it prints, how it ends, and what its options do."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from eventjet.dev.nats import NatsServer
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import ask_once
from eventjet.log.topology import IDENTITY
from tests import logs
from tests.acceptance.conftest import Program
from tests.acceptance.test_restore import name_of
from tests.integration.restoring import endpoint, records_of, seal
from tests.logs import block

pytestmark = pytest.mark.timeout(1_500)


@pytest.fixture
def filled(bank: Program, eventjet_nats: NatsServer) -> Program:
    """The bank with 30 deposits."""
    assert bank("init").status == 0
    deposits = ((f"account.a-{number % 3}", block(), b'{"amount": "1.50"}') for number in range(30))
    logs.append(endpoint(eventjet_nats.url), name_of(bank), deposits)
    return bank


def answer(program: Program, *arguments: str, **more: str) -> Any:
    ended = program(*arguments, "--json", **more)
    assert ended.status == 0, ended.err
    return json.loads(ended.out)


def rows(folder: Path) -> list[int]:
    positions: list[int] = DeltaTable(folder).to_pyarrow_table().column("position").to_pylist()
    return sorted(positions)


def test_a_lake_is_synced_listed_and_verified(filled: Program) -> None:
    url = filled.folder / "lake"
    report = answer(filled, "lake", "sync", str(url), "--to", "20", "--batch-events", "7", "--personal")
    assert (report["position"], report["events"]) == (20, 20)
    assert {table["name"]: table["rows"] for table in report["tables"]} == {
        "events": 20, "account_opened": 0, "account_deposited": 20, "account_withdrawn": 0
    }  # fmt: skip
    assert rows(url / "events") == list(range(1, 21))

    status = answer(filled, "lake", "status", str(url), "--format", "delta")
    assert {(table["position"], table["behind"], table["personal"]) for table in status["tables"]} == {(20, 10, True)}
    status_text = filled("lake", "status", str(url))
    assert (status_text.status, "account_deposited" in status_text.out) == (0, True)

    synced = filled("lake", "sync", str(url), "--personal")
    assert (synced.status, "up to position 30" in synced.out) == (0, True)
    assert "Up to date" in filled("lake", "sync", str(url), "--personal").out
    verified = answer(filled, "lake", "verify", str(url), "--range-events", "9", "--format", "delta")
    assert verified["sound"]
    assert {table["ranges"] for table in verified["tables"]} == {4}

    exported = answer(filled, "lake", "export", str(url), "balances", "--to", "20", "--personal", "--format", "delta")
    assert (exported["position"], [table["name"] for table in exported["tables"]]) == (20, ["balances"])
    assert filled("lake", "export", str(url), "balances", "--personal").status == 0
    assert "balances" in filled("lake", "status", str(url)).out
    wrong = pa.table({"account_id": ["a-9"], "owner": ["Ada"], "amount": pa.array([1], pa.decimal128(12, 2))})
    write_deltalake(url / "balances", wrong, mode="append")
    result = filled("lake", "verify", str(url))
    assert result.status == 1
    assert "balances has 1 rows, and the log gives 0 up to position 30: the row is there twice" in " ".join(
        result.out.split()
    )

    twice = pa.table({"position": pa.array([5], pa.int64())})
    write_deltalake(url / "account_deposited", twice, mode="append", schema_mode="merge")
    result = filled("lake", "verify", str(url))
    assert result.status == 1
    assert "account_deposited: positions 1 to 30 have 31 rows, and the log gives 30." in " ".join(result.out.split())


def test_the_past_comes_from_an_archive(filled: Program, eventjet_nats: NatsServer) -> None:
    name = name_of(filled)
    url = filled.folder / "lake"
    identity = ask_once(endpoint(eventjet_nats.url), stream_info(name)).metadata[IDENTITY]
    records = records_of(eventjet_nats.url, name)[:20]
    records[4] = (*records[4][:4], b'{"amount": "2.50"}')  # which shows where it was read
    archive = seal(filled.folder / "archive", records, identity, name=name)
    assert answer(filled, "lake", "sync", str(url), "--from-archive", archive)["events"] == 30
    amounts = DeltaTable(url / "account_deposited").to_pyarrow_table().sort_by("position").column("amount").to_pylist()
    assert (amounts[3:6], len(amounts)) == ([Decimal("1.5"), Decimal("2.5"), Decimal("1.5")], 30)
    exported = answer(filled, "lake", "export", str(url), "balances", "--personal", "--from-archive", archive)
    assert exported["events"] == 30
    assert answer(filled, "lake", "verify", str(url), "--from-archive", archive)["sound"]
    assert filled("lake", "verify", str(url)).status == 1


def test_iceberg_tables_are_in_the_named_catalog(filled: Program) -> None:
    url, catalog = filled.folder / "tables", f"sqlite:///{filled.folder}/company.db"
    named = {
        "PYICEBERG_CATALOG__COMPANY__TYPE": "sql",
        "PYICEBERG_CATALOG__COMPANY__URI": catalog,
        "PYICEBERG_CATALOG__COMPANY__WAREHOUSE": f"file://{filled.folder}/elsewhere",
    }
    assert (
        answer(filled, "lake", "sync", str(url), "--format", "iceberg", "--catalog", "company", **named)["position"]
        == 30
    )
    assert {path.name for path in url.iterdir()} == {
        "events", "account_opened", "account_deposited", "account_withdrawn"
    }  # fmt: skip
    status = answer(filled, "lake", "status", str(url), "--format", "iceberg", "--catalog", "company", **named)
    assert {table["position"] for table in status["tables"]} == {30}
    iceberg = ("--format", "iceberg")
    assert (
        answer(filled, "lake", "export", str(url), "balances", "--personal", "--catalog", "company", *iceberg, **named)[
            "position"
        ]
        == 30
    )
    assert answer(filled, "lake", "verify", str(url), "--format", "iceberg", "--catalog", "company", **named)["sound"]


def test_faults_are_reported_in_a_paragraph(filled: Program) -> None:
    url = str(filled.folder / "lake")
    ended = filled("lake", "sync", url, "--format", "hudi")
    assert (ended.status, ended.is_one_paragraph()) == (2, True)
    assert "Use delta or iceberg" in ended.message()
    assert "`eventjet lake sync` makes them" in filled("lake", "status", url).out
    ended = filled("lake", "verify", url)
    assert (ended.status, ended.is_one_paragraph()) == (1, True)
    assert "`eventjet lake sync` makes it" in ended.message()
    for kind, module in (("delta", "deltalake"), ("iceberg", "pyiceberg")):
        ended = filled("lake", "sync", url, "--format", kind, without=(module,))
        assert (ended.status, ended.is_one_paragraph()) == (3, True)
        assert 'pip install "eventjet[lake]"' in ended.message()
        assert module in ended.message()
