"""The pipeline runs on Spark, beside a log and in a folder of its own: a minute, most of it Spark's start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import duckdb
from eventjet.dev import NatsServer

from starter.app import app
from starter.tasks import Task

PROJECT = Path(__file__).parents[1]


async def test_the_pipeline_takes_every_event_once(tmp_path: Path) -> None:
    for file in ("spark-pipeline.yml", "conf/spark-defaults.conf", "conf/log4j2.properties", "transformations/tasks.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        text = (PROJECT / "pipeline" / file).read_text(encoding="utf-8")
        (tmp_path / file).write_text(text.replace(str(PROJECT / "pipeline"), str(tmp_path)), encoding="utf-8")
    with NatsServer() as nats:
        async with app.connect(servers=nats.url) as jet:
            await jet.init()
            await jet.repository(Task).execute("t-1", Task.add, "Make tea")
            await jet.repository(Task).execute("t-1", Task.finish)
        command = [sys.executable, "-m", "eventjet.cli", "pipeline", str(tmp_path)]
        subprocess.run(command, cwd=PROJECT, env={**os.environ, "EVENTJET_SERVERS": nats.url}, check=True)
    warehouse = tmp_path / "warehouse"
    rows = duckdb.sql(f"select position, type from '{warehouse}/events/*.parquet' order by position").fetchall()
    assert rows == [(1, "task.added"), (2, "task.finished")]
    assert duckdb.sql(f"select title, done from '{warehouse}/tasks/*.parquet'").fetchall() == [("Make tea", True)]
