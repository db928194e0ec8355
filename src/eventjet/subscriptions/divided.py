"""A term's way from the log into the database where fold processes do the folding: read, divide, gather, commit.

The thread of `DividedReader` reads frames and gives each fold process its own records, undecoded. `DividedPipeline`
gathers what a batch came to and commits it in one transaction with the one checkpoint, so that leases, fencing and
positions are what they are without fold processes. What they cannot take ends this way: the worker goes on alone from
the position that is committed, and meets it there with its event's name.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from eventjet import failpoints
from eventjet.codec.headers import MSG_ID, header
from eventjet.codec.reasons import reason_of
from eventjet.errors import CheckpointFenced, FoldProcessLost
from eventjet.jetstream.reader import DurablePull
from eventjet.observability import tracing
from eventjet.parallel.process import FoldFailed
from eventjet.parallel.processes import FoldProcesses
from eventjet.projections.resolve import ResolvedProjection
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.dialect import is_about_data
from eventjet.subscriptions.context import Session
from eventjet.subscriptions.quarantine_retry import log_parked
from eventjet.subscriptions.reader import CHUNK_MAX, Source, close_reading, left_after
from eventjet.subscriptions.retry import Pace
from eventjet.writers.batch import Batch
from eventjet.writers.fold_task import BatchFoldTask, changes_in
from eventjet.writers.fold_writer import FoldWriter, Prepared

_AHEAD = 2
"""Batches that are being folded while one before them is committed, at most."""
_WAIT_S = 1.0


class NotDivided(Exception):
    """The worker has to go on alone: an event, a row or a fold process is not what can be dealt with here."""


class DividedReader:
    """Made by `DividedReader.open`; `take` raises whatever ended the reading, after the batches before it."""

    def __init__(
        self, pull: DurablePull, processes: FoldProcesses, task: BatchFoldTask, position: int, pace: Pace, name: str
    ) -> None:
        """Made within the loop that takes. `position` is the committed one."""
        self._pull = pull
        self._task = task
        self.processes = processes
        self._pace = pace
        self._committed = self._cut = position
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._ahead = 0
        self._failure: BaseException | None = None
        self._closed = self._ending = False
        self._thread = threading.Thread(target=self._read, name=f"eventjet {name}", daemon=True)

    @classmethod
    async def open(
        cls, source: Source, position: int, processes: FoldProcesses, task: BatchFoldTask, pace: Pace
    ) -> DividedReader:
        """Take the durable over; `start` begins to read. The fold processes are the caller's to end, before `close`."""
        endpoint = source.endpoint.with_name(f"eventjet worker {source.durable}")
        pull = await asyncio.to_thread(
            DurablePull, endpoint, source.stream, source.durable, position=position, batch_max=CHUNK_MAX
        )
        return cls(pull, processes, task, position, pace, source.durable)

    def start(self) -> None:
        self._thread.start()

    async def take(self, timeout_s: float) -> Batch | None:
        """The next batch, without its events; None when none came in time or `wake` was called."""
        if not self._batches and self._failure is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        with self._changed:
            self._arrived.clear()
            if self._batches:
                return self._batches.popleft()
            if self._failure is not None:
                raise self._failure
        return None

    def committed(self, position: int) -> None:
        """The batch that ends there is committed: one more may be folded."""
        with self._changed:
            self._committed = position
            self._ahead -= 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Let a waiting `take` return. From the loop."""
        self._arrived.set()

    def left_after(self, position: int) -> int:
        return left_after(self._pull, position)

    def end(self) -> None:
        """Read no more than what comes next; whoever takes goes on while it `has_more`."""
        self._ending = True

    @property
    def has_more(self) -> bool:
        """Whether a batch is folded, or being folded, and not committed."""
        return self._ahead > 0

    async def close(self) -> None:
        """End the thread and the connection, after the fold processes, which it may wait for; the durable stays."""
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()
        await asyncio.to_thread(close_reading, self._pull, self._thread)

    def _read(self) -> None:
        """The thread: whatever ends it is handed over."""
        try:
            self.processes.begin(self._task)
            self._divide()
        except BaseException as error:  # noqa: BLE001 - raised again by the task that takes
            with self._changed:
                self._failure = error
            self._wake_from_thread()

    def _divide(self) -> None:
        count, position, event_id = 0, self._cut, ""
        for records in self._pull:
            # For each process what one alone would take: fewer rows an event, in it and in the database.
            most = self._pace.part_max * len(self.processes)
            while records:
                room = max(1, most - count)
                part, records = records[:room], records[room:]
                self.processes.send(part)
                count += len(part)
                position, event_id = part[-1][0], header(part[-1][3], MSG_ID) or ""
                if count >= most:
                    if not self._cut_at(position, event_id):
                        return
                    count = 0
            if count and (self._ending or not self._pull.pending):
                if not self._cut_at(position, event_id):
                    return
                count = 0
            if self._ending:
                return

    def _cut_at(self, position: int, event_id: str) -> bool:
        """Have the batch up to here folded, once few enough are ahead; False when nobody takes any more."""
        with self._changed:
            while not self._closed and self._ahead > _AHEAD:
                self._changed.wait(_WAIT_S)
            if self._closed:
                return False
            self._ahead += 1
            committed = self._committed
        batch = Batch(self._cut, position, event_id, ())
        self.processes.cut((position, committed))
        self._cut = position
        with self._changed:
            self._batches.append(batch)
        self._wake_from_thread()
        return True

    def _wake_from_thread(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            self._closed = True  # the loop is closed, so nobody waits any more


class DividedPipeline:
    """For one term; `position` is what the checkpoint says. See `BatchPipeline`."""

    def __init__(
        self,
        resolved: ResolvedProjection,
        held: Checkpoint,
        reader: DividedReader,
        committer: tuple[Session, FoldWriter],
        pace: Pace,
        on_commit: Callable[[int, int, float], None],
    ) -> None:
        """`committer` is the connection, and what commits over it."""
        self._resolved = resolved
        self._held = held
        self._reader = reader
        self._session, self._writer = committer
        self._pace = pace
        self._on_commit = on_commit
        self._batch: Batch | None = None
        self._since = self._ended = time.monotonic()
        self.position = held.position

    async def step(self, timeout_s: float) -> bool:
        """Commit the next batch; False when none came, or was folded, in time, or reading was woken.

        Raises `NotDivided`, `FoldProcessLost`, `CheckpointFenced`, what the database raises, and whatever ended the
        reading.
        """
        if self._batch is None:
            try:
                self._batch = await self._reader.take(timeout_s)
            except FoldFailed as error:
                raise NotDivided(str(error)) from error
            if self._batch is None:
                return False
            self._since = time.monotonic()
            failpoints.reach("worker.batch_taken")
        try:
            answers = await asyncio.to_thread(self._reader.processes.answers, timeout_s)
        except FoldFailed as error:
            raise NotDivided(str(error)) from error
        if answers is None:
            bound_s = self._reader.processes.bound_s
            if time.monotonic() - self._since > bound_s:
                self._pace.failed(self._pace.part_max)
                raise FoldProcessLost(f"did not answer within {bound_s:g} s")
            return False
        batch, self._batch = self._batch, None
        failpoints.reach("worker.batch_folded")
        events = sum(count for count, _, _ in answers)
        took_s = await self._committed(Prepared(batch, changes_in(answers), {}), events)
        failpoints.reach("worker.after_commit")
        self.position = batch.last
        self._reader.committed(batch.last)
        self._on_commit(batch.last, events, took_s)
        self._pace.committed(self._pace.part_max, time.monotonic() - self._ended)
        self._ended = time.monotonic()
        return True

    async def _committed(self, prepared: Prepared, events: int) -> float:
        # Of which traces its events are only fold processes know.
        with tracing.batch(self._resolved.name, self._resolved.revision, events, prepared.batch.last):
            return await self._commit(prepared)

    async def _commit(self, prepared: Prepared) -> float:
        began = time.perf_counter()
        try:
            await self._session.write(self._writer.commit, self._held, prepared)
        except CheckpointFenced:
            self._pace.failed(self._pace.part_max)
            raise
        except DBAPIError as error:
            if is_about_data(error):
                raise NotDivided(reason_of(error, private=self._resolved.is_private)) from error
            self._pace.failed(self._pace.part_max)
            raise
        log_parked(self._held.name, prepared.changes.quarantine)
        return time.perf_counter() - began
