"""A rebuild runs on a real cluster, whose master and two workers know neither the app's folder nor a secret."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from tests.integration.rebuild_log import ALL, Book, remains
from tests.integration.roles import ADMIN, with_rebuild_role
from tests.integration.spark_cluster import (
    Cluster,
    cli,
    defaults,
    driver_conf,
    files_with,
    settings_of,
    standalone_cluster,
    watched,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "EVENTJET_TEST_CLUSTER_EVENTS" not in os.environ, reason="minutes of several JVMs: `make faults` runs it"
    ),
]

EVENTS = int(os.environ.get("EVENTJET_TEST_CLUSTER_EVENTS", "3000"))
PASSWORD = "c4nary:n@ts-s3cret"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with standalone_cluster(tmp_path_factory.mktemp("elsewhere")) as started:
        yield started


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m", config=with_rebuild_role("*", PASSWORD)) as server:
        yield server


@pytest.fixture(params=["postgresql", "sqlite"])
def book(request: pytest.FixtureRequest, nats: NatsServer, tmp_path: Path) -> Book:
    database = f"sqlite:///{tmp_path}/read.db"
    if request.param == "postgresql":
        database = request.getfixturevalue("eventjet_database")
    overrides = {"servers": nats.url, "database": database, "user": ADMIN, "password": ADMIN}
    return Book(Settings.load(overrides, {}), tmp_path)


def test_a_cluster_that_loses_an_executor_rebuilds_and_stores_no_secret(
    book: Book, cluster: Cluster, tmp_path: Path
) -> None:
    last = book.fill(EVENTS, accounts=400)
    marker = tmp_path / "killed"
    app = deadly_package(book, marker, last // 2)
    conf = driver_conf(tmp_path, defaults(cluster.folder))
    secrets = [PASSWORD, *filter(None, [make_url(book.settings.database).password])]
    before, shown = len(cluster.executors()), list[str]()
    with watched(secrets, shown):
        command = cli("rebuild", *ALL, "--json", "--master", cluster.master, *app)
        environ = {**settings_of(book, "rebuild", PASSWORD), "SPARK_CONF_DIR": str(conf), "SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["events"] == EVENTS
    assert marker.exists()
    assert len(cluster.executors()) - before >= 3
    for name in ALL:
        assert book.rows(name) == book.folded(last, name)
    assert remains(book.where) == []
    count, telling = files_with(secrets, cluster.folder)
    assert (telling, shown) == ([], [])
    assert count > 20
    assert not any(secret in done.stdout + done.stderr for secret in secrets)


def deadly_package(book: Book, marker: Path, position: int) -> list[str]:
    """Write the app as a package that kills its executor once; return the arguments for the CLI."""
    source = Path(book.ref.path[0], f"{book.ref.module}.py").read_text()
    first = "    row = replace(row, events=row.events + 1,"
    assert first in source
    die_once = (
        f"    if event.position == {position} and not os.path.exists({str(marker)!r}):\n"
        f"        open({str(marker)!r}, 'w').close()\n"
        "        os.kill(parent_of(os.getppid()), 9)\n"
    )
    imports = "import os\nfrom .processes import parent_of\nfrom dataclasses"
    files = {
        "__init__.py": "",
        "processes.py": "def parent_of(pid):\n    with open(f'/proc/{pid}/stat') as stat:\n"
        "        return int(stat.read().rpartition(')')[2].split()[1])\n",
        "model.py": source.replace(first, die_once + first).replace("from dataclasses", imports, 1),
        "wiring/__init__.py": "from ..model import app as bank\n",
    }
    package = marker.parent / "app" / f"{book.name}_bank"
    (package / "wiring").mkdir(parents=True)
    for name, text in files.items():
        (package / name).write_text(text)
    return ["--app", f"{package.name}.wiring:bank", "--app-dir", str(package.parent)]
