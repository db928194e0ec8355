"""A rebuild through Spark Connect, whose server is another process and knows neither app nor secrets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from tests.integration.rebuild_log import ALL, Book, remains
from tests.integration.roles import ADMIN, with_rebuild_role
from tests.integration.spark_cluster import cli, connect_server, files_with, settings_of, watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EVENTS = int(os.environ.get("EVENTJET_TEST_CLUSTER_EVENTS", "3000"))
PASSWORD = "c4nary:n@ts-s3cret"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def remote(elsewhere: Path) -> Iterator[str]:
    with connect_server(elsewhere) as url:
        yield url


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m", config=with_rebuild_role("*", PASSWORD)) as server:
        yield server


LARGE = pytest.mark.skipif("EVENTJET_TEST_CLUSTER_EVENTS" not in os.environ, reason="every day one database is enough")


@pytest.fixture(params=["postgresql", pytest.param("sqlite", marks=LARGE)])
def book(request: pytest.FixtureRequest, nats: NatsServer, tmp_path: Path) -> Book:
    database = f"sqlite:///{tmp_path}/read.db"
    if request.param == "postgresql":
        database = request.getfixturevalue("eventjet_database")
    overrides = {"servers": nats.url, "database": database, "user": ADMIN, "password": ADMIN}
    return Book(Settings.load(overrides, {}), tmp_path)


def test_a_connect_server_rebuilds_with_the_current_app_and_stores_no_secret(
    book: Book, remote: str, elsewhere: Path, tmp_path: Path
) -> None:
    last = book.fill(EVENTS, accounts=400)
    app = ["--app", f"{book.ref.module}:app", "--app-dir", book.ref.path[0]]
    secrets = [PASSWORD, *filter(None, [make_url(book.settings.database).password])]
    shown: list[str] = []
    driver = tmp_path / "driver"
    driver.mkdir()

    def run_rebuild(*names: str, **more: str) -> subprocess.CompletedProcess[str]:
        environ = {**settings_of(book, "rebuild", PASSWORD), "SPARK_REMOTE": remote, **more}
        command = cli("rebuild", *names, "--json", *app)
        done = subprocess.run(command, cwd=driver, env=environ, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["events"] == EVENTS
        return done

    with watched(secrets, shown):
        first = run_rebuild(*ALL)
        for name in ALL:
            assert book.rows(name) == book.folded(last, name)
    if book.where.dialect.name == "postgresql":
        # The changed module in another session of the same server: the server does not run the old module.
        module = Path(book.ref.path[0], f"{book.ref.module}.py")
        module.write_text(module.read_text().replace("accounts + 1", "accounts + 1000"))
        run_rebuild("owners")
        assert sum(row.accounts for row in book.rows("owners")) > 1_000
    assert remains(book.where) == []
    count, telling = files_with(secrets, elsewhere)
    assert (telling, shown) == ([], [])
    assert count > 2
    assert not any(secret in first.stdout + first.stderr for secret in secrets)
    assert list(driver.iterdir()) == []


@pytest.mark.parametrize("book", ["postgresql"], indirect=True)
def test_an_interrupted_rebuild_ends_its_tasks_on_the_server(book: Book, remote: str, tmp_path: Path) -> None:
    book.fill(EVENTS, accounts=400)
    marker = tmp_path / "reached"
    # The last event of the log blocks, so the parts before it are done by then.
    first = "    row = replace(row, events=row.events + 1,"
    wait = (
        f"    if event.position == {EVENTS}:\n"
        f"        open({str(marker)!r}, 'w').write(str(os.getpid()))\n"
        "        time.sleep(120)\n"
    )
    slow = book.altered((first, wait + first), ("from dataclasses", "import os\nimport time\nfrom dataclasses"))
    command = cli("rebuild", "balances", "--master", remote, "--app", f"{slow.module}:app", "--app-dir", slow.path[0])
    stderr = tmp_path / "stderr"
    with stderr.open("w") as stderr_file:
        running = subprocess.Popen(
            command, cwd=tmp_path, env=settings_of(book, "rebuild", PASSWORD), stderr=stderr_file
        )
        try:
            wait_for(lambda: marker.exists() and marker.read_text() != "", stderr)
            worker = Path("/proc", marker.read_text())
            assert worker.exists()
            wait_for(lambda: re.search(r"phase=read done=[1-9]", stderr.read_text()) is not None, stderr)
            running.send_signal(signal.SIGINT)
            assert running.wait(90) != 0
        finally:
            running.kill()
            running.wait(20)
    assert remains(book.where) == []
    wait_for(lambda: not worker.exists(), stderr)


USER_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from pyspark.sql import SparkSession
from eventjet.rebuild import AppRef, rebuild
from eventjet.settings import Settings
from eventjet.spark.session import running_session

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
spark.conf.set("spark.sql.shuffle.partitions", "3")
spark.addTag("theirs")
before = spark.conf.getAll, spark.getTags()
ref = AppRef.parse(sys.argv[2], Path(sys.argv[3]))
report = asyncio.run(rebuild(ref, ["balances"], Settings.load({}), engine="spark"))
after = spark.conf.getAll, spark.getTags()
print(json.dumps([running_session(spark).local, before == after, report.rows, spark.range(3).count()]))
"""


@pytest.mark.parametrize("book", ["postgresql"], indirect=True)
def test_a_users_own_session_runs_a_rebuild_and_is_not_changed(book: Book, remote: str, tmp_path: Path) -> None:
    last = book.fill(EVENTS, accounts=400)
    (tmp_path / "theirs.py").write_text(USER_PROGRAM)
    command = [sys.executable, str(tmp_path / "theirs.py"), remote, f"{book.ref.module}:app", book.ref.path[0]]
    environ = settings_of(book, "rebuild", PASSWORD)
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, True, len(book.rows()), 3]
    assert book.rows() == book.folded(last)


def wait_for(condition: object, log: Path, timeout_s: float = 90.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
