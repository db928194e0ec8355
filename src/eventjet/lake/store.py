"""What both table formats offer: tables whose position is in the commit of their rows, for one writer at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, Literal, Protocol, TypeAlias, get_args

from eventjet.archive.object_stores import storage_fault
from eventjet.archive.reading import folder_of
from eventjet.errors import EventjetError, LakeRefused, Unreachable, UsageError

Format: TypeAlias = Literal["delta", "iceberg"]
FORMATS: tuple[Format, ...] = get_args(Format)

_STORES: Mapping[Format, str] = {
    "delta": "eventjet.lake.delta:DeltaStore",
    "iceberg": "eventjet.lake.iceberg:IcebergStore",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Of which log a table is, and of which of its events; it never changes."""

    stream: str
    log: str
    """The identity of the log."""
    content: str
    """The wire name of the event type, or `projection NAME`; empty for the table of all records."""
    personal: bool
    """Whether personal fields are in the table."""

    def properties(self) -> dict[str, str]:
        """Return the texts by which a table has its origin."""
        return {f"eventjet.{name}": str(value) for name, value in asdict(self).items()}

    @classmethod
    def read(cls, properties: Mapping[str, Any]) -> Origin | None:
        """Return the origin that a table has; None where eventjet did not make it."""
        texts: dict[str, Any] = {each.name: properties.get(f"eventjet.{each.name}") for each in fields(cls)}
        return None if None in texts.values() else cls(**{**texts, "personal": texts["personal"] == "True"})


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a table is true: each commit of rows carries its mark."""

    position: int
    """The table has all its rows of the log up to this position, and no row beyond it."""
    event: int
    """A digest of the id of the log's event at the position, 0 if there is none; see `event_digest`."""
    row: int
    """The position of the table's last row; 0 for a table without rows, and for a read model."""
    schema: int = 0
    """The schema of the event to which all rows are upcast; 0 for other tables, and where an earlier release wrote."""


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""What deltalake colours its messages with."""
_FRAMES = re.compile(r"^\s*0: ", re.MULTILINE)
"""Where the stack of its native code begins."""


def event_digest(event_id: str | None) -> int:
    """Return 63 bits by which the event at a position is recognized; 0 where the log has no event or no id."""
    return int.from_bytes(sha256(event_id.encode()).digest()[:8], "big") >> 1 if event_id else 0


def taken_by_another_format(url: str, table: str) -> LakeRefused:
    """Return the error for a folder with a table of the other format: its tools would remove the files of this one."""
    reason = "a table of another format is in its folder"
    return LakeRefused(url, table, reason, "Name another URL, or that `--format`.")


class OpenTable(Protocol):
    """One table of a lake, as it was when it was opened or when this process last wrote to it."""

    @property
    def name(self) -> str: ...

    @property
    def origin(self) -> Origin: ...

    @property
    def mark(self) -> Mark: ...

    @property
    def schema(self) -> Any:
        """The table's Arrow schema."""
        ...

    @property
    def last_row(self) -> int:
        """The greatest position in the table now; 0 for a table without rows."""
        ...

    @property
    def row_count(self) -> int: ...

    def widen(self, schema: Any) -> None:
        """Add the columns that the table lacks; only Iceberg also widens decimals."""
        ...

    def append(self, rows: Any, mark: Mark, *, replacing: bool = False) -> None:
        """Append an Arrow table, which may be empty, and move the mark, in one commit.

        With `replacing` the table has these rows alone afterwards, and earlier versions of it keep theirs.

        Raises `LakeFenced` if the mark is not what this process knows any more.
        """
        ...

    def read(self, first: int, last: int) -> Any:
        """Return the rows with positions from `first` to `last` as an Arrow table, in any order."""
        ...

    def read_all(self) -> Any:
        """Return all rows as an Arrow table, in any order."""
        ...


class Store(Protocol):
    """The tables of one lake."""

    widens_decimals: bool

    def close(self) -> None: ...

    def check_commits(self) -> None:
        """Raise `LakeRefused` where of two commits at the same time both might succeed."""

    def names(self) -> list[str]:
        """Return the names of all tables there, also of those that eventjet did not make."""
        ...

    def table(self, name: str) -> OpenTable | None:
        """Open a table; None if there is no such table. Raises `LakeRefused` for a table of somebody else."""
        ...

    def create(self, name: str, schema: Any, origin: Origin, mark: Mark) -> OpenTable:
        """Create an empty table. Raises `LakeFenced` if another writer has created it."""
        ...

    def dropping(self, name: str) -> str:
        """Return in words how a table is dropped."""
        ...


@contextmanager
def open_store(url: str, table_format: str, stream: str, catalog: str | None) -> Generator[Store]:
    """Yield the lake of an application; raises `UsageError`, and `Unreachable` where a package is not installed."""
    if table_format not in FORMATS:
        raise UsageError(f"There is no table format {table_format!r}. Use {' or '.join(FORMATS)}.")
    if catalog is not None and table_format != "iceberg":
        raise UsageError("--catalog is Iceberg's, and Delta tables need none. Add `--format iceberg`, or leave it out.")
    folder = folder_of(url, "lake")
    if folder is not None and set("#%") & set(str(folder)):
        raise UsageError(f"Both formats read paths as URLs, so # and % cannot be in {folder}. Name another folder.")
    kind: Callable[[str, str, str | None], Store] = resolve_name(_STORES[table_format])
    with closing(kind(str(folder or url.rstrip("/")), stream, catalog)) as store:
        yield store


def package(name: str) -> Any:
    """Import a module of the extra `lake`; raises `Unreachable` where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        remedy = 'Install it with `pip install "eventjet[lake]"`.'
        raise Unreachable("The lake", f"the package {error.name} is not installed", remedy) from None


@contextmanager
def translated(url: str, table: str) -> Generator[None]:
    """Raise the faults of a format's package, and of the storage below it, as `LakeRefused`."""
    try:
        yield
    except EventjetError:
        raise
    except Exception as error:
        reason = " ".join(_COLOUR.sub("", _FRAMES.split(str(error))[0]).split()).rstrip(".")
        fault = storage_fault(url, reason)
        if fault is not None:
            raise LakeRefused(url, table, *fault) from error
        remedy = (
            "Look at the storage, its credentials and the table; what was committed stays, and the next run goes on."
        )
        raise LakeRefused(url, table, f"{type(error).__name__}: {reason}", remedy) from error
