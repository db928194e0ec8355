"""`App` checks the whole system when it is built, and reports all faults at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table

from eventjet import App, DefinitionError, Recorded, aggregate, event, load_app, projection
from eventjet.errors import UsageError
from eventjet.examples.bank.account import Account, Opened
from eventjet.settings import Settings


@event("x.happened", schema=2)
class Happened:
    n: int


@aggregate("Bad-Name")
class Badly:
    n: int  # no default

    def evolve(self, event: Happened | Opened) -> Badly:
        return self


@aggregate("account")
class Namesake:
    n: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    account_id: str
    surplus: int


table = Table("rows", MetaData(), Column("account_id", String, primary_key=True), Column("amount", Integer))


@projection("rows", table=table)
def rows(row: Row | None, event: Recorded[Opened]) -> Row | None:
    return row


def test_all_faults_of_an_app_are_reported_at_once() -> None:
    with pytest.raises(DefinitionError) as caught:
        App("My Bank", aggregates=[Account, Badly, Namesake, int], projections=[rows, rows])  # type: ignore[list-item]
    text = str(caught.value)
    for part in (
        "'My Bank' is not [a-z][a-z0-9_]*",
        "'Bad-Name' is not",
        "Badly.n has no default",
        "Opened is folded by Account and by Badly",
        "two aggregates are called 'account'",
        "Namesake has no `evolve(self, event)`",
        "int is not an aggregate",
        "@upcaster('x.happened', schema=1)",
        "@upcaster('account.withdrawn', schema=1)",
        "projection 'rows'",
        "'surplus'",
        "'amount'",
        "two projections are called 'rows'",
    ):
        assert part in text
    assert len(caught.value.faults) >= 12


@aggregate("opaque", snapshot_every=10)
class Opaque:
    lock: object = None
    path: type = int

    def evolve(self, event: Opened) -> Opaque:
        return self


def test_a_state_that_cannot_be_a_snapshot_is_refused_at_once() -> None:
    with pytest.raises(DefinitionError, match="snapshot"):
        App("x", aggregates=[Opaque])


def test_an_unresolvable_annotation_is_refused_with_a_fix() -> None:
    @event("local.event")
    class Local:
        n: int = 0

    @aggregate("local")
    class Holder:
        n: int = 0

        def evolve(self, event: Local) -> Holder:
            return self

    with pytest.raises(DefinitionError, match="at module level"):
        App("x", aggregates=[Holder])


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("bank", "module:name"),
        ("no_such_module_here:app", "There is no module"),
        ("eventjet.examples.bank.account:bank", "is not an App. There is no such name. It holds no App"),
        ("eventjet.examples.bank.app:account", "It holds bank"),
        ("eventjet.examples.bank.app:bnk", "There is no such name. Did you mean 'bank'"),
        ("eventjet.examples.bank.ap:bank", "Did you mean 'eventjet.examples.bank.app'"),
        (
            "eventjet.examples.bank:app",
            "It is a module: name an App that it holds, as in eventjet.examples.bank.app:app",
        ),
    ],
)
def test_a_wrong_reference_to_an_app_is_refused_with_a_fix(reference: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load_app(reference)


def test_a_module_that_fails_at_import_is_reported(tmp_path: Path) -> None:
    (tmp_path / "fails_at_import.py").write_text("1 / 0\n")
    (tmp_path / "needs_a_package.py").write_text("import a_package_nobody_has\n")
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        load_app("fails_at_import:app", tmp_path)
    with pytest.raises(UsageError, match="a_package_nobody_has"):
        load_app("needs_a_package:app", tmp_path)


def test_settings_come_from_keywords_then_the_environment() -> None:
    environ = {"EVENTJET_SERVERS": "nats://a:4222, nats://b:4222", "EVENTJET_REPLICAS": "3", "OTHER": "x"}
    settings = Settings.load({"database": "sqlite:///x.db", "user": None}, environ)
    assert (settings.servers, settings.replicas) == (("nats://a:4222", "nats://b:4222"), 3)
    assert settings.database == "sqlite:///x.db"
    assert Settings.load({"servers": "nats://c:1"}, environ).servers == ("nats://c:1",)


@pytest.mark.parametrize(
    ("overrides", "environ", "says"),
    [
        ({"servers": "localhost:4222"}, {}, "nats://host:4222"),
        ({"servers": "nats://h:99999"}, {}, "nats://host:4222"),
        ({"servers": ""}, {"EVENTJET_SERVERS": ""}, "No NATS server"),
        ({"database": "mysql://x"}, {}, "postgresql://"),
        ({"database": "postgresql://h:port/x"}, {}, "postgresql://"),
        ({"database": "postgresql://h:99999/x"}, {}, "postgresql://"),
        ({"replicas": 2}, {}, "1, 3 or 5"),
        ({"colour": "red"}, {}, "no setting 'colour'"),
        ({}, {"EVENTJET_REPLICAS": "many"}, "not a number"),
    ],
)
def test_a_bad_setting_is_refused_with_a_valid_form(
    overrides: dict[str, object], environ: dict[str, str], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        Settings.load(overrides, environ)


def test_settings_show_no_secret() -> None:
    secrets = {"password": "canary", "token": "canary", "database": "postgresql://u:canary@h/d"}
    settings = Settings.load({"servers": "nats://ada:canary@h:4222", **secrets})
    assert "canary" not in repr(settings) + str(settings.shown())
    with pytest.raises(UsageError) as caught:
        Settings.load({"servers": "http://ada:canary@h:4222"})
    assert "canary" not in str(caught.value)
