"""What the tests of archives share: a server, one Spark session that knows a file system of its own, and a log."""

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
    """An app over an empty log, with its tables in SQLite."""
    folder.mkdir(exist_ok=True)
    book = Book(Settings.load({"servers": nats.url, "database": f"sqlite:///{folder}/read.db"}, {}), folder)
    create_tables(book.where.sync_engine(), book.projections.values())
    return book


async def sealed(book: Book, url: object, to: int | None = None, segment_events: int = 1_000_000) -> ArchiveReport:
    """Archive the log of `book`, in the session that runs."""
    return await archive(book.ref, str(url), book.settings, to=to, segment_events=segment_events)


def opened(url: object) -> ArchiveReader:
    """An archive in a folder of this machine."""
    return ArchiveReader(FolderFiles(str(url)))


def log_records(book: Book, last: int, first: int = 1) -> list[RawRecord]:
    """As JetStream has them."""
    return [one for batch in read_range(book.endpoint, book.name, first, last + 1) for one in batch]


async def made(book: Book, **options: Any) -> dict[str, list[Any]]:
    """All tables after a rebuild."""
    await rebuild(book.ref, ALL, book.settings, **options)
    return tables(book)


def tables(book: Book) -> dict[str, list[Any]]:
    return {name: book.rows(name) for name in ALL}


def purge(book: Book, first: int) -> None:
    """Take the log's past away, so that it begins at `first`."""
    with NatsConnection.open(book.endpoint) as link:
        link.api(f"STREAM.PURGE.{book.name}", {"seq": first})


def files_of(archive: Archive, folder: Path) -> list[Path]:
    return [folder / file.path for file in archive.files(1, archive.last)]
