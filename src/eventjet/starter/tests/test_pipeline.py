"""The pipeline runs on Spark, beside a log and in a folder of its own: a minute, most of it Spark's start."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import duckdb
from eventjet.dev import NatsServer

from starter.app import app
from starter.tasks import Task

PIPELINE = Path(__file__).parents[1] / "pipeline"


async def done(servers: str) -> None:
    async with app.connect(servers=servers) as jet:
        await jet.init()
        await jet.repository(Task).execute("t-1", Task.add, "Make tea")
        await jet.repository(Task).execute("t-1", Task.finish)


def test_the_pipeline_takes_every_event_once(tmp_path: Path) -> None:
    # Spark takes no relative paths, so the files name the folder where the project was made.
    project_folder = re.search("databaseName=(.+)/catalog;", (PIPELINE / "conf/spark-defaults.conf").read_text("utf-8"))
    assert project_folder is not None
    for folder in (".", "conf", "transformations"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for file in (PIPELINE / folder).glob("*.*"):
            text = file.read_text(encoding="utf-8").replace(Path(project_folder[1]).as_uri(), tmp_path.as_uri())
            (tmp_path / folder / file.name).write_text(text.replace(project_folder[1], str(tmp_path)), encoding="utf-8")
    with NatsServer() as nats:
        asyncio.run(done(nats.url))
        command = [sys.executable, "-m", "eventjet.cli", "pipeline", str(tmp_path)]
        subprocess.run(command, cwd=PIPELINE.parent, env={**os.environ, "EVENTJET_SERVERS": nats.url}, check=True)
    rows = duckdb.connect().execute(f"select position, type from '{tmp_path}/warehouse/events/*.parquet' order by 1")
    assert rows.fetchall() == [(1, "task.added"), (2, "task.finished")]
    rows = duckdb.connect().execute(f"select title, done from '{tmp_path}/warehouse/tasks/*.parquet'")
    assert rows.fetchall() == [("Make tea", True)]
