"""The embedded PostgreSQL keeps its promises: data, port and password over restarts, and no leftovers."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, text

from eventjet.dev import PostgresServer
from eventjet.dev import postgres as wheel
from eventjet.errors import ComponentFailed, ComponentMissing, Unreachable


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(durable=False) as started:
        yield started


@pytest.fixture
def folder() -> Iterator[Path]:
    """Unlike `tmp_path` one that other users may pass through, as PostgreSQL needs when root runs the tests."""
    made = Path(tempfile.mkdtemp(prefix="eventjet-test-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


def connect(url: str) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(url.replace("+psycopg", ""), autocommit=True)


def shown(url: str, setting: str) -> object:
    with connect(url) as connection:
        row = connection.execute(f"SHOW {setting}").fetchone()  # type: ignore[arg-type]
    assert row is not None
    return row[0]


def remember(url: str) -> int:
    """Add one row; returns how many there are."""
    with connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (at timestamptz DEFAULT now())")
        connection.execute("INSERT INTO kept DEFAULT VALUES")
        row = connection.execute("SELECT count(*) FROM kept").fetchone()
    assert row is not None
    assert isinstance(row[0], int)
    return row[0]


def test_a_stop_and_a_start_keep_data_and_url(server: PostgresServer) -> None:
    url = server.create_database("stopped")
    assert remember(url) == 1
    server.stop()
    assert not server.running
    server.start()
    assert server.url_of("stopped") == url
    assert remember(url) == 2


def test_a_killed_server_recovers_what_was_committed(server: PostgresServer) -> None:
    url = server.create_database("killed")
    assert remember(url) == 1
    with connect(url) as held:
        server.kill()
        assert not server.running
        with pytest.raises(psycopg.OperationalError):
            held.execute("SELECT 1")
    server.start()
    assert remember(url) == 2


def test_a_killed_server_leaves_no_backend_at_work(server: PostgresServer) -> None:
    with connect(server.url) as held:
        backend = held.info.backend_pid
        assert Path(f"/proc/{backend}").exists()
        server.kill()
        assert not Path(f"/proc/{backend}").exists()
    server.start()


def test_a_folder_that_was_given_outlives_the_server(folder: Path) -> None:
    with PostgresServer(folder / "data", durable=False) as first:
        assert remember(first.url) == 1
    with PostgresServer(folder / "data", durable=False) as second:
        assert remember(second.url) == 2


def test_a_temporary_folder_goes_with_the_server() -> None:
    with PostgresServer(durable=False) as server:
        made = server.directory
        assert made.is_dir()
        server.kill()
    assert not made.exists()


def test_a_start_that_was_cut_short_is_repeated(folder: Path) -> None:
    unfinished = folder / "data" / "data.new"
    unfinished.mkdir(parents=True)
    (folder / "data").chmod(0o711)
    (unfinished / "PG_VERSION").write_text("18\n")
    with PostgresServer(folder / "data", durable=False) as server:
        assert remember(server.url) == 1


def test_two_servers_run_at_once_on_ports_of_their_own(server: PostgresServer) -> None:
    with PostgresServer(durable=False) as other:
        assert other.port != server.port
        assert remember(other.url) == 1


def test_a_folder_has_one_server_at_a_time(folder: Path) -> None:
    with (
        PostgresServer(folder / "data", durable=False),
        pytest.raises(ComponentFailed, match="lock file"),
    ):
        PostgresServer(folder / "data", durable=False).start()


def test_it_waits_for_the_disk_unless_told_otherwise(folder: Path, server: PostgresServer) -> None:
    assert shown(server.url, "fsync") == "off"
    with PostgresServer(folder / "data") as durable:
        assert shown(durable.url, "fsync") == "on"


def test_text_and_time_do_not_depend_on_the_machine(server: PostgresServer) -> None:
    assert shown(server.url, "timezone") == "UTC"
    with connect(server.url) as connection:
        row = connection.execute("SELECT array_agg(x ORDER BY x) FROM unnest(array['a', 'B', 'ä']) x").fetchone()
    assert row == (["B", "a", "ä"],)


def test_the_password_is_asked_for(server: PostgresServer) -> None:
    user, _, rest = server.url.partition("//")[2].partition("@")[0].partition(":")
    assert len(rest) == 48
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        connect(server.url.replace(rest, "guess"))
    assert user == "eventjet"


def test_sqlalchemy_takes_the_url_as_it_is(server: PostgresServer) -> None:
    engine = create_engine(server.create_database("with spaces/and more"))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT current_database()")).scalar_one() == "with spaces/and more"
    engine.dispose()


def test_a_dropped_database_takes_its_connections_along(server: PostgresServer) -> None:
    url = server.create_database("dropped")
    held = connect(url)
    server.drop_database("dropped")
    with pytest.raises(psycopg.OperationalError):
        held.execute("SELECT 1")
    held.close()


def test_a_server_that_was_never_started_says_so() -> None:
    with pytest.raises(Unreachable, match=r"Call `start\(\)` first"):
        _ = PostgresServer().url


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ComponentMissing, match=r'pip install "eventjet\[dev\]"'):
        PostgresServer().start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")
def test_as_root_it_runs_as_nobody_even_from_folders_closed_to_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = wheel.postgres_install()
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    shutil.copytree(install, closed / install.parent.name / install.name)
    libraries = f"{install.parent.name}.libs"
    shutil.copytree(install.parent.parent / libraries, closed / libraries)
    monkeypatch.setattr("eventjet.dev.postgres.postgres_install", lambda: closed / install.parent.name / install.name)
    with PostgresServer(durable=False) as server:
        assert remember(server.url) == 1
        assert Path(f"/proc/{server.pid}").stat().st_uid != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")
def test_as_root_a_folder_closed_to_others_is_refused_in_words(folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o700)
    with pytest.raises(Unreachable, match="may not pass through"):
        PostgresServer(folder / "closed" / "data").start()
