"""A manifest of an archive is read back as it was written, and refused when it is inconsistent."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventjet.archive.reading import (
    Archive,
    ArchivedFile,
    ArchiveReader,
    FolderFiles,
    Segment,
    dump_segment,
    folder_of,
    load_archive,
    segment_ranges,
)
from eventjet.errors import ArchiveBroken, UsageError
from eventjet.spark.archiving import url_for_spark


def segment(first: int, last: int, *edges: int, log: str = "log-1") -> Segment:
    """Return a segment whose files begin at `first` and at `edges`."""
    starts = (first, *edges)
    ends = (*(edge - 1 for edge in edges), last)
    files = tuple(
        ArchivedFile(f"events/{a}/{b}.parquet", a, b, 10, "0" * 64) for a, b in zip(starts, ends, strict=True)
    )
    return Segment("bank", log, first, last, 1, 2, f"event-{last}", files)


SEALED = (segment(3, 10, 5, 6), segment(11, 20), segment(21, 21))


def test_segments_are_read_back_in_the_order_of_positions() -> None:
    archive = load_archive("a", [dump_segment(sealed) for sealed in reversed(SEALED)])
    assert archive == Archive("a", SEALED)
    assert (archive.first, archive.last, archive.events) == (3, 21, 19)
    assert [part.name for part in archive.segments] == sorted(part.name for part in archive.segments)


def test_fields_of_a_later_release_are_ignored() -> None:
    line = orjson.loads(dump_segment(SEALED[1]))
    files = [{**file, "added_later": 1} for file in line["files"]]
    assert load_archive("a", [altered(files=files, added_later=1)]).segments == SEALED[1:2]


def test_an_archive_without_lines_is_empty() -> None:
    archive = load_archive("a", [])
    assert (archive.first, archive.last, archive.events, archive.files(1, archive.last)) == (0, 0, 0, ())


def test_the_files_of_a_range_are_those_that_overlap_it() -> None:
    archive = Archive("a", SEALED)
    assert [(file.first, file.last) for file in archive.files(5, 11)] == [(5, 5), (6, 10), (11, 20)]
    assert len(archive.files(1, archive.last)) == 5
    assert archive.files(22, 30) == archive.files(1, 2) == ()


def altered(**values: object) -> str:
    """Return a line of the manifest with some of its values changed."""
    return orjson.dumps({**orjson.loads(dump_segment(SEALED[1])), **values}).decode()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([dump_segment(SEALED[0]), dump_segment(SEALED[2])], "position 11 should follow"),
        ([dump_segment(SEALED[1]), dump_segment(segment(15, 30))], "position 21 should follow"),
        ([dump_segment(SEALED[0]), dump_segment(segment(11, 20, log="log-2"))], "of different logs"),
        ([altered(format=9)], "the format 9, and this eventjet reads 1"),
        (["{"], "a line of its manifest cannot be read"),
        (["[]"], "a line of its manifest cannot be read"),
        ([altered(last_id=None, files=[{}])], "a line of its manifest cannot be read"),
        ([altered(first="11")], "a line of its manifest cannot be read"),
        ([altered(last="11")], "a line of its manifest cannot be read"),
        ([altered(last=25)], "end at position 20"),
        ([dump_segment(replace(SEALED[0], files=SEALED[0].files[::2]))], "does not go on at position 5"),
    ],
)
def test_an_inconsistent_manifest_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ArchiveBroken, match=message):
        load_archive("a", lines)


def test_a_segment_ends_at_the_end_of_a_save() -> None:
    ends = {4: 4, 5: 7, 10: 12, 15: 15, 16: 16}
    assert list(segment_ranges(3, 16, 5, ends.__getitem__)) == [(3, 7), (8, 12), (13, 15), (16, 16)]
    assert list(segment_ranges(3, 4, 5, ends.__getitem__)) == [(3, 4)]


@given(st.integers(1, 10**9), st.integers(0, 5_000), st.integers(1, 2_000))
def test_segments_end_at_the_same_positions_wherever_a_run_begins(first: int, length: int, events: int) -> None:
    ranges = list(segment_ranges(first, first + length - 1, events))
    assert [position for a, b in ranges for position in range(a, b + 1)] == list(range(first, first + length))
    assert all(b % events == 0 for _, b in ranges[:-1])
    assert all(b - a < events for a, b in ranges)
    if len(ranges) > 1:
        assert list(segment_ranges(ranges[1][0], ranges[-1][1], events)) == ranges[1:]


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("/data/a", "/data/a"),
        ("/data/a/", "/data/a"),
        ("file:/data/a b", "/data/a b"),
        ("file:///data/a%20b", "/data/a%20b"),
        ("file://localhost/data/a", "/data/a"),
        ("FILE:///data", "/data"),
        ("hdfs://name:8020/data", None),
        ("s3a://bucket/data", None),
    ],
)
def test_a_local_folder_is_recognised_by_its_url(url: str, folder: str | None) -> None:
    assert folder_of(url) == (None if folder is None else Path(folder))


def test_a_url_for_spark_names_its_file_system() -> None:
    assert url_for_spark("/data/a/") == "file:///data/a"
    assert url_for_spark("hdfs://name/data/") == "hdfs://name/data"
    assert url_for_spark("data").startswith("file:///")


@pytest.mark.parametrize("url", ["", "/data/*", "hdfs://name/{a,b}", "s3a://key:secret@bucket/a", "hdfs://[name/a"])
def test_an_invalid_url_of_an_archive_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        folder_of(url)
    assert "secret" not in str(caught.value)


def test_an_archive_outside_of_a_local_folder_needs_spark() -> None:
    with pytest.raises(UsageError, match="--engine spark"):
        FolderFiles("hdfs://name/a")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    lines = tmp_path / "manifest" / "1" / "part-0.txt"
    lines.parent.mkdir(parents=True)
    lines.write_text("\n".join(map(dump_segment, SEALED)))
    archive = ArchiveReader(FolderFiles(str(tmp_path)))
    for reads in (lambda: archive.check(1, 21), lambda: list(archive.records(3, 22))):
        with pytest.raises(ArchiveBroken, match=r"events/3/4\.parquet cannot be read"):
            reads()


@pytest.mark.parametrize(
    "path",
    [
        "../other/x.parquet",
        "events/../../x.parquet",
        "events/..",
        "events/a/../../../x",
        "events/./x",
        "events//etc/passwd",
        "/etc/passwd",
        "file:///etc/passwd",
        "events/%2e%2e/x",
        "events/a\\..\\x",
        "events/a\n",
        "events/*/x",
        "events",
        "",
        None,
        7,
    ],
)
def test_a_manifest_with_a_path_outside_of_the_archive_is_refused(path: object) -> None:
    file = {**orjson.loads(dump_segment(SEALED[2]))["files"][0], "path": path}
    line = orjson.dumps({**orjson.loads(dump_segment(SEALED[2])), "files": [file]}).decode()
    with pytest.raises(ArchiveBroken, match=r"not among its own|cannot be read"):
        load_archive("a", [line])


@pytest.mark.parametrize("linked", ["file", "folder", "manifest"])
def test_a_link_out_of_the_archive_is_refused(tmp_path: Path, linked: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "part-1").write_bytes(b"canary")
    folder = tmp_path / "archive"
    (folder / "manifest" / "1").mkdir(parents=True)
    (folder / "events").mkdir()
    linked_segment = replace(SEALED[2], files=(replace(SEALED[2].files[0], path="events/21/part-1"),))
    if linked == "manifest":
        (folder / "manifest" / "1" / "part-1").symlink_to(secret / "part-1")
    else:
        (folder / "manifest" / "1" / "part-1").write_text(dump_segment(linked_segment) + "\n")
    if linked == "folder":
        (folder / "events" / "21").symlink_to(secret)
    if linked == "file":
        (folder / "events" / "21").mkdir()
        (folder / "events" / "21" / "part-1").symlink_to(secret / "part-1")
    with pytest.raises(ArchiveBroken, match="leads out of its folder"):
        ArchiveReader(FolderFiles(str(folder))).check(1, 100)
    if linked != "manifest":
        with pytest.raises(ArchiveBroken, match="leads out of its folder"):
            ArchiveReader(FolderFiles(str(folder))).record(21)


def test_a_changed_file_is_reported_without_its_new_hash(tmp_path: Path) -> None:
    (tmp_path / "manifest" / "1").mkdir(parents=True)
    (tmp_path / "manifest" / "1" / "part-1").write_text(dump_segment(SEALED[2]) + "\n")
    (tmp_path / "events" / "21").mkdir(parents=True)
    (tmp_path / SEALED[2].files[0].path).write_bytes(b"canary")
    with pytest.raises(ArchiveBroken, match="was changed") as raised:
        ArchiveReader(FolderFiles(str(tmp_path))).check(1, 100)
    assert hashlib.sha256(b"canary").hexdigest()[:8] not in str(raised.value)


def test_the_folder_of_an_archive_can_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "manifest" / "1").mkdir(parents=True)
    (tmp_path / "real" / "manifest" / "1" / "part-1").write_text(dump_segment(SEALED[2]) + "\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert ArchiveReader(FolderFiles(str(tmp_path / "link"))).manifest.last == 21
