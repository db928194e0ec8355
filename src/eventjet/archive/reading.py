"""An archive read: what its manifest holds, whether its files are what was sealed, and their records in order.

Nothing here lists a folder of events, so what no manifest names is never seen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from eventjet.archive.manifest import Archive, load_archive
from eventjet.codec.headers import RawRecord
from eventjet.errors import ArchiveBroken, Unreachable, UsageError
from eventjet.urls import parse

EVENTS = "events"
MANIFEST = "manifest"
COLUMNS = ("position", "time_ns", "subject", "headers", "body")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_PATTERN = re.compile(r"[*?\[\]{}\\\n]")


class ArchiveFiles(Protocol):
    """How the files of one archive are reached. Paths are relative to its folder, with `/`."""

    @property
    def url(self) -> str: ...

    def manifest_lines(self) -> Sequence[str]:
        """All lines of the manifest; none where there is no archive yet. Raises `ArchiveBroken`."""
        ...

    def digests(self, paths: Sequence[str]) -> Mapping[str, tuple[int, str]]:
        """(bytes, sha256) of each file; raises `ArchiveBroken` for one that cannot be read."""
        ...

    def batches(self, path: str, size: int) -> Iterator[Any]:
        """The Arrow batches of a file's records, by position, each of `size` records at most."""
        ...


class FolderFiles:
    """The files of an archive in a folder of this machine."""

    def __init__(self, url: str) -> None:
        """Raises `UsageError` for a URL that names anything else."""
        folder = folder_of(url)
        if folder is None:
            raise UsageError(
                f"{url} is not a folder of this machine, and only Spark reads other file systems. Use `--engine spark`."
            )
        self.url = url
        self._folder = folder

    def manifest_lines(self) -> list[str]:
        lines: list[str] = []
        try:
            for file in sorted((self._folder / MANIFEST).glob("*/part-*")):
                self._check_inside(file)
                lines += filter(None, file.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise ArchiveBroken(self.url, f"its manifest cannot be read ({error})") from error
        return lines

    def digests(self, paths: Sequence[str]) -> dict[str, tuple[int, str]]:
        return {path: self._digest(path) for path in paths}

    def batches(self, path: str, size: int) -> Iterator[Any]:
        self._check_inside(self._folder / path)
        with _arrow("pyarrow.parquet").ParquetFile(self._folder / path) as file:
            yield from file.iter_batches(batch_size=size, columns=list(COLUMNS))

    def _digest(self, path: str) -> tuple[int, str]:
        try:
            self._check_inside(self._folder / path)
            with (self._folder / path).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
                return file.tell(), digest.hexdigest()
        except OSError as error:
            raise ArchiveBroken(self.url, f"{path} cannot be read ({error.strerror or error})") from error

    def _check_inside(self, file: Path) -> None:
        """Whoever writes the archive decides on what is in it, and on nothing else that this user may read."""
        if not file.resolve().is_relative_to(self._folder.resolve()):
            raise ArchiveBroken(self.url, f"{file.name} is a link that leads out of its folder")


class ArchiveReader:
    """An archive with its files. Raises `ArchiveBroken` when what its manifest says does not fit together."""

    def __init__(self, files: ArchiveFiles) -> None:
        self.manifest: Archive = load_archive(files.url, files.manifest_lines())
        self._files = files

    def check(self, first: int, last: int) -> None:
        """Raise `ArchiveBroken` unless the files of the positions `first` to `last` have the bytes that were sealed."""
        files = self.manifest.files(first, last)
        digests = self._files.digests([file.path for file in files])
        for file in files:
            size, sha256 = digests[file.path]
            if (size, sha256) != (file.bytes, file.sha256):
                sealed = f"{file.bytes} bytes with the sha256 {file.sha256[:12]}…"
                raise ArchiveBroken(self.manifest.url, f"{file.path} was changed: it is not what was sealed, {sealed}")

    def records(self, start: int, end: int, *, batch: int = 2_000) -> Generator[list[RawRecord]]:
        """Yield the records at `start` <= position < `end` as `read_range` does, in lists of up to `batch`.

        Raises `ArchiveBroken` at the first position that is not there; `check` compares checksums.
        """
        url = self.manifest.url
        position = max(start, 1)
        for file in self.manifest.files(position, end - 1) if position < end else ():
            for records in self._records_of(file.path, batch):
                wanted = [record for record in records if position <= record[0] < end]
                found = [record[0] for record in wanted]
                if found != (expected := list(range(position, position + len(wanted)))):
                    there, due = next(pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1])
                    raise ArchiveBroken(url, f"{file.path} has position {there} where {due} should be")
                position += len(wanted)
                if wanted:
                    yield wanted
        if position < end:
            raise ArchiveBroken(url, f"position {position} is not in it")

    def record(self, position: int) -> RawRecord:
        """The one at a position; raises as `records` does."""
        return next(self.records(position, position + 1))[0]

    def _records_of(self, path: str, batch: int) -> Iterator[list[RawRecord]]:
        arrow = _arrow("pyarrow")
        try:
            for columns in self._files.batches(path, batch):
                position, time_ns, subject, headers, body = (columns.column(name) for name in COLUMNS)
                # Bytes stay bytes until a fold decodes them.
                fields = (position, time_ns, subject.cast(arrow.binary()), headers, body)
                yield list(zip(*(field.to_pylist() for field in fields), strict=True))
        except (OSError, arrow.ArrowException, KeyError) as error:
            raise ArchiveBroken(self.manifest.url, f"{path} cannot be read ({error})") from error


def folder_of(url: str) -> Path | None:
    """The folder of this machine that a URL names, without a scheme or with `file:`; None for any other.

    Raises `UsageError` for a URL that no archive can have.
    """
    if not url or _PATTERN.search(url):
        raise UsageError(
            "What is given cannot name an archive. Give a folder, or the URL of one, without *?[]{} in it."
        )
    scheme = _SCHEME.match(url)
    if scheme is None:
        return Path(url).absolute()
    if scheme[1].lower() != "file":
        found = parse(url)
        if found is None or found.password is not None:
            said = "The URL of an archive is shown and may not hold a password."
            remedy = "Write it as scheme://host/folder, and give the credentials to Spark's configuration."
            raise UsageError(f"{said} {remedy}")
        return None
    path = url[len(scheme[0]) :]
    return Path(re.sub(r"^//(localhost)?(?=/)", "", path)).absolute()


def _arrow(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        remedy = 'Install it with `pip install "eventjet[spark]"`.'
        raise Unreachable("The archive", "the package pyarrow, which reads Parquet, is not installed", remedy) from None
