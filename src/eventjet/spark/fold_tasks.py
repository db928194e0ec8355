"""What Spark's Python workers run: values that can be pickled, holding names and references only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice
from typing import Any

from pyspark import TaskContext
from sqlalchemy import make_url

from eventjet import failpoints
from eventjet.codec.envelope import Decoder, RawRecord
from eventjet.errors import CodecError, ProjectionError, RowsRefused
from eventjet.projections.app_ref import AppRef
from eventjet.projections.row_codec import ColumnValues
from eventjet.rebuild.folding import Folding, Foldings, Tokens, fold_of, uncollected
from eventjet.rebuild.run_space import Target
from eventjet.rebuild.spaces import space_kind
from eventjet.rebuild.sqlite import CHUNK
from eventjet.spark.columns import SCHEMA, STORED, arrow_batch, arrow_schema, pyarrow, records_of
from eventjet.spark.options import is_sealed, unseal
from eventjet.sql.database import Database

KEYED = f"token string, {SCHEMA}"
"""A record with the token of one key it touches; without a subject it tells what a task read, or why it could not."""

_RESULT = {
    "projection": "string",
    "part": "bigint",
    "events": "bigint",
    "rows": "bigint",
    "payload": "binary",
    "parked": "binary",
    "fault": "string",
}
RESULT = ", ".join(f"{name} {ddl}" for name, ddl in _RESULT.items())
"""What became of a part; rows that the driver has to insert come before it as `payload`, and so do `parked` events."""

PARTS_STRIDE = 100_000
"""A task that loads entries in several transactions numbers them this far apart."""
PARKED_CHUNK = 500
"""Parked events in one message to the driver."""

_TOKENS_HELD_MAX = 2_000


@dataclass(frozen=True, slots=True)
class KeyTask:
    """Gives each record the tokens of the keys its event touches, once for each."""

    app: AppRef
    projection: str
    dialect: ColumnValues

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        app = self.app.load()
        resolved = fold_of(app, self.projection)
        decode = Decoder(app.catalog, resolved.events)
        tokens_of = Tokens(resolved, self.dialect)
        seen = 0
        for batch in batches:
            seen += batch.num_rows
            keyed: list[tuple[str, RawRecord]] = []
            try:
                for record in records_of(batch):
                    event = decode(record)
                    if event is not None:
                        keyed += [(token, record) for token in tokens_of(event)]
            except (CodecError, ProjectionError) as error:
                yield _keyed_batch([("", (0, 0, b"", b"", str(error).encode()))])
                return
            remaining = iter(keyed)
            while chunk := list(islice(remaining, _TOKENS_HELD_MAX)):
                yield _keyed_batch(chunk)
        yield _keyed_batch([("", (seen, 0, b"", b"", b""))])


@dataclass(frozen=True, slots=True)
class FoldTask:
    """Folds a whole partition for every target and loads it, or hands the rows back to the driver."""

    app: AppRef
    targets: tuple[Target, ...]
    keyed: bool

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        failpoints.reach("task.begun")
        context = TaskContext.get()
        assert context is not None
        part = context.partitionId()  # the same when the task is tried again
        here = replace(self, targets=tuple(map(_at_hand, self.targets)))
        try:
            with uncollected():
                yield from here._fold(batches, part)
        except (CodecError, ProjectionError, RowsRefused, _ToldError) as error:
            yield _result(self.targets[0].projection, part, fault=str(error))

    def _fold(self, batches: Iterator[Any], part: int) -> Iterator[Any]:
        names = [target.projection for target in self.targets]
        known = [target.known for target in self.targets]
        foldings = Foldings(self.app.load(), names, self.targets[0].database.dialect, known)
        outlets = [_Outlet(target, folding, part) for target, folding in zip(self.targets, foldings.each, strict=True)]
        events = 0
        for batch in batches:
            if self.keyed:
                tallied, records = _keyed_records(batch)
                events += tallied
                foldings.take_keyed(records)
            else:
                events += batch.num_rows
                foldings.take(records_of(batch))
            for outlet in outlets:
                yield from outlet.flush()
        failpoints.reach("task.folded")
        for outlet in outlets:
            yield from outlet.finish(events)


class _Outlet:
    """Where the rows of one projection go from one task."""

    def __init__(self, target: Target, folding: Folding, part: int) -> None:
        self._target = target
        self._folding = folding
        self._part = part
        self._chunks = 0

    def flush(self) -> Iterator[Any]:
        """Let entries go when there are many: no later event changes them."""
        if self._folding.is_due():
            yield from self._load(self._folding.drain(), 0)

    def finish(self, events: int) -> Iterator[Any]:
        parked = iter(self._folding.parked)
        while chunk := list(islice(parked, PARKED_CHUNK)):
            yield _result(self._target.projection, self._part, parked=pack_rows([astuple(event) for event in chunk]))
        yield from self._load(self._folding.rows(), events)

    def _load(self, rows: Iterable[Sequence[Any]], events: int) -> Iterator[Any]:
        number = self._chunks * PARTS_STRIDE + self._part
        self._chunks += 1
        name = self._target.projection
        if self._target.database.dialect.is_concurrent:
            loaded = space_kind(self._target.database).load(self._target, number, rows)
            yield _result(name, number, events=events, rows=loaded)
            return
        total = 0
        remaining = iter(rows)
        while chunk := list(islice(remaining, CHUNK)):
            total += len(chunk)
            yield _result(name, number, payload=pack_rows(chunk))
        yield _result(name, number, events=events, rows=total)


def _at_hand(target: Target) -> Target:
    """The target with its password, where that is sealed."""
    url = make_url(target.database.url)
    named = url.query.get("passfile")
    if not isinstance(named, str) or not is_sealed(named):
        return target
    url = url.set(password=unseal(named)).difference_update_query(["passfile"])
    return replace(target, database=Database(url.render_as_string(hide_password=False)))


class _ToldError(Exception):
    """A fault that an earlier task met and passed on."""


def pack_rows(rows: Sequence[Sequence[Any]]) -> bytes:
    """Rows as SQLite's driver takes them (int, float, str, bytes, None) as one Arrow stream."""
    arrow = pyarrow()
    columns = [arrow.array(column) for column in zip(*rows, strict=True)]
    batch = arrow.RecordBatch.from_arrays(columns, names=[str(number) for number in range(len(columns))])
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def unpack_rows(payload: bytes) -> Iterator[tuple[Any, ...]]:
    """The rows of `pack_rows`."""
    with pyarrow().ipc.open_stream(payload) as reader:
        for batch in reader:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _keyed_records(batch: Any) -> tuple[int, list[tuple[str, RawRecord]]]:
    """(how many records the tallies among them stand for, the others with their tokens)."""
    tallied = 0
    keyed: list[tuple[str, RawRecord]] = []
    for token, record in zip(batch.column(0).to_pylist(), records_of(batch), strict=True):
        position, _, subject, _, body = record
        if subject:
            keyed.append((token, record))
        elif body:
            raise _ToldError(body.decode())
        else:
            tallied += position
    return tallied, keyed


def _keyed_batch(keyed: Sequence[tuple[str, RawRecord]]) -> Any:
    arrow = pyarrow()
    tokens = arrow.array([token for token, _ in keyed], arrow.string())
    records = arrow_batch([record for _, record in keyed])
    return arrow.RecordBatch.from_arrays([tokens, *records.columns], names=["token", *STORED])


def _result(projection: str, part: int, **told: int | str | bytes) -> Any:
    """One row of `RESULT`; what is not told is null."""
    row = {"projection": projection, "part": part, **told}
    return pyarrow().RecordBatch.from_pylist([row], schema=arrow_schema(_RESULT))
