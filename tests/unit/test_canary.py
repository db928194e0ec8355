"""A secret in any setting, even in a wrong one, is printed nowhere."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eventjet
from eventjet.archive.reading import folder_of
from eventjet.cli.main import main
from eventjet.cli.target import without_token
from eventjet.errors import EventjetError
from eventjet.jetstream.client import connect
from eventjet.nats import client
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.spark.source import LogOptions
from eventjet.sql.database import Database
from eventjet.urls import shown_master

CANARY = "c4nary"
HERE = "127.0.0.1:1"
"""An address without a listener."""

SERVERS = [
    f"nats://u:{CANARY}@{HERE}",
    f"nats://{CANARY}@{HERE}",
    f"nats://{CANARY}:@{HERE}",
    f"nats://u%3A{CANARY}@{HERE}",
    f"nats://u:a@b{CANARY}@{HERE}",
    f"nats://u:{CANARY}@{CANARY}@{HERE}",
    f"nats://u:{CANARY}/{CANARY}@{HERE}",
    f"nats://u:1/{CANARY}@{HERE}",
    f"nats://u:1?{CANARY}@{HERE}",
    f"nats://u:1#{CANARY}@{HERE}",
    f"nats://u:1,{CANARY}@{HERE}",
    f"nats://u:{CANARY}",
    f"nats://u:{CANARY}@127.0.0.1:99999",
    f"nats://u:{CANARY}@127.0.0.1:{CANARY}",
    f"nats://u:{CANARY}@[::1",
    f"nats://u:{CANARY}@{HERE}/path",
    f"nats://{HERE}?password={CANARY}",
    f"nats://{HERE};{CANARY}",
    f"nats://{HERE},u:{CANARY}@{HERE}",
    f"nats://u:{CANARY} @{HERE}",
    f"nats://u:{CANARY}\n@{HERE}",
    f"nats:u:{CANARY}@{HERE}",
    f"nats:/u:{CANARY}@{HERE}",
    f"nats//u:{CANARY}@{HERE}",
    f"NATS://u:{CANARY}@{HERE}",
    f"http://u:{CANARY}@{HERE}",
    f"u:{CANARY}@{HERE}",
    f"{CANARY}@{HERE}",
    CANARY,
]
DATABASES = [
    f"postgresql://u:{CANARY}@{HERE}/d",
    f"postgresql+psycopg://u:{CANARY}@{HERE}/d",
    f"postgresql://u%3A{CANARY}@{HERE}/d",
    f"postgresql://u:%zz{CANARY}@{HERE}/d",
    f"postgresql://u@{HERE}/d?password={CANARY}",
    f"postgresql://u@{HERE}/d?sslpassword={CANARY}",
    f"postgresql://u@{HERE}/d?passwd={CANARY}",
    f"postgresql://u@{HERE}/d?{CANARY}=1",
    f"postgresql://u@{HERE}/d?connect_timeout={CANARY}",
    f"postgresql://u@{HERE}/d?PASSWORD={CANARY}&host=/nowhere",
    f"postgresql://u:{CANARY}@/d?host=/nowhere",
    f"postgresql://u:a@b{CANARY}@{HERE}/d",
    f"postgresql://u:{CANARY}/{CANARY}@{HERE}/d",
    f"postgresql://u:1/{CANARY}@{HERE}/d",
    f"postgresql://u:1?{CANARY}@{HERE}/d",
    f"postgresql://u:1?a={CANARY}@{HERE}/d",
    f"postgresql://u:1#{CANARY}@{HERE}/d",
    f"postgresql://u:{CANARY}",
    f"postgresql://u:{CANARY}@127.0.0.1:port/d",
    f"postgresql://u:{CANARY}@127.0.0.1:99999/d",
    f"postgresql://u:{CANARY}@[::1/d",
    f"postgresql:u:{CANARY}@{HERE}/d",
    f"postgresql:/u:{CANARY}@{HERE}/d",
    f"postgresql:eventjet:{CANARY}@{HERE}",
    f"postgresql+asyncpg://u:{CANARY}@{HERE}/d",
    f"postgres://u:{CANARY}@{HERE}/d",
    f"PostgreSQL://u:{CANARY}@{HERE}/d",
    f" postgresql://u:{CANARY}@{HERE}/d",
    f"jdbc:postgresql://{HERE}/d?user=u&password={CANARY}",
    f"mysql://u:{CANARY}@{HERE}/d",
    f"host=127.0.0.1 port=1 user=u password={CANARY} dbname=d",
    f"sqlite://u:{CANARY}@{HERE}/x.db",
    f"sqlite:///x.db?key={CANARY}",
    f"sqlite:{CANARY}",
    CANARY,
]
_SEED = f"SUAM{CANARY}"
ALONE = {
    "user": [CANARY, f"u:{CANARY}"],
    "password": [CANARY, "1"],
    "token": [CANARY],
    **{
        name: [_SEED, f"-----BEGIN USER NKEY SEED-----\n{_SEED}", _SEED * 1_000, f"/nowhere/{CANARY}\0"]
        for name in ("credentials", "nkey", "tls_ca", "tls_key")
    },
}
GIVEN = [
    *(("servers", form) for form in SERVERS),
    *(("database", form) for form in DATABASES),
    *((name, form) for name, forms in ALONE.items() for form in forms),
]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Point the environment to addresses without a server, and make attempts follow without a pause."""
    monkeypatch.setattr(client, "PAUSE_S", 0.0)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("EVENTJET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EVENTJET_APP", "eventjet.examples.bank.app:bank")
    monkeypatch.setenv("EVENTJET_SERVERS", f"nats://{HERE}")
    monkeypatch.setenv("EVENTJET_DATABASE", f"sqlite:///{tmp_path}/x.db")


