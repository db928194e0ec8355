"""Large bodies of an archive are written to and read from an object store, and its faults are reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eventjet import Blob, BlobDamaged, BlobMissing
from eventjet.archive.bodies import ArchivedBodies
from eventjet.errors import ArchiveBroken
from tests.object_store import BUCKET, SECRET, ObjectStore

CONTENT = bytes(range(256)) * 30_000
BLOB = Blob.of(CONTENT)
URL = f"s3://{BUCKET}/archive"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with ObjectStore(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def store(running: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    running.be_alone(monkeypatch, tmp_path)
    return running


def pieces() -> Iterator[bytes]:
    for start in range(0, len(CONTENT), 500_000):
        yield CONTENT[start : start + 500_000]


def test_a_body_is_written_completely_or_not_at_all(store: ObjectStore) -> None:
    bodies = ArchivedBodies(URL)
    assert not bodies.exist()
    with pytest.raises(BlobMissing):
        bodies.read(BLOB)

    def broken() -> Iterator[bytes]:
        yield from pieces()
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="the source is gone"):
        bodies.write(BLOB.digest, broken())
    assert not bodies.has(BLOB.digest)
    assert bodies.write(BLOB.digest, pieces()) == BLOB.size
    assert (bodies.has(BLOB.digest), bodies.exist(), bodies.read(BLOB)) == (True, True, CONTENT)
    (file,) = [path for path in store.folder.rglob("*") if path.is_file()]
    assert file.relative_to(store.folder).as_posix() == f"archive/objects/{BLOB.digest[7:9]}/{BLOB.digest[7:]}"
    file.write_bytes(CONTENT[:-1])
    with pytest.raises(BlobDamaged):
        bodies.read(BLOB)


@pytest.mark.parametrize(
    ("url", "environ", "words"),
    [
        (URL, {"AWS_ACCESS_KEY_ID": "another"}, ("refuses the credentials", "AWS_ACCESS_KEY_ID")),
        ("s3://nowhere/archive", {}, ("no such bucket",)),
        (URL, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, ("AWS_ENDPOINT_URL=http://127.0.0.1:9 does not answer",)),
    ],
)
def test_a_fault_of_the_object_store_is_reported_with_its_cause(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, url: str, environ: dict[str, str], words: tuple[str, ...]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    bodies = ArchivedBodies(url)
    for work in (lambda: bodies.write(BLOB.digest, pieces()), lambda: bodies.read(BLOB)):
        with pytest.raises(ArchiveBroken) as broken:
            work()
        text = str(broken.value)
        assert [word for word in (*words, url) if word not in text] == [], text
        assert SECRET not in text
