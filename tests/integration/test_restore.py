"""A past published into an empty stream: the same log, or an explanation, whatever happens on the way."""

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
    """A log of some 1,500 events of every kind; the server that held it is gone."""
    with NatsServer(sync_interval="1m") as server:
        asyncio.run(fill(APP, server.url, 1_500))
        return records_of(server.url)


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer(sync_interval="1m") as server:
        yield server


@pytest.fixture
def url(server: NatsServer) -> str:
    """A server without the stream."""
    delete(server.url)
    return server.url


def make(url: str, **config: object) -> None:
    """The stream, as `init` would make it but for what is given."""
    with NatsConnection.open(endpoint(url)) as link:
        link.api(f"STREAM.CREATE.{NAME}", {**stream_config(NAME, 1), **config})


def same(url: str, records: Sequence[RawRecord]) -> bool:
    return [lasting(one) for one in records_of(url)] == [lasting(one) for one in records]


class Interrupted(Exception):
    pass


def interrupt_after(events: int) -> object:
    def told(phase: str, done: int, _total: int) -> None:
        if phase == "publish" and done >= events:
            raise Interrupted

    return told


def restored(url: str, records: Sequence[RawRecord], progress: object = None) -> Restored:
    told = {} if progress is None else {"progress": progress}
    return Restore(endpoint(url), archive_of(records, LOG), timeout_s=20.0, **told).run()  # type: ignore[arg-type]


async def test_the_restored_log_is_the_same_and_init_finds_nothing_amiss(url: str, records: list[RawRecord]) -> None:
    told: list[tuple[str, int, int]] = []
    report = restored(url, records, lambda *step: told.append(step))
    assert (report.first, report.last, report.published) == (1, len(records), len(records))
    assert same(url, records)
    assert {phase: (done, total) for phase, done, total in told} == dict.fromkeys(
        ("publish", "compare"), (len(records), len(records))
    )
    async with APP.connect(servers=url) as jet:
        topology = await jet.init()
    assert (topology.identity, topology.drifts) == (LOG, ())


async def test_an_interrupted_restore_goes_on_and_init_tells_that_it_is_not_whole(
    url: str, records: list[RawRecord]
) -> None:
    with pytest.raises(Interrupted):
        restored(url, records, interrupt_after(2 * BATCH_MAX))
    assert ask_once(endpoint(url), stream_info(NAME)).last == 2 * BATCH_MAX
    async with APP.connect(servers=url) as jet:
        assert [drift.setting for drift in (await jet.init()).drifts] == ["duplicate_window"]
    report = restored(url, records)
    assert (report.published, report.events) == (len(records) - 2 * BATCH_MAX, len(records))
    assert same(url, records)
    assert restored(url, records).published == 0
    async with APP.connect(servers=url) as jet:
        assert (await jet.init()).drifts == ()


async def test_an_empty_stream_that_init_made_becomes_the_restored_log(url: str, records: list[RawRecord]) -> None:
    async with APP.connect(servers=url) as jet:
        assert (await jet.init()).identity != LOG
        restored(url, records)
        assert (await jet.init()).identity == LOG
    assert same(url, records)


async def test_an_archive_that_ends_within_a_save_says_so_when_it_is_restored(
    url: str, records: list[RawRecord], tmp_path: Path
) -> None:
    """Money that left one account and reached no other is not to be taken for whole."""
    settings = Settings(servers=(url,))
    within = next(index for index, record in enumerate(records, 1) if unfinished_save(record[3]))
    for end, torn in ((within - 1, 0), (within, 1), (within + 1, 0), (len(records), 0)):
        delete(url)
        archived = seal(tmp_path / str(end), records[:end], LOG)
        report = await restore(APP, archived, settings, engine="local")
        assert (report.last, report.torn) == (end, torn)
        assert ("NOT whole: the archive ends within a save. 1 event" in " ".join(restore_lines(report))) == bool(torn)


