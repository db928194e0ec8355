"""Large bodies in audits, archives, restores, Spark, the console, contracts and roles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given

from eventjet import App, Blob, Forbidden, Jet, Personal, Settings, aggregate, event
from eventjet.archive.bodies import ArchivedBodies, archive_bodies
from eventjet.console import console
from eventjet.dev.nats import NatsServer
from eventjet.domain.blob import blobs_in, source_of
from eventjet.errors import ArchiveBroken, Refused
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.objects import Bucket
from eventjet.log.sweep import has_bucket, references_of, sweep_objects
from eventjet.nats.endpoint import Endpoint
from eventjet.operations.roles import accounts, roles_of
from eventjet.rebuild import Kind, archive, audit, restore
from eventjet.spark import AppRef, events
from eventjet.spark.session import Started
from eventjet.testing.strategies import Values, instances_of
from tests.blobs import Document, Filed, documents
from tests.integration.restoring import records_of, seal
from tests.logs import fresh_name

LARGE = b"".join(sha256(str(number).encode()).digest() for number in range(40_000))


@event("person.pictured")
class Pictured:
    face: Personal[Blob]


@aggregate("person")
class Person:
    def picture(self, face: Blob) -> Pictured:
        return Pictured(face=face)

    def evolve(self, event: Pictured) -> Person:
        return self


@given(instances_of(Filed, Values()))
def test_laws_draw_blobs_with_their_content(drawn: Filed) -> None:
    assert all(source_of(blob) is not None for _, blob in blobs_in(drawn))
    assert documents("docs").catalog.encode(drawn).event == drawn


@asynccontextmanager
async def log_with_documents(app: App, settings: Settings, *contents: bytes) -> AsyncGenerator[Jet]:
    """Yield a connection to a log with a document for each body."""
    async with app.connect(settings) as jet:
        await jet.init()
        for number, content in enumerate(contents):
            blob = Blob.of(content, media_type="text/html", name=f"п{number}.html")
            await jet.repository(Document).execute(f"d-{number}", Document.file, blob)
        yield jet


async def lose(jet: Jet, content: bytes) -> None:
    bucket = Bucket(jet.name)
    assert jet.client is not None
    stored = await jet.client.run(bucket.reading(Blob.of(content).digest))
    assert stored is not None
    assert await jet.client.run(bucket.removing(stored))


async def test_an_audit_names_each_missing_body(nats: NatsServer) -> None:
    app, settings = documents(fresh_name()), Settings(servers=(nats.url,))
    async with log_with_documents(app, settings, LARGE, b"second") as jet:
        assert (await audit(app, settings)).sound
        await lose(jet, b"second")
        report = await audit(app, settings)
    assert not report.sound
    (finding,) = report.findings
    (place,) = finding.examples
    assert (finding.kind, place.first) == (Kind.BODY, 2)
    assert Blob.of(b"second").digest in place.what


async def test_an_archive_includes_restored_bodies_and_bodies_of_retired_events(
    nats: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, settings, url = documents(fresh_name()), Settings(servers=(nats.url,)), str(tmp_path / "archive")
    async with log_with_documents(app, settings, LARGE, b"second") as jet:
        seal(tmp_path / "archive", records_of(nats.url, app.name), jet.store.identity, name=app.name)
        await lose(jet, b"second")
        report = await archive(app, url, settings)
        assert (report.bodies.copied, len(report.bodies.missing), report.sealed) == (1, 1, ())
        await jet.blobs.put(b"second")
        monkeypatch.setattr(app.catalog, "with_blobs", frozenset[type]())
        report = await archive(app, url, settings)
        assert (report.bodies.copied, report.bodies.present, report.bodies.missing) == (1, 1, ())
        assert ArchivedBodies(url).read(Blob.of(b"second")) == b"second"
        await lose(jet, b"second")
        assert not (await audit(app, settings)).sound
    with NatsServer(sync_interval="1m") as other:
        report = await restore(app, url, Settings(servers=(other.url,)), engine="local")
        assert (report.bodies.copied, report.bodies.missing) == (2, ())


async def test_a_restore_stores_bodies_and_names_bodies_that_the_archive_lacks(
    nats: NatsServer, tmp_path: Path
) -> None:
    app, settings = documents(fresh_name()), Settings(servers=(nats.url,))
    url = tmp_path / "archive"
    async with log_with_documents(app, settings, LARGE, b"second") as jet:
        records = records_of(nats.url, app.name)
        seal(url, records, jet.store.identity, name=app.name)
        await asyncio.to_thread(_archive, nats.url, app.name, url)
    name = Blob.of(b"second").digest.removeprefix("sha256:")
    (url / "objects" / name[:2] / name).unlink()
    with NatsServer(sync_interval="1m") as other:
        elsewhere = Settings(servers=(other.url,))
        report = await restore(app, str(url), elsewhere, engine="local")
        assert (report.bodies.copied, report.bodies.bytes) == (1, len(LARGE))
        assert [gone.digest for gone in report.bodies.missing] == [Blob.of(b"second").digest]
        async with app.connect(elsewhere) as jet:
            assert await jet.blobs.read(Blob.of(LARGE)) == LARGE
            assert (await jet.repository(Document).load("d-0")).scan == Blob.of(
                LARGE, media_type="text/html", name="п0.html"
            )


async def test_a_refused_restore_leaves_the_bodies_of_the_log_alone(nats: NatsServer, tmp_path: Path) -> None:
    """Otherwise a sweep would mistake the object store for the archived log's."""
    app, settings, url = documents(fresh_name()), Settings(servers=(nats.url,)), tmp_path / "archive"
    with NatsServer(sync_interval="1m") as other:
        async with log_with_documents(app, Settings(servers=(other.url,)), LARGE) as jet:
            seal(url, records_of(other.url, app.name), jet.store.identity, name=app.name)
            await asyncio.to_thread(_archive, other.url, app.name, url)
    async with log_with_documents(app, settings, b"mine") as jet:
        with pytest.raises(Refused, match="Nothing was written"):
            await restore(app, str(url), settings, engine="local")
        endpoint = Endpoint((nats.url,))
        with NatsConnection.open(endpoint) as link:
            swept = sweep_objects(link, endpoint, app.name, removes=True)
        assert (swept.objects, swept.missing) == (1, ())
        assert await jet.blobs.read(Blob.of(b"mine")) == b"mine"


