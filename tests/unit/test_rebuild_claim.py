"""The claim of a rebuild on SQLite, beside those who look whether it lives."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

from eventjet.rebuild.runs import new_run
from eventjet.rebuild.sqlite import claimed, is_claimed
from eventjet.sql.database import Database


def test_a_run_claims_its_place_though_another_takes_it_for_dead_meanwhile(tmp_path: Path) -> None:
    database, run = Database(f"sqlite:///{tmp_path}/read.db"), new_run()
    with claimed(database, run):
        (lock,) = tmp_path.iterdir()
    entered, over = threading.Event(), threading.Event()

    def claim() -> None:
        with claimed(database, run):
            entered.set()
            over.wait(60)

    claiming = threading.Thread(target=claim)
    with lock.open("wb") as found:
        # As whoever clears away: it locks what nobody holds, and removes it.
        fcntl.flock(found, fcntl.LOCK_EX)
        claiming.start()
        assert not entered.wait(0.2)
        lock.unlink()
    assert entered.wait(60)
    assert is_claimed(database, run)
    over.set()
    claiming.join(60)
    assert not is_claimed(database, run)