async def test_no_archive_is_made_that_ends_within_a_save(url: str, tmp_path: Path) -> None:
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
    """A checkpoint of a log at one of these records."""
    event_id = header(records[position - 1][3], MSG_ID) or ""
    return SimpleNamespace(name="balances", log=log, position=position, event_id=event_id)


def test_a_restored_log_of_a_promoted_mirror_continues_the_logs_before(url: str, records: list[RawRecord]) -> None:
    """Their checkpoints go on up to where the mirror ended, or to where the archive ends."""
    kept = records[:100]
    archive = archive_of(kept, LOG, continues="first@40 second@5000")
    Restore(endpoint(url), archive, timeout_s=20.0).run()
    with NatsConnection.open(endpoint(url)) as link:
        state = link.ask(stream_info(NAME))
        assert earlier_logs(state) == {"first": 40, "second": 100}
        for log, position in (("first", 40), ("second", 100), (LOG, 100)):
            link.run(checking_same_log(NAME, stand(kept, log, position)))
        with pytest.raises(LogRolledBack, match="has the events up to position 40 only"):
            link.run(checking_same_log(NAME, stand(kept, "first", 41)))
        with pytest.raises(LogRolledBack, match="it was made from the log third"):
            link.run(checking_same_log(NAME, stand(kept, "third", 1)))


def test_an_empty_promoted_log_that_is_restored_into_continues_what_the_archive_says(
    url: str, records: list[RawRecord]
) -> None:
    make(url, metadata={IDENTITY: "another", CONTINUES: "one@0"})
    restored(url, records[:100])
    assert earlier_logs(ask_once(endpoint(url), stream_info(NAME))) == {}


@pytest.mark.parametrize(
    ("log", "start", "end", "said"),
    [
        ("another", 0, 5, "of the log another, and the archive is of"),
        (LOG, 5, 20, "its event at position 1 is not that of the archive"),
        (LOG, 0, None, "it holds 1,572 events at positions 1 to 1,572, and the archive 1 to 1,000"),
    ],
    ids=["another log", "another past", "more than that"],
)
def test_a_stream_that_holds_anything_else_is_left_alone(
    url: str, records: list[RawRecord], log: str, start: int, end: int | None, said: str
) -> None:
    make(url, metadata={IDENTITY: log})
    app = [(one[2].decode().removeprefix("bank."), _bare(one[3]), one[4]) for one in records[start:end]]
    last = append_raw(url, app)
    with pytest.raises(Refused, match=said):
        restored(url, records[:1_000])
    after = ask_once(endpoint(url), stream_info(NAME))
    assert (after.last, after.metadata[IDENTITY]) == (last, log)


def _bare(headers: bytes) -> bytes:
    return re.sub(rb"\r\nNats-(Expected|Batch)[^\r]*", b"", headers)


def test_a_stream_of_other_settings_is_left_alone(url: str, records: list[RawRecord]) -> None:
    make(url, allow_atomic=False)
    with pytest.raises(Refused, match="bank: allow_atomic is False, declared is True"):
        restored(url, records)


def test_a_stream_whose_past_was_purged_is_left_alone(url: str, records: list[RawRecord]) -> None:
    make(url, first_seq=100, metadata={IDENTITY: LOG})
    with pytest.raises(Refused, match="its next event gets position 100"):
        restored(url, records)


