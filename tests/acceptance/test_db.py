"""`eventjet db`: the real program over a bank whose projection is changed and changed back."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

from tests.acceptance.conftest import Program


def altered(bank: Program) -> None:
    """Write the app's next deploy, with another revision."""
    source = (bank.folder / "bank.py").read_text()
    assert '@projection("balances")' in source
    newer = source.replace('@projection("balances")', '@projection("balances", revision=2)')
    (bank.folder / "newer.py").write_text(newer)


def tables(bank: Program) -> set[str]:
    with closing(sqlite3.connect(bank.folder / "read.db")) as connection:
        return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}


def test_upgrade_prints_its_changes_and_needs_no_app(bank: Program) -> None:
    upgrade = bank("db", "upgrade", EVENTJET_APP="nothing:here")
    assert upgrade.status == 0
    assert "created  table eventjet_projection" in upgrade.out
    again = json.loads(bank("db", "upgrade", "--json").out)
    assert (again["before"], again["after"], again["tables"], again["columns"]) == ("0003", "0003", [], [])
    with closing(sqlite3.connect(bank.folder / "read.db")) as connection, connection:
        connection.execute("update eventjet_alembic_version set version_num = '0999'")
    newer = bank("db", "upgrade")
    assert newer.status == 3
    assert newer.is_one_paragraph()
    assert "upgrade eventjet here too" in newer.message()


def test_tables_without_their_version_are_neither_used_nor_recreated(bank: Program) -> None:
    assert bank("init").status == 0
    with closing(sqlite3.connect(bank.folder / "read.db")) as connection, connection:
        connection.execute("drop table eventjet_alembic_version")
    for command in (["worker"], ["db", "upgrade"], ["init"]):
        ended = bank(*command)
        assert (ended.status, ended.is_one_paragraph()) == (3, True)
        assert "'eventjet_alembic_version' is gone or empty, and eventjet_action," in ended.message()


def test_a_revision_is_built_promoted_rolled_back_and_dropped(bank: Program) -> None:
    altered(bank)
    newer = {"EVENTJET_APP": "newer:bank"}
    assert bank("init").status == 0
    assert bank("rebuild", "balances", "--engine", "local").status == 0
    missing = bank("worker", **newer)
    assert missing.status == 3
    assert "revision 1 holds 'balances'. Run `eventjet init`" in missing.message()
    early = bank("db", "promote", "balances", **newer)
    assert (early.status, early.is_one_paragraph()) == (1, True)
    assert "it has no tables yet; `eventjet init` makes them" in early.message()
    assert "created  table balances__r2" in bank("init", **newer).out
    rebuilt = bank("rebuild", "balances", "--engine", "local", **newer)
    assert "eventjet db promote balances" in " ".join(rebuilt.out.split())
    refused = bank("db", "unused", "--drop", "balances:1", **newer)
    assert refused.status == 2
    assert "readers see its rows until revision 2 takes over" in refused.message()
    assert "revision 1 is inactive now" in bank("db", "promote", "balances", **newer).out
    assert json.loads(bank("db", "promote", "balances", "--json").out)["left"] == [2]
    assert json.loads(bank("db", "promote", "balances", "--json", **newer).out)["left"] == [1]
    (listed,) = json.loads(bank("db", "unused", "--json", **newer).out)["revisions"]
    assert (listed["projection"], listed["revision"], listed["location"], listed["in_use"]) == (
        "balances",
        1,
        "__r1",
        None,
    )
    assert "balances__r1" in tables(bank)
    assert 'dropped  balances:1: "balances__r1"' in bank("db", "unused", "--drop", "balances:1", **newer).out
    assert "balances__r1" not in tables(bank)
    assert bank("db", "unused", **newer).out == "There is nothing unused.\n"
    gone = bank("db", "promote", "balances")
    assert gone.status == 1
    assert "its tables were dropped; `eventjet init` makes them" in gone.message()
    assert "its tables were dropped; `eventjet init` makes them anew, empty" in " ".join(bank("status").out.split())
    for argument in ("balances", "balances:x", "balances:1"):
        ended = bank("db", "unused", "--drop", argument, **newer)
        assert (ended.status, ended.is_one_paragraph()) == (2, True)


def test_a_dropped_table_is_reported_by_status_and_init_and_reset_when_asked(bank: Program) -> None:
    assert bank("init").status == 0
    assert bank("rebuild", "balances", "--engine", "local").status == 0
    with closing(sqlite3.connect(bank.folder / "read.db")) as connection, connection:
        connection.execute("drop table balances")
    (status,) = (status for status in json.loads(bank("status", "--json").out) if status["name"] == "balances")
    assert status["state"] == "failed"
    assert "'balances' is not in the database" in status["reason"]
    refused = bank("init")
    assert (refused.status, refused.is_one_paragraph()) == (1, True)
    assert "has lost its rows: 'balances' is not in the database" in refused.message()
    verified = bank("verify", "balances", "--engine", "local")
    assert verified.status == 1
    assert "has lost its rows: 'balances' is not in the database. Run `eventjet rebuild" in verified.message()
    assert bank("init", "--reset", "nothing").status == 2
    assert "created  table balances" in bank("init", "--reset", "balances").out
    (status,) = (status for status in json.loads(bank("status", "--json").out) if status["name"] == "balances")
    assert (status["state"], status["position"], status["reason"]) == ("new", 0, None)


def test_a_file_that_is_no_database_is_named_by_every_command(bank: Program) -> None:
    bank("init")
    notes = bank.folder / "notes.txt"
    notes.write_text("no database at all\n" * 100)
    for command in (("status",), ("init",), ("rebuild", "balances"), ("verify", "balances"), ("db", "upgrade")):
        refused = bank(*command, EVENTJET_DATABASE=f"sqlite:///{notes}")
        assert refused.status == 3, command
        assert "notes.txt: file is not a database. Name the file that has the read models" in refused.message()
    checked = bank("doctor", EVENTJET_DATABASE=f"sqlite:///{notes}")
    assert checked.status == 3
    assert "file is not a database" in " ".join(checked.out.split())
    assert "journal mode" not in checked.out
