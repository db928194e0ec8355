"""What a manifest says of an archive: written and read the same, and refused when it does not hang together."""

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
    """One whose files begin at `first` and at `edges`."""
    starts = (first, *edges)
    ends = (*(edge - 1 for edge in edges), last)
    files = tuple(
        ArchivedFile(f"events/{a}/{b}.parquet", a, b, 10, "0" * 64) for a, b in zip(starts, ends, strict=True)
    )
    return Segment("bank", log, first, last, 1, 2, f"event-{last}", files)


SEALED = (segment(3, 10, 5, 6), segment(11, 20), segment(21, 21))


def test_what_was_written_is_read_in_the_order_of_positions() -> None:
    archive = load_archive("a", [dump_segment(one) for one in reversed(SEALED)])
    assert archive == Archive("a", SEALED)
    assert (archive.first, archive.last, archive.events) == (3, 21, 19)
    assert [one.name for one in archive.segments] == sorted(one.name for one in archive.segments)


def test_what_a_later_release_adds_to_a_line_is_passed_over() -> None:
    told = orjson.loads(dump_segment(SEALED[1]))
    files = [{**each, "added_later": 1} for each in told["files"]]
    assert load_archive("a", [altered(files=files, added_later=1)]).segments == SEALED[1:2]


def test_an_archive_without_lines_is_empty() -> None:
    archive = load_archive("a", [])
    assert (archive.first, archive.last, archive.events, archive.files(1, archive.last)) == (0, 0, 0, ())


def test_the_files_of_a_range_are_those_that_hold_some_of_it() -> None:
    archive = Archive("a", SEALED)
    assert [(file.first, file.last) for file in archive.files(5, 11)] == [(5, 5), (6, 10), (11, 20)]
    assert len(archive.files(1, archive.last)) == 5
    assert archive.files(22, 30) == archive.files(1, 2) == ()


def altered(**values: object) -> str:
    """A line of the manifest with some of its values changed."""
    return orjson.dumps({**orjson.loads(dump_segment(SEALED[1])), **values}).decode()


@pytest.mark.parametrize(
    ("lines", "said"),
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
def test_a_manifest_that_does_not_hang_together_is_refused(lines: list[str], said: str) -> None:
    with pytest.raises(ArchiveBroken, match=said):
        load_archive("a", lines)


def test_a_segment_ends_where_a_save_ends() -> None:
    ends = {4: 4, 5: 7, 10: 12, 15: 15, 16: 16}
    assert list(segment_ranges(3, 16, 5, ends.__getitem__)) == [(3, 7), (8, 12), (13, 15), (16, 16)]
    assert list(segment_ranges(3, 4, 5, ends.__getitem__)) == [(3, 4)]


@given(st.integers(1, 10**9), st.integers(0, 5_000), st.integers(1, 2_000))
def test_segments_are_cut_at_the_same_positions_wherever_a_run_begins(first: int, length: int, events: int) -> None:
    found = list(segment_ranges(first, first + length - 1, events))
    assert [position for a, b in found for position in range(a, b + 1)] == list(range(first, first + length))
    assert all(b % events == 0 for _, b in found[:-1])
    assert all(b - a < events for a, b in found)
    if len(found) > 1:
        assert list(segment_ranges(found[1][0], found[-1][1], events)) == found[1:]


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
def test_a_folder_of_this_machine_is_known_by_its_url(url: str, folder: str | None) -> None:
    assert folder_of(url) == (None if folder is None else Path(folder))


def test_spark_is_told_the_file_system() -> None:
    assert url_for_spark("/data/a/") == "file:///data/a"
    assert url_for_spark("hdfs://name/data/") == "hdfs://name/data"
    assert url_for_spark("data").startswith("file:///")


@pytest.mark.parametrize("url", ["", "/data/*", "hdfs://name/{a,b}", "s3a://key:secret@bucket/a", "hdfs://[name/a"])
def test_a_url_that_no_archive_can_have_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        folder_of(url)
    assert "secret" not in str(caught.value)


def test_only_spark_reads_what_is_not_in_a_folder_of_this_machine() -> None:
    with pytest.raises(UsageError, match="--engine spark"):
        FolderFiles("hdfs://name/a")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
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
def test_a_manifest_names_nothing_outside_of_the_archive(path: object) -> None:
    file = {**orjson.loads(dump_segment(SEALED[2]))["files"][0], "path": path}
    line = orjson.dumps({**orjson.loads(dump_segment(SEALED[2])), "files": [file]}).decode()
    with pytest.raises(ArchiveBroken, match=r"not among its own|cannot be read"):
        load_archive("a", [line])


@pytest.mark.parametrize("linked", ["file", "folder", "manifest"])
def test_a_link_out_of_the_archive_shows_nothing_of_what_it_leads_to(tmp_path: Path, linked: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "part-1").write_bytes(b"canary")
    folder = tmp_path / "archive"
    (folder / "manifest" / "1").mkdir(parents=True)
    (folder / "events").mkdir()
    one = replace(SEALED[2], files=(replace(SEALED[2].files[0], path="events/21/part-1"),))
    if linked == "manifest":
        (folder / "manifest" / "1" / "part-1").symlink_to(secret / "part-1")
    else:
        (folder / "manifest" / "1" / "part-1").write_text(dump_segment(one) + "\n")
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


def test_a_file_that_was_changed_is_told_without_what_it_holds_now(tmp_path: Path) -> None:
    (tmp_path / "manifest" / "1").mkdir(parents=True)
    (tmp_path / "manifest" / "1" / "part-1").write_text(dump_segment(SEALED[2]) + "\n")
    (tmp_path / "events" / "21").mkdir(parents=True)
    (tmp_path / SEALED[2].files[0].path).write_bytes(b"canary")
    with pytest.raises(ArchiveBroken, match="was changed") as raised:
        ArchiveReader(FolderFiles(str(tmp_path))).check(1, 100)
    assert hashlib.sha256(b"canary").hexdigest()[:8] not in str(raised.value)


def test_an_archive_may_itself_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "manifest" / "1").mkdir(parents=True)
    (tmp_path / "real" / "manifest" / "1" / "part-1").write_text(dump_segment(SEALED[2]) + "\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert ArchiveReader(FolderFiles(str(tmp_path / "link"))).manifest.last == 21
