"""What the fault tests of rebuilds share: a live read model that grows, readers of it, and real rebuilds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from eventjet.errors import Unreachable
from eventjet.jetstream.connection import NatsConnection
from eventjet.rebuild import AppRef, rebuild, verify
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY
from tests.faults.feed import Feed
from tests.faults.processes import WorkerProcess, await_it
from tests.faults.scene import NAMES
from tests.faults.tally import Added, tally_app
from tests.forked import ROOT, Forked
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import database_with
from tests.integration.rebuild_log import remains
from tests.logs import fresh_name

_COUNTS = {"totals": "coalesce(sum(additions), 0)", "journal": "count(*)"}
_PACE_S = 0.002
_REST, _REST_MAX_S = 3, 0.2
"""How much longer than a look a reader rests after it: on large tables it would take a core for itself."""
STARTS_S = 240.0
"""Spark on a machine that is busy with other things."""


class Reader:
    """A thread that reads a read model all the time: its position and how many events its rows have, in one statement.

    They must agree with the log at every look, and the position may never fall.
    """

    def __init__(self, database: str, feed: Feed, name: str) -> None:
        self.looks = 0
        self.wrong: list[str] = []
        self.longest_s = 0.0
        """The longest that one look took."""
        self.unanswered = 0
        """Looks while the database was away."""
        self._database = Database(database)
        self._feed = feed
        self._query = text(
            f"select (select position from eventjet_projection where name = '{name}'), {_COUNTS[name]} from {name}"
        )
        self._counted = [0]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reader of {name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        before = 0
        while not self._stop.is_set():
            try:
                with (
                    self._database.sync_engine("reader").connect().execution_options(**{READ_ONLY: True}) as connection
                ):
                    while not self._stop.is_set():
                        before = self._look(connection, before)
            except (DBAPIError, Unreachable) as error:
                self.unanswered += 1
                if not isinstance(error, Unreachable) and "does not exist" in str(error):
                    self.wrong.append(str(error))
                time.sleep(0.05)

    def _look(self, connection: object, before: int) -> int:
        began = time.monotonic()
        with connection.begin():  # type: ignore[attr-defined]
            position, counted = connection.execute(self._query).one()  # type: ignore[attr-defined]
        took_s = time.monotonic() - began
        self.longest_s = max(self.longest_s, took_s)
        self.looks += 1
        if position < before or counted != self._expected(position):
            self.wrong.append(f"at {position} after {before}: {counted} events, and not {self._expected(position)}")
        time.sleep(min(max(_PACE_S, _REST * took_s), _REST_MAX_S))
        return int(position)

    def _expected(self, position: int) -> int:
        while len(self._counted) <= position:
            _, data = self._feed.log[len(self._counted) - 1]
            self._counted.append(self._counted[-1] + isinstance(data, Added))
        return self._counted[position]


class RebuildProcess:
    """The real `eventjet rebuild` (or `verify`), armed, in a session of its own; killed at the end with all of it."""

    def __init__(
        self, stage: Stage, *arguments: str, at: str = "", action: str = "kill", command: str = "rebuild"
    ) -> None:
        """`at`: `failpoint` or `failpoint:count`.

        By default it is the local engine.
        """
        stem = stage.folder / f"run-{time.monotonic_ns()}"
        self.log, self.fired = stem.with_suffix(".log"), stem.with_suffix(".fired")
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
            "EVENTJET_SERVERS": stage.ledger.settings.servers[0],
            "EVENTJET_DATABASE": stage.ledger.settings.database,
            "EVENTJET_FAILPOINT_LOG": str(self.fired),
            "COLUMNS": "80",
        }
        if at:
            name, _, count = at.partition(":")
            environ["EVENTJET_FAILPOINT"] = f"{name}:{action}:{count or 1}"
        names = NAMES if command == "rebuild" else NAMES[:1]
        program = [command, *names, *(arguments or ("--engine", "local"))]
        where = ["--app", f"{stage.ref.module}:app", "--app-dir", stage.ref.path[0]]
        self.process = Forked(
            "eventjet.cli",
            [*program, *where],
            folder=stage.folder,
            environ=environ,
            out=self.log,
            err=self.log,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.others():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)

    def others(self) -> dict[int, str]:
        """Return the other living processes of its session: pid and state."""
        words = subprocess.run(
            ["ps", "-o", "pid=,stat=", "-s", str(self.process.pid)], capture_output=True, text=True
        ).stdout.split()
        states = dict(zip(map(int, words[::2]), words[1::2], strict=True))
        return {pid: state for pid, state in states.items() if pid != self.process.pid and not state.startswith("Z")}

    def stopped(self) -> list[int]:
        """Return the processes of the session that SIGSTOP has stopped."""
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(self.process.pid)], capture_output=True, text=True)
        own = [self.process.pid] if state.stdout.startswith("T") else []
        return own + [pid for pid, state in self.others().items() if state.startswith("T")]

    def await_stop(self) -> list[int]:
        """Wait until a failpoint has stopped one of its processes."""
        await_it(lambda: bool(self.stopped()) or self.process.poll() is not None, self.logged, STARTS_S)
        assert self.fired.exists(), self.logged()
        return self.stopped()

    def ended(self, timeout_s: float = STARTS_S) -> int:
        """Return its status, once it has ended by itself or by its fault."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout_s} s:\n{self.logged()}") from None

    def killed(self) -> None:
        """Wait until its fault has killed it."""
        assert self.ended() == -signal.SIGKILL, self.logged()
        assert self.fired.exists(), self.logged()
        await_it(lambda: self.others() == {}, lambda: f"{self.others()}\n{self.logged()}")

    def logged(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass(slots=True)
class Stage:
    """A log, its feed and readers, made by `stage`."""

    ledger: Ledger
    folder: Path
    feed: Feed
    ref: AppRef
    readers: list[Reader]
    verified: int = 0
    """Rows that verifications compared without a difference."""
    settled: int = 0
    summary: list[str] = field(default_factory=list[str])

    @property
    def is_sqlite(self) -> bool:
        return self.ledger.settings.database.startswith("sqlite")

    async def settle(self) -> None:
        """After a fault: the next rebuild succeeds, a verification finds nothing, and nothing is left behind."""
        await rebuild(self.ref, NAMES, self.ledger.settings, engine="local")
        await self.check()

    async def check(self) -> None:
        """Do the same without another rebuild."""
        for name in NAMES:
            report = await verify(self.ref, name, self.ledger.settings, engine="local")
            assert report.differences == 0, report.examples[:3]
            self.verified += report.rows
        assert remains(Database(self.ledger.settings.database)) == []
        with NatsConnection.open(self.ledger.endpoint) as link:
            names = link.api(f"CONSUMER.NAMES.{self.ledger.name}")["consumers"] or []
        # A killed process's own consumers expire by themselves; only the workers' durable ones may be there.
        durable = {name for name in names if not name.startswith("ej_read_")}
        assert durable <= {f"{name}-r1" for name in NAMES}, durable
        self.settled += 1
        assert not self.wrong, self.wrong[:5]

    def database_is_up(self) -> None:
        """Wait until the database takes statements again."""

        def up() -> bool:
            try:
                with Database(self.ledger.settings.database).sync_engine("fault tests").connect() as connection:
                    connection.execute(text("select 1"))
            except DBAPIError:
                return False
            return True

        await_it(up, lambda: "the database to be back")

    @property
    def wrong(self) -> list[str]:
        """Return all that readers saw and that was not whole."""
        return [complaint for reader in self.readers for complaint in reader.wrong]

    def counts(self) -> str:
        """Return what the zeros were counted over."""
        looks = sum(reader.looks for reader in self.readers)
        away = sum(reader.unanswered for reader in self.readers)
        longest_s = max(reader.longest_s for reader in self.readers)
        return (
            f"{len(self.wrong)} of {looks:,} looks saw an empty, partial or older table ({away} found the database "
            f"away, the slowest took {longest_s:.2f} s); 0 differences in {self.verified:,} rows verified after "
            f"{self.settled} recoveries, nothing left behind; {self.feed.stored:,} events"
        )

    def print_summary(self) -> None:
        kind = "SQLite" if self.is_sqlite else "PostgreSQL"
        sys.stdout.write("\n" + "".join(f"{kind}: {line}\n" for line in [*self.summary, self.counts()]))


@contextmanager
def stage(server: str, database: str, folder: Path, *, events: int = 2_000, rate: float = 100.0) -> Generator[Stage]:
    """Make a log that grows at a rate, its live read models with a worker, and a reader of each."""
    app = tally_app(fresh_name("tally"))
    (folder / f"{app.name}.py").write_text(
        f"from tests.faults.tally import tally_app\n\napp = tally_app({app.name!r})\n"
    )
    ledger = Ledger(Settings(servers=(server,), database=database), app.name, app.catalog, dict(app.projections))
    database_with(database, *app.projections.values())
    ledger.create()
    with ExitStack() as stack:
        feed = stack.enter_context(Feed(ledger, entities=200))
        feed.allow(events)
        feed.finish()
        started = WorkerProcess(ledger, folder, lease_s=2.0, batch_max=200, names=NAMES)
        worker = stack.enter_context(started).ready()
        feed.rate = rate
        feed.allow(10_000_000)
        readers = [stack.enter_context(Reader(database, feed, name)) for name in NAMES]
        running = Stage(ledger, folder, feed, AppRef.parse(f"{app.name}:app", folder), readers)
        yield running
        feed.end()
        assert worker.process.poll() is None, worker.logged()
        running.print_summary()
