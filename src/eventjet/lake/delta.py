"""Delta tables by delta-rs. A table's mark is in the transaction identifiers of the commit that has its rows.

Appends do not conflict in Delta, so two writers would both succeed. But a commit fails that has a transaction
identifier of an application which another commit has had since the table was read: so all writers of eventjet use one,
and only others, such as a compaction, may write between. Each commit has a number of its own, because a store
may make a commit, lose its answer, and refuse the repetition.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from eventjet.archive.object_stores import endpoint_of
from eventjet.errors import LakeFenced, LakeRefused
from eventjet.lake.store import Mark, Origin, package, taken_by_another_format, translated
from eventjet.lake.tables import KEY
from eventjet.spark.columns import pyarrow

_APP, _EVENT, _ROW, _SCHEMA = "eventjet", "eventjet.event", "eventjet.row", "eventjet.schema"
"""The applications of the transaction identifiers; their versions are the fields of the mark."""
_COMMIT = "eventjet.commit"
"""One more of these applications, whose version is the random number of the last commit."""
_FIRST_LOOK = {"connect_timeout": "5s", "timeout": "10s", "max_retries": "2", "retry_timeout": "10s"}
"""A store that does not answer is given up soon before a run, and after three minutes within it, as delta-rs does."""
_CONDITIONAL = "_eventjet_conditional_write"
_CONDITIONAL_TEXT = (
    b"eventjet writes this object only if it does not exist. A store that writes it again would let two writers make "
    b"the same commit, and lose one of them.\n"
)


class DeltaStore:
    """The Delta tables in a folder, one folder each."""

    widens_decimals = False

    def __init__(self, url: str, stream: str, catalog: str | None) -> None:
        del stream, catalog
        self._url = url
        package("deltalake")
        self._files: Any = None
        if "://" in url:
            with translated(url, ""):
                self._files = package("deltalake.fs").DeltaStorageHandler(url, _FIRST_LOOK)
                self._files.get_file_info([""])

    def close(self) -> None: ...

    def check_commits(self) -> None:
        if endpoint_of(self._url) is None:
            return  # the clouds' own stores refuse to write what is there
        stores, put = package("obstore.store"), package("obstore").put
        with translated(self._url, ""):
            retries = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
            store = stores.from_url(self._url.replace("s3a://", "s3://", 1), retry_config=retries)
            for _ in range(2):
                try:
                    put(store, _CONDITIONAL, _CONDITIONAL_TEXT, mode="create")
                except package("obstore.exceptions").AlreadyExistsError:
                    return
        raise LakeRefused(
            self._url,
            "",
            f"the store at {endpoint_of(self._url)} writes an object again that was to be written only if it does not "
            "exist (`If-None-Match`), so of two commits at once one would be lost",
            "Use a store that supports conditional writes, or Iceberg with a catalog: `--format iceberg --catalog "
            "NAME`.",
        )

    def names(self) -> list[str]:
        if self._files is None:
            folder = Path(self._url)
            return [path.parent.name for path in folder.glob("*/_delta_log")]
        with translated(self._url, ""):
            entries = self._files.get_file_info_selector(package("pyarrow.fs").FileSelector(""))
        return [entry.path for entry in entries if self._has_folder(f"{entry.path}/_delta_log")]

    def table(self, name: str) -> DeltaTable | None:
        location = f"{self._url}/{name}"
        with translated(self._url, name):
            # `is_deltatable` would stop all other threads while it asks a store.
            try:
                table = package("deltalake").DeltaTable(location)
            except package("deltalake.exceptions").TableNotFoundError:
                return None
            return DeltaTable(self._url, name, table)

    def create(self, name: str, schema: Any, origin: Origin, mark: Mark) -> DeltaTable:
        if self._has_folder(f"{name}/metadata"):
            raise taken_by_another_format(self._url, name)
        deltalake = package("deltalake")
        key, *others = schema
        described = f"{origin.content or 'All events'} of {origin.stream}, kept by eventjet"
        number = secrets.randbits(63)
        with translated(self._url, name):
            try:
                table = deltalake.DeltaTable.create(
                    f"{self._url}/{name}",
                    schema=pyarrow().schema([key.with_metadata(origin.properties()), *others]),
                    name=name,
                    description=described,
                    # Tried again behind another writer's, it would take the mark back to the beginning.
                    commit_properties=_commit(mark, number, max_retries=0),
                )
            except Exception as error:
                if "case-insensitive" in str(error):
                    reason = "two fields of an object in it differ by case alone, which Delta cannot have"
                    remedy = "Rename one of them in a new schema of the event, or use `--format iceberg`."
                    raise LakeRefused(self._url, name, reason, remedy) from error
                stored = self.table(name)
                if stored is None:
                    raise
                if stored.commit_number != number:
                    raise LakeFenced(self._url, name, mark.position) from error
                return stored
        return DeltaTable(self._url, name, table)

    def _has_folder(self, path: str) -> bool:
        if self._files is None:
            return Path(self._url, path).exists()
        with translated(self._url, path):
            return bool(self._files.get_file_info([path])[0].type.value)

    def dropping(self, name: str) -> str:
        return f"delete the folder {self._url}/{name}"


class DeltaTable:
    """One Delta table; see `OpenTable`."""

    def __init__(self, url: str, name: str, table: Any) -> None:
        self.name = name
        self._url = url
        self._table = table
        origin = None if self._version(_APP) is None else Origin.read(table.schema().fields[0].metadata)
        if origin is None:
            raise LakeRefused(
                url, name, "eventjet did not make it", "Name another URL, or move this table to another folder."
            )
        self.origin = origin
        self.mark = self._read_mark()

    @property
    def commit_number(self) -> int | None:
        """The number of the last commit of eventjet; None for a commit of an earlier release."""
        return self._version(_COMMIT)

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
        with self._committing(self.mark) as commit:
            package("deltalake").write_deltalake(
                self._table, schema.empty_table(), mode="append", schema_mode="merge", commit_properties=commit
            )

    def append(self, rows: Any, mark: Mark, *, replacing: bool = False) -> None:
        deltalake = package("deltalake")
        # What this process knows of the table may include commits that came while its last one was written.
        if self._read_mark() != self.mark:
            raise LakeFenced(self._url, self.name, self.mark.position)
        with self._committing(mark) as commit:
            if rows.num_rows or replacing:
                deltalake.write_deltalake(
                    self._table,
                    rows,
                    mode="overwrite" if replacing else "append",
                    writer_properties=deltalake.WriterProperties(compression="ZSTD"),
                    commit_properties=commit,
                )
            else:
                self._table.create_write_transaction([], "append", self._table.schema(), commit_properties=commit)
                self._table.update_incremental()
        self.mark = mark

    def read(self, first: int, last: int) -> Any:
        field = package("pyarrow.compute").field(KEY)
        with translated(self._url, self.name):
            return self._table.to_pyarrow_dataset().to_table(filter=(field >= first) & (field <= last))

    def read_all(self) -> Any:
        with translated(self._url, self.name):
            return self._table.to_pyarrow_table()

    @contextmanager
    def _committing(self, mark: Mark) -> Generator[Any]:
        """Yield the properties of a commit with the mark; raises `LakeFenced` if another writer's came before."""
        number = secrets.randbits(63)
        with translated(self._url, self.name):
            try:
                yield _commit(mark, number)
            except Exception as error:
                # It may be there all the same: its answer was lost, or what deltalake does afterwards failed.
                self._table.update_incremental()
                if self.commit_number == number:
                    return
                if isinstance(error, package("deltalake.exceptions").CommitFailedError):
                    raise LakeFenced(self._url, self.name, self.mark.position) from error
                raise

    def _version(self, application: str) -> int | None:
        version: int | None = self._table.transaction_version(application)
        return version

    def _read_mark(self) -> Mark:
        return Mark(*(self._version(application) or 0 for application in (_APP, _EVENT, _ROW, _SCHEMA)))


def _commit(mark: Mark, number: int, max_retries: int | None = None) -> Any:
    deltalake = package("deltalake")
    versions = {_APP: mark.position, _EVENT: mark.event, _ROW: mark.row, _SCHEMA: mark.schema, _COMMIT: number}
    transactions = [deltalake.Transaction(*version) for version in versions.items()]
    # The same for people who look at the table's history.
    text = {"eventjet.position": str(mark.position)}
    return deltalake.CommitProperties(text, max_commit_retries=max_retries, app_transactions=transactions)
