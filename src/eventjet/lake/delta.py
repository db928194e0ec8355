"""Delta tables by delta-rs. A table's mark is in the transaction identifiers of the commit that has its rows.

Appends do not conflict in Delta, so two writers would both succeed. But a commit fails that has a transaction
identifier of an application which another commit has had since the table was read: so all writers of eventjet use one,
and only others, such as a compaction, may write between.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from eventjet.errors import LakeFenced, LakeRefused
from eventjet.lake.store import Mark, Origin, check_unused, package, translated
from eventjet.lake.tables import KEY
from eventjet.spark.columns import pyarrow

_APP, _EVENT, _ROW = "eventjet", "eventjet.event", "eventjet.row"
"""The applications of the transaction identifiers; their versions are the fields of the mark."""
_ORIGIN = ("stream", "log", "content", "personal")


class DeltaStore:
    """The Delta tables in a folder, one folder each."""

    widens_decimals = False

    def __init__(self, url: str, stream: str, catalog: str | None) -> None:
        del stream, catalog
        self._url = url
        package("deltalake")

    def close(self) -> None: ...

    def table(self, name: str) -> DeltaTable | None:
        location = f"{self._url}/{name}"
        with translated(self._url, name):
            kind = package("deltalake").DeltaTable
            return DeltaTable(self._url, name, kind(location)) if kind.is_deltatable(location) else None

    def create(self, name: str, schema: Any, origin: Origin, mark: Mark) -> DeltaTable:
        check_unused(self._url, name, "metadata")
        deltalake = package("deltalake")
        note = {f"eventjet.{field}": str(getattr(origin, field)) for field in _ORIGIN}
        key, *others = schema
        described = f"{origin.content or 'All events'} of {origin.stream}, kept by eventjet"
        with translated(self._url, name):
            try:
                table = deltalake.DeltaTable.create(
                    f"{self._url}/{name}",
                    schema=pyarrow().schema([key.with_metadata(note), *others]),
                    name=name,
                    description=described,
                    commit_properties=_commit(mark),
                )
            except deltalake.exceptions.DeltaError as error:
                if deltalake.DeltaTable.is_deltatable(f"{self._url}/{name}"):
                    raise LakeFenced(self._url, name, mark.position) from error
                raise
            except Exception as error:
                if "case-insensitive" not in str(error):
                    raise
                reason = "two fields of an object in it differ by case alone, which Delta cannot have"
                remedy = "Rename one of them in a new schema of the event, or use `--format iceberg`."
                raise LakeRefused(self._url, name, reason, remedy) from error
        return DeltaTable(self._url, name, table)

    def dropping(self, name: str) -> str:
        return f"delete the folder {self._url}/{name}"


class DeltaTable:
    """One Delta table; see `OpenTable`."""

    def __init__(self, url: str, name: str, table: Any) -> None:
        self.name = name
        self._url = url
        self._table = table
        note: Mapping[str, Any] = table.schema().fields[0].metadata
        if self._version(_APP) is None or any(f"eventjet.{field}" not in note for field in _ORIGIN):
            raise LakeRefused(
                url, name, "eventjet did not make it", "Name another URL, or move this table to another folder."
            )
        stream, log, content, personal = (str(note[f"eventjet.{field}"]) for field in _ORIGIN)
        self.origin = Origin(stream, log, content, personal == "True")
        self.mark = self._read_mark()

    @property
    def schema(self) -> Any:
        with translated(self._url, self.name):
            return pyarrow().schema(self._table.schema().to_arrow())

    @property
    def last_row(self) -> int:
        with translated(self._url, self.name):
            actions = pyarrow().table(self._table.get_add_actions(flatten=True))
        if not actions.num_rows:
            return 0
        has_statistics = f"max.{KEY}" in actions.column_names
        known: list[Any] = actions.column(f"max.{KEY}").to_pylist() if has_statistics else [None]
        # Files that others wrote may lack statistics, and to read them all would be too much for each run.
        return self.mark.row if None in known else max(known)

    @property
    def row_count(self) -> int:
        with translated(self._url, self.name):
            count: int = self._table.count()
        return count

    def widen(self, schema: Any) -> None:
        with self._committing():
            package("deltalake").write_deltalake(
                self._table,
                schema.empty_table(),
                mode="append",
                schema_mode="merge",
                commit_properties=_commit(self.mark),
            )

    def append(self, rows: Any, mark: Mark, *, replacing: bool = False) -> None:
        deltalake = package("deltalake")
        # What this process knows of the table may include commits that came while its last one was written.
        if self._read_mark() != self.mark:
            raise LakeFenced(self._url, self.name, self.mark.position)
        with self._committing():
            if rows.num_rows or replacing:
                deltalake.write_deltalake(
                    self._table,
                    rows,
                    mode="overwrite" if replacing else "append",
                    writer_properties=deltalake.WriterProperties(compression="ZSTD"),
                    commit_properties=_commit(mark),
                )
            else:
                self._table.create_write_transaction(
                    [], "append", self._table.schema(), commit_properties=_commit(mark)
                )
                self._table.update_incremental()
        self.mark = mark

    @contextmanager
    def _committing(self) -> Generator[None]:
        """Raise `LakeFenced` for a commit within the block that another writer's came before."""
        with translated(self._url, self.name):
            try:
                yield
            except package("deltalake.exceptions").CommitFailedError as error:
                raise LakeFenced(self._url, self.name, self.mark.position) from error

    def read(self, first: int, last: int) -> Any:
        field = package("pyarrow.compute").field(KEY)
        with translated(self._url, self.name):
            return self._table.to_pyarrow_dataset().to_table(filter=(field >= first) & (field <= last))

    def read_all(self) -> Any:
        with translated(self._url, self.name):
            return self._table.to_pyarrow_table()

    def _version(self, application: str) -> int | None:
        version: int | None = self._table.transaction_version(application)
        return version

    def _read_mark(self) -> Mark:
        position, event, row = (self._version(application) or 0 for application in (_APP, _EVENT, _ROW))
        return Mark(position, event, row)


def _commit(mark: Mark) -> Any:
    deltalake = package("deltalake")
    transaction = deltalake.Transaction
    versions = [transaction(_APP, mark.position), transaction(_EVENT, mark.event), transaction(_ROW, mark.row)]
    # The same for people who look at the table's history.
    return deltalake.CommitProperties({"eventjet.position": str(mark.position)}, app_transactions=versions)
