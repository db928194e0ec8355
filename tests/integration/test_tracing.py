"""One trace covers an HTTP request, its command and event, the projected row, and the reactor's next command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from sqlalchemy import Column, Integer, MetaData, String, Table

from eventjet import App, Jet, Reaction, Recorded, Settings, aggregate, event, projection, reactor, served
from eventjet.dev.nats import NatsServer
from eventjet.observability import spans, tracing
from tests.integration.projecting import database_with
from tests.integration.reacting import until, working
from tests.logs import fresh_name
from tests.traced import ids, metrics_of, of, traced

ROOT = Path(__file__).parents[2]
SECRET = "a secret reason"
BROWSER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@event("cup.filled")
class Filled:
    n: int


@event("cup.washed")
class Washed:
    pass


@aggregate("cup")
class Cup:
    n: int = 0

    def fill(self, n: int) -> Filled:
        if n < 0:
            raise ValueError(SECRET)
        return Filled(n=n)

    def wash(self) -> Washed:
        return Washed()

    def evolve(self, event: Filled | Washed) -> Cup:
        return Cup(n=self.n + 1)


@dataclass(frozen=True, slots=True)
class Row:
    cup_id: str
    n: int


@projection(
    "cups", table=Table("cups", MetaData(), Column("cup_id", String(9), primary_key=True), Column("n", Integer))
)
def cups(row: Row | None, event: Recorded[Filled]) -> Row | None:
    return Row(event.aggregate_id, event.data.n)


@reactor("washer", start="beginning")
async def washer(event: Recorded[Filled], to: Reaction[object]) -> None:
    await to.repository(Cup).execute("other", Cup.wash)


Send = Callable[[dict[str, Any]], Awaitable[None]]


def asgi(jet: Jet) -> Callable[[dict[str, Any], Send], Awaitable[None]]:
    """Return an HTTP application that opens one span a request beneath the caller's, as instrumented frameworks do."""
    tracer = tracing.active()
    assert tracer is not None

    async def answer(scope: dict[str, Any], send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        context = propagate.extract(headers)
        with trace.get_tracer("web", tracer_provider=PROVIDERS[-1]).start_as_current_span(
            f"{scope['method']} {scope['path']}", context, kind=SpanKind.SERVER
        ):
            result = await jet.repository(Cup).execute("c-1", Cup.fill, 3)
            await jet.caught_up(cups, position=result.position, timeout_s=60)
        await send({"type": "http.response.start", "status": 204, "headers": []})

    return answer


PROVIDERS: list[TracerProvider] = []


@pytest.fixture
def telemetry() -> Iterator[tuple[InMemorySpanExporter, InMemoryMetricReader]]:
    with traced() as (exporter, reader, tracers):
        PROVIDERS.append(tracers)
        yield exporter, reader
        PROVIDERS.pop()


@pytest.fixture
def app() -> App:
    return App(
        fresh_name("cups"), aggregates=[Cup], projections=[cups], reactors=[washer], served=[served(Cup, Cup.fill)]
    )


@pytest.fixture
def settings(nats: NatsServer, tmp_path: Path, app: App) -> Settings:
    settings = Settings(servers=(nats.url,), database=f"sqlite:///{tmp_path / 'read.db'}")
    database_with(settings.database, *app.projections.values())
    return settings


async def test_one_trace_covers_request_command_row_and_reaction(
    app: App, settings: Settings, telemetry: tuple[InMemorySpanExporter, InMemoryMetricReader]
) -> None:
    exporter, reader = telemetry
    async with app.connect(settings) as jet:
        await jet.init()
        async with working(app, settings):
            sent: list[dict[str, Any]] = []

            async def send(message: dict[str, Any]) -> None:
                sent.append(message)

            scope = {"method": "POST", "path": "/cups", "headers": [(b"traceparent", BROWSER.encode())]}
            await asgi(jet)(scope, send)
            assert sent[0]["status"] == 204
            await until(lambda: bool(of(exporter, spans.BATCH)) and len(of(exporter, spans.COMMAND)) == 2)
            await until(lambda: bool(of(exporter, spans.HANDLE)))
    (request,) = [span for span in exporter.get_finished_spans() if span.name == "POST /cups"]
    fill = next(span for span in of(exporter, spans.COMMAND) if span.name == "cup.fill")
    wash = next(span for span in of(exporter, spans.COMMAND) if span.name == "cup.wash")
    batch, handle = of(exporter, spans.BATCH)[0], of(exporter, spans.HANDLE)[0]
    trace_id = int(BROWSER[3:35], 16)
    assert {ids(span)[0] for span in (request, fill, wash, batch, handle)} == {trace_id}
    parents = {span.name: span.parent.span_id if span.parent else 0 for span in (request, fill, wash, batch, handle)}
    assert parents == {
        request.name: int(BROWSER[36:52], 16),
        fill.name: ids(request)[1],
        batch.name: ids(fill)[1],
        handle.name: ids(fill)[1],
        wash.name: ids(handle)[1],
    }
    assert [(link.context.trace_id, link.context.span_id) for link in batch.links] == [ids(fill)]
    assert dict(batch.attributes or {}).items() >= {"eventjet.projection": "cups", "eventjet.events": 1}.items()
    assert spans.APPEND_SECONDS in (fill.attributes or {})
    durations = metrics_of(reader)
    assert durations[spans.COMMAND.metric] == 2
    assert durations[spans.BATCH.metric] >= 1


async def test_a_batch_of_many_traces_is_linked_to_each_and_has_a_trace_of_its_own(
    app: App, settings: Settings, telemetry: tuple[InMemorySpanExporter, InMemoryMetricReader]
) -> None:
    exporter, _ = telemetry
    async with app.connect(settings) as jet:
        await jet.init()
        for n in range(5):
            await jet.repository(Cup).execute(f"c-{n}", Cup.fill, n)
        async with working(app, settings):
            await until(lambda: sum(len(span.links) for span in of(exporter, spans.BATCH)) == 5)
    filled = {ids(span) for span in of(exporter, spans.COMMAND) if span.name == "cup.fill"}
    linked = [
        (link.context.trace_id, link.context.span_id) for batch in of(exporter, spans.BATCH) for link in batch.links
    ]
    assert set(linked) == filled
    assert all(span.parent is None for span in of(exporter, spans.BATCH) if len(span.links) > 1)


async def test_a_refused_command_has_its_error_type_and_a_conflict_is_counted(
    app: App, settings: Settings, telemetry: tuple[InMemorySpanExporter, InMemoryMetricReader]
) -> None:
    exporter, reader = telemetry
    async with app.connect(settings) as jet, app.connect(settings) as rival:
        await jet.init()
        with pytest.raises(ValueError, match=SECRET):
            await jet.repository(Cup).execute("c-1", Cup.fill, -1)
        await jet.repository(Cup).execute("c-1", Cup.fill, 1)
        await rival.repository(Cup).execute("c-1", Cup.fill, 2)
        await jet.repository(Cup).execute("c-1", Cup.fill, 3)
    refused, *_, last = of(exporter, spans.COMMAND)
    assert (refused.attributes or {})[spans.ERROR] == "ValueError"
    assert (refused.attributes or {})[spans.OUTCOME] == "refused"
    assert (last.attributes or {})[spans.LOST] == 1
    assert metrics_of(reader)[spans.CONFLICTS] == 1
    assert not [span for span in exporter.get_finished_spans() if SECRET in span.to_json()]


async def test_a_served_command_is_in_its_callers_trace(
    app: App, settings: Settings, telemetry: tuple[InMemorySpanExporter, InMemoryMetricReader]
) -> None:
    exporter, _ = telemetry
    async with app.connect(settings) as jet:
        await jet.init()
        async with jet.service(), app.client(settings) as remote:
            await remote.repository(Cup).execute("c-1", Cup.fill, 1)
            await remote.repository(Cup).command("once").execute("c-1", Cup.fill, 2)
    commands = [span for span in of(exporter, spans.COMMAND) if span.name == "cup.fill"]
    for request_span, serve_span, command_span in zip(
        of(exporter, spans.REQUEST), of(exporter, spans.SERVE), commands, strict=True
    ):
        assert serve_span.parent is not None
        assert serve_span.parent.span_id == ids(request_span)[1]
        assert command_span.parent is not None
        assert command_span.parent.span_id == ids(serve_span)[1]


WITHOUT_TELEMETRY = """
import asyncio, sys
from tests.integration.test_tracing import Cup, App, tracing

async def main():
    app = App(sys.argv[1], aggregates=[Cup])
    async with app.connect(servers=sys.argv[2]) as jet:
        await jet.init()
        await jet.repository(Cup).execute("c-1", Cup.fill, 1)
        (recorded,) = await jet.repository(Cup).history("c-1")
    print(tracing.active(), recorded.metadata.traceparent)

asyncio.run(main())
"""


def test_without_opentelemetry_there_are_no_spans_and_no_trace_headers(nats: NatsServer) -> None:
    # The test runs a new process: a page of the documentation may have set a provider in this one for good.
    command = [sys.executable, "-c", WITHOUT_TELEMETRY, fresh_name(), nats.url]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (process.returncode, process.stdout) == (0, "None None\n"), process.stderr
