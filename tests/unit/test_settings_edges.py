"""Edge cases of settings: text values, misspelled variables, mirrors, defaults beside `eventjet dev`."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from eventjet.errors import UsageError
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.login import unreachable_remedy
from eventjet.settings import Settings
from eventjet.sql.database import Database, unusable


def test_keywords_can_be_text_as_in_the_environment() -> None:
    settings = Settings.load({"credentials": "x.creds", "replicas": "3", "servers": ["nats://a:1"]}, {})
    assert (settings.credentials, settings.replicas, settings.servers) == (Path("x.creds"), 3, ("nats://a:1",))
    assert Settings.load({"user": "12"}, {}).user == "12"


@pytest.mark.parametrize("name", ["save_timeout_s", "request_timeout_s"])
@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_an_unlimited_timeout_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(UsageError, match=name.upper()):
        Settings.load({name: seconds}, {})


@pytest.mark.parametrize(
    ("name", "right_name"),
    [
        ("EVENTJET_DATABSE", "EVENTJET_DATABASE"),
        ("EVENTJET_SERVER", "EVENTJET_SERVERS"),
        ("EVENTJET_SAVE_TIMEOUT", "EVENTJET_SAVE_TIMEOUT_S"),
    ],
)
def test_a_misspelled_variable_is_refused_with_the_right_name(name: str, right_name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is set.*Did you mean {right_name}"):
        Settings.load(environ={name: "x"})


@pytest.mark.parametrize(
    "name", ["EVENTJET_APP", "EVENTJET_LOG_FORMAT", "EVENTJET_SERVICE_HOST", "EVENTJET_PORT", "EVENTJET_DB_PASSWORD"]
)
def test_variables_of_other_programs_are_ignored(name: str) -> None:
    assert Settings.load(environ={name: "x"}) == Settings()


@pytest.mark.parametrize("value", ["west,east", "a b", "west.api", "http://127.0.0.1:4222", "west,nats://127.0.0.1"])
def test_an_invalid_mirror_is_refused_by_the_name_of_its_setting(value: str) -> None:
    with pytest.raises(UsageError, match="EVENTJET_READ_FROM"):
        Settings.load(environ={"EVENTJET_READ_FROM": value})


def test_reads_of_a_mirror_use_the_same_credentials_unless_its_url_has_others() -> None:
    log = Settings.load({"servers": "nats://east:4222", "user": "ada", "password": "p"}, environ={})
    assert log.for_reads() is log
    west = log.with_overrides({"read_from": "nats://west:4222"}).for_reads()
    assert (west.servers, west.user, west.read_from) == (("nats://west:4222",), "ada", None)
    own = log.with_overrides({"read_from": "nats://bob:q@west:4222"}).for_reads()
    assert (own.user, own.password) == (None, None)
    domain = log.with_overrides({"read_from": "west"}).for_reads()
    assert (domain.servers, domain.jetstream_domain) == (("nats://east:4222",), "west")


def test_an_unset_variable_beside_eventjet_dev_suggests_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EVENTJET_DATABASE", "EVENTJET_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    settings = Settings.load()
    database, endpoint = Database(settings.database), Endpoint.of(settings)
    missing = sqlite3.OperationalError("no such table: eventjet_projection")
    assert f"sqlite:///{tmp_path / 'eventjet.db'}: eventjet's tables are not in it. Run `eventjet init`." in str(
        database.unreachable(missing)
    )
    assert unreachable_remedy(endpoint, [ConnectionRefusedError()]).startswith("Start it, or set --servers")

    (tmp_path / ".eventjet").mkdir()
    (tmp_path / ".eventjet" / "env").touch()
    hint = "is not set. While `eventjet dev` runs here, set it by `. .eventjet/env`."
    assert database.unreachable(missing).remedy == f"EVENTJET_DATABASE {hint}"
    assert unreachable_remedy(endpoint, [ConnectionRefusedError()]) == f"EVENTJET_SERVERS {hint}"
    assert Database(f"sqlite:///{tmp_path}/read.db").unreachable(missing).remedy == "Run `eventjet init`."
    with create_engine("sqlite:///eventjet.db", poolclass=NullPool).connect() as connection:
        assert unusable(connection, "it is old", "Upgrade it.").remedy == f"EVENTJET_DATABASE {hint}"
    monkeypatch.setenv("EVENTJET_DATABASE", settings.database)
    assert database.unreachable(missing).remedy == "Run `eventjet init`."
