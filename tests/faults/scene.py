"""`Scene`: a log that grows, the read models over it, and the check that they equal its fold at any moment."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Engine, text

from eventjet.errors import ApiRefused
from eventjet.jetstream.connection import NatsConnection
from eventjet.settings import Settings
from eventjet.sql.database import Database
from eventjet.sql.dialect import READ_ONLY
from tests.faults import audit
from tests.faults.feed import Feed
from tests.faults.processes import await_it
from tests.faults.tally import Tables, Truth, Verdict, judge, snapshot, tally_app
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import database_with
from tests.logs import fresh_name

NAMES = ("totals", "journal")
NO_CONSUMER = 10014


@dataclass(frozen=True, slots=True)
class Place:
    """The checkpoint of a projection."""

    pid: int
    """The pid of the process that owns it; 0 for nobody."""
    epoch: int
    position: int
    state: str
    reason: str | None


@dataclass(slots=True)
class Scene:
    """A log, its feed and the expected rows, made by `scene`."""

    ledger: Ledger
    folder: Path
    feed: Feed
    truth: Truth
    lines: Truth
    """The journal's own, since the two are at different positions."""
    names: tuple[str, ...] = NAMES
    """The projections that have workers."""
    checks: int = 0
    journal_at: int = 0
    journal_count: int = 0
    summary: list[str] = field(default_factory=list[str])

    @property
    def is_sqlite(self) -> bool:
        return self.ledger.settings.database.startswith("sqlite")

    def places(self) -> dict[str, Place]:
        """Return the checkpoints; raise when a projection has failed."""
        query = text("select name, owner, epoch, position, state, reason, lease_until from eventjet_projection")
        places: dict[str, Place] = {}
        with self._engine().connect().execution_options(**{READ_ONLY: True}) as connection:
            for name, owner, epoch, position, state, reason, _ in connection.execute(query):
                places[name] = Place(int((owner or ":0").split(":")[1]), epoch, position, state, reason)
        failed = {name: place.reason for name, place in places.items() if place.state == "failed"}
        assert not failed, failed
        return places

    def owner_of(self, name: str) -> Place | None:
        """Return the checkpoint with the owner of its lease, if it ever had one."""
        place = self.places().get(name)
        return place if place is not None and place.pid else None

    def owned_by(self, pid: int) -> dict[str, int]:
        """Return the projections that a process owns, with their epochs."""
        return {name: place.epoch for name, place in self.places().items() if place.pid == pid}

    def check(self) -> None:
        """Assert that the rows in the database equal the fold of the log up to their checkpoints."""
        self.feed.check()
        tables = snapshot(self.ledger.settings.database, after=self.journal_at)
        expected = self.truth.at(tables.totals_at)
        assert tables.totals == expected, f"at {tables.totals_at}: {judge(Truth(self.feed.log), self._all())}"
        lines = self.lines.lines(self.journal_at, tables.journal_at)
        assert tables.journal == lines, f"at {tables.journal_at}: {judge(Truth(self.feed.log), self._all())}"
        self.journal_count += len(lines)
        assert tables.journal_count == self.journal_count
        self.journal_at = tables.journal_at
        self.checks += 1

    def finish(self, timeout_s: float = 60.0) -> Verdict:
        """Let the workers catch up; return the verdict on everything, by the log as the server has it."""
        last = self.feed.finish()
        self.caught_up(last, timeout_s)
        self.check()
        stored = self.ledger.recorded(last)
        assert [(event.aggregate_id, event.data) for event in stored] == self.feed.log
        verdict = judge(Truth(self.feed.log), self._all())
        assert verdict.events == last
        return verdict

    def caught_up(self, position: int, timeout_s: float = 60.0) -> float:
        """Wait until the projections are there, for as long as they come nearer; return the seconds it took."""

        def there() -> bool:
            places = self.places()
            return all(name in places and places[name].position >= position for name in self.names)

        def reached() -> int:
            return sum(place.position for place in self.places().values())

        return await_it(there, lambda: f"position {position}: {self.places()}", timeout_s, reached)

    def is_locked(self) -> bool:
        """Return whether a stopped process locks the whole database, as it can only on SQLite."""
        if not self.is_sqlite:
            return False
        connection = sqlite3.connect(self.ledger.settings.database.removeprefix("sqlite:///"), timeout=0.3)
        try:
            connection.execute("begin immediate")
            connection.rollback()
        except sqlite3.OperationalError:
            return True
        finally:
            connection.close()
        return False

    def begin_to_build(self) -> None:
        """Make the next term one that builds, as the first one is; not while the database is locked."""
        if self.is_locked():
            return
        with self._engine().begin() as connection:
            connection.execute(text("update eventjet_projection set state = 'building' where state = 'active'"))

    def evict(self) -> None:
        """Delete the durable consumers that workers read from, as an administrator might."""
        with NatsConnection.open(self.ledger.endpoint) as link:
            for name in NAMES:
                try:
                    link.api(f"CONSUMER.DELETE.{self.ledger.name}.{name}-r1")
                except ApiRefused as refusal:
                    if refusal.err_code != NO_CONSUMER:
                        raise

    def waiting_for(self, durable: str) -> tuple[int, int]:
        """Return the messages that a durable has not delivered, and those not acknowledged."""
        with NatsConnection.open(self.ledger.endpoint) as link:
            info = link.api(f"CONSUMER.INFO.{self.ledger.name}.{durable}")
        return info["num_pending"], info["num_ack_pending"]

    def say(self, line: str) -> None:
        self.summary.append(line)

    def print_summary(self) -> None:
        """Print the summary: what every zero was counted over."""
        kind = "SQLite" if self.is_sqlite else "PostgreSQL"
        sys.stdout.write("\n" + "".join(f"{kind}: {line}\n" for line in self.summary))

    def _all(self) -> Tables:
        return snapshot(self.ledger.settings.database)

    def _engine(self) -> Engine:
        return Database(self.ledger.settings.database).sync_engine("fault tests")


@contextmanager
def scene(server: str, database: str, folder: Path, entities: int = 1_000) -> Generator[Scene]:
    """Make a log of its own on the server, with read models in the database, audited."""
    app = tally_app(fresh_name("tally"))
    ledger = Ledger(Settings(servers=(server,), database=database), app.name, app.catalog, dict(app.projections))
    database_with(database, *app.projections.values())
    audit.install(database)
    ledger.create()
    with Feed(ledger, entities) as feed:
        running = Scene(ledger, folder, feed, Truth(feed.log), Truth(feed.log))
        yield running
        running.print_summary()
