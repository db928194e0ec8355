"""`verify` compares every row of a live read model with the log, while everything goes on.

The live rows are copied in one database snapshot, and made again from the log up to the same position. Rows of a fold
are compared here, in the form in which they are stored; tables of SQL projections are compared by the database.

Numbers from PostgreSQL's sequences do not follow from the log, because a batch that is rolled back uses numbers up. So
such columns, and foreign keys to them, are not compared, and rows that have no other key are paired in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import compress
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Enum, String, Table, Text, and_, cast, func, or_, select

from eventjet import failpoints
from eventjet.codec.headers import RawRecord
from eventjet.domain.identity import encode_id
from eventjet.domain.position import RETIRED
from eventjet.domain.recorded import Recorded
from eventjet.errors import RebuildError, RowUnreadable
from eventjet.findings import Finding, Level
from eventjet.jetstream.reader import read_range
from eventjet.projections.app_ref import Application, AppRef, projections_of
from eventjet.projections.columns import key_labels
from eventjet.projections.fold import BlockedAggregates, Fold, QuarantiningFold, RowKey, Rows, reader
from eventjet.projections.resolve import ResolvedProjection
from eventjet.projections.row_codec import RowCodec
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql
from eventjet.projections.state_fold import Cell, StateId
from eventjet.rebuild.job import EngineOptions, Job, await_position, in_job
from eventjet.rebuild.plan import EngineChoice, EngineName, Plan
from eventjet.rebuild.progress import Report, Watch
from eventjet.rebuild.runner import check_loaded, load, replaying
from eventjet.rebuild.shadow import Pair, Shadow, shadow_of
from eventjet.rebuild.workspace import remove_leftovers
from eventjet.settings import Settings
from eventjet.sql.checkpoint import Checkpoint
from eventjet.sql.database import dialect_of
from eventjet.sql.dialect import READ_ONLY

EXAMPLES_MAX = 20
"""The maximum number of differences that a report shows; all differences are counted."""
NEVER = "never equal"
UNKNOWN_SINCE = "the position is not known for an SQL projection, nor for a state"

_FETCH = 2_000
_REPORT_EVERY = 10_000
_PAIR_NUMBER = "eventjet_row"


@dataclass(frozen=True, slots=True)
class Difference:
    """One key whose live row differs from the row that the log gives."""

    key: tuple[Any, ...]
    """The primary key, of enums the labels; for an SQL projection the table's name comes first."""
    live: Any
    """The live row; None when there is none."""
    expected: Any
    """The row made from the log; None when there should be none."""
    columns: tuple[str, ...]
    """The row's fields, or the columns of an SQL projection, that differ; empty where a side has no row."""
    since: str
    """`missed since N`: the rows were equal before the event at position N; or `never equal`. Unknown for SQL."""
    position: int | None = None
    """The N of `missed since N`, None otherwise."""


