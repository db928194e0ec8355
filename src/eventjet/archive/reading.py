"""An archive read: what its manifest holds, whether its files are what was sealed, and their records in order.

An archive in a folder of this machine needs no Spark for that. Every other one goes through a Spark session, whose
JVM knows the file systems; none of this lists a folder of events, so what no manifest names is never seen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eventjet.archive.manifest import Archive, ArchivedFile, load_archive
from eventjet.codec.envelope import RawRecord
from eventjet.errors import ArchiveBroken, Unreachable, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS = "events"
MANIFEST = "manifest"
COLUMNS = ("position", "time_ns", "subject", "headers", "body")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_PATTERN = re.compile(r"[*?\[\]{}\\\n]")


def folder_of(url: str) -> Path | None:
    """The folder of this machine that a URL names, without a scheme or with `file:`; None for any other.

    Raises `UsageError` for a URL that no archive can have.
    """
    if not url or _PATTERN.search(url):
        raise UsageError(f"{url!r} cannot name an archive. Give a folder, or the URL of one, without *?[]{{}} in it.")
    scheme = _SCHEME.match(url)
    if scheme is None:
        return Path(url).absolute()
    if scheme[1].lower() != "file":
        _refuse_secret(url)
        return None
    path = url[len(scheme[0]) :]
    return Path(re.sub(r"^//(localhost)?(?=/)", "", path)).absolute()


def url_for_spark(url: str) -> str:
    """The URL as Hadoop takes it, whatever its default file system is; without a `/` at the end."""
    folder = folder_of(url)
    return url.rstrip("/") if folder is None else f"file://{folder}"


def read_manifest(url: str, spark: SparkSession | None = None) -> Archive:
    """What an archive holds: nothing where there is none yet. Raises `ArchiveBroken` when that does not fit together.

    `spark` is for archives that are not in a folder of this machine; without it those raise `UsageError`.
    """
    folder = folder_of(url)
    if folder is not None:
        return load_archive(url, list(_lines(url, folder)))
    from eventjet.spark.archive_frames import manifest_lines

    return load_archive(url, manifest_lines(_needed(url, spark), url))


def check_files(archive: Archive, first: int, last: int, spark: SparkSession | None = None) -> None:
    """Raise `ArchiveBroken` unless every file with positions from `first` to `last` has the bytes that were sealed."""
    files = archive.files(first, last)
    folder = folder_of(archive.url)
    if folder is None:
        from eventjet.spark.archive_frames import digests

        found = digests(_needed(archive.url, spark), archive.url, [file.path for file in files])
    else:
        found = {file.path: _digest(archive.url, folder, file.path) for file in files}
    for file in files:
        size, sha256 = found[file.path]
        if (size, sha256) != (file.bytes, file.sha256):
            reason = f"{file.path} was changed: it has {size} bytes and the sha256 {sha256[:12]}…"
            raise ArchiveBroken(archive.url, f"{reason}, and {file.bytes} bytes and {file.sha256[:12]}… were sealed")


def archived_records(
    archive: Archive, start: int, end: int, *, batch: int = 2_000, spark: SparkSession | None = None
) -> Generator[list[RawRecord]]:
    """Yield the records at `start` <= position < `end` as `read_range` does, in lists of up to `batch`.

    Raises `ArchiveBroken` at the first position that is not there; checksums are for `check_files`. `spark` as above:
    it then brings one file after the other.
    """
    position = max(start, 1)
    for file in archive.files(position, end - 1) if position < end else ():
        for records in _records(archive.url, file, batch, spark):
            wanted = [one for one in records if position <= one[0] < end]
            for expected, (found, *_) in enumerate(wanted, position):
                if found != expected:
                    raise ArchiveBroken(archive.url, f"{file.path} has position {found} where {expected} should be")
            position += len(wanted)
            if wanted:
                yield wanted
    if position < end:
        raise ArchiveBroken(archive.url, f"position {position} is not in it")


def _lines(url: str, folder: Path) -> Iterator[str]:
    try:
        for file in sorted((folder / MANIFEST).glob("*/part-*")):
            yield from filter(None, file.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ArchiveBroken(url, f"its manifest cannot be read ({error})") from error


def _digest(url: str, folder: Path, path: str) -> tuple[int, str]:
    try:
        with (folder / path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return file.tell(), digest.hexdigest()
    except OSError as error:
        raise ArchiveBroken(url, f"{path} cannot be read ({error.strerror or error})") from error


def _records(url: str, file: ArchivedFile, batch: int, spark: SparkSession | None) -> Iterator[list[RawRecord]]:
    arrow = _arrow("pyarrow")
    try:
        for found in _batches(url, file, batch, spark):
            position, time_ns, subject, headers, body = (found.column(name) for name in COLUMNS)
            # Bytes stay bytes until a fold decodes them.
            columns = (position, time_ns, subject.cast(arrow.binary()), headers, body)
            yield list(zip(*(column.to_pylist() for column in columns), strict=True))
    except (OSError, arrow.ArrowException, KeyError) as error:
        raise ArchiveBroken(url, f"{file.path} cannot be read ({error})") from error


def _batches(url: str, file: ArchivedFile, batch: int, spark: SparkSession | None) -> Iterator[Any]:
    folder = folder_of(url)
    if folder is None:
        from eventjet.spark.archive_frames import arrow_table

        yield from arrow_table(_needed(url, spark), url, file.path).to_batches(max_chunksize=batch)
        return
    with _arrow("pyarrow.parquet").ParquetFile(folder / file.path) as opened:
        yield from opened.iter_batches(batch_size=batch, columns=list(COLUMNS))


def _arrow(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        remedy = 'Install it with `pip install "eventjet[spark]"`.'
        raise Unreachable("The archive", "the package pyarrow, which reads Parquet, is not installed", remedy) from None


def _needed(url: str, spark: SparkSession | None) -> SparkSession:
    if spark is None:
        raise UsageError(
            f"{url} is not a folder of this machine, and only Spark reads other file systems. Use `--engine spark`."
        )
    return spark


def _refuse_secret(url: str) -> None:
    try:
        secret = urlsplit(url).password
    except ValueError as error:
        raise UsageError(f"{url!r} is not a URL ({error}). Write it as scheme://host/folder.") from None
    if secret:
        raise UsageError(
            "The URL of an archive is shown and may not hold a password. Give the credentials to Spark's configuration."
        )
