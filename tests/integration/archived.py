"""Helpers for the tests of archives: a log to archive, archives to open, and tables to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eventjet.archive.reading import Archive, ArchiveReader, FolderFiles
from eventjet.codec.headers import RawRecord
from eventjet.dev.nats import NatsServer
from eventjet.jetstream.connection import NatsConnection
from eventjet.jetstream.reader import read_range
from eventjet.rebuild import ArchiveReport, archive, rebuild
from eventjet.settings import Settings
from eventjet.sql.locations import create_tables
from tests.integration.rebuild_log import ALL, Book


def book_of(nats: NatsServer, folder: Path) -> Book:
    """Return an app over an empty log, with its tables in SQLite."""
    folder.mkdir(exist_ok=True)
    book = Book(Settings.load({"servers": nats.url, "database": f"sqlite:///{folder}/read.db"}, {}), folder)
    create_tables(book.where.sync_engine(), book.projections.values())
    return book


async def sealed(book: Book, url: object, to: int | None = None, segment_events: int = 1_000_000) -> ArchiveReport:
    """Archive the log of `book` with the running Spark session."""
    return await archive(book.ref, str(url), book.settings, to=to, segment_events=segment_events)


def opened(url: object) -> ArchiveReader:
    """Open an archive in a local folder."""
    return ArchiveReader(FolderFiles(str(url)))


def log_records(book: Book, last: int, first: int = 1) -> list[RawRecord]:
    """Return the records of the log from JetStream."""
    return [record for batch in read_range(book.endpoint, book.name, first, last + 1) for record in batch]


async def rebuilt_tables(book: Book, **options: Any) -> dict[str, list[Any]]:
    """Rebuild all tables, and return their rows."""
    await rebuild(book.ref, ALL, book.settings, **options)
    return tables(book)


def tables(book: Book) -> dict[str, list[Any]]:
    return {name: book.rows(name) for name in ALL}


def purge(book: Book, first: int) -> None:
    """Purge the events before `first`."""
    with NatsConnection.open(book.endpoint) as link:
        link.api(f"STREAM.PURGE.{book.name}", {"seq": first})


def files_of(archive: Archive, folder: Path) -> list[Path]:
    return [folder / file.path for file in archive.files(1, archive.last)]
