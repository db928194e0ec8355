"""Archives in memory: one segment of one file with any records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from eventjet.archive.reading import ArchivedFile, ArchiveReader, Segment, dump_segment
from eventjet.codec.headers import RawRecord, event_id_of

_PAGE = 333
"""Records of a page: an odd size."""


class MemoryFiles:
    """Files in memory with the interface of `ArchiveFiles`."""

    url = "the archive"

    def __init__(
        self, records: Sequence[RawRecord], stream: str, log: str, last: int | None, continues: str = ""
    ) -> None:
        self._records = records
        self._stream = stream
        self._log = log
        self._last = last or records[-1][0]
        self._continues = continues

    def manifest_lines(self) -> list[str]:
        first, end = self._records[0], self._records[-1]
        files = (ArchivedFile("events/part", first[0], self._last, 0, ""),)
        ids = (self._stream, self._log)
        segment = Segment(*ids, first[0], self._last, first[1], end[1], event_id_of(end), files, self._continues)
        return [dump_segment(segment)]

    def digests(self, paths: Sequence[str]) -> Mapping[str, tuple[int, str]]:
        return dict.fromkeys(paths, (0, ""))

    def batches(self, path: str, size: int) -> Iterator[Any]:
        for start in range(0, len(self._records), _PAGE):
            yield batch_of(self._records[start : start + _PAGE])


def archive_of(
    records: Sequence[RawRecord],
    log: str = "the-log",
    *,
    stream: str = "bank",
    last: int | None = None,
    continues: str = "",
) -> ArchiveReader:
    """Return an archive of these records, whose manifest ends at `last`."""
    return ArchiveReader(MemoryFiles(records, stream, log, last, continues))


def batch_of(records: Sequence[RawRecord]) -> pa.RecordBatch:
    """Return records as an archive's file has them."""
    positions, times_ns, subjects, headers, bodies = zip(*records, strict=True)
    columns: dict[str, Any] = {
        "position": pa.array(positions, pa.int64()),
        "time_ns": pa.array(times_ns, pa.int64()),
        "subject": pa.array([subject.decode() for subject in subjects], pa.string()),
        "headers": pa.array(headers, pa.binary()),
        "body": pa.array(bodies, pa.binary()),
    }
    return pa.RecordBatch.from_pydict(columns)
