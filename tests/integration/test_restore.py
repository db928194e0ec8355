"""Restoring an archive into an empty stream gives the same log, or a refusal that names the reason."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from eventjet import App, Settings
from eventjet.archive.republish import BATCH_MAX, WINDOW_NS, Restore, Restored, lasting
from eventjet.codec.headers import MSG_ID, RawRecord, header, recorded_at, unfinished_save
from eventjet.dev.nats import NatsServer
from eventjet.errors import ArchiveBroken, LogRolledBack, Refused, UsageError
from eventjet.examples.bank.account import Account
from eventjet.examples.bank.app import withdrawn_has_a_reason
from eventjet.jetstream.api import stream_info
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.log.integrity import checking_same_log, earlier_logs
from eventjet.log.topology import CONTINUES, IDENTITY, stream_config
from eventjet.operations.reports import restore_lines
from eventjet.rebuild import archive, restore
from tests.archives import archive_of
from tests.faults.proxy import PASS, Fate, NatsProxy, Publish
from tests.integration.restoring import (
    NAME,
    append_raw,
    delete,
    endpoint,
    fill,
    records_of,
    seal,
)
from tests.logs import block

APP = App(NAME, aggregates=[Account], upcasters=[withdrawn_has_a_reason])
LOG = "18e9b2fc-0d0b-4a0f-9c57-1f6f3f3a0c11"


@pytest.fixture(scope="module")
def records() -> Sequence[RawRecord]:
    """Return about 1,500 records of every kind from a log whose server is gone."""
    with NatsServer(sync_interval="1m") as server:
        asyncio.run(fill(APP, server.url, 1_500))
        return records_of(server.url)


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m") as server:
        yield server


@pytest.fixture
def url(server: NatsServer) -> str:
    """Return the URL of a server without the stream."""
    delete(server.url)
    return server.url


def make(url: str, **config: object) -> None:
    """Create the stream as `init` does, with these settings changed."""
    with NatsConnection.open(endpoint(url)) as link:
        link.api(f"STREAM.CREATE.{NAME}", {**stream_config(NAME, 1), **config})


def has_records(url: str, records: Sequence[RawRecord]) -> bool:
    return [lasting(record) for record in records_of(url)] == [lasting(record) for record in records]


class Interrupted(Exception):
    pass


def interrupt_after(events: int) -> object:
    def interrupt(phase: str, done: int, _total: int) -> None:
        if phase == "publish" and done >= events:
            raise Interrupted

    return interrupt


def restored(url: str, records: Sequence[RawRecord], progress: object = None) -> Restored:
    options = {} if progress is None else {"progress": progress}
    return Restore(endpoint(url), archive_of(records, LOG), timeout_s=20.0, **options).run()  # type: ignore[arg-type]


async def test_a_restored_log_equals_the_archive_and_init_finds_no_drift(url: str, records: list[RawRecord]) -> None:
    steps: list[tuple[str, int, int]] = []
    report = restored(url, records, lambda *step: steps.append(step))
    assert (report.first, report.last, report.published) == (1, len(records), len(records))
    assert has_records(url, records)
    assert {phase: (done, total) for phase, done, total in steps} == dict.fromkeys(
        ("publish", "compare"), (len(records), len(records))
    )
    async with APP.connect(servers=url) as jet:
        topology = await jet.init()
    assert (topology.identity, topology.drifts) == (LOG, ())


async def test_an_interrupted_restore_can_be_continued_and_init_reports_it(url: str, records: list[RawRecord]) -> None:
    with pytest.raises(Interrupted):
        restored(url, records, interrupt_after(2 * BATCH_MAX))
    assert ask_once(endpoint(url), stream_info(NAME)).last == 2 * BATCH_MAX
    async with APP.connect(servers=url) as jet:
        assert [drift.setting for drift in (await jet.init()).drifts] == ["duplicate_window"]
    report = restored(url, records)
    assert (report.published, report.events) == (len(records) - 2 * BATCH_MAX, len(records))
    assert has_records(url, records)
    assert restored(url, records).published == 0
    async with APP.connect(servers=url) as jet:
        assert (await jet.init()).drifts == ()


async def test_an_empty_stream_that_init_made_becomes_the_restored_log(url: str, records: list[RawRecord]) -> None:
    async with APP.connect(servers=url) as jet:
        assert (await jet.init()).identity != LOG
        restored(url, records)
        assert (await jet.init()).identity == LOG
    assert has_records(url, records)


async def test_restoring_an_archive_that_ends_within_a_save_reports_it(
    url: str, records: list[RawRecord], tmp_path: Path
) -> None:
    """An archive in which money left one account and reached no other is incomplete."""
    settings = Settings(servers=(url,))
    within = next(index for index, record in enumerate(records, 1) if unfinished_save(record[3]))
    for end, torn in ((within - 1, 0), (within, 1), (within + 1, 0), (len(records), 0)):
        delete(url)
        archived = seal(tmp_path / str(end), records[:end], LOG)
        report = await restore(APP, archived, settings, engine="local")
        assert (report.last, report.torn) == (end, torn)
        assert ("NOT whole: the archive ends within a save. 1 event" in " ".join(restore_lines(report))) == bool(torn)


async def test_an_archive_may_not_end_within_a_save(url: str, tmp_path: Path) -> None:
    async with APP.connect(servers=url) as jet:
        await jet.init()
        accounts = jet.repository(Account)
        for name in ("ada", "bob"):
            await accounts.execute(name, Account.open, name)
        await jet.transact(
            accounts.decide("ada", Account.deposit, Decimal(2)), accounts.decide("bob", Account.deposit, Decimal(3))
        )
    with pytest.raises(UsageError, match="Position 3 is within a save, which ends at 4"):
        await archive(APP, str(tmp_path / "archive"), Settings(servers=(url,)), to=3)


def stand(records: Sequence[RawRecord], log: str, position: int) -> SimpleNamespace:
    """Return a checkpoint of a log at one of these records."""
    event_id = header(records[position - 1][3], MSG_ID) or ""
    return SimpleNamespace(name="balances", log=log, position=position, event_id=event_id)


def test_a_restored_log_of_a_promoted_mirror_continues_the_earlier_logs(url: str, records: list[RawRecord]) -> None:
    """Checkpoints of earlier logs stay valid up to the end of the mirror or of the archive."""
    archived = records[:100]
    archive = archive_of(archived, LOG, continues="first@40 second@5000")
    Restore(endpoint(url), archive, timeout_s=20.0).run()
    with NatsConnection.open(endpoint(url)) as link:
        state = link.ask(stream_info(NAME))
        assert earlier_logs(state) == {"first": 40, "second": 100}
        for log, position in (("first", 40), ("second", 100), (LOG, 100)):
            link.run(checking_same_log(NAME, stand(archived, log, position)))
        with pytest.raises(LogRolledBack, match="has the events up to position 40 only"):
            link.run(checking_same_log(NAME, stand(archived, "first", 41)))
        with pytest.raises(LogRolledBack, match="it was made from the log third"):
            link.run(checking_same_log(NAME, stand(archived, "third", 1)))


def test_restoring_into_an_empty_promoted_log_takes_earlier_logs_from_the_archive(
    url: str, records: list[RawRecord]
) -> None:
    make(url, metadata={IDENTITY: "another", CONTINUES: "one@0"})
    restored(url, records[:100])
    assert earlier_logs(ask_once(endpoint(url), stream_info(NAME))) == {}


@pytest.mark.parametrize(
    ("log", "start", "end", "problem"),
    [
        ("another", 0, 5, "of the log another, and the archive is of"),
        (LOG, 5, 20, "its event at position 1 is not that of the archive"),
        (LOG, 0, None, "it holds 1,572 events at positions 1 to 1,572, and the archive 1 to 1,000"),
    ],
    ids=["another log", "another past", "more than that"],
)
def test_a_stream_with_other_events_is_not_changed(
    url: str, records: list[RawRecord], log: str, start: int, end: int | None, problem: str
) -> None:
    make(url, metadata={IDENTITY: log})
    app = [(record[2].decode().removeprefix("bank."), _bare(record[3]), record[4]) for record in records[start:end]]
    last = append_raw(url, app)
    with pytest.raises(Refused, match=problem):
        restored(url, records[:1_000])
    after = ask_once(endpoint(url), stream_info(NAME))
    assert (after.last, after.metadata[IDENTITY]) == (last, log)


def _bare(headers: bytes) -> bytes:
    return re.sub(rb"\r\nNats-(Expected|Batch)[^\r]*", b"", headers)


def test_a_stream_with_other_settings_is_refused(url: str, records: list[RawRecord]) -> None:
    make(url, allow_atomic=False)
    with pytest.raises(Refused, match="bank: allow_atomic is False, declared is True"):
        restored(url, records)


def test_a_purged_stream_is_refused(url: str, records: list[RawRecord]) -> None:
    make(url, first_seq=100, metadata={IDENTITY: LOG})
    with pytest.raises(Refused, match="its next event gets position 100"):
        restored(url, records)


@pytest.mark.parametrize("writes_at", [BATCH_MAX, 1_572])
def test_a_concurrent_writer_ends_the_restore_with_a_reason(url: str, records: list[RawRecord], writes_at: int) -> None:
    def write_at_position(phase: str, done: int, _total: int) -> None:
        if phase == "publish" and done == writes_at:
            append_raw(url, [("account.rival", block(), b"{}")])

    problem = "somebody else wrote" if writes_at < len(records) else "holds 1573 events"
    with pytest.raises(Exception, match=problem):
        restored(url, records, write_at_position)
    assert ask_once(endpoint(url), stream_info(NAME)).last == writes_at + 1
    with pytest.raises(Refused):
        restored(url, records)


@pytest.mark.parametrize(
    "fate",
    [
        Fate(answer="cut"),
        Fate(request="cut"),
        pytest.param(Fate(late_s=12.0), marks=pytest.mark.slow),
    ],
    ids=["answer cut", "request cut", "request late"],
)
async def test_a_lost_answer_is_resolved_by_reading_the_stream(url: str, records: list[RawRecord], fate: Fate) -> None:
    commits: list[str] = []

    def choose(publish: Publish) -> Fate:
        if b"Nats-Batch-Commit" not in publish.headers:
            return PASS
        commits.append(publish.subject)
        return fate if len(commits) in (2, 4) else PASS

    async with NatsProxy(url, choose) as proxy:
        past = archive_of(records, LOG)
        # The restore waits twice this timeout for stored batches.
        report = await asyncio.to_thread(Restore(endpoint(proxy.url), past, timeout_s=5.0).run)
    assert report.events == len(records)
    assert has_records(url, records)
    assert len(commits) >= 4


@pytest.mark.parametrize("first", [701, 2])
async def test_a_log_that_begins_later_keeps_its_positions(url: str, records: list[RawRecord], first: int) -> None:
    later = records[first - 1 :]
    report = restored(url, later)
    assert (report.first, report.last) == (first, len(records))
    assert has_records(url, later)
    async with APP.connect(servers=url) as jet:
        assert (await jet.init()).drifts == ()


def test_a_message_of_the_largest_size_still_fits(url: str) -> None:
    make(url)
    headers = block(version=1, Ej_Command="c")
    append_raw(url, [("account.a", headers, b"x" * (900_000 - len(headers))), ("account.a", block(), b"")])
    largest = records_of(url)
    delete(url)
    restored(url, largest)
    assert has_records(url, largest)
    restored_once = records_of(url)
    delete(url)
    restored(url, restored_once)
    assert [len(record[3]) for record in records_of(url)] == [len(record[3]) for record in restored_once]


def test_a_server_with_a_smaller_message_limit_is_refused(records: list[RawRecord]) -> None:
    large = [*records[:3], (4, records[3][1], b"bank.account.x", block(version=1), b"x" * 200_000)]
    with NatsServer(sync_interval="1m", config="max_payload: 100KB") as small:
        with pytest.raises(Refused, match="102,400 bytes; an event of positions 1 to 4 has 200,"):
            restored(small.url, large)
        assert ask_once(endpoint(small.url), stream_info(NAME)).last == 0


def test_repeated_message_ids_are_all_restored(url: str) -> None:
    twice = [
        (1 + number, 10**18, b"bank.account.a", block(version=1, Nats_Msg_Id="same"), b"%d" % number)
        for number in range(3)
    ]
    restored(url, twice)
    assert [record[4] for record in records_of(url)] == [b"0", b"1", b"2"]


def test_foreign_messages_are_restored_unchanged(url: str) -> None:
    foreign = [
        (1, 10**18, b"bank.account.a", b"", b""),
        (2, 10**18, b"bank.account.a", b"NATS/1.0\r\nx:\r\n\r\n", b"\xff\r\n\x00"),
        (3, 10**18, b"bank.account.*", b"NATS/1.0\r\nEj-Type: no\r\n\r\n", b"HPUB"),
        (4, 10**18, "bank.konto.ä".encode(), block(version=1, Nats_Expected_Last_Subject_Sequence="x"), b"{}"),
    ]
    restored(url, foreign)
    assert has_records(url, foreign)
    assert [record[2] for record in records_of(url)] == [record[2] for record in foreign]


def test_an_archive_whose_events_do_not_follow_each_other_is_refused(url: str) -> None:
    broken = [
        (1, 10**18, b"bank.account.a", block(version=1, Nats_Expected_Last_Subject_Sequence="0"), b"{}"),
        (2, 10**18, b"bank.account.b", block(version=1, Nats_Expected_Last_Subject_Sequence="1"), b"{}"),
    ]
    with pytest.raises(ArchiveBroken, match="positions 1 to 2 does not follow the one it was written after"):
        restored(url, broken)
    state = ask_once(endpoint(url), stream_info(NAME))
    assert (state.last, state.config["duplicate_window"]) == (0, WINDOW_NS)


async def test_time_travel_skips_retired_events(url: str) -> None:
    kinds = ("account.opened", "account.noted", "account.deposited", "account.deposited")
    bodies = (b'{"owner":"ada"}', b"{}", b'{"amount":"1"}', b'{"amount":"2"}')
    past = [
        (number, 10**18 + number * 10**9, b"bank.account.a", block(Ej_Type=kind, Ej_Version=str(number)), body)
        for number, (kind, body) in enumerate(zip(kinds, bodies, strict=True), 1)
    ]
    restored(url, past)
    app = App(NAME, aggregates=[Account], upcasters=[withdrawn_has_a_reason], retired_events=["account.noted"])
    async with app.connect(servers=url) as jet:
        accounts = jet.repository(Account)
        assert (await accounts.load("a", at=recorded_at(past[2]))).balance == Decimal(1)
        assert (await accounts.load("a", at=recorded_at(past[1]))).balance == Decimal(0)
        assert await jet.store.position_at(recorded_at(past[1])) == 2
