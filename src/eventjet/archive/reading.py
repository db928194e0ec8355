"""Read an archive: its manifest, the check that its files are as they were sealed, and its records in order.

An archive is a folder (a local path, or the URL of any Hadoop file system) with two parts:

* `events/<first>-<last>-<try>/part-….parquet` — the sealed segments: records with the columns of the source
  `jetstream`, by position. Every try to write a segment has a folder of its own, so that no run can harm a segment that
  another run sealed
* `manifest/<first>-<last>/part-….txt` — one line of JSON for each segment, written last: a file that the manifest does
  not name is not part of the archive

No function here lists a folder of events, so files that no manifest names are never read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson

from eventjet.codec.headers import RawRecord
from eventjet.errors import ArchiveBroken, Unreachable, UsageError
from eventjet.log.integrity import continued_logs
from eventjet.urls import parse

FORMAT = 1
"""The format version of the manifest's lines."""
EVENTS = "events"
MANIFEST = "manifest"
COLUMNS = ("position", "time_ns", "subject", "headers", "body")

_PATH = re.compile(r"events(?:/(?!\.\.?(?:/|$))[A-Za-z0-9_.=-]+)+")
"""The allowed paths of files: below the folder of events and without `..`, even if the manifest was forged."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_PATTERN = re.compile(r"[*?\[\]{}\\\n]")


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """One Parquet file of a segment."""

    path: str
    """Relative to the archive's folder, with `/`."""
    first: int
    """Position of its first record; no position is missing up to `last`."""
    last: int
    bytes: int
    sha256: str
    """SHA-256 of the file's bytes, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A sealed range of positions, of which none is missing."""

    stream: str
    log: str
    """The identity of the log from which the segment was read."""
    first: int
    last: int
    first_time_ns: int
    """The time of its first event, in ns since 1970."""
    last_time_ns: int
    last_id: str
    """The id of its last event, by which a log with the same past is recognized."""
    files: tuple[ArchivedFile, ...]
    continues: str = ""
    """`identity@position` of each earlier log whose past the log has up to that position; empty without a promotion."""

    @property
    def events(self) -> int:
        """The number of records in the segment."""
        return self.last - self.first + 1

    @property
    def name(self) -> str:
        """The beginning of the names of its folders; names sort by position."""
        return f"{self.first:020d}-{self.last:020d}"


@dataclass(frozen=True, slots=True)
class Archive:
    """All sealed segments of one log, which follow one another without a gap."""

    url: str
    segments: tuple[Segment, ...]

    @property
    def stream(self) -> str:
        """The stream of its log; an archive without segments raises `IndexError` here, and for `log`."""
        return self.segments[-1].stream

    @property
    def log(self) -> str:
        """The identity of its log."""
        return self.segments[-1].log

    @property
    def continues(self) -> str:
        """`identity@position` of each earlier log whose past it has, up to that position."""
        ends = continued_logs(self.segments[-1].continues)
        return " ".join(f"{log}@{min(end, self.last)}" for log, end in ends.items())

    @property
    def first(self) -> int:
        """Position of the first record; 0 in an empty archive."""
        return self.segments[0].first if self.segments else 0

    @property
    def last(self) -> int:
        """Position of the last record; 0 in an empty archive."""
        return self.segments[-1].last if self.segments else 0

    @property
    def events(self) -> int:
        """The number of records in the archive."""
        return sum(segment.events for segment in self.segments)

    def files(self, first: int, last: int) -> tuple[ArchivedFile, ...]:
        """Return the files that have positions from `first` to `last`, ordered by position."""
        files = (file for segment in self.segments for file in segment.files)
        return tuple(file for file in files if file.first <= last and file.last >= first)


