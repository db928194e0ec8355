"""An archive has every record of the log, and is refused for another log or when it is damaged."""

from __future__ import annotations

import random
import shutil
from decimal import Decimal
from pathlib import Path

import pytest

from eventjet import App, Settings
from eventjet.archive.reading import ArchiveReader
from eventjet.dev.nats import NatsServer
from eventjet.errors import ArchiveBroken, RebuildError, UsageError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.jetstream.connection import NatsConnection
from eventjet.rebuild import ENGINES, archive, preview, rebuild, verify
from eventjet.spark import archiving
from eventjet.spark.archiving import SparkFiles, archived_frame, reading
from eventjet.spark.session import Started
from tests.integration.archived import book_of, files_of, log_records, opened, purge, rebuilt_tables, sealed, tables
from tests.integration.rebuild_log import Book, remains
from tests.logs import block, fresh_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def book(nats: NatsServer, tmp_path: Path) -> Book:
    return book_of(nats, tmp_path)


async def test_an_archive_has_every_record_of_the_log(book: Book, spark: Started, tmp_path: Path) -> None:
    book.fill(2_500)
    url = tmp_path / "archive"
    first = await sealed(book, url, to=1_500, segment_events=1_000)
    assert [(segment.first, segment.last) for segment in first.sealed] == [(1, 1_000), (1_001, 1_500)]
    second = await sealed(book, url, segment_events=1_000)
    assert [(segment.first, segment.last) for segment in second.sealed] == [(1_501, 2_000), (2_001, 2_500)]
    assert (second.first, second.last, second.events) == (1, 2_500, 2_500)

    reader = opened(url)
    archive = reader.manifest
    assert archive.segments == (*first.sealed, *second.sealed)
    reader.check(1, archive.last)
    records = log_records(book, 2_500)
    batches = list(reader.records(1, 2_501, batch=300))
    assert [record for batch in batches for record in batch] == records
    assert max(map(len, batches)) <= 300
    assert [record for batch in reader.records(999, 1_503) for record in batch] == records[998:1_502]
    for segment in archive.segments:
        assert (segment.first_time_ns, segment.last_time_ns) == (
            records[segment.first - 1][1],
            records[segment.last - 1][1],
        )
        assert f"Nats-Msg-Id: {segment.last_id}\r\n".encode() in records[segment.last - 1][3]

    with reading(spark.spark):
        rows = archived_frame(spark.spark, archive, 999, 1_502).orderBy("position").collect()
    frame_records = [
        (row.position, row.time_ns, row.subject.encode(), bytes(row.headers), bytes(row.body)) for row in rows
    ]
    assert frame_records == records[998:1_502]


async def test_a_segment_ends_where_a_save_ends(nats: NatsServer, spark: Started, tmp_path: Path) -> None:
    """So an archive that is killed between two segments has no partial save."""
    del spark  # the fixture has started the session
    app, settings = (
        App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason]),
        Settings(servers=(nats.url,)),
    )
    async with app.connect(settings) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        for number in range(4):
            amounts = [accounts.decide(f"{name}-{number}", Account.deposit, Decimal(1)) for name in ("a", "b")]
            for name in ("a", "b"):
                await accounts.execute(f"{name}-{number}", Account.open, name)
            await accounts.execute(f"a-{number}", Account.deposit, Decimal(3))
            await jet.transact(*amounts)
    report = await archive(app, str(tmp_path / "archive"), settings, segment_events=2)
    bounds = [(segment.first, segment.last) for segment in report.sealed]
    assert bounds == [(1, 2), (3, 5), (6, 6), (7, 8), (9, 10), (11, 12), (13, 15), (16, 16), (17, 18), (19, 20)]


