"""What an archive holds, as its manifest says. PURE.

An archive is a folder (a local path, or the URL of any Hadoop file system) with two parts:

* `events/<first>-<last>-<try>/part-….parquet` — sealed segments: records as the source `jetstream` has them, by
  position. Every try to write one has a folder of its own, so that no run can harm what another one sealed
* `manifest/<first>-<last>/part-….txt` — one line of JSON a segment, written last: what it does not name does not exist
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import orjson

from eventjet.errors import ArchiveBroken

FORMAT = 1
"""Of the manifest's lines."""
_PATH = re.compile(r"events(?:/(?!\.\.?(?:/|$))[A-Za-z0-9_.=-]+)+")
"""Of a file: below the folder of events, through no `..`, whoever wrote the manifest."""


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """One Parquet file of a segment."""

    path: str
    """Relative to the archive's folder, with `/`."""
    first: int
    """Position of its first record; its positions are unbroken."""
    last: int
    bytes: int
    sha256: str
    """Of the file's bytes, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A sealed range of positions, unbroken."""

    stream: str
    log: str
    """The identity of the log it was read from."""
    first: int
    last: int
    first_time_ns: int
    """When its first event was recorded, in ns since 1970."""
    last_time_ns: int
    last_id: str
    """The id of its last event, by which a log is known to have the same past."""
    files: tuple[ArchivedFile, ...]

    @property
    def events(self) -> int:
        """How many records it holds."""
        return self.last - self.first + 1

    @property
    def name(self) -> str:
        """Of its folders; sorts by position."""
        return f"{self.first:020d}-{self.last:020d}"


@dataclass(frozen=True, slots=True)
class Archive:
    """All sealed segments of one log, which follow one another without a gap."""

    url: str
    segments: tuple[Segment, ...]

    @property
    def stream(self) -> str:
        """Of its log; an empty archive has neither."""
        return self.segments[-1].stream

    @property
    def log(self) -> str:
        """The identity of its log."""
        return self.segments[-1].log

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
        """How many records it holds."""
        return sum(one.events for one in self.segments)

    def files(self, first: int, last: int) -> tuple[ArchivedFile, ...]:
        """Those that hold positions from `first` to `last`, by position."""
        files = (file for segment in self.segments for file in segment.files)
        return tuple(file for file in files if file.first <= last and file.last >= first)


def cut(first: int, last: int, events: int) -> Iterator[tuple[int, int]]:
    """(first, last) of the segments to be made of a range: `events` positions at most, cut at multiples of that."""
    while first <= last:
        end = min(last, ((first - 1) // events + 1) * events)
        yield first, end
        first = end + 1


def dump_segment(segment: Segment) -> str:
    """One line of the manifest."""
    return orjson.dumps({"format": FORMAT, "events": segment.events, **asdict(segment)}).decode()


def load_archive(url: str, lines: Iterable[str]) -> Archive:
    """Out of all the manifest's lines, in any order; raises `ArchiveBroken` for a gap, an overlap or another format."""
    segments = sorted((_segment(url, line) for line in lines), key=lambda one: one.first)
    for before, after in pairwise(segments):
        if (before.stream, before.log) != (after.stream, after.log):
            raise ArchiveBroken(url, f"the segments {before.name} and {after.name} are of different logs")
        if after.first != before.last + 1:
            raise ArchiveBroken(url, f"position {before.last + 1} should follow {before.name}, and {after.name} does")
    return Archive(url, tuple(segments))


def _check_kinds(read: Segment | ArchivedFile) -> None:
    """Raise `TypeError` unless every value is of its field's type."""
    for each in fields(read):
        value = getattr(read, each.name)
        if each.type in ("int", "str") and type(value).__name__ != each.type:
            raise TypeError(f"{each.name} is {value!r}, and not {each.type}")


def _segment(url: str, line: str) -> Segment:
    """One line of the manifest, whose files have to make up the segment without a gap."""
    try:
        found: dict[str, Any] = orjson.loads(line)
        if found["format"] != FORMAT:
            reason = f"its manifest has the format {found['format']!r}, and this eventjet reads {FORMAT}"
            raise ArchiveBroken(url, reason)
        names = ("stream", "log", "first", "last", "first_time_ns", "last_time_ns", "last_id")
        files = tuple(
            ArchivedFile(**{one.name: each[one.name] for one in fields(ArchivedFile)}) for each in found["files"]
        )
        segment = Segment(**{name: found[name] for name in names}, files=files)
        for one in (segment, *files):
            _check_kinds(one)
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ArchiveBroken(url, f"a line of its manifest cannot be read ({error})") from error
    following = segment.first
    for file in segment.files:
        if not _PATH.fullmatch(file.path):
            raise ArchiveBroken(url, f"a file of {segment.name} is not among its own, as its manifest names it")
        if file.first != following or file.last < file.first:
            raise ArchiveBroken(url, f"{file.path} does not go on at position {following}")
        following = file.last + 1
    if following != segment.last + 1:
        raise ArchiveBroken(url, f"the files of {segment.name} end at position {following - 1}")
    return segment
