"""Rebuilds in one process, one for every line on its standard input, so that the second finds all warm.

`python -m benchmarks.subjects.rebuilding <master>`, with the server and the database in `EVENTJET_*`. A line is an
engine, how many processes the local one has, and, where the sealed past comes from an archive, its folder:
`spark 1 /tmp/archive`. The answer is a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bank import balances
from eventjet.rebuild import AppRef, EngineOptions, rebuild
from eventjet.settings import Settings

APP = AppRef.parse("benchmarks.bank:bank", Path(__file__).parent.parent.parent)


def main(master: str) -> None:
    settings = Settings.load({})
    with ExitStack() as stack:
        has_session = False
        for line in sys.stdin:
            engine, *archive = line.split()
            started = time.monotonic()
            if engine == "spark" and not has_session:
                from eventjet.spark.session import spark_session

                stack.enter_context(spark_session(master))
                has_session = True
            session_s = time.monotonic() - started
            started = time.monotonic()
            chosen = EngineOptions("spark" if engine == "spark" else "local")
            options: dict[str, Any] = {"engine": chosen, **({"from_archive": archive[0]} if archive else {})}
            report = asyncio.run(rebuild(APP, [balances.name], settings, **options))
            result = {
                "events": report.events,
                "rows": report.rows,
                "wall_s": time.monotonic() - started,
                "session_s": session_s,
                "phases_s": dict(report.seconds),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
