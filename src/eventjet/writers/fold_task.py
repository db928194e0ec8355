"""`BatchFoldTask`: what a worker's fold process does: decode its share, fold it batch by batch, render what changed.

Rows that it does not remember it reads over a connection of its own, while the worker commits on another. That sees
what was committed, and what is not committed yet it has in memory: see `BatchFold`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypeAlias

from sqlalchemy import Connection

from eventjet.codec.headers import RawRecord
from eventjet.codec.reasons import reason_of
from eventjet.domain.parked import AggregateKey, Parked
from eventjet.errors import UsageError
from eventjet.log.predecessors import PredecessorReader
from eventjet.nats.endpoint import Endpoint
from eventjet.parallel.process import ShareWork
from eventjet.projections.app_ref import AppRef
from eventjet.projections.fold import BlockedAggregates, Reader, reader
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.sql.database import WORKER, Database
from eventjet.sql.locations import located
from eventjet.sql.statements import Changes, QuarantineChanges, Rendered, Statements
from eventjet.writers.batch import Batch
from eventjet.writers.fold_writer import BatchFold, Prepared, changes_of

Mark: TypeAlias = tuple[int, int]
"""(last position of the batch, position up to which all is committed)."""
Answer: TypeAlias = tuple[int, Rendered, list[tuple[Any, ...]]]
"""(events of the subscription, rows and keys, what was parked)."""


@dataclass(frozen=True, slots=True)
class BatchFoldTask:
    """See `eventjet.parallel.process.ShareTask`."""

    app: AppRef
    endpoint: Endpoint
    database: Database
    projection: str
    revision: int
    location: str
    """Where the table is."""
    position: int
    """Before the first batch."""
    voids: Mapping[int, str] = field(repr=False)
    blocked: frozenset[AggregateKey] = field(repr=False)
    """Aggregates whose events wait at the position of the first batch."""

    @contextmanager
    def begin(self, share: int) -> Generator[ShareWork]:
        app = self.app.load()
        resolved = app.projections.get(self.projection)
        if not isinstance(resolved, ResolvedProjection) or resolved.revision != self.revision:
            raise UsageError(
                f"The app at {self.app.module}:{self.app.attribute} has no projection {self.projection!r} of revision "
                f"{self.revision}, and the worker has one. Start the worker again."
            )
        catalog, dialect = app.catalog.of_log(self.voids), self.database.dialect
        engine = self.database.sync_engine(f"eventjet fold {self.projection} {share + 1}", WORKER)
        engine = engine.execution_options(**dialect.look_options)
        with PredecessorReader(self.endpoint, app.name) as earlier, engine.connect() as connection:
            codec = RowCodec(resolved.table, resolved.row_type, dialect)
            yield _BatchFolding(
                reader(catalog, resolved, (), earlier),
                BatchFold(resolved, codec, BlockedAggregates(set(self.blocked))),
                dialect.statements(located(resolved.table, self.location, dialect), codec),
                connection,
                self.position,
                private=resolved.is_private,
            )


class _BatchFolding:
    """See `eventjet.parallel.process.ShareWork`."""

    def __init__(
        self,
        decode: Reader,
        fold: BatchFold,
        statements: Statements,
        connection: Connection,
        position: int,
        *,
        private: bool,
    ) -> None:
        self._decode = decode
        self._fold = fold
        self._statements = statements
        self._connection = connection
        self._is_private = private
        self._position = position
        self._pieces: list[Prepared] = []
        self._count = 0

    def take(self, records: list[RawRecord]) -> None:
        """Fold them at once: what was decoded is still in the core's cache then, and is let go."""
        decode = self._decode
        decode.expect(records)
        events = [event for record in records if (event := decode(record)) is not None]
        piece = Batch(self._position, records[-1][0], "", events)
        prepared = self._fold.fold(piece, self._read)
        assert prepared is not None
        self._pieces.append(replace(prepared, batch=replace(piece, events=())))
        self._position = piece.last
        self._count += len(events)

    def cut(self, mark: Mark) -> Answer:
        last, committed = mark
        self._fold.committed(committed)
        count, pieces = self._count, self._pieces
        self._position, self._count, self._pieces = last, 0, []
        changed = {key: row for piece in pieces for key, row in piece.rows.items()}
        made = [row for piece in pieces for row in piece.changes.made]
        changes = replace(changes_of(changed), made=made)
        parked = [one for piece in pieces if (own := piece.changes.quarantine) for one in own.parked]
        return count, self._statements.render(changes), [astuple(one) for one in parked]

    def reason_of(self, error: Exception) -> str:
        return reason_of(error, private=self._is_private)

    def _read(self, keys: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], Any]:
        try:
            return self._statements.read(self._connection, keys)
        finally:
            # On SQLite what is read later would still be what was there now.
            self._connection.rollback()


def changes_in(answers: Sequence[Answer]) -> Changes:
    """What a batch does to the rows, of the answers of all processes."""
    parked = sorted((Parked(*one) for _, _, own in answers for one in own), key=lambda one: one.position)
    quarantine = QuarantineChanges(parked) if parked else None
    return Changes(quarantine=quarantine, rendered=[rendered for _, rendered, _ in answers])
