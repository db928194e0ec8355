"""Large bodies of process steps and of remote commands are stored before their events, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eventjet import App, Blob, Step, UsageError, do, event, process, served
from eventjet.dev.nats import NatsServer
from eventjet.errors import CommandFailed
from eventjet.settings import Settings
from tests.blobs import Document
from tests.integration.reacting import working
from tests.integration.test_serving import service
from tests.logs import fresh_name

SCAN, PAGE, RECEIPT = (name * 100_000 for name in (b"scan", b"page", b"receipt"))


@event("scanning.asked")
class Asked:
    document: str


@event("scanning.done")
class Done:
    receipt: Blob


@process("scanning")
class Scanning:
    """A process that files a document with generated content."""

    document: str = ""
    receipt: Blob | None = None

    def ask(self, document: str) -> Asked:
        return Asked(document=document)

    def finish(self, receipt: Blob) -> Done:
        return Done(receipt=receipt)

    def step(self) -> Step[Scanning, Done] | None:
        if not self.document or self.receipt is not None:
            return None
        filing = do(Document, self.document, Document.file, Blob.of(SCAN), (Blob.of(PAGE),))
        return filing.then(Scanning.finish, Blob.of(RECEIPT))

    def evolve(self, event: Asked | Done) -> Scanning:
        return (
            replace(self, document=event.document) if isinstance(event, Asked) else replace(self, receipt=event.receipt)
        )


@pytest.fixture
def settings(nats: NatsServer) -> Settings:
    return Settings(servers=(nats.url,), request_timeout_s=30.0)


async def test_a_body_of_a_process_step_is_stored_before_its_events(settings: Settings) -> None:
    app = App(fresh_name(), aggregates=[Document], processes=[Scanning])
    async with app.connect(settings) as jet:
        await jet.init()
        async with working(app, settings):
            await jet.repository(Scanning).execute("s-1", Scanning.ask, "d-1")
            ended = await jet.settled(Scanning, "s-1", timeout_s=60)
        (filed,) = await jet.repository(Document).history("d-1")
        contents = [await jet.blobs.read(blob) for blob in (filed.data.scan, *filed.data.pages)]
        assert contents == [SCAN, PAGE]
        assert ended.receipt is not None
        assert await jet.blobs.read(ended.receipt) == RECEIPT


async def test_a_request_has_the_reference_of_a_stored_body_and_no_content(settings: Settings) -> None:
    app = App(fresh_name(), aggregates=[Document], served=[served(Document, Document.file)])
    async with app.connect(settings) as jet:
        await jet.init()
        async with service(app, settings), app.client(settings) as remote:
            repository = remote.repository(Document)
            with pytest.raises(UsageError, match=r"the content of pages\[0\].*`await jet\.blobs\.put\(content\)`"):
                await repository.execute("d-1", Document.file, await jet.blobs.put(SCAN), (Blob.of(PAGE),))
            unknown = Blob(digest=Blob.of(PAGE).digest, size=len(PAGE))
            with pytest.raises(CommandFailed, match=r"does not have the body sha256:.*jet\.blobs\.put") as refused:
                await repository.execute("d-1", Document.file, unknown)
            assert refused.value.status == 400
            await repository.execute("d-1", Document.file, await jet.blobs.put(SCAN))
        (filed,) = await jet.repository(Document).history("d-1")
        assert await jet.blobs.read(filed.data.scan) == SCAN
