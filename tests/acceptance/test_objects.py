"""`eventjet objects` as a program: what it counts, removes, finds and brings back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventjet import Blob
from eventjet.dev.nats import NatsServer
from eventjet.log.objects import Bucket
from tests.acceptance.conftest import Program
from tests.blobs import Document, documents
from tests.logs import fresh_name

APP = """
from tests.blobs import documents

app = documents("{name}")
"""


@pytest.fixture
def name() -> str:
    return fresh_name("files")


@pytest.fixture
def files(eventjet_nats: NatsServer, tmp_path: Path, name: str) -> Program:
    (tmp_path / "files.py").write_text(APP.format(name=name))
    root = str(Path(__file__).parents[2])
    environ = {"EVENTJET_APP": "files:app", "EVENTJET_SERVERS": eventjet_nats.url, "PYTHONPATH": root, "COLUMNS": "80"}
    return Program(tmp_path, environ)


async def test_objects_are_counted_swept_verified_and_brought_back(
    files: Program, name: str, eventjet_nats: NatsServer
) -> None:
    missing = files("objects", "status")
    assert missing.status == 3
    assert f"The object store '{name}_objects'" in missing.message()
    assert missing.is_one_paragraph()
    async with documents(name).connect(servers=eventjet_nats.url) as jet:
        assert f"OBJ_{name}_objects" in (await jet.init()).created
        await jet.repository(Document).execute("d-1", Document.file, Blob.of(b"scan" * 300_000))
        await jet.blobs.put(b"orphan")
    assert f"OBJ_{name}_objects is as declared" in files("doctor").out
    counted = files("objects", "status", "--older-than", "60m")
    assert counted.status == 0
    lines = dict(line.split("  ", 1) for line in counted.out.splitlines())
    assert lines["objects"].strip() == "2, 1.2 MB"
    assert lines["young"].strip() == "1 that no event refers to yet"
    assert files("objects", "sweep", "--dry-run").out.startswith("A sweep would remove 0 orphans of 0 bytes")
    swept = json.loads(files("objects", "sweep", "--older-than", "1h", "--json").out)
    assert (swept["objects"], swept["young"], swept["removed"]) == (2, 1, 0)
    assert files("objects", "sweep", "--older-than", "5m").status == 2
    assert files("objects", "verify").out == "1 body checked; each has the digest that the log says.\n"

    bucket, digest = Bucket(name), Blob.of(b"scan" * 300_000).digest
    async with documents(name).connect(servers=eventjet_nats.url) as jet:
        assert jet.client is not None
        stored = await jet.client.run(bucket.reading(digest))
        assert stored is not None
        assert await jet.client.run(bucket.removing(stored))
    broken = files("objects", "verify")
    assert broken.status == 1
    assert "1 of 1 body not as the log says:" in broken.out
    assert digest[7:19] in broken.out
    gone = files("objects", "status")
    assert gone.status == 1
    assert "1 body that events refer to is missing:" in gone.out
    lacking = files("objects", "restore", "archive")
    assert lacking.status == 1
    assert "NOT whole: the archive lacks bodies" in lacking.out
    content = files.folder / "archive" / "objects" / digest[7:9] / digest[7:]
    content.parent.mkdir(parents=True)
    content.write_bytes(b"scan" * 300_000)
    back = files("objects", "restore", "archive")
    assert (back.status, back.out) == (0, "bodies: 1 copied, 1.2 MB; 0 there already\n")
    assert json.loads(files("objects", "verify", "--json").out) == {"checked": 1, "faults": []}