def output_of(*steps: Callable[[], object]) -> str:
    """Return the results of the steps, or their errors with the whole traceback, as text."""
    output = ""
    for step in steps:
        try:
            result = step()
            output += f"{result!r} {result}\n"
        except EventjetError as error:
            output += "".join(traceback.format_exception(error)) + repr(error)
    return output


def output_with(values: dict[str, Any]) -> str:
    """Return all that functions print of the settings `values`, as text."""

    async def connected() -> None:
        await connect(Settings.load(values))

    def database() -> object:
        where = Database(Settings.load(values).database)
        with where.reaching_sync(), where.sync_engine().connect():
            return where.shown

    def copied() -> object:
        where = Database(Settings.load(values).database)
        return where.connect() if where.dialect.name == "postgresql" else None

    return output_of(
        lambda: Settings.load(values),
        lambda: Settings.load(values).shown(),
        lambda: Endpoint.of(Settings.load(values)),
        lambda: asyncio.run(connected()),
        database,
        copied,
    )


@pytest.mark.parametrize(("name", "form"), GIVEN)
def test_a_secret_in_a_setting_is_never_printed(
    name: str,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    output = output_with({name: form})
    if "\0" not in form:
        monkeypatch.setenv(f"EVENTJET_{name.upper()}", form)
        output += output_with({})
        statuses = {main([*command, "--debug"]) for command in (["init", "--json"], ["status", "--json"], ["tail"])}
        assert statuses <= {2, 3}, output + "".join(capsys.readouterr())
        assert "own fault" not in output
    printed = capsys.readouterr()
    output += printed.out + printed.err + caplog.text
    assert CANARY not in output


@pytest.mark.parametrize("form", SERVERS)
def test_a_secret_in_servers_on_a_command_line_is_never_printed(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tail", "--debug", "--servers", form]) in (2, 3)
    output = output_of(lambda: Endpoint((form,))) if form != CANARY else ""  # the bare word may be a host
    assert CANARY not in "".join(capsys.readouterr()) + output


@pytest.mark.parametrize("form", DATABASES)
def test_a_secret_in_a_database_on_a_command_line_is_never_printed(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pause", "balances", "--debug", "--database", form]) in (2, 3)
    assert CANARY not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "arguments",
    [
        *({"servers": form} for form in SERVERS),
        *({name: CANARY} for name in ("passwordFile", "tokenFile", "nkey", "credentials", "tlsCa", "tlsKey", "user")),
        {"passwordFile": f"/nowhere/{CANARY}#{'0' * 64}"},
        {"tokenFile": f"{CANARY}\n" * 1_000},
    ],
)
def test_options_of_the_spark_source_show_no_secret(arguments: dict[str, str]) -> None:
    options = {"stream": "bank", **arguments}
    assert CANARY not in output_of(lambda: LogOptions.parse(options), lambda: LogOptions.parse(options).endpoint())


@pytest.mark.parametrize(
    "url",
    [
        f"s3a://k:{CANARY}@bucket/x",
        f"s3a://k:{CANARY}/{CANARY}@bucket/x",
        f"s3a://k:1/{CANARY}@bucket/x",
        f"s3a://k:1{{{CANARY}@bucket/x",
        f"s3a://bucket/x?key={CANARY}",
        f"s3a:k:{CANARY}@bucket",
    ],
)
def test_the_url_of_an_archive_shows_no_secret(url: str) -> None:
    with pytest.raises(EventjetError) as raised:
        folder_of(url)
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize(
    "url", [f"sc://h:15002/;token={CANARY}", f"sc://h/;user_id=a;token={CANARY}", f"sc:h;{CANARY}", f"sc://{CANARY}@h"]
)
def test_a_spark_master_shows_no_token(url: str) -> None:
    assert CANARY not in shown_master(url)
    with pytest.raises(EventjetError) as raised:
        without_token(url)
    assert CANARY not in str(raised.value)
    for plain in ("local[2]", "local", "yarn", "spark://a:7077,b:7077", "k8s://https://h:6443", "sc://h:15002"):
        assert shown_master(plain) == without_token(plain) == plain


def test_the_help_of_the_settings_shows_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import pydoc

    monkeypatch.setenv("EVENTJET_PASSWORD", CANARY)
    assert CANARY not in pydoc.render_doc(eventjet.Settings)
    assert "environ(" not in pydoc.render_doc(eventjet.Settings)


def test_a_password_that_is_a_common_word_does_not_mask_that_word(caplog: pytest.LogCaptureFixture) -> None:
    output = output_of(lambda: Database(f"postgresql://u:failed@{HERE}/d").connect())
    assert "failed" in output
    assert "***" not in output
    assert not caplog.records


def test_the_public_parts_of_settings_are_shown() -> None:
    settings = Settings.load(
        {"servers": "nats://u:p@h:1,tls://[::1]:2", "database": "postgresql://u:p@h:5/d"}, {}
    ).shown()
    assert settings == {"servers": "nats://h:1, tls://[::1]:2", "database": "postgresql://h:5/d"}
    for url in ("sqlite:////home/a@b/x y.db", "postgresql:///d?host=/run/pg"):
        assert Database(url).shown == url