@dataclass(slots=True)
class _Comparison:
    """The comparison of live rows with those that the log gives."""

    rows: int = 0
    """How many live rows were compared."""
    differences: int = 0
    """How many keys have different rows."""
    examples: list[Difference] = field(default_factory=list[Difference])
    """The first differences, by key."""

    def add(self, other: _Comparison) -> None:
        self.rows += other.rows
        self.differences += other.differences
        self.examples = [*self.examples, *other.examples][:EXAMPLES_MAX]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome of `verify`."""

    projection: str
    revision: int
    engine: EngineName
    position: int
    """Position of the live read model when its rows were copied."""
    events: int
    """How many events the rows were made from."""
    rows: int
    """How many live rows were compared."""
    differences: int
    """How many keys have different rows."""
    examples: tuple[Difference, ...]
    """The first differences, by key."""
    seconds: Mapping[str, float]
    """Wall time by phase."""

    @property
    def finding(self) -> Finding | None:
        """The meaning of the differences and their remedy; None when nothing differs."""
        if not self.differences:
            return None
        rows = f"{self.differences:,} of the rows of {self.projection} are not what the log says"
        fix = f"`eventjet rebuild {self.projection}` makes it again from the log."
        return Finding("projections", "row_differs", Level.FAULT, rows, "readers see wrong rows", fix)


async def verify(
    app: Application | AppRef,
    name: str,
    settings: Settings,
    *,
    engine: EngineChoice | EngineOptions = "auto",
    from_archive: str | None = None,
    progress: Report | None = None,
) -> VerifyReport:
    """Rebuild a read model into a shadow at the live position, and compare the two; the live rows are only read.

    When nothing differs, the live checkpoint records the current code as the code that makes these rows.

    `name` is the projection; the other arguments are those of `rebuild`. Raises the errors of `rebuild`, and
    `LogRolledBack` when the live read model was made from another past.
    """
    return await in_job(
        app,
        settings,
        engine,
        lambda job: _verify(job, name),
        check=lambda app: projections_of(app, [name]),
        from_archive=from_archive,
        progress=progress,
    )


def _verify(job: Job, name: str) -> VerifyReport:
    (resolved,) = projections_of(job.app, [name])
    with job.watch.phase("start"):
        job.database.check_sessions()
        remove_leftovers(job.database, existing=True)
    with _with_live_copy(job, resolved) as (shadow, plan, checkpoint):
        is_sql = isinstance(resolved, ResolvedSql)
        if is_sql:
            job.source.check(plan, job.watch)
            with replaying(shadow, job) as writer:
                writer.replay(plan)
        else:
            check_loaded(shadow, plan, load(job, plan, [shadow]))
        failpoints.reach("verify.loaded")
        with job.watch.phase("compare"):
            comparison = _compare_tables(job, shadow) if is_sql else _compare_rows(job, plan, shadow)
        failpoints.reach("verify.compared")
        if not comparison.differences:
            shadow.note_proof(checkpoint)
    return VerifyReport(
        projection=resolved.name,
        revision=resolved.revision,
        engine=plan.engine,
        position=plan.last,
        events=plan.events,
        rows=comparison.rows,
        differences=comparison.differences,
        examples=tuple(comparison.examples),
        seconds=job.watch.seconds,
    )


@contextmanager
def _with_live_copy(job: Job, resolved: AnyResolved) -> Generator[tuple[Shadow[Any], Plan, Checkpoint]]:
    """Yield a shadow with a copy of the live rows, the plan to make the rows again, and the checkpoint of the copy."""
    with shadow_of(job.database, resolved, job.log.identity, job.watch, to_swap=False) as shadow:
        with job.watch.phase("copy"):
            checkpoint = shadow.copy_live()
            if checkpoint is None or checkpoint.state == RETIRED:
                raise RebuildError(
                    f"{resolved.name!r} has no live read model yet, so there is nothing to verify. "
                    "Start a worker, or run `eventjet rebuild`."
                )
            job.check_same_log(checkpoint)
            await_position(job, checkpoint.position)
        failpoints.reach("verify.copied")
        yield shadow, job.plan([resolved], checkpoint.position), checkpoint


def _first_drifts(
    job: Job, plan: Plan, resolved: ResolvedProjection, live: Mapping[RowKey, Any], resolutions: Mapping[int, str]
) -> dict[RowKey, int | None]:
    """Return for each key the position of the first event that is missing in the live row; None if never equal."""
    codec = RowCodec(resolved.table, resolved.row_type, job.database.dialect)
    probe = DriftProbe(resolved, live, resolutions, partial(are_equal, codec=codec))
    with job.earlier() as earlier:
        decode = reader(job.catalog, resolved, resolutions, earlier)
        for records in _records(job, plan, resolved, live):
            decode.expect(records)
            for event in filter(None, map(decode, records)):
                probe.fold(event)
    return {key: probe.drifted_at(key) for key in live}


def _records(
    job: Job, plan: Plan, resolved: ResolvedProjection, live: Mapping[RowKey, Any]
) -> Iterator[list[RawRecord]]:
    """Yield the records that could have changed the live rows, in order: those of the rows' aggregates, or all."""
    end = plan.last + 1
    if job.source.archive is not None or not resolved.keyed_by_aggregate:
        yield from job.source.records(plan.first, end)
        return
    for (aggregate_id,) in live:
        subject = f"{plan.stream}.*.{encode_id(aggregate_id)}"
        yield from read_range(job.log.endpoint, plan.stream, plan.first, end, filter_subject=subject)