def segment_ranges(
    first: int, last: int, events: int, end_of_save: Callable[[int], int] = lambda position: position
) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each segment of a range, cut at multiples of `events`, or where the save there ends.

    `end_of_save` returns the last position of the save that has a position.
    """
    while first <= last:
        end = end_of_save(min(last, ((first - 1) // events + 1) * events))
        yield first, end
        first = end + 1


def dump_segment(segment: Segment) -> str:
    """Return the manifest's line for a segment."""
    line = {"format": FORMAT, "events": segment.events, **asdict(segment)}
    if not segment.continues:
        del line["continues"]
    return orjson.dumps(line).decode()


def load_archive(url: str, lines: Iterable[str]) -> Archive:
    """Read the manifest's lines, in any order; raises `ArchiveBroken` for a gap, an overlap or another format."""
    segments = sorted((_parse_segment(url, line) for line in lines), key=lambda segment: segment.first)
    for previous, following in pairwise(segments):
        ends = {following.log: previous.last, **continued_logs(following.continues)}
        if previous.stream != following.stream or ends.get(previous.log, 0) < previous.last:
            raise ArchiveBroken(url, f"the segments {previous.name} and {following.name} are of different logs")
        if following.first != previous.last + 1:
            raise ArchiveBroken(
                url, f"position {previous.last + 1} should follow {previous.name}, and {following.name} does"
            )
    return Archive(url, tuple(segments))


def _check_types(part: Segment | ArchivedFile) -> None:
    """Raise `TypeError` unless every number and text has its field's type."""
    for field in fields(part):
        value = getattr(part, field.name)
        if field.type in ("int", "str") and type(value).__name__ != field.type:
            raise TypeError(f"{field.name} is {value!r}, and not {field.type}")


def _parse_segment(url: str, line: str) -> Segment:
    """Read one line of the manifest; raises `ArchiveBroken` unless its files make up the segment without a gap."""
    try:
        value: dict[str, Any] = orjson.loads(line)
        if value["format"] != FORMAT:
            reason = f"its manifest has the format {value['format']!r}, and this eventjet reads {FORMAT}"
            raise ArchiveBroken(url, reason)
        names = ("stream", "log", "first", "last", "first_time_ns", "last_time_ns", "last_id")
        files = tuple(
            ArchivedFile(**{field.name: file[field.name] for field in fields(ArchivedFile)}) for file in value["files"]
        )
        texts = {name: value[name] for name in names}
        segment = Segment(**texts, files=files, continues=value.get("continues", ""))
        for part in (segment, *files):
            _check_types(part)
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ArchiveBroken(url, f"a line of its manifest cannot be read ({error})") from error
    next_position = segment.first
    for file in segment.files:
        if not _PATH.fullmatch(file.path):
            raise ArchiveBroken(url, f"a file of {segment.name} is not among its own, as its manifest names it")
        if file.first != next_position or file.last < file.first:
            raise ArchiveBroken(url, f"{file.path} does not go on at position {next_position}")
        next_position = file.last + 1
    if next_position != segment.last + 1:
        raise ArchiveBroken(url, f"the files of {segment.name} end at position {next_position - 1}")
    return segment


class ArchiveFiles(Protocol):
    """Access to the files of one archive; paths are relative to its folder, with `/`."""

    @property
    def url(self) -> str: ...

    def manifest_lines(self) -> Sequence[str]:
        """Return all lines of the manifest, none when there is no archive yet; raises `ArchiveBroken`."""
        ...

    def digests(self, paths: Sequence[str]) -> Mapping[str, tuple[int, str]]:
        """Return (bytes, sha256) of each file; raises `ArchiveBroken` for one that cannot be read."""
        ...

    def batches(self, path: str, size: int) -> Iterator[Any]:
        """Yield the records of a file as Arrow batches of up to `size` records, ordered by position."""
        ...