async def test_an_archive_that_is_up_to_date_is_not_changed(book: Book, tmp_path: Path) -> None:
    url = tmp_path / "archive"
    empty = await sealed(book, url)
    assert (empty.events, empty.sealed, url.exists()) == (0, (), False)
    last = book.fill(10)
    await sealed(book, url)
    before = {path: path.stat().st_mtime_ns for path in url.rglob("*")}
    again = await sealed(book, url)
    assert (again.last, again.sealed) == (last, ())
    assert {path: path.stat().st_mtime_ns for path in url.rglob("*")} == before
    assert (await sealed(book, url, to=3)).sealed == ()
    with pytest.raises(UsageError, match="ends at 10"):
        await sealed(book, url, to=11)


async def test_large_events_get_smaller_archive_files(
    book: Book, spark: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    bodies = [chance.randbytes(990_000) if number % 8 == 0 else b"{}" for number in range(32)]
    last = book.append_raw((f"a-{number}", block("account.closed"), body) for number, body in enumerate(bodies))
    monkeypatch.setattr(archiving, "FILE_BYTES_MAX", 2_100_000)
    await sealed(book, tmp_path / "archive")
    reader = opened(tmp_path / "archive")
    archive = reader.manifest
    assert max(file.bytes for file in archive.files(1, archive.last)) < 2_100_000
    assert [record for batch in reader.records(1, last + 1) for record in batch] == log_records(book, last)
    with reading(spark.spark):
        rows = archived_frame(spark.spark, archive, 1, last).orderBy("position").collect()
    assert [bytes(row.body) for row in rows] == bodies


async def test_an_archive_on_a_hadoop_file_system_is_written_and_read_by_spark(
    book: Book, spark: Started, mounted: Path
) -> None:
    book.fill(1_200)
    url = f"viewfs://archives/there/{book.name}"
    await sealed(book, url, to=500, segment_events=400)
    report = await sealed(book, url, to=1_000, segment_events=400)
    assert [(segment.first, segment.last) for segment in report.sealed] == [(501, 800), (801, 1_000)]
    assert (await sealed(book, url, to=1_000)).sealed == ()

    reader = ArchiveReader(SparkFiles(spark.spark, url))
    archive = reader.manifest
    assert (archive.first, archive.last, len(archive.segments)) == (1, 1_000, 4)
    assert (mounted / book.name / archive.files(1, archive.last)[0].path).exists()
    reader.check(1, 1_000)
    archived = [record for batch in reader.records(300, 901) for record in batch]
    assert archived == log_records(book, 900, first=300)

    wanted = await rebuilt_tables(book, engine="local")
    assert await rebuilt_tables(book, engine="spark", from_archive=url) == wanted
    report = await verify(book.ref, "balances", book.settings, engine="spark", from_archive=url)
    assert (report.differences, report.events) == (0, 1_200)
    with pytest.raises(UsageError, match="--engine spark"):
        await rebuilt_tables(book, engine="local", from_archive=url)

    damaged = mounted / book.name / archive.files(600, 600)[0].path
    damaged.with_name(f".{damaged.name}.crc").unlink()
    flip(damaged)
    with pytest.raises(ArchiveBroken, match=damaged.name):
        await rebuilt_tables(book, engine="spark", from_archive=url)
    damaged.unlink()
    with pytest.raises(ArchiveBroken, match=damaged.name):
        await rebuilt_tables(book, engine="spark", from_archive=url)
    assert tables(book) == wanted


def flip(path: Path) -> None:
    """Change a bit in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_first(folder: Path) -> str:
    path = files_of(opened(folder).manifest, folder)[0]
    flip(path)
    return path.name


def lose_last(folder: Path) -> str:
    path = files_of(opened(folder).manifest, folder)[-1]
    path.unlink()
    return path.name


def swap_two(folder: Path) -> str:
    first, _, last = files_of(opened(folder).manifest, folder)
    data = first.read_bytes()
    first.write_bytes(last.read_bytes())
    last.write_bytes(data)
    return first.name


def forget_segment(folder: Path) -> str:
    next(folder.glob(f"manifest/{101:020d}-*/part-*")).unlink()
    return "position 101"


async def test_a_rebuild_from_a_damaged_archive_fails_and_names_the_damage(
    book: Book, spark: Started, tmp_path: Path
) -> None:
    book.fill(300)
    await sealed(book, tmp_path / "archive", segment_events=100)
    before = await rebuilt_tables(book, engine="local"), book.checkpoint()
    book.fill(10)
    for harm in (flip_first, lose_last, swap_two, forget_segment):
        harmed = tmp_path / harm.__name__
        shutil.copytree(tmp_path / "archive", harmed)
        named = harm(harmed)
        for engine in ENGINES:
            with pytest.raises(ArchiveBroken, match=named):
                await rebuild(book.ref, ["balances"], book.settings, engine=engine, from_archive=str(harmed))
    assert (tables(book), book.checkpoint()) == before
    assert remains(book.where) == []


async def test_an_archive_of_another_log_or_another_past_is_refused(
    book: Book, nats: NatsServer, tmp_path: Path
) -> None:
    url = str(tmp_path / "archive")
    other = book_of(nats, tmp_path / "other")
    book.fill(20)
    other.fill(20)
    await sealed(book, url)
    for run in (sealed(other, url), rebuilt_tables(other, engine="local", from_archive=url)):
        with pytest.raises(ArchiveBroken, match="is of the log"):
            await run
    identity = opened(url).manifest.segments[0].log
    book.delete()
    book.create(identity)
    for events, message in ((10, "the log has lost its end"), (15, "and the log has the event")):
        book.fill(events, seed=9)
        for run in (sealed(book, url), rebuilt_tables(book, engine="local", from_archive=url)):
            with pytest.raises(ArchiveBroken, match=message):
                await run


async def test_an_archive_continues_with_a_promoted_mirror_up_to_the_mirrors_end(book: Book, tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    book.fill(20)
    old = (await sealed(book, url, to=15)).log
    book.promote(20)
    book.fill(10)
    for _ in range(2):
        new = (await sealed(book, url)).log
    assert new != old
    assert [(segment.log, segment.continues, segment.last) for segment in opened(url).manifest.segments] == [
        (old, "", 15),
        (new, f"{old}@20", 30),
    ]
    await rebuilt_tables(book, engine="local", from_archive=url)
    book.promote(25)
    with pytest.raises(ArchiveBroken, match="where its mirror ended when it was promoted"):
        await sealed(book, url)


async def test_a_purged_log_is_rebuilt_from_the_archive_and_the_remaining_log(book: Book, tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    book.fill(600)
    await sealed(book, url, segment_events=250)
    book.fill(100, seed=2)
    wanted = await rebuilt_tables(book, engine="local")
    purge(book, 601)
    plan = (await preview(book.ref, ["balances"], book.settings, engine="local", from_archive=url)).plan
    assert (plan.first, plan.archived, plan.last, plan.ranges[0].start) == (1, 600, 700, 601)
    for engine in ENGINES:
        assert await rebuilt_tables(book, engine=engine, from_archive=url) == wanted
    report = await verify(book.ref, "balances", book.settings, from_archive=url)
    assert (report.differences, report.events) == (0, 700)
    assert (await sealed(book, url)).events == 700
    purge(book, 701)
    with pytest.raises(ArchiveBroken, match="no event any more"):
        await rebuilt_tables(book, engine="local", from_archive=url)
    assert tables(book) == wanted


async def test_a_gap_between_archive_and_log_is_refused(book: Book, tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    book.fill(50)
    await sealed(book, url, to=20)
    purge(book, 30)
    for run in (sealed(book, url), rebuilt_tables(book, engine="local", from_archive=url)):
        with pytest.raises(ArchiveBroken, match="ends at position 20, and the log begins at 30"):
            await run


async def test_a_log_with_a_gap_is_archived_only_up_to_the_gap(book: Book, spark: Started, tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    book.fill(50)
    with NatsConnection.open(book.endpoint) as link:
        link.api(f"STREAM.MSG.DELETE.{book.name}", {"seq": 35})
    with pytest.raises(RebuildError, match="broken at position 35"):
        await sealed(book, url, segment_events=20)
    assert opened(url).manifest.last == 20