class DriftProbe:
    """A fold of events, as a projection's `reader` returns them, onto a few rows, to find where they drifted. Pure."""

    def __init__(
        self,
        resolved: ResolvedProjection,
        live: Mapping[RowKey, Any],
        resolutions: Mapping[int, str],
        are_equal: Callable[[Any, Any], bool],
    ) -> None:
        """Watch the rows of the keys in `live`, which maps each key to its live row, or to None when there is none.

        `resolutions` maps the positions of quarantined events to what was decided about them. `are_equal` tells whether
        the database stores a folded row and a live row alike.
        """
        self._live = live
        self._are_equal = are_equal
        self._fold = _fold_onto(resolved, live, resolutions)
        self._equal = {key: row is None for key, row in live.items()}
        self._drifted: dict[RowKey, int] = {}
        self.rows: dict[RowKey, Any] = {}
        """The rows folded so far, by key; None for a deleted row."""

    def fold(self, event: Any) -> Rows:
        """Fold the next event and return the watched rows that it changed. Raises `HandlerFailed`."""
        changed: Rows = {}
        for key, row in self._fold(self.rows, event).items():
            if key not in self._live:
                continue
            was_equal, self._equal[key] = self._equal[key], self._are_equal(row, self._live[key])
            self.rows[key] = changed[key] = row
            if self._equal[key]:
                self._drifted.pop(key, None)
            elif was_equal:
                self._drifted[key] = event.position
        return changed

    def drifted_at(self, key: RowKey) -> int | None:
        """Return the position of the first event that the live row lacks; None if they are equal, or never were."""
        return self._drifted.get(key)


def _fold_onto(
    resolved: ResolvedProjection, live: Mapping[RowKey, Any], resolutions: Mapping[int, str]
) -> Callable[[Rows, Any], Rows]:
    codec = RowCodec(resolved.table, resolved.row_type)
    if resolved.joins is not None:
        return _joined_onto(Fold(resolved, codec))
    if not resolved.quarantines:
        fold = Fold(_only_live_keys(resolved, live), codec)
        return lambda rows, event: fold(rows, [event])
    fold = QuarantiningFold(resolved, codec)
    blocked = BlockedAggregates(resolutions=resolutions)

    def fold_or_quarantine(rows: Rows, event: Any) -> Rows:
        folded = fold(rows, [event], blocked)
        blocked.aggregates.update(folded.blocked)
        return folded.changed

    return fold_or_quarantine


def _joined_onto(fold: Fold) -> Callable[[Rows, Any], Rows]:
    """Fold every row, since a row may come from another key; the caller takes those that it watches."""
    cells: dict[StateId, Cell] = {}
    all_rows: Rows = {}

    def join_and_fold(_: Rows, event: Any) -> Rows:
        joining = fold.join([event], cells)
        cells.update(joining.cells)
        changed = fold(all_rows, joining.events, joining.keys)
        all_rows.update(changed)
        return changed

    return join_and_fold


def _only_live_keys(resolved: ResolvedProjection, live: Mapping[RowKey, Any]) -> ResolvedProjection:
    """Return the projection reduced to the keys in `live`, because the rows of other keys are not known here."""

    def keys_of(event: Recorded[Any]) -> tuple[RowKey, ...]:
        return tuple(key for key in resolved.keys_of(event) if key in live)

    return replace(resolved, key_of=None, keys_of=keys_of) if resolved.reads else resolved


def _compare_rows(job: Job, plan: Plan, shadow: Shadow[ResolvedProjection]) -> _Comparison:
    """Compare a fold's rows, then its states; a live row that no fold can have written is a `RowUnreadable`."""
    resolved, comparison = shadow.resolved, _Comparison()
    codec = RowCodec(resolved.table, resolved.row_type, shadow.target.database.dialect)
    (live_table, expected_table), *state_pairs = shadow.pairs()
    first_pairs: list[tuple[Any, Any]] = []
    with _in_key_order(shadow, live_table, codec) as live, _in_key_order(shadow, expected_table, codec) as expected:
        for pair in _pair_rows(live, expected, codec):
            comparison.rows += pair[0] is not None
            if comparison.rows % _REPORT_EVERY == 0:
                job.watch.report("compare", comparison.rows, 0)
            if not are_equal(*pair, codec):
                comparison.differences += 1
                if len(first_pairs) < EXAMPLES_MAX:
                    first_pairs.append(pair)
    keyed = [(_key_of(expected if row is None else row, codec), row, expected) for row, expected in first_pairs]
    live_rows = {key: row for key, row, _ in keyed if not isinstance(row, RowUnreadable) or row.has_key}
    since = _first_drifts(job, plan, resolved, live_rows, shadow.target.resolutions) if live_rows else {}
    comparison.examples = [
        Difference(
            key_labels(resolved.table.primary_key.columns, key),
            row.values if isinstance(row, RowUnreadable) else row,
            expected,
            differing(row, expected, codec),
            NEVER if since.get(key) is None else f"missed since {since[key]}",
            since.get(key),
        )
        for key, row, expected in keyed
    ]
    with shadow.workspace.engine().connect().execution_options(**{READ_ONLY: True}) as connection:
        for pair in state_pairs:
            # States are no rows of the read model, so only their differences count.
            comparison.add(replace(_compare_table(connection, pair, (), job.watch), rows=0))
    return comparison