class FolderFiles:
    """The files of an archive in a folder of this machine."""

    def __init__(self, url: str) -> None:
        """Open the folder that `url` names; raises `UsageError` for a URL of another file system."""
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
        except PermissionError as error:
            remedy = "Give this user the right to read all files of the archive."
            raise ArchiveBroken(self.url, f"its manifest cannot be read ({error})", remedy) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ArchiveBroken(self.url, f"its manifest cannot be read ({error})") from error
        return lines

    def digests(self, paths: Sequence[str]) -> dict[str, tuple[int, str]]:
        return {path: self._digest(path) for path in paths}

    def batches(self, path: str, size: int) -> Iterator[Any]:
        self._check_inside(self._folder / path)
        with import_arrow("pyarrow.parquet").ParquetFile(self._folder / path) as file:
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
        """Raise `ArchiveBroken` for a link out of the folder, which could expose other files of this user."""
        if not file.resolve().is_relative_to(self._folder.resolve()):
            raise ArchiveBroken(self.url, f"{file.name} is a link that leads out of its folder")


class ArchiveReader:
    """An archive's manifest and records; creating it raises `ArchiveBroken` when the manifest is inconsistent."""

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
        """Yield the records at `start` <= position < `end`, as `read_range` does, in lists of up to `batch`.

        Raises `ArchiveBroken` at the first missing position. Checksums are not compared here, but by `check`.
        """
        url = self.manifest.url
        position = max(start, 1)
        for file in self.manifest.files(position, end - 1) if position < end else ():
            for records in self._records_of(file.path, batch):
                wanted = [record for record in records if position <= record[0] < end]
                positions = [record[0] for record in wanted]
                if positions != (expected := list(range(position, position + len(wanted)))):
                    actual, due = next(pair for pair in zip(positions, expected, strict=True) if pair[0] != pair[1])
                    raise ArchiveBroken(url, f"{file.path} has position {actual} where {due} should be")
                position += len(wanted)
                if wanted:
                    yield wanted
        if position < end:
            raise ArchiveBroken(url, f"position {position} is not in it")

    def record(self, position: int) -> RawRecord:
        """Return the record at a position; raises the errors of `records`."""
        return next(self.records(position, position + 1))[0]

    def _records_of(self, path: str, batch: int) -> Iterator[list[RawRecord]]:
        arrow = import_arrow("pyarrow")
        try:
            for columns in self._files.batches(path, batch):
                position, time_ns, subject, headers, body = (columns.column(name) for name in COLUMNS)
                # Subjects are cast back to bytes, because a raw record has bytes until a fold decodes it.
                fields = (position, time_ns, subject.cast(arrow.binary()), headers, body)
                yield list(zip(*(field.to_pylist() for field in fields), strict=True))
        except (OSError, arrow.ArrowException, KeyError) as error:
            raise ArchiveBroken(self.manifest.url, f"{path} cannot be read ({error})") from error


def nothing_in(url: str) -> ArchiveBroken:
    """Return the error for an archive without events, or whose folder does not exist."""
    folder = folder_of(url)
    is_missing = folder is not None and not folder.exists()
    reason = "there is no such folder" if is_missing else "nothing is in it"
    return ArchiveBroken(url, reason, "Name what `eventjet archive` made, or a copy of it.")


def folder_of(url: str, what: Literal["archive", "lake"] = "archive") -> Path | None:
    """Return the folder of a URL without a scheme, or with `file:`; None for others. Raises `UsageError`."""
    if not url or _PATTERN.search(url):
        raise UsageError(
            f"What is given cannot name the {what}. Give a folder, or the URL of one, without *?[]{{}} in it."
        )
    scheme = _SCHEME.match(url)
    if scheme is None:
        return Path(url).absolute()
    if scheme[1].lower() != "file":
        parsed = parse(url)
        if parsed is None or parsed.password is not None:
            place = "Spark's configuration" if what == "archive" else "the environment, as AWS_ACCESS_KEY_ID and others"
            raise UsageError(
                f"The URL of the {what} is shown and may not hold a password. Write it as scheme://host/folder, and "
                f"give the credentials to {place}."
            )
        return None
    path = url[len(scheme[0]) :]
    return Path(re.sub(r"^//(localhost)?(?=/)", "", path)).absolute()


def import_arrow(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        remedy = 'Install it with `pip install "eventjet[spark]"`.'
        raise Unreachable("The archive", "the package pyarrow, which reads Parquet, is not installed", remedy) from None