async def test_a_file_system_that_arrow_does_not_know_is_refused_only_for_bodies(
    nats: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark knows more file systems than Arrow, so events without bodies may be archived there."""
    app, settings, url = documents(fresh_name()), Settings(servers=(nats.url,)), str(tmp_path / "archive")
    async with log_with_documents(app, settings, b"first") as jet:
        seal(tmp_path / "archive", records_of(nats.url, app.name), jet.store.identity, name=app.name)
        await archive(app, url, settings)
    elsewhere = "nosuch://archives/there"
    for look in (ArchivedBodies(elsewhere).exist, lambda: ArchivedBodies(elsewhere).has(Blob.of(b"first").digest)):
        with pytest.raises(ArchiveBroken, match=r"Arrow cannot use its file system .*nosuch"):
            look()
    monkeypatch.setattr("eventjet.rebuild.archiving.ArchivedBodies", lambda _: ArchivedBodies(elsewhere))
    with NatsServer(sync_interval="1m") as other:
        with pytest.raises(ArchiveBroken, match=r"`pyarrow\.fs` opens here"):
            await restore(app, url, Settings(servers=(other.url,)), engine="local")
        with NatsConnection.open(Endpoint((other.url,))) as link:
            assert not has_bucket(link, app.name)


async def test_a_restore_without_bodies_does_not_use_arrow(
    nats: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, settings, url = documents(fresh_name()), Settings(servers=(nats.url,)), str(tmp_path / "archive")
    async with app.connect(settings) as jet:
        await jet.init()
        await jet.repository(Document).execute("d-1", Document.note, "plain")
        seal(tmp_path / "archive", records_of(nats.url, app.name), jet.store.identity, name=app.name)
    monkeypatch.setattr(app.catalog, "with_blobs", frozenset[type]())
    monkeypatch.setattr(
        "eventjet.rebuild.archiving.ArchivedBodies", lambda _: ArchivedBodies("nosuch://archives/there")
    )
    with NatsServer(sync_interval="1m") as other:
        report = await restore(app, url, Settings(servers=(other.url,)), engine="local")
        assert (report.events, report.bodies.copied) == (1, 0)


def _archive(url: str, app: str, folder: Path) -> None:
    endpoint = Endpoint((url,))
    with NatsConnection.open(endpoint) as link:
        references = references_of(link, endpoint, app)
        archive_bodies(link, app, ArchivedBodies(str(folder)), references.values())


@pytest.mark.slow
@pytest.mark.timeout(1_200)
async def test_spark_archives_bodies_and_reads_them_on_demand(nats: NatsServer, spark: Started, tmp_path: Path) -> None:
    name, settings, url = fresh_name(), Settings(servers=(nats.url,)), str(tmp_path / "archive")
    (tmp_path / f"{name}.py").write_text(f'from tests.blobs import documents\n\napp = documents("{name}")\n')
    ref = AppRef.parse(f"{name}:app", tmp_path)
    async with log_with_documents(documents(name), settings, LARGE, b"second") as jet:
        report = await archive(ref, url, settings)
        assert (report.bodies.copied, report.bodies.missing, report.last) == (2, (), 2)
        await lose(jet, b"second")
    frame = events(spark.spark, ref, Filed, settings=settings)
    rows = frame.select("aggregate_id", "scan").orderBy("position").collect()
    assert [Blob(**row.scan.asDict()).size for row in rows] == [len(LARGE), 6]
    bodies = ArchivedBodies(url)

    def sizes(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch.assign(size=[len(bodies.read(scan["digest"])) for scan in batch["scan"]])[
                ["aggregate_id", "size"]
            ]

    counted = frame.select("aggregate_id", "scan").mapInPandas(sizes, "aggregate_id string, size bigint").collect()
    assert sorted((row.aggregate_id, row.size) for row in counted) == [("d-0", len(LARGE)), ("d-1", 6)]


async def test_the_console_offers_a_body_only_as_a_download(nats: NatsServer, tmp_path: Path) -> None:
    name = fresh_name()
    app = App(name, aggregates=[Document, Person])
    settings = Settings(servers=(nats.url,), database=f"sqlite:///{tmp_path}/read.db")
    html = b"<script>alert(1)</script>" * 40_000
    site = console(app, settings=settings)
    transport = httpx.ASGITransport(site)
    async with (
        log_with_documents(app, settings, html) as jet,
        site.router.lifespan_context(site),
        httpx.AsyncClient(transport=transport, base_url="http://console.example", timeout=60) as web,
    ):
        await jet.repository(Person).execute("p-1", Person.picture, Blob.of(b"face", name="ada.jpg"))
        digest = Blob.of(html).digest
        page = await web.get("/events/one?position=1")
        assert f"/events/body?position=1&amp;digest={quote(digest, safe='')}" in page.text
        body = await web.get("/events/body", params={"position": 1, "digest": digest})
        assert (body.status_code, body.content) == (200, html)
        assert body.headers["content-type"] == "application/octet-stream"
        assert body.headers["content-disposition"] == f"attachment; filename*=UTF-8''{quote('п0.html')}"
        assert body.headers["x-content-type-options"] == "nosniff"
        assert int(body.headers["content-length"]) == len(html)
        hidden = await web.get("/events/one?position=2")
        assert "ada.jpg" not in hidden.text
        assert "/events/body" not in hidden.text
        for position, requested in ((2, Blob.of(b"face").digest), (2, digest), (9, digest), (1, "sha256:0")):
            answer = await web.get("/events/body", params={"position": position, "digest": requested})
            assert answer.status_code == 404, (position, requested)
        await lose(jet, html)
        assert (await web.get("/events/body", params={"position": 1, "digest": digest})).status_code == 404


async def test_errors_do_not_show_a_personal_blob(nats: NatsServer) -> None:
    app = App(fresh_name(), aggregates=[Person])
    async with app.connect(servers=nats.url) as jet:
        await jet.init()
        await jet.repository(Person).execute("p-1", Person.picture, Blob.of(b"face", name="ada.jpg"))
        (recorded,) = [recorded async for recorded in jet.tail()]
        masked = jet.masked("person.pictured", 1, {"face": {"digest": "sha256:0", "name": "ada.jpg"}})
        assert masked == {"face": "<personal>"}
        await lose(jet, b"face")
        with pytest.raises(Exception, match="does not have the body") as caught:
            await jet.blobs.read(recorded.data.face)
        assert "ada" not in str(caught.value)


def test_an_exported_schema_has_the_reference() -> None:
    from eventjet.codec.shape import shape_of

    shape = shape_of(Filed)
    assert shape["properties"]["scan"] == {"$ref": "#/$defs/Blob"}
    blob = shape["$defs"]["Blob"]
    assert blob["properties"]["digest"]["pattern"] == "^sha256:[0-9a-f]{64}$"
    assert "```" not in json.dumps(blob)


async def test_roles_let_an_app_store_read_and_sweep_and_a_reader_only_read(tmp_path: Path) -> None:
    app = documents("docs")
    roles = roles_of("docs", ("document",), (), objects=True)
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts('docs', roles)}"

    def settings_of(server: NatsServer, name: str) -> Settings:
        return Settings(servers=(server.url,), user=name, password=name, inbox_prefix=f"_INBOX_{name}")

    with NatsServer(sync_interval="1m", config=config) as server:
        async with app.connect(settings_of(server, "admin")) as jet:
            await jet.init()
        for role in ("writer", "writer_document"):
            async with app.connect(settings_of(server, role)) as jet:
                await jet.repository(Document).execute(role, Document.file, Blob.of(LARGE))
                await jet.repository(Document).execute(f"{role}-2", Document.file, Blob.of(role.encode()))
                assert await jet.blobs.read(Blob.of(LARGE)) == LARGE
                await jet.blobs.put(b"orphan")
        async with app.connect(settings_of(server, "reader")) as jet:
            await jet.blobs.save(Blob.of(LARGE), tmp_path / "copy")
            with pytest.raises(Forbidden):
                await jet.blobs.put(b"of a reader")
        admin = Endpoint.of(settings_of(server, "admin"))
        with NatsConnection.open(admin) as link:
            outcome = sweep_objects(link, admin, "docs", age_s=0, removes=True)
        assert (outcome.removed, outcome.objects, outcome.missing) == (1, 4, ())
        rebuilding = Endpoint.of(settings_of(server, "rebuild"))
        await asyncio.to_thread(_archive_as, rebuilding, tmp_path / "archive")
        assert ArchivedBodies(str(tmp_path / "archive")).read(Blob.of(LARGE)) == LARGE


def _archive_as(endpoint: Endpoint, folder: Path) -> None:
    with NatsConnection.open(endpoint) as link:
        references = references_of(link, endpoint, "docs")
        archive_bodies(link, "docs", ArchivedBodies(str(folder)), references.values())