def _compare_tables(job: Job, shadow: Shadow[ResolvedSql]) -> _Comparison:
    """Compare the tables of an SQL projection, one after the other."""
    comparison = _Comparison()
    numbered = shadow.workspace.numbered(shadow.tables)
    with shadow.workspace.engine().connect().execution_options(**{READ_ONLY: True}) as connection:
        for pair in shadow.pairs():
            comparison.add(_compare_table(connection, pair, numbered, job.watch))
    return comparison


@contextmanager
def _in_key_order(shadow: Shadow[ResolvedProjection], table: Table, codec: RowCodec) -> Generator[Iterator[Any]]:
    """Yield an iterator over a table's rows, in batches, in the order in which Python sorts their dumped keys."""
    engine = shadow.workspace.engine()
    quote = engine.dialect.identifier_preparer.quote_identifier
    in_bytes = shadow.target.database.dialect.byte_order

    def sorted_by(column: Column[Any]) -> str:
        name = quote(column.name)
        # PostgreSQL sorts the labels of an enum in the order of its declaration.
        name = f"cast({name} as text)" if isinstance(column.type, Enum) and column.type.native_enum else name
        return name + in_bytes if isinstance(column.type, String) else name

    order = ", ".join(map(sorted_by, shadow.resolved.table.primary_key.columns))
    columns = ", ".join(map(quote, codec.columns))
    with engine.connect() as connection:
        shadow.target.database.dialect.load_all(connection)
        options = {"stream_results": True, "yield_per": _FETCH, READ_ONLY: True}
        rows = connection.execution_options(**options).exec_driver_sql(
            f"select {columns} from {engine.dialect.identifier_preparer.format_table(table)} order by {order}"
        )
        yield (_load_row(codec, values) for values in rows)


def _load_row(codec: RowCodec, values: Sequence[Any]) -> Any:
    try:
        return codec.load(values)
    except RowUnreadable as error:
        return error


def _key_of(row: Any, codec: RowCodec) -> tuple[Any, ...]:
    """Return the key of a row, which may be a `RowUnreadable`."""
    return row.key if isinstance(row, RowUnreadable) else codec.key(row)


def _sort_key(row: Any, codec: RowCodec) -> tuple[Any, ...]:
    return codec.dump_keys([_key_of(row, codec)])[0]


def _pair_rows(live: Iterator[Any], expected: Iterator[Any], codec: RowCodec) -> Iterator[tuple[Any, Any]]:
    """Pair the rows of two sides, sorted by key; a row without a partner, or a second of a key, is with None."""
    live_row, expected_row = next(live, None), next(expected, None)
    while live_row is not None or expected_row is not None:
        if (
            expected_row is None
            or (isinstance(live_row, RowUnreadable) and not live_row.has_key)
            or (live_row is not None and _sort_key(live_row, codec) < _sort_key(expected_row, codec))
        ):
            yield live_row, None
            live_row = next(live, None)
        elif live_row is None or _sort_key(expected_row, codec) < _sort_key(live_row, codec):
            yield None, expected_row
            expected_row = next(expected, None)
        else:
            yield live_row, expected_row
            live_row, expected_row = next(live, None), next(expected, None)


def are_equal(left: Any, right: Any, codec: RowCodec) -> bool:
    """Tell whether two rows are stored alike, or neither side has a row."""
    return left is right if left is None or right is None else not differing(left, right, codec)


