"""The tables that a lake has of one application, and the rows of the log's records for them, in Arrow.

A lake has the table `events` of all records, and one table for each event type, whose columns are those of the
DataFrame of the type; on demand also read models, with the columns of their tables. Lakehouses have no type for a
duration, so a `timedelta` is the number of its microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eventjet.codec.catalog import Catalog, EventType
from eventjet.codec.headers import TYPE, RawRecord, header
from eventjet.codec.records import Decoder
from eventjet.projections.app_ref import Application
from eventjet.projections.resolve import ResolvedProjection
from eventjet.spark.columns import Form, forms_of, pyarrow
from eventjet.spark.event_rows import (
    EVENTS,
    batch_of,
    event_tables,
    masked_text,
    personal_fields,
    recorded_columns,
    recorded_row,
    row_columns,
    stored_columns,
    stored_row,
    stored_row_beside,
)

KEY = "position"
"""The column that orders every table, and in which no value comes twice."""


@dataclass(frozen=True, slots=True)
class LakeTable:
    """One table of a lake, as the application declares it now."""

    name: str
    event: EventType | None
    """The event type whose events it has; None for the table of all records, and for a read model."""
    columns: Mapping[str, Form]
    schema: Any
    """The Arrow schema of its columns."""
    nullable: frozenset[str]
    """Columns that are null in a row that was written before the column was declared, as they would be now."""
    forms: Mapping[str, Form]
    """The forms of the event's fields that are in the table, by the names of the fields."""
    read_model: ResolvedProjection | None = None
    """The projection whose rows it has, which each export replaces; None for a table of events."""

    @property
    def type_name(self) -> str | None:
        """The wire name of its events; None for the table of all records."""
        return None if self.event is None else self.event.info.name

    @property
    def event_schema(self) -> int:
        """The schema to which its events are upcast; 0 for other tables."""
        return 0 if self.event is None else self.event.info.schema

    @property
    def content(self) -> str:
        """What a table is of, as its `Origin` has it."""
        return self.type_name or ("" if self.read_model is None else f"projection {self.read_model.name}")

    @property
    def key(self) -> list[str]:
        """The columns in which together no value comes twice."""
        return [KEY] if self.read_model is None else [column.name for column in self.read_model.table.primary_key]

    def batch(self, rows: Sequence[Sequence[Any]]) -> Any:
        """Return rows as an Arrow table of the table's schema."""
        arrow = pyarrow()
        if not rows:
            return self.schema.empty_table()
        return arrow.Table.from_batches([batch_of(rows, self.columns)]).cast(self.schema)


def tables_of(catalog: Catalog, *, personal: bool) -> list[LakeTable]:
    """Return the tables of an application, `events` first; without `personal`, personal fields have no columns."""
    whole = LakeTable(EVENTS, None, stored_columns(), _schema(stored_columns()), frozenset(), {})
    return [whole, *(_typed(name, kind, personal=personal) for name, kind in event_tables(catalog).items())]


def read_models_of(app: Application) -> list[LakeTable]:
    """Return a table for each projection that can be folded, unless a table of events has its name."""
    taken = {EVENTS, *event_tables(app.catalog)}
    return [
        _read_model(resolved)
        for resolved in app.projections.values()
        if isinstance(resolved, ResolvedProjection) and resolved.name not in taken
    ]


def _read_model(resolved: ResolvedProjection) -> LakeTable:
    columns = row_columns(resolved)
    # Each export writes all rows again, so a new column has its value in every row.
    return LakeTable(resolved.name, None, columns, _schema(columns), frozenset(columns), {}, resolved)


def _typed(name: str, kind: EventType, *, personal: bool) -> LakeTable:
    cls = kind.event_type
    hidden = frozenset[str]() if personal else personal_fields(cls)
    forms = {field: form for field, form in forms_of(cls).items() if field not in hidden}
    columns = recorded_columns(cls, hidden)
    by_field = dict(zip(forms, list(columns)[len(columns) - len(forms) :], strict=True))
    declared: Mapping[str, Any] = getattr(cls, "__pydantic_fields__", {})
    without_value = {field for field, info in declared.items() if info.default is None}
    nullable = frozenset(column for field, column in by_field.items() if field in without_value)
    return LakeTable(name, kind, columns, _schema(columns), nullable, forms)


