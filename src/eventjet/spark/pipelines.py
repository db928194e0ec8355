"""`declare` turns an application into the datasets of a pipeline that Spark runs: `spark-pipelines run`.

A pipeline (Spark Declarative Pipelines) is a folder with definitions in Python and SQL. `declare` adds to it:

* `events`, a streaming table with every record of the log
* a streaming table for each event type, with a column for each field, upcast
* a materialized view for each projection that is a fold or entries

Only `events` reads the log, from the position at which its checkpoint is; the other datasets read `events`. A table of
Spark has only rows of committed batches, and a batch is a range of positions. So a run that was killed loses and
repeats nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import getdoc
from typing import Any, cast

from pyspark import pipelines as dp
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from eventjet.codec.catalog import EventType
from eventjet.domain.personal import is_private
from eventjet.errors import UsageError
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.skip_markers import reading_skip_markers
from eventjet.nats.endpoint import Endpoint
from eventjet.observability import logs
from eventjet.projections.app_ref import Application, AppRef, loaded
from eventjet.projections.resolve import ResolvedProjection
from eventjet.rebuild.folding import Folding, Foldings, fold_of
from eventjet.rebuild.plan import Route, route_of
from eventjet.settings import Settings
from eventjet.spark.columns import SCHEMA, Form, leaf, records_of
from eventjet.spark.event_rows import (
    EVENTS,
    ROW_VALUES,
    batch_of,
    event_tables,
    masked_text,
    personal_fields,
    recorded_columns,
    row_columns,
    stored_columns,
    stored_row,
)
from eventjet.spark.frames import RecordedTask, ddl_of, log_connection, process_folder
from eventjet.spark.running import send_files, shipped
from eventjet.spark.session import running_session
from eventjet.spark.shuffle_blocks import BLOCK_COLUMNS, CONF, PackByState, incoming, packing, shuffled
from eventjet.spark.source import Reader, read_columns

_log = logging.getLogger(__name__)

_RECORD = ("position", "time_ns", "subject", "headers", "coalesce(cast(body as binary), x'') as body")
"""Expressions that make a record, as the source `jetstream` has it, of a row of the table `events`."""
_RECORD_COLUMNS = {"time_ns": "int", "subject": "str", "headers": "bytes"}
"""The columns of `events` from which records are decoded again; the others are those of `eventjet.spark.events`."""
_TIMES = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}
"""Spark's own type is one that other programs read as nanoseconds since 1970, which end in the year 2262."""
_CHUNK = 10_000
"""The maximum number of rows of a read model in one Arrow batch."""


def declare(app: Application | AppRef, *, personal: bool = False, settings: Settings | None = None) -> None:
    """Declare the datasets of an application, in a file of definitions that `spark-pipelines run` reads.

    The tables of event types have the types' names with `_` for other characters than letters and digits
    (`account_deposited`), the views those of the projections. A warning names the projections that Spark cannot fold.
    Without `personal`, personal fields have no columns, `events` has no body of events that contain some and hides
    fields that no class declares, and projections with personal data are left out. `settings` default to `EVENTJET_*`;
    they say where the log is.

    Raises `UsageError` for names that two datasets would have, and for a session that forgets its tables when it ends,
    and `Unreachable` where the log is not there.

    ```python
    # transformations/bank.py
    from pyspark import pipelines as dp
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from eventjet.examples.bank.app import bank
    from eventjet.spark import pipelines

    pipelines.declare(bank)
    spark = SparkSession.active()


    @dp.materialized_view
    def deposits_per_day():
        deposits = spark.read.table("account_deposited")
        return deposits.groupBy(F.to_date("recorded_at").alias("day")).agg(F.sum("amount").alias("amount"))
    ```
    """
    spark = _session()
    declaring = _Declaring.prepare(spark, app, settings or Settings.load(), personal=personal)
    application = declaring.app
    tables = event_tables(application.catalog)
    taken = {EVENTS, *tables} & application.projections.keys()
    if taken:
        raise UsageError(
            f"{min(taken)!r} would be the table of events and the view of a projection. Rename the projection."
        )
    declaring.declare_events()
    for name, kind in tables.items():
        declaring.declare_type(name, kind)
    for resolved in application.projections.values():
        if not isinstance(resolved, ResolvedProjection):
            reason = "its handlers write SQL"
        elif resolved.is_private and not personal:
            reason = "it has personal data, and `personal=True` was not given"
        else:
            declaring.declare_read_model(resolved)
            continue
        logs.PIPELINE_LEFT_OUT.log(_log, projection=resolved.name, reason=reason)