def differing(left: Any, right: Any, codec: RowCodec) -> tuple[str, ...]:
    """Return the fields whose stored values differ between two rows, even where their class calls the rows equal."""
    if left is None or right is None:
        return ()
    for row in (left, right):
        if isinstance(row, RowUnreadable):
            return (codec.fields[codec.columns.index(row.column)],) if row.column else codec.fields
    triples = zip(codec.fields, codec.dump(left), codec.dump(right), strict=True)
    return tuple(name for name, a, b in triples if not _is_same(a, b))


def _is_same(a: Any, b: Any) -> bool:
    """Tell whether two values are equal and print alike: 1.0 is not 1.00, and 0.0 is not -0.0."""
    if isinstance(a, float | Decimal):
        return type(a) is type(b) and str(a) == str(b)
    return a == b


def _compare_table(connection: Connection, pair: Pair, numbered: Collection[Column[Any]], watch: Watch) -> _Comparison:
    """Compare the rows of one table; `numbered` are the columns that the database fills from sequences."""
    live, expected = pair
    rows = connection.scalar(select(func.count()).select_from(live)) or 0
    watch.report("compare", rows, 0)
    compared = [column.key for column in expected.columns if not _is_generated(column, numbered)]
    key = [column.key for column in expected.primary_key.columns]
    if not set(key) <= set(compared):
        primary_key = key
        key = [_PAIR_NUMBER]
        left, right = (
            select(
                *[side.c[name] for name in compared],
                func.row_number().over(order_by=[side.c[key_name] for key_name in primary_key]).label(_PAIR_NUMBER),
            ).subquery(f"eventjet_{name}")
            for side, name in ((live, "a"), (expected, "b"))
        )
    else:
        left, right = live.alias("eventjet_a"), expected.alias("eventjet_b")
    joined = left.outerjoin(right, and_(*[left.c[name] == right.c[name] for name in key]), full=True)
    missing = left.c[key[0]].is_(None), right.c[key[0]].is_(None)
    distinct = [dialect_of(connection).differ(left.c[name], right.c[name]) for name in compared]
    differ = or_(*missing, *distinct)
    differences = connection.scalar(select(func.count()).select_from(joined).where(differ)) or 0
    if not differences:
        return _Comparison(rows)
    names = [*key, *[name for name in compared if name not in key]]
    columns = [side.c[name] for side in (left, right) for name in names]
    order = [func.coalesce(left.c[name], right.c[name]) for name in key]

    def first(selected: Sequence[ColumnElement[Any]]) -> Sequence[Any]:
        labelled = [column.label(f"c{number}") for number, column in enumerate([*selected, *distinct])]
        query = select(*labelled).select_from(joined).where(differ)
        return connection.execute(query.order_by(*order).limit(EXAMPLES_MAX)).all()

    try:
        examples = first(columns)
    except Exception:  # noqa: BLE001 - whatever a driver or a type raises for a value that Python does not have
        dialect_of(connection).load_all(connection)
        examples = first([cast(column, Text) for column in columns])
    sides = len(columns)
    return _Comparison(
        rows,
        differences,
        [
            _difference(expected, row[:sides], names, len(key), list(compress(compared, row[sides:])))
            for row in examples
        ],
    )


def _is_generated(column: Column[Any], numbered: Collection[Column[Any]]) -> bool:
    """Tell whether the database fills this column, or a column that it refers to, from a sequence."""
    if column in numbered:
        return True
    return any(key.column is not column and _is_generated(key.column, numbered) for key in column.foreign_keys)


def _difference(table: Table, row: Sequence[Any], names: list[str], keys: int, differ: Sequence[str]) -> Difference:
    live, expected = dict(zip(names, row, strict=False)), dict(zip(names, row[len(names) :], strict=True))
    sides = [side if any(side[name] is not None for name in names[:keys]) else None for side in (live, expected)]
    present_side = sides[0] or sides[1] or {}
    rows = [
        None if side is None else {name: value for name, value in side.items() if name != _PAIR_NUMBER}
        for side in sides
    ]
    columns = tuple(differ) if all(sides) else ()
    parts = [present_side[name] for name in names[:keys]]
    key = key_labels(table.primary_key.columns, parts) if len(parts) == len(table.primary_key.columns) else parts
    return Difference((table.name, *key), rows[0], rows[1], columns, UNKNOWN_SINCE)