@pytest.mark.parametrize("writes_at", [BATCH_MAX, 1_572])
def test_another_writer_ends_it_with_an_explanation(url: str, records: list[RawRecord], writes_at: int) -> None:
    def told(phase: str, done: int, _total: int) -> None:
        if phase == "publish" and done == writes_at:
            append_raw(url, [("account.rival", block(), b"{}")])

    said = "somebody else wrote" if writes_at < len(records) else "holds 1573 events"
    with pytest.raises(Exception, match=said):
        restored(url, records, told)
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
async def test_an_answer_that_is_lost_is_found_out_by_reading(url: str, records: list[RawRecord], fate: Fate) -> None:
    commits: list[str] = []

    def choose(publish: Publish) -> Fate:
        if b"Nats-Batch-Commit" not in publish.headers:
            return PASS
        commits.append(publish.subject)
        return fate if len(commits) in (2, 4) else PASS

    async with NatsProxy(url, choose) as proxy:
        past = archive_of(records, LOG)
        # Twice as long is waited for what is stored.
        report = await asyncio.to_thread(Restore(endpoint(proxy.url), past, timeout_s=5.0).run)
    assert report.events == len(records)
    assert same(url, records)
    assert len(commits) >= 4


@pytest.mark.parametrize("first", [701, 2])
async def test_a_log_that_begins_later_keeps_its_positions(url: str, records: list[RawRecord], first: int) -> None:
    late = records[first - 1 :]
    report = restored(url, late)
    assert (report.first, report.last) == (first, len(records))
    assert same(url, late)
    async with APP.connect(servers=url) as jet:
        assert (await jet.init()).drifts == ()


def test_a_message_of_the_largest_size_still_fits(url: str) -> None:
    make(url)
    headers = block(version=1, Ej_Command="c")
    append_raw(url, [("account.a", headers, b"x" * (900_000 - len(headers))), ("account.a", block(), b"")])
    largest = records_of(url)
    delete(url)
    restored(url, largest)
    assert same(url, largest)
    again = records_of(url)
    delete(url)
    restored(url, again)
    assert [len(one[3]) for one in records_of(url)] == [len(one[3]) for one in again]


def test_a_server_for_smaller_messages_is_named(records: list[RawRecord]) -> None:
    large = [*records[:3], (4, records[3][1], b"bank.account.x", block(version=1), b"x" * 200_000)]
    with NatsServer(sync_interval="1m", config="max_payload: 100KB") as small:
        with pytest.raises(Refused, match="102,400 bytes; an event of positions 1 to 4 has 200,"):
            restored(small.url, large)
        assert ask_once(endpoint(small.url), stream_info(NAME)).last == 0


def test_an_id_that_the_log_holds_twice_is_stored_twice(url: str) -> None:
    twice = [
        (1 + number, 10**18, b"bank.account.a", block(version=1, Nats_Msg_Id="same"), b"%d" % number)
        for number in range(3)
    ]
    restored(url, twice)
    assert [one[4] for one in records_of(url)] == [b"0", b"1", b"2"]


def test_what_others_wrote_is_restored_as_it_is(url: str) -> None:
    strange = [
        (1, 10**18, b"bank.account.a", b"", b""),
        (2, 10**18, b"bank.account.a", b"NATS/1.0\r\nx:\r\n\r\n", b"\xff\r\n\x00"),
        (3, 10**18, b"bank.account.*", b"NATS/1.0\r\nEj-Type: no\r\n\r\n", b"HPUB"),
        (4, 10**18, "bank.konto.ä".encode(), block(version=1, Nats_Expected_Last_Subject_Sequence="x"), b"{}"),
    ]
    restored(url, strange)
    assert same(url, strange)
    assert [one[2] for one in records_of(url)] == [one[2] for one in strange]


def test_a_past_whose_events_do_not_follow_their_own_is_told_apart(url: str) -> None:
    broken = [
        (1, 10**18, b"bank.account.a", block(version=1, Nats_Expected_Last_Subject_Sequence="0"), b"{}"),
        (2, 10**18, b"bank.account.b", block(version=1, Nats_Expected_Last_Subject_Sequence="1"), b"{}"),
    ]
    with pytest.raises(ArchiveBroken, match="positions 1 to 2 does not follow the one it was written after"):
        restored(url, broken)
    state = ask_once(endpoint(url), stream_info(NAME))
    assert (state.last, state.config["duplicate_window"]) == (0, WINDOW_NS)


async def test_time_travel_passes_over_events_that_were_retired(url: str) -> None:
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