@dataclass(frozen=True, slots=True)
class _Declaring:
    """One application and what the tasks of its datasets need."""

    spark: SparkSession
    app: Application
    reference: AppRef
    """The reference by which tasks import the application."""
    options: Mapping[str, str]
    """The options of the source `jetstream`."""
    skipped: Mapping[int, str]
    personal: bool
    record: StructType
    """The columns of a record, as the source `jetstream` has it."""

    @classmethod
    def prepare(
        cls, spark: SparkSession, app: Application | AppRef, settings: Settings, *, personal: bool
    ) -> _Declaring:
        application = loaded(app)
        with NatsConnection.open(Endpoint.of(settings).with_name("eventjet-spark")) as connection:
            skipped = connection.run(reading_skip_markers(application.name))
        started = running_session(spark)
        connection_options, secrets = log_connection(settings)
        send_files(secrets, started)
        reference = shipped(started, app if isinstance(app, AppRef) else AppRef.of(app), process_folder())
        options = {**connection_options, "stream": application.name}
        return cls(spark, application, reference, options, skipped, personal, _struct(SCHEMA))

    def declare_events(self) -> None:
        task = _EventsTask(None if self.personal else self.reference)
        comment = f"Every record of the log of {self.app.name}, in the order of position."

        schema = _struct(ddl_of(_events_columns()))

        @dp.table(name=EVENTS, comment=comment, spark_conf=_TIMES)
        def _() -> DataFrame:
            return self._log(self.spark.readStream).mapInArrow(task, schema)

    def declare_type(self, name: str, kind: EventType) -> None:
        cls, info = kind.event_type, kind.info
        left_out = frozenset[str]() if self.personal else personal_fields(cls)
        task = RecordedTask(self.reference, info.name, info.schema, left_out=left_out, skipped=self.skipped)
        names = ", ".join(f"'{wire_name}'" for wire_name in (info.name, *info.formerly))
        schema = _struct(ddl_of(recorded_columns(cls, left_out)))

        comment = _sentence_of(cls, f"Events {info.name} of {self.app.name}, schema {info.schema}.")

        @dp.table(name=name, comment=comment, spark_conf=_TIMES)
        def _() -> DataFrame:
            if self._is_masked([cls]):
                records = self._log(self.spark.readStream)
            else:
                records = self._records(self.spark.readStream.table(EVENTS).where(f"type in ({names})"))
            return records.mapInArrow(task, schema)

    def declare_read_model(self, resolved: ResolvedProjection) -> None:
        route = route_of(resolved)
        task = ReadModelTask(self.reference, resolved.name, route, self.skipped)
        partitions = int(str(self.spark.conf.get("spark.sql.shuffle.partitions")))
        reference, name, skipped = self.reference, resolved.name, self.skipped
        pack = packing(read_columns, partitions, reference, resolved, ROW_VALUES, None, skipped)
        by_state = PackByState(partitions, reference, name, ROW_VALUES, None, skipped, with_states=False)
        schema, block_schema = _struct(ddl_of(row_columns(resolved))), _struct(BLOCK_COLUMNS)
        comment = f"The read model {resolved.name} of {self.app.name}, revision {resolved.revision}."

        @dp.materialized_view(name=resolved.name, comment=comment, spark_conf={**CONF, **_TIMES})
        def _() -> DataFrame:
            if self._is_masked(resolved.decoded):
                records = self._log(self.spark.read)
            else:
                records = self._records(self.spark.read.table(EVENTS))
            if not resolved.reads:
                return records.mapInArrow(replace(task, read=read_columns), schema)
            blocks = shuffled(records.mapInArrow(pack, block_schema), partitions)
            if route is Route.BY_STATE:
                blocks = shuffled(blocks.mapInArrow(by_state, block_schema), partitions)
            return blocks.mapInArrow(replace(task, partitions=partitions), schema)

    def _is_masked(self, event_types: Collection[type]) -> bool:
        """Return whether the table `events` lacks values of these events, so that they cannot be decoded from it.

        A field that only an older schema has may be personal, and an upcaster or a validator may need its value.
        """
        catalog = self.app.catalog
        kinds = [kind for kind in catalog.kinds() if kind.event_type in event_types]
        return catalog.is_private and not self.personal and any(map(_needs_hidden_values, kinds))

    def _log(self, reading: Any) -> Any:
        """Return the records of the log by `spark.readStream`, or up to its present end by `spark.read`."""
        return self._of_known_schema(reading.format("jetstream").options(**self.options).load())

    def _records(self, rows: DataFrame) -> Any:
        """Return the records of rows of the table `events`."""
        return self._of_known_schema(rows.selectExpr(*_RECORD))

    def _of_known_schema(self, records: Any) -> Any:
        # `mapInArrow` asks Spark for the columns of what it is given, which a pipeline refuses while it is defined:
        # the table may not exist yet. Nothing is asked where the schema is known.
        records._cached_schema = self.record
        return records


