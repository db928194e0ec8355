"""A session of a cursor keeps quarantined events when a write fails, retries in order, and may write first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eventjet.codec.headers import RawRecord
from eventjet.domain.quarantined import BLOCKED, QUARANTINED, RETRIED, RETRY, AggregateKey, Quarantined
from eventjet.domain.reactor import Retry
from eventjet.errors import StoreUnavailable, UnexpectedExit
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.fold import Offered
from eventjet.settings import Settings
from eventjet.subscriptions.context import WorkerOptions
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_session import CursorSession, ReactionContext, ReactionSubscription
from eventjet.subscriptions.cursor_store import QuarantinedEntry, StoredCursor
from eventjet.subscriptions.declarations import Declaration
from eventjet.subscriptions.handlers import EventHandler, Try
from eventjet.subscriptions.keyed_executor import KeyedExecutor
from eventjet.subscriptions.partitions import PartitionAssignment
from eventjet.writers.batch import Batch

NOW = 1_000.0
TRIES = 3


class RecordingCursors:
    """Cursors that record their writes, after a number of failures."""

    def __init__(self, failures: int = 0) -> None:
        self.clock = lambda: NOW
        self.failures = failures
        self.writes: list[tuple[int, list[tuple[int, str]]]] = []
        self.tries: list[tuple[tuple[int, int], ...]] = []
        """The counted attempts of each write."""

    async def quarantined(self, name: str) -> list[QuarantinedEntry]:
        return []

    async def write(
        self,
        stored: StoredCursor,
        cursor: Cursor,
        added: Sequence[QuarantinedEntry] = (),
        removed: Sequence[QuarantinedEntry] = (),
    ) -> None:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("The cursor", "no answer")
        stored.value = cursor, stored.sequence, NOW
        self.tries.append(cursor.tries)
        self.writes.append((cursor.position, [(entry.position, entry.event.resolution) for entry in added]))


class RecordingHandler(EventHandler):
    """A handler that records each event with the number of writes before it, and fails a number of times."""

    def __init__(
        self, cursors: RecordingCursors, *, quarantines: bool = True, failures: int = 0, feed: Any = None
    ) -> None:
        declaration = Declaration("echo", "reactor", 1, "new", ())
        super().__init__(declaration, feed or Unread(), Retry(tries=TRIES, first_s=0.0), quarantines=quarantines)
        self.cursors = cursors
        self.failures = failures
        self.handled: list[tuple[int, int]] = []

    def work(self, event: Any) -> tuple[AggregateKey, Try]:
        async def handle(attempt: int) -> None:
            self.handled.append((event, len(self.cursors.writes)))
            if self.failures:
                self.failures -= 1
                raise StoreUnavailable("it", "passing")

        return ("thing", "one"), handle


class Records:
    """A reader of some records, by default undecodable, and then of nothing."""

    def __init__(self, positions: Sequence[int], *, decoded: bool = False) -> None:
        self._positions = list(positions)
        self._decoded = decoded

    def start(self) -> None:
        pass

    async def take(self, timeout_s: float) -> Batch | None:
        if not self._positions:
            await asyncio.sleep(3600)
        offers: list[Any] = [
            Offered(record_at(position), None, ValueError("no"))
            if not self._decoded
            else Offered(record_at(position), cast("Any", position))
            for position in self._positions
        ]
        self._positions.clear()
        return Batch(0, offers[-1].position, f"e{offers[-1].position}", offers)

    async def close(self) -> None:
        pass


class Reread:
    """A feed whose records are decoded for another attempt."""

    stream, filters, reader = "app", (), None

    async def at(self, position: int) -> RawRecord:
        return record_at(position)

    def decode(self, record: RawRecord) -> Offered:
        return Offered(record, cast("Any", record[0]))

    def noted(self, cursor: Cursor) -> Cursor:
        return cursor


class Unread:
    """A feed whose records have no event to handle."""

    stream, endpoint, filters, reader = "app", Endpoint.of(Settings()), (), None

    async def check(self, cursor: Cursor) -> str:
        return cursor.log

    async def at(self, position: int) -> RawRecord:
        return record_at(position)

    def decode(self, record: RawRecord) -> None:
        return None

    def noted(self, cursor: Cursor) -> Cursor:
        return cursor


def record_at(position: int) -> RawRecord:
    return position, 0, b"app.thing.one", b"", b""


def quarantined_at(position: int, resolution: str) -> QuarantinedEntry:
    return QuarantinedEntry(Quarantined(position, "thing", "one", "", "", resolution), log="log")


def session_of(
    cursors: RecordingCursors,
    lanes: KeyedExecutor,
    records: Records,
    quarantined: Sequence[QuarantinedEntry] = (),
    handler: RecordingHandler | None = None,
    written_at: float = NOW,
    tries: tuple[tuple[int, int], ...] = (),
) -> CursorSession:
    any_cursors: Any = cursors
    repositories: Any = SimpleNamespace(catalog=SimpleNamespace(is_private=False))

    async def opened(*_: Any) -> Records:
        return records

    context = ReactionContext(repositories, any_cursors, "me", WorkerOptions(), open_reader=opened)
    event_handler = handler or RecordingHandler(cursors)
    subscription = ReactionSubscription(event_handler, context, PartitionAssignment(1), lambda: None)
    cursor = Cursor("echo", "reactor", "log", tries=tries)
    session = CursorSession(subscription, StoredCursor(cursor, 1, written_at), asyncio.Event())
    session.start(lanes, records, quarantined)
    return session


async def test_quarantined_events_are_written_again_after_a_write_without_an_answer() -> None:
    cursors, lanes = RecordingCursors(failures=1), KeyedExecutor(4, 100)
    session = session_of(cursors, lanes, Records([1, 2]))
    taking = asyncio.ensure_future(session.take())
    while lanes.position < 2:
        await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable):
        await session.write()
    await session.write()
    assert cursors.writes == [(2, [(1, QUARANTINED), (2, BLOCKED)])]
    await session.write()
    assert cursors.writes[1:] == [(2, [])]
    taking.cancel()
    await lanes.close()


async def test_a_quarantined_event_does_not_block_earlier_events_of_its_aggregate() -> None:
    cursors, lanes = RecordingCursors(), KeyedExecutor(4, 100)
    session = session_of(cursors, lanes, Records([3, 4, 5, 6]), [quarantined_at(5, QUARANTINED)])
    taking = asyncio.ensure_future(session.take())
    while lanes.position < 6:
        await asyncio.sleep(0)
    await session.write()
    assert cursors.writes == [(6, [(3, QUARANTINED), (4, BLOCKED), (6, BLOCKED)])]
    taking.cancel()
    await lanes.close()


async def test_a_retry_stops_before_the_next_quarantined_event() -> None:
    cursors, lanes = RecordingCursors(), KeyedExecutor(4, 100)
    session = session_of(
        cursors,
        lanes,
        Records([3, 4, 5, 6]),
        [quarantined_at(3, RETRY), quarantined_at(4, BLOCKED), quarantined_at(5, QUARANTINED)],
    )
    taking = asyncio.ensure_future(session.take())
    while lanes.position < 6:
        await asyncio.sleep(0)
    await session.write()
    assert cursors.writes == [(6, [(3, RETRIED), (6, BLOCKED)])]
    taking.cancel()
    await lanes.close()


@pytest.mark.parametrize(("seconds", "before"), [(3.0, 0), (4.0, 1)])
async def test_a_session_whose_cursor_is_older_than_a_lease_writes_first(seconds: float, before: int) -> None:
    cursors, lanes = RecordingCursors(), KeyedExecutor(4, 100)
    handler = RecordingHandler(cursors)
    session = session_of(cursors, lanes, Records([1], decoded=True), handler=handler, written_at=NOW - seconds)
    taking = asyncio.ensure_future(session.take())
    while lanes.position < 1:
        await asyncio.sleep(0)
    assert handler.handled == [(1, before)]
    taking.cancel()
    await lanes.close()


@pytest.mark.parametrize("task", ["take", "keep"])
async def test_a_task_of_a_session_that_returns_ends_the_session_with_an_error(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_: CursorSession) -> None: ...

    monkeypatch.setattr(CursorSession, task, nothing)
    session = session_of(RecordingCursors(), KeyedExecutor(4, 100), Records([]))
    with pytest.raises(UnexpectedExit):
        await session.run(asyncio.Event())


@pytest.mark.parametrize(
    ("quarantines", "handled", "quarantined"), [(True, [], [(1, QUARANTINED)]), (False, [(1, 0)], [])]
)
async def test_unfinished_attempts_quarantine_an_event_without_another_call(
    quarantines: bool, handled: list[tuple[int, int]], quarantined: list[tuple[int, str]]
) -> None:
    """Only a quarantine takes the event: elsewhere the code may have changed meanwhile, and the handler runs."""
    cursors, lanes = RecordingCursors(), KeyedExecutor(4, 100)
    handler = RecordingHandler(cursors, quarantines=quarantines)
    session = session_of(cursors, lanes, Records([1], decoded=True), handler=handler, tries=((1, TRIES),))
    taking = asyncio.ensure_future(session.take())
    while lanes.position < 1:
        await asyncio.sleep(0)
    await session.write()
    assert (handler.handled, cursors.writes, cursors.tries) == (handled, [(1, quarantined)], [()])
    taking.cancel()
    await lanes.close()


async def test_a_finished_attempt_does_not_count_for_other_workers() -> None:
    cursors, lanes = RecordingCursors(), KeyedExecutor(4, 100)
    handler = RecordingHandler(cursors, failures=2 * TRIES)
    session = session_of(cursors, lanes, Records([1], decoded=True), handler=handler, tries=((1, TRIES - 1), (7, 1)))
    taking = asyncio.ensure_future(session.take())
    while len(handler.handled) < 2:
        await asyncio.sleep(0)
    await session.write()
    assert cursors.tries == [((7, 1),)]
    while lanes.position < 1:
        await asyncio.sleep(0)
    assert len(handler.handled) == 2 * TRIES + 1
    taking.cancel()
    await lanes.close()


@pytest.mark.parametrize("unseen", [TRIES - 1, TRIES])
async def test_attempts_of_a_quarantined_event_count_until_its_retry_ends(unseen: int) -> None:
    cursors, lanes = RecordingCursors(), KeyedExecutor(4, 100)
    handler = RecordingHandler(cursors, feed=Reread())
    session = session_of(cursors, lanes, Records([]), [quarantined_at(3, RETRY)], handler, tries=((3, unseen),))
    lanes.add(6, "e6", [])
    await session.write()
    assert cursors.tries == [((3, unseen),)]
    taking = asyncio.ensure_future(session.take())
    while not session._to_write:  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(0)
    await session.write()
    assert cursors.tries[-1] == ()
    assert cursors.writes[-1] == (6, [(3, RETRIED if unseen < TRIES else QUARANTINED)])
    taking.cancel()
    await lanes.close()
