"""The claim of a rebuild on SQLite, while others check whether it is alive."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

from eventjet.rebuild.runs import new_run
from eventjet.rebuild.sqlite_workspace import SqliteWorkspace
from eventjet.sql.database import Database


def test_a_run_claims_its_workspace_although_a_clean_up_removes_its_lock_file(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/read.db")
    space = SqliteWorkspace(database, new_run())
    with space.claimed():
        (lock,) = tmp_path.iterdir()
    entered, over = threading.Event(), threading.Event()

    def claim() -> None:
        with space.claimed():
            entered.set()
            over.wait(60)

    claiming = threading.Thread(target=claim)
    with lock.open("wb") as lock_file:
        # As a clean-up does: it locks a file without an owner, and removes it.
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        claiming.start()
        assert not entered.wait(0.2)
        lock.unlink()
    assert entered.wait(60)
    with database.sync_engine().connect() as connection:
        assert space.is_claimed(connection)
        over.set()
        claiming.join(60)
        assert not space.is_claimed(connection)