def _schema(columns: Mapping[str, Form]) -> Any:
    arrow = pyarrow()
    return arrow.schema([(name, _without_durations(form.arrow)) for name, form in columns.items()])


def _without_durations(kind: Any) -> Any:
    arrow = pyarrow()
    if arrow.types.is_duration(kind):
        return arrow.int64()
    if arrow.types.is_struct(kind):
        return arrow.struct([arrow.field(field.name, _without_durations(field.type)) for field in kind])
    if arrow.types.is_list(kind):
        return arrow.list_(_without_durations(kind.value_type))
    if arrow.types.is_map(kind):
        return arrow.map_(kind.key_type, _without_durations(kind.item_type))
    return kind


class RowReader:
    """Makes the rows of records for a lake's tables; an event that cannot be decoded raises as in a projection."""

    def __init__(self, catalog: Catalog, tables: Sequence[LakeTable], *, personal: bool) -> None:
        typed = [(table.event, table) for table in tables if table.event is not None]
        self._decode = Decoder(catalog, [event.event_type for event, _ in typed])
        self._by_type: dict[str, LakeTable] = {}
        for event, table in typed:
            # An event of a newer schema has the name, too, and must not be passed over.
            self._by_type |= dict.fromkeys((event.info.name, *event.info.formerly), table)
        self._masking = None if personal or not catalog.is_private else catalog

    def rows(self, records: Sequence[RawRecord], after: Mapping[str, int]) -> dict[str, list[Sequence[Any]]]:
        """Return the tables' rows of records beyond `after`; raises `UsageError` for a value that fits no column."""
        rows: dict[str, list[Sequence[Any]]] = {name: [] for name in after}
        end = 2**63
        whole_after = after.get(EVENTS, end)
        whole, by_type, masking = rows.get(EVENTS, []), self._by_type, self._masking
        for record in records:
            type_name = header(record[3], TYPE)
            table, row = by_type.get(type_name or ""), None
            if table is not None and record[0] > after.get(table.name, end):
                event = self._decode(record)
                if event is not None:
                    row = recorded_row(event, table.forms)
                    rows[table.name].append(row)
            if record[0] > whole_after:
                stored = stored_row(record) if row is None else stored_row_beside(row, record)
                whole.append(stored if masking is None else (*stored[:-1], masked_text(masking, record)))
        return rows


def in_declared_order(table: LakeTable, rows: Any) -> Any:
    """Return stored rows in the declared columns, null where the table lacks one, in the order of the key."""
    for missing in [column for column in table.schema if column.name not in rows.column_names]:
        rows = rows.append_column(missing, pyarrow().nulls(rows.num_rows, missing.type))
    order = [(name, "ascending") for name in table.key]
    return rows.select(table.schema.names).cast(table.schema).sort_by(order).combine_chunks()


def first_difference(expected: Any, stored: Any, key: Sequence[str]) -> tuple[tuple[Any, ...], str] | None:
    """Return (key, reason) of the first difference of two Arrow tables that are ordered by the columns `key`."""
    ours, theirs = (
        list(zip(*(table.column(name).to_pylist() for name in key), strict=True)) for table in (expected, stored)
    )
    if ours != theirs:
        for due, actual in zip(ours, theirs, strict=False):
            if due != actual:
                if actual < due:
                    reason = "the row is there twice, or the log gives none"
                    return actual, reason
                return due, "the row is missing"
        if len(ours) > len(theirs):
            return ours[len(theirs)], "the row is missing"
        return theirs[len(ours)], "the row is there twice, or the log gives none"
    differing: list[tuple[tuple[Any, ...], str]] = []
    for name in expected.column_names:
        folded, kept = expected.column(name), stored.column(name)
        if not folded.equals(kept):
            pairs = zip(ours, folded.to_pylist(), kept.to_pylist(), strict=True)
            where = next((where for where, value, actual in pairs if value != actual), ours[0])
            differing.append((where, f"the column {name} has another value than the log gives"))
    return min(differing, default=None)
