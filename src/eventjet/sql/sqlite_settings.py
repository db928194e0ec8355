"""What SQLite says of its version and of a file's journal. How it syncs is each connection's: always `FULL`."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, text

from eventjet.sql.soundness import Soundness, Weakness, numbers_of

OLDEST = (3, 35)
"""`returning` came with it."""
_MENDED = (3, 51, 3)
_BACKPORTED = ((3, 44, 6), (3, 50, 7))
"""The first releases, and those of older branches, without the WAL-reset fault (sqlite.org/wal.html#walresetbug)."""


def soundness(connection: Connection) -> Soundness:
    """Of the library that this process uses, and the file."""
    file = next(str(path) for _, name, path in connection.execute(text("pragma database_list")) if name == "main")
    # Asked over a connection that takes the file for one that nobody changes, `pragma journal_mode` says `delete`.
    with Path(file).open("rb") as opened:
        is_wal = opened.read(20)[18:] == b"\x02\x02"
    return judged(str(connection.scalar(text("select sqlite_version()"))), is_wal=is_wal)


def judged(version: str, *, is_wal: bool) -> Soundness:
    """Of a version, and whether the file is in the mode that eventjet puts it into. PURE."""
    numbers = numbers_of(version)
    weaknesses: list[Weakness] = []
    if numbers < OLDEST:
        remedy = f"Use a Python whose sqlite3 is {'.'.join(map(str, OLDEST))} or newer."
        weaknesses.append(Weakness(f"SQLite {version} is too old", "eventjet cannot use it", remedy, is_fault=True))
    elif numbers < _MENDED and not any(one[:2] == numbers[:2] and one <= numbers for one in _BACKPORTED):
        weaknesses.append(
            Weakness(
                f"SQLite {version} has the WAL-reset fault",
                "in rare coincidences of two checkpoints and a commit the file loses that commit, or breaks",
                "Use a Python whose sqlite3 is 3.51.3 or newer, or PostgreSQL where several workers write.",
                is_rare=True,
            )
        )
    if not is_wal:
        weaknesses.append(
            Weakness(
                "its journal mode is not `wal`",
                "readers and workers lock each other out",
                "Start `eventjet worker`, which switches it. A file system that does not allow that will not do.",
            )
        )
    return Soundness(f"SQLite {version}", tuple(weaknesses))
