"""An audit of commits, kept by the database itself: who moved a checkpoint, from where to where, and in which epoch.

Each worker process is known to its sessions by a name: a setting of the session on PostgreSQL, a function of the
connection on SQLite. A commit by another than the checkpoint's owner is a zombie's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from sqlalchemy import Engine, event, text

from eventjet.sql.database import Database
from tests.tables import reading

_POSTGRES = (
    (
        "create table audit (id bigserial primary key, name text, worker text, owner text, epoch bigint, "
        "before bigint, after bigint)"
    ),
    (
        "create function note_commit() returns trigger language plpgsql as $$ begin "
        "insert into audit (name, worker, owner, epoch, before, after) values (new.name, "
        "current_setting('faults.worker', true), new.owner, new.epoch, old.position, new.position); "
        "return null; end $$"
    ),
    (
        "create trigger audit_commit after update of position on eventjet_projection "
        "for each row execute function note_commit()"
    ),
)
_SQLITE = (
    (
        "create table audit (id integer primary key, name text, worker text, owner text, epoch integer, "
        "before integer, after integer)"
    ),
    (
        "create trigger audit_commit after update of position on eventjet_projection begin "
        "insert into audit (name, worker, owner, epoch, before, after) values "
        "(new.name, faults_worker(), new.owner, new.epoch, old.position, new.position); end"
    ),
)


def install(database: str) -> None:
    """Make the table and its trigger."""
    where = Database(database)
    engine = where.sync_engine("fault tests")
    with engine.begin() as connection:
        for statement in _POSTGRES if where.dialect.name == "postgresql" else _SQLITE:
            connection.exec_driver_sql(statement)
    engine.dispose()


def sessions_of(worker: str, database: str) -> str:
    """Return the database's URL for the process of this name, whose sessions from here on carry it."""
    if Database(database).dialect.name == "postgresql":
        mark = "&" if "?" in database else "?"
        return f"{database}{mark}options={quote(f'-c faults.worker={worker}')}"

    @event.listens_for(Engine, "connect")
    def name_it(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.create_function("faults_worker", 0, lambda: worker)

    return database


@dataclass(frozen=True, slots=True)
class Commit:
    """A move of a checkpoint."""

    name: str
    worker: str
    owner: str | None
    epoch: int
    before: int
    after: int

    @property
    def foreign(self) -> bool:
        """Whether another owned the checkpoint; owners are `host:pid:random`, and workers are named by their pid."""
        return (self.owner or "").split(":")[1:2] != [self.worker]


@dataclass(frozen=True, slots=True)
class Audit:
    """All commits of a run."""

    commits: list[Commit]

    @classmethod
    def read(cls, database: str) -> Audit:
        """Return what the database has recorded."""
        with reading(database) as connection:
            query = text("select name, worker, owner, epoch, before, after from audit order by id")
            return cls([Commit(*row) for row in connection.execute(query)])

    @property
    def zombies(self) -> int:
        """Count commits by a worker that was deposed, or in an epoch that was over."""
        return sum(commit.foreign for commit in self.commits) + sum(
            after.epoch < before.epoch for before, after in self._neighbours()
        )

    @property
    def breaks(self) -> int:
        """Count commits that did not begin where the one before had ended."""
        return sum(after.before != before.after or after.after <= after.before for before, after in self._neighbours())

    @property
    def takeovers(self) -> int:
        """Count commits by another process than the one before."""
        return sum(after.worker != before.worker for before, after in self._neighbours())

    def _neighbours(self) -> list[tuple[Commit, Commit]]:
        names = sorted({commit.name for commit in self.commits})
        return [pair for name in names for pair in pairwise([commit for commit in self.commits if commit.name == name])]

    def __str__(self) -> str:
        return (
            f"{self.zombies} zombie commits and {self.breaks} gaps between commits, over {len(self.commits):,} commits"
        )
