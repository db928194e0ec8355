"""A rebuild runs on two worker processes that have neither the app nor a secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from tests.integration.rebuild_log import ALL, Book, remains
from tests.integration.roles import ADMIN, with_rebuild_role
from tests.integration.spark_cluster import QUICK, cli, driver_conf, settings_of

PASSWORD = "tw0:workers"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_get_the_app_and_passwords_and_write_the_same_rows(tmp_path: Path, eventjet_database: str) -> None:
    conf = {"spark.executor.memory": "512m", "spark.executor.extraJavaOptions": QUICK, "spark.ui.enabled": "false"}
    with NatsServer(sync_interval="1m", config=with_rebuild_role("*", PASSWORD)) as nats:
        overrides = {"servers": nats.url, "database": eventjet_database, "user": ADMIN, "password": ADMIN}
        book = Book(Settings.load(overrides, {}), tmp_path)
        last = book.fill(2_000, accounts=200)
        environ = settings_of(book, "rebuild", PASSWORD) | {
            "SPARK_CONF_DIR": str(driver_conf(tmp_path, conf)),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }
        app = ["--app", f"{book.ref.module}:{book.ref.attribute}", "--app-dir", book.ref.path[0]]
        done = subprocess.run(
            cli("rebuild", *ALL, "--json", "--master", "local-cluster[2,1,512]", *app),
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["events"] == last
        for name in ALL:
            assert book.rows(name) == book.folded(last, name)
        assert remains(book.where) == []