def _session() -> SparkSession:
    """Return the pipeline's session; raises `UsageError` where there is none, or none that keeps tables."""
    try:
        spark: Any = SparkSession.active()
    except (PySparkException, RuntimeError):
        raise UsageError(
            "No pipeline is being defined. Call `declare` in a file that `spark-pipeline.yml` includes, and start it "
            "with `spark-pipelines run`."
        ) from None
    is_built_in = spark.conf.get("spark.sql.catalog.spark_catalog", "builtin") == "builtin"
    if is_built_in and spark.conf.get("spark.sql.catalogImplementation", "in-memory") == "in-memory":
        raise UsageError(
            "Spark's catalog is in memory, so the next run would not know the tables of this one. Put "
            "`spark.sql.catalogImplementation hive` into spark-defaults.conf, in the folder that SPARK_CONF_DIR names."
        )
    return spark


def _needs_hidden_values(kind: EventType) -> bool:
    """Return whether an event's class may need values that `Catalog.masked_body` hides."""
    return is_private(kind.event_type) or kind.info.schema > 1 or _reads_all(kind.codec.schema)


def _reads_all(node: Any) -> bool:
    """Return whether a part of a core schema gives JSON to application code, which may read undeclared fields."""
    if isinstance(node, list | tuple):
        return any(map(_reads_all, cast("list[Any]", node)))
    if not isinstance(node, dict):
        return False
    schema = cast("dict[str, Any]", node)
    is_code = schema.get("type") in ("function-before", "function-wrap", "function-plain")
    return is_code or any(map(_reads_all, schema.values()))


def _sentence_of(cls: type, sentence: str) -> str:
    """Return the sentence, followed by the first line of the docstring that the class itself has."""
    doc = getdoc(cls) if cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}(") else None
    return f"{sentence} {doc.splitlines()[0]}" if doc else sentence


def _struct(ddl: str) -> StructType:
    """Return a schema as a value, because Spark parses no text while it asks for the query of a dataset."""
    return cast("StructType", StructType.fromDDL(ddl))


def _events_columns() -> dict[str, Form]:
    return {**stored_columns(), **{name: leaf(kind) for name, kind in _RECORD_COLUMNS.items()}}


@dataclass(frozen=True, slots=True)
class _EventsTask:
    """A Spark task that makes rows of the table `events`; no content of a record raises."""

    masking: AppRef | None
    """The application that says which values of bodies are hidden; None if none is."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        catalog = None if self.masking is None else self.masking.load().catalog
        columns = _events_columns()
        body_place = list(columns).index("body")
        for batch in batches:
            rows: list[list[Any]] = []
            for record in records_of(batch):
                row = [*stored_row(record), record[1], record[2].decode("utf-8", "replace"), record[3]]
                if catalog is not None:
                    row[body_place] = masked_text(catalog, record)
                rows.append(row)
            if rows:
                yield batch_of(rows, columns)


@dataclass(frozen=True, slots=True)
class ReadModelTask:
    """A Spark task that folds a partition of the log and returns the rows of one projection.

    An event that cannot be folded fails the view, for projections that quarantine, too: only the database knows what
    was decided about it.
    """

    app: AppRef
    projection: str
    route: Route
    """How the records came here."""
    skipped: Mapping[int, str]
    read: Reader | None = None
    """The function that makes records of Spark's batches; without it the batches are shuffle blocks."""
    partitions: int = 1
    """The number of partitions of the shuffle."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        app = self.app.load()
        resolved = replace(fold_of(app, self.projection), on_error="stop")
        folding = Folding(resolved, ROW_VALUES, {})
        take = Foldings([folding], app.catalog.of_log(self.skipped), None).take_of(self.route)
        columns = row_columns(resolved)
        for _, records in incoming(batches, self.route, self.read, self.partitions):
            take(records)
            if folding.is_due():
                yield from _row_batches(folding.drain(), columns)
        yield from _row_batches(folding.drain(), columns)


def _row_batches(rows: list[Any], columns: Mapping[str, Form]) -> Iterator[Any]:
    for start in range(0, len(rows), _CHUNK):
        yield batch_of(rows[start : start + _CHUNK], columns)
