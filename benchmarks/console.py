"""How long pages of the console take over a long log: `python -m benchmarks.console --events N --aggregates M`.

The log is written as the store writes it, but without commands; then `eventjet rebuild` makes the read model. Every
page is requested once, and then twenty times more: printed are the first time, and the median and the worst of the
others.
Ends with status 1 when a page is slower than it may be.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import quote

from benchmarks.log import fill
from benchmarks.options import parser_of
from benchmarks.usage import resident_mb
from eventjet.codec.headers import header_block
from eventjet.dev import NatsServer, PostgresServer
from eventjet.domain.identity import new_event_id

WARM_MAX_S = 0.3
TIMES = 20
APP = "benchmarks.console_bank:bank"
_STREAM = "console_bank"
_HOT = 100_000
"""Events of one account, the last ones of the log."""


def main() -> int:
    """The program."""
    parser = parser_of(__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--aggregates", type=int, default=1_000_000)
    parser.add_argument("--postgres", action="store_true", help="rows in PostgreSQL instead of SQLite")
    options = parser.parse_args()
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="eventjet-console-")))
        server = ending.enter_context(closing(NatsServer(sync_interval="1m"))).start()
        database = f"sqlite:///{folder}/read.db"
        if options.postgres:
            database = ending.enter_context(closing(PostgresServer())).start().url.replace("+psycopg", "", 1)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("EVENTJET_")}
        environ = {**inherited, "EVENTJET_SERVERS": server.url, "EVENTJET_DATABASE": database, "EVENTJET_APP": APP}
        began = time.monotonic()
        # Message ids are remembered for a moment only: two minutes of them would fill the memory.
        records = _records(options.events, options.aggregates)
        fill(server.url, options.events, _STREAM, records, duplicate_window=1_000_000_000)
        print(
            f"{options.events:,} events of {options.aggregates:,} accounts: {time.monotonic() - began:.0f} s",
            flush=True,
        )
        for command in (["init", "--repair"], ["rebuild", "balances", "--engine", "local"]):
            began = time.monotonic()
            subprocess.run([sys.executable, "-m", "eventjet.cli", *command], env=environ, check=True, stdout=sys.stderr)
            print(f"eventjet {' '.join(command)}: {time.monotonic() - began:.0f} s", flush=True)
        return _measured(environ, options.events, options.aggregates)


def _records(events: int, accounts: int) -> Iterator[tuple[str, bytes, bytes]]:
    """All accounts are opened in turn, then pay in by rounds; the last events are those of one account."""
    hot = min(_HOT, events // 10)
    deposited = json.dumps({"amount": "5"}).encode()
    for position in range(1, events - hot + 1):
        turn, account = divmod(position - 1, accounts)
        body = deposited if turn else json.dumps({"owner": f"owner {account}"}).encode()
        before = position - accounts if turn else 0
        yield _record(f"a-{account:07}", turn + 1, before, "account.deposited" if turn else "account.opened", body)
    for version in range(1, hot + 1):
        position = events - hot + version
        opened = json.dumps({"owner": "somebody busy"}).encode()
        kind = "account.deposited" if version > 1 else "account.opened"
        yield _record("busy", version, position - 1 if version > 1 else 0, kind, deposited if version > 1 else opened)


def _record(account: str, version: int, before: int, kind: str, body: bytes) -> tuple[str, bytes, bytes]:
    block = header_block(
        [
            ("Nats-Msg-Id", new_event_id()),
            ("Nats-Expected-Last-Subject-Sequence", str(before)),
            ("Ej-Type", kind),
            ("Ej-Schema", "1"),
            ("Ej-Version", str(version)),
            ("Ej-Command", f"c-{account}-{version}"),
            ("Ej-Meta-actor", "benchmark"),
        ]
    )
    return f"account.{account}", block, body


def _pages(events: int, accounts: int) -> Mapping[str, str]:
    account = f"a-{accounts // 2:07}"
    key = quote(json.dumps([account]))
    return {
        "overview": "/",
        "aggregates by prefix": "/aggregates?type=account&id=a-00",
        "aggregates, whole id": f"/aggregates?type=account&id={account}",
        "aggregate": f"/aggregates/one?type=account&id={account}",
        "aggregate of 100,000 events": "/aggregates/one?type=account&id=busy",
        "its version 50,000": "/aggregates/one?type=account&id=busy&upto=50000",
        "time travel": f"/aggregates/one?type=account&id={account}&version=3",
        "event": f"/events/one?position={events // 2}",
        "log": "/log",
        "log of an aggregate": f"/log?aggregate=account&id={account}",
        "log of an actor": "/log?actor=nobody",
        "log, from a position": f"/log?at={events // 3}",
        "read models": "/models",
        "read model": "/models/one?name=balances",
        "read model, deep": f"/models/one?name=balances&start={account}",
        "row": f"/models/row?name=balances&key={key}",
        "quarantine": "/quarantine",
        "processes": "/processes",
        "jobs": "/jobs",
        "actions": "/actions",
    }


def _measured(environ: Mapping[str, str], events: int, accounts: int) -> int:
    command = [sys.executable, "-m", "eventjet.cli", "ui", "--port", "0", "--allow-actions"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as console:
        try:
            assert console.stdout is not None
            url = console.stdout.readline().strip().rstrip("/")
            slow: list[str] = []
            print(f"{'page':<30} {'first':>8} {'median':>8} {'worst':>8}  ms, of {TIMES}")
            for name, path in _pages(events, accounts).items():
                first, *others = (_fetch(url + path) for _ in range(TIMES + 1))
                median = statistics.median(others)
                print(f"{name:<30} {first * 1e3:>8.0f} {median * 1e3:>8.0f} {max(others) * 1e3:>8.0f}", flush=True)
                if median > WARM_MAX_S:
                    slow.append(name)
            print(f"memory of the console: {resident_mb(console.pid):.0f} MB")
        finally:
            console.terminate()
    if slow:
        print(f"slower than {WARM_MAX_S * 1e3:.0f} ms: {', '.join(slow)}")
    return int(bool(slow))


def _fetch(url: str) -> float:
    began = time.perf_counter()
    with urllib.request.urlopen(url, timeout=60) as answer:
        answer.read()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
