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
from tests.faults.tally import Seen, Truth, Verdict, judge, snapshot, tally_app
from tests.integration.ledger_log import Ledger
from tests.integration.projecting import database_with
from tests.logs import fresh_name

NAMES = ("totals", "journal")
NO_CONSUMER = 10014


@dataclass(frozen=True, slots=True)
class Place:
    """One projection's checkpoint."""

    pid: int
    """Of the process that owns it; 0 for nobody."""
    epoch: int
    position: int
    state: str
    reason: str | None


@dataclass(slots=True)
class Scene:
    """Made by `scene`."""

    ledger: Ledger
    folder: Path
    feed: Feed
    truth: Truth
    lines: Truth
    """The journal's own, since the two stand at different positions."""
    names: tuple[str, ...] = NAMES
    """The projections that are worked on."""
    checks: int = 0
    journal_at: int = 0
    journal_count: int = 0
    said: list[str] = field(default_factory=list[str])

    @property
    def is_sqlite(self) -> bool:
        return self.ledger.settings.database.startswith("sqlite")

    def places(self) -> dict[str, Place]:
        """The checkpoints as they stand; raises when a projection has failed."""
        query = text("select name, owner, epoch, position, state, reason, lease_until from eventjet_projection")
        found: dict[str, Place] = {}
        with self._engine().connect().execution_options(**{READ_ONLY: True}) as connection:
            for name, owner, epoch, position, state, reason, _ in connection.execute(query):
                found[name] = Place(int((owner or ":0").split(":")[1]), epoch, position, state, reason)
        failed = {name: place.reason for name, place in found.items() if place.state == "failed"}
        assert not failed, failed
        return found

    def owner_of(self, name: str) -> Place | None:
        """Who holds its lease, if it ever had an owner."""
        found = self.places().get(name)
        return found if found is not None and found.pid else None

    def owned_by(self, pid: int) -> dict[str, int]:
        """The projections that a process owns, with their epochs."""
        return {name: place.epoch for name, place in self.places().items() if place.pid == pid}

    def check(self) -> None:
        """What stands in the database now equals the fold of the log up to its checkpoints."""
        self.feed.check()
        seen = snapshot(self.ledger.settings.database, after=self.journal_at)
        expected = self.truth.at(seen.totals_at)
        assert seen.totals == expected, f"at {seen.totals_at}: {judge(Truth(self.feed.log), self._all())}"
        lines = self.lines.lines(self.journal_at, seen.journal_at)
        assert seen.journal == lines, f"at {seen.journal_at}: {judge(Truth(self.feed.log), self._all())}"
        self.journal_count += len(lines)
        assert seen.journal_count == self.journal_count
        self.journal_at = seen.journal_at
        self.checks += 1

    def finish(self, timeout_s: float = 60.0) -> Verdict:
        """Let the workers catch up; the verdict on everything, from the log as the server has it."""
        last = self.feed.finish()
        self.caught_up(last, timeout_s)
        self.check()
        stored = self.ledger.recorded(last)
        assert [(one.aggregate_id, one.data) for one in stored] == self.feed.log
        verdict = judge(Truth(self.feed.log), self._all())
        assert verdict.events == last
        return verdict

    def caught_up(self, position: int, timeout_s: float = 60.0) -> float:
        """Wait until the projections are there, for as long as they come nearer; returns the seconds it took."""

        def there() -> bool:
            found = self.places()
            return all(name in found and found[name].position >= position for name in self.names)

        def reached() -> int:
            return sum(place.position for place in self.places().values())

        return await_it(there, lambda: f"position {position}: {self.places()}", timeout_s, reached)

    def is_held(self) -> bool:
        """Whether a stopped process holds the whole database, as one can only on SQLite."""
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
        """Have the next term be one that builds, as the first one is; not while the database is held."""
        if self.is_held():
            return
        with self._engine().begin() as connection:
            connection.execute(text("update eventjet_projection set state = 'building' where state = 'active'"))

    def evict(self) -> None:
        """Delete the durables under whoever reads from them, as an administrator might."""
        with NatsConnection.open(self.ledger.endpoint) as link:
            for name in NAMES:
                try:
                    link.api(f"CONSUMER.DELETE.{self.ledger.name}.{name}-r1")
                except ApiRefused as refusal:
                    if refusal.err_code != NO_CONSUMER:
                        raise

    def waiting_for(self, durable: str) -> tuple[int, int]:
        """Messages that a durable has not delivered, and not seen acknowledged."""
        with NatsConnection.open(self.ledger.endpoint) as link:
            found = link.api(f"CONSUMER.INFO.{self.ledger.name}.{durable}")
        return found["num_pending"], found["num_ack_pending"]

    def say(self, line: str) -> None:
        self.said.append(line)

    def tell(self) -> None:
        """Print what was said: what every zero was counted over."""
        kind = "SQLite" if self.is_sqlite else "PostgreSQL"
        sys.stdout.write("\n" + "".join(f"{kind}: {line}\n" for line in self.said))

    def _all(self) -> Seen:
        return snapshot(self.ledger.settings.database)

    def _engine(self) -> Engine:
        return Database(self.ledger.settings.database).sync_engine("fault tests")


@contextmanager
def scene(server: str, database: str, folder: Path, entities: int = 1_000) -> Generator[Scene]:
    """A log of its own on the server, with read models in the database, audited."""
    app = tally_app(fresh_name("tally"))
    ledger = Ledger(Settings(servers=(server,), database=database), app.name, app.catalog, dict(app.projections))
    database_with(database, *app.projections.values())
    audit.install(database)
    ledger.create()
    with Feed(ledger, entities) as feed:
        found = Scene(ledger, folder, feed, Truth(feed.log), Truth(feed.log))
        yield found
        found.tell()
