"""Iceberg tables by pyiceberg. A table's mark is in the summary of the snapshot that has its rows.

It is among the table's properties, too, in the same commit, because snapshots that others make (a compaction) do not
have it, and expired snapshots are gone. A commit asserts that the table's snapshot is the one that was read.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eventjet.archive.object_stores import s3_settings
from eventjet.errors import LakeFenced, LakeRefused, UsageError
from eventjet.lake.store import Mark, Origin, package, taken_by_another_format, translated
from eventjet.lake.tables import KEY

_MARK = ("position", "event", "row", "schema")
_COMMIT = "eventjet.commit"
"""What the id of a commit is called in the summary of its snapshot."""
_CATALOG = "catalog.db"
"""The catalog in a folder of this machine, if no other one is named."""
_TRIES = 5
"""How often a commit is tried again that something else than a sync came before."""


class IcebergStore:
    """The Iceberg tables of one namespace of a catalog."""

    widens_decimals = True

    def __init__(self, url: str, stream: str, catalog: str | None) -> None:
        self._url = url
        self._namespace = stream
        self._name = catalog
        package("pyiceberg")
        if catalog is None and "://" in url:
            raise UsageError(
                "Iceberg tables outside this machine's folders need a catalog. Name one of pyiceberg's "
                "configuration with --catalog, or use `--format delta`."
            )
        # Only `create` makes what is not there.
        exists = catalog is not None or Path(url, _CATALOG).exists()
        self._catalog: Any = self._open_catalog() if exists else None

    def close(self) -> None:
        if self._catalog is not None:
            self._catalog.close()

    def check_commits(self) -> None: ...  # the catalog compares

    def names(self) -> list[str]:
        if self._catalog is None:
            return []
        with translated(self._url, "catalog"):
            try:
                return [name for *_, name in self._catalog.list_tables((self._namespace,))]
            except package("pyiceberg.exceptions").NoSuchNamespaceError:
                return []

    def table(self, name: str) -> IcebergTable | None:
        if self._catalog is None:
            return None
        missing = package("pyiceberg.exceptions")
        with translated(self._url, name):
            try:
                table = self._catalog.load_table((self._namespace, name))
            except (missing.NoSuchTableError, missing.NoSuchNamespaceError):
                return None
            if self._name is None:
                self._check_place(name, str(table.location()))
            return IcebergTable(self._url, name, table)

    def _check_place(self, name: str, location: str) -> None:
        """Raise `LakeRefused` for a folder that was moved or copied, whose catalog still names the earlier paths."""
        path = Path(location.removeprefix("file://"))
        if path.resolve() != Path(self._url, name).resolve():
            raise LakeRefused(
                self._url,
                name,
                f"its files are in {path}, so the folder was moved or copied, and writing here would change them there",
                f"Name {path.parent}, or move it back; or name an empty folder, which gets all of this log.",
            )

    def create(self, name: str, schema: Any, origin: Origin, mark: Mark) -> IcebergTable:
        location = f"{'' if '://' in self._url else 'file://'}{self._url}/{name}"
        taken = package("pyiceberg.exceptions").TableAlreadyExistsError
        properties = {
            **origin.properties(),
            "write.parquet.compression-codec": "zstd",
            # Each commit writes the table's metadata again; the last hundred are kept.
            "write.metadata.delete-after-commit.enabled": "true",
            **_properties(mark),
        }
        self._catalog = self._catalog or self._open_catalog()
        with translated(self._url, name):
            try:
                self._catalog.create_namespace_if_not_exists((self._namespace,))
            except package("sqlalchemy.exc").IntegrityError:
                pass  # another process has created it meanwhile
            files = package("pyiceberg.io").load_file_io(self._catalog.properties, location)
            if files.new_input(f"{location}/_delta_log").exists():
                raise taken_by_another_format(self._url, name)
            try:
                table = self._catalog.create_table(
                    (self._namespace, name), schema, location=location, properties=properties
                )
            except taken as error:
                raise LakeFenced(self._url, name, mark.position) from error
            return IcebergTable(self._url, name, table)

    def _open_catalog(self) -> Any:
        load = package("pyiceberg.catalog").load_catalog
        with translated(self._url, "catalog"):
            # A catalog in SQL would keep its connection if another process made its tables at the same time.
            defaults: dict[str, str] = {"init_catalog_tables": "false"}
            if self._name is None:
                url = self._url
                Path(url).mkdir(parents=True, exist_ok=True)
                defaults |= {"type": "sql", "uri": f"sqlite:///{url}/{_CATALOG}", "warehouse": f"file://{url}"}
            else:
                configured: Mapping[str, Any] = (
                    package("pyiceberg.utils.config").Config().get_catalog_config(self._name) or {}
                )
                defaults |= {f"s3.{key}": value for key, value in s3_settings().items()}
                defaults = {key: value for key, value in defaults.items() if key not in configured}
            catalog = load(self._name or "eventjet", **defaults)
            if "init_catalog_tables" in defaults and hasattr(catalog, "create_tables"):
                try:
                    _create_tables(catalog)
                except BaseException:
                    catalog.close()
                    raise
            return catalog

    def dropping(self, name: str) -> str:
        return f"drop the table {self._namespace}.{name} of the catalog"


class IcebergTable:
    """One Iceberg table; see `OpenTable`."""

    def __init__(self, url: str, name: str, table: Any) -> None:
        self.name = name
        self._url = url
        self._table = table
        origin = Origin.read(table.properties)
        if origin is None:
            raise LakeRefused(
                url, name, "eventjet did not make it", "Name another URL, or another namespace for this table."
            )
        self.origin = origin
        self.mark = self._read_mark()

    @property
    def schema(self) -> Any:
        return self._table.schema().as_arrow()

    @property
    def last_row(self) -> int:
        field = self._table.schema().find_field(KEY)
        greatest = 0
        for task in self._files():
            bounds: Mapping[int, bytes] = task.file.upper_bounds or {}
            bound = bounds.get(field.field_id)
            if bound is None:
                # Files that others wrote may lack statistics, and to read them all would be too much for each run.
                return self.mark.row
            greatest = max(greatest, package("pyiceberg.conversions").from_bytes(field.field_type, bound))
        return greatest

    @property
    def row_count(self) -> int:
        return sum(task.file.record_count for task in self._files())

    def _files(self) -> list[Any]:
        with translated(self._url, self.name):
            return list(self._table.scan().plan_files())

    def widen(self, schema: Any) -> None:
        with translated(self._url, self.name):
            try:
                with self._table.update_schema() as update:
                    update.union_by_name(schema)
            except package("pyiceberg.exceptions").CommitFailedException as error:
                raise LakeFenced(self._url, self.name, self.mark.position) from error
            self._table.refresh()

    def append(self, rows: Any, mark: Mark, *, replacing: bool = False) -> None:
        conflict = package("pyiceberg.exceptions").CommitFailedException
        with translated(self._url, self.name):
            for _ in range(_TRIES):
                if self._read_mark() != self.mark:
                    break
                commit_id = secrets.token_hex(8)
                try:
                    self._commit(rows, mark, commit_id, replacing=replacing)
                except Exception as error:
                    # It may be there all the same, when the answer of the catalog was lost.
                    self._table.refresh()
                    if not self._has_commit(commit_id):
                        if isinstance(error, conflict):
                            continue
                        raise
                self.mark = mark
                return
        raise LakeFenced(self._url, self.name, self.mark.position)

    def _commit(self, rows: Any, mark: Mark, commit_id: str, *, replacing: bool) -> None:
        table, properties = self._table, _properties(mark)
        # pyiceberg tries a commit again behind another writer's, without the assertion about the snapshot: so two
        # writers would both append. What is set here is not stored.
        known = table.metadata
        table.metadata = known.model_copy(update={"properties": {**known.properties, "commit.retry.num-retries": "0"}})
        with table.transaction() as transaction:
            transaction.set_properties(properties)
            # Without rows, too: what asserts the snapshot is the append.
            # An overwrite of nothing warns.
            write = transaction.overwrite if replacing and self.row_count else transaction.append
            write(rows, snapshot_properties={**properties, _COMMIT: commit_id})

    def _has_commit(self, commit_id: str) -> bool:
        summaries = (snapshot.summary for snapshot in self._table.metadata.snapshots)
        return any(each is not None and each.additional_properties.get(_COMMIT) == commit_id for each in summaries)

    def read(self, first: int, last: int) -> Any:
        with translated(self._url, self.name):
            return self._table.scan(row_filter=f"{KEY} >= {first} and {KEY} <= {last}").to_arrow()

    def read_all(self) -> Any:
        with translated(self._url, self.name):
            return self._table.scan().to_arrow()

    def _read_mark(self) -> Mark:
        """Read the mark of the snapshot, or of the last one before it that has one, else of the properties."""
        snapshot = self._table.current_snapshot()
        while snapshot is not None:
            summary: Mapping[str, str] = snapshot.summary.additional_properties if snapshot.summary else {}
            if "eventjet.position" in summary:
                return _mark(summary)
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        return _mark(self._table.properties)


def _create_tables(catalog: Any) -> None:
    """Make the tables of a catalog in SQL unless they are there; each may be made by another process meanwhile."""
    for tries_left in reversed(range(_TRIES)):
        try:
            catalog.create_tables()
        except package("sqlalchemy.exc").DBAPIError:
            if not tries_left:
                raise
        else:
            return


def _properties(mark: Mark) -> dict[str, str]:
    return {f"eventjet.{field}": str(getattr(mark, field)) for field in _MARK}


def _mark(properties: Mapping[str, str]) -> Mark:
    return Mark(*(int(properties.get(f"eventjet.{field}", 0)) for field in _MARK))
