"""The spans of a command, when they are exported, and the trace in its events, depending on the sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, DEFAULT_ON, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import NonRecordingSpan, SpanContext

from eventjet import App, Jet, Metadata, aggregate, event
from eventjet.errors import Refused
from eventjet.observability import spans, tracing
from tests.traced import ids, metrics_of, of, traced

UNSAMPLED = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, is_remote=True)
HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@event("cup.filled")
class Filled:
    n: int


@aggregate("cup")
class Cup:
    n: int = 0

    def fill(self, n: int) -> Filled | None:
        if n < 0:
            raise ValueError
        return Filled(n=n) if n else None

    def evolve(self, event: Filled) -> Cup:
        return Cup(n=self.n + 1)


CUPS = App("cups", aggregates=[Cup])


class Counting(ParentBased):
    """The usual sampler, which counts its calls."""

    asked = 0

    def should_sample(self, *args: Any, **named: Any) -> SamplingResult:
        self.asked += 1
        return super().should_sample(*args, **named)


class Stubborn(Sampler):
    """A sampler of an application that records every span without sampling it."""

    def should_sample(self, *_: Any, **__: Any) -> SamplingResult:
        return SamplingResult(Decision.RECORD_ONLY)

    def get_description(self) -> str:
        return f"Stubborn{{{DEFAULT_ON.get_description()}}}"


async def headers(jet: Jet) -> list[str | None]:
    return [event.metadata.traceparent for event in await jet.repository(Cup).history("c-1")]


def header_of(span: ReadableSpan) -> str:
    assert span.context is not None
    trace_id, span_id = ids(span)
    return f"00-{trace_id:032x}-{span_id:016x}-{span.context.trace_flags:02x}"


async def test_a_command_in_an_unsampled_request_makes_no_span_and_passes_its_context_on() -> None:
    sampler = Counting(ALWAYS_ON)
    with traced(sampler) as (exporter, reader, _):
        token = context.attach(trace.set_span_in_context(NonRecordingSpan(UNSAMPLED)))
        async with CUPS.in_memory() as jet:
            await jet.repository(Cup).execute("c-1", Cup.fill, 1)
            assert await headers(jet) == [HEADER]
        context.detach(token)
        assert (sampler.asked, exporter.get_finished_spans()) == (0, ())
        assert metrics_of(reader)[spans.COMMAND.metric] == 1


async def test_a_command_with_an_unsampled_cause_continues_its_trace() -> None:
    with traced() as (exporter, _, _):
        async with CUPS.in_memory() as jet:
            cups = jet.repository(Cup)
            await cups.command(metadata=Metadata(traceparent=HEADER)).execute("c-1", Cup.fill, 1)
            assert await headers(jet) == [HEADER]
        assert exporter.get_finished_spans() == ()


async def test_a_custom_sampler_is_asked_in_an_unsampled_request_too() -> None:
    with traced(Stubborn()) as (exporter, _, tracers):
        ended = Ended()
        tracers.add_span_processor(ended)
        token = context.attach(trace.set_span_in_context(NonRecordingSpan(UNSAMPLED)))
        async with CUPS.in_memory() as jet:
            await jet.repository(Cup).execute("c-1", Cup.fill, 1)
        context.detach(token)
        assert ended.names == ["eventjet.load", "cup.fill"]
        assert exporter.get_finished_spans() == ()  # recorded is not sampled


async def test_a_span_records_the_outcome_of_its_command() -> None:
    with traced() as (exporter, reader, _):
        async with CUPS.in_memory() as jet:
            cups = jet.repository(Cup)
            execution = await cups.execute("c-1", Cup.fill, 1)
            await cups.execute("c-1", Cup.fill, 0)
            with pytest.raises(ValueError):  # noqa: PT011 - of the domain
                await cups.execute("c-1", Cup.fill, -1)
            (header,) = await headers(jet)
        filled, nothing, refused = of(exporter, spans.COMMAND)
        attributes = dict(filled.attributes or {})
        assert attributes.pop(spans.APPEND_SECONDS) > 0  # pyright: ignore[reportOperatorIssue]
        assert attributes == {"eventjet.aggregate_id": "c-1", "eventjet.position": execution.position}
        assert header == header_of(filled)
        assert [dict(span.attributes or {}).get(spans.OUTCOME) for span in (nothing, refused)] == ["nothing", "refused"]
        assert (refused.attributes or {})[spans.ERROR] == "ValueError"
        assert metrics_of(reader)[spans.COMMAND.metric] == 3


async def test_a_transaction_is_a_span_with_the_loads_of_its_members_as_children() -> None:
    with traced() as (exporter, _, _):
        async with CUPS.in_memory() as jet:
            cups = jet.repository(Cup)
            commits = await jet.transact(cups.decide("c-1", Cup.fill, 1), cups.decide("c-2", Cup.fill, 2))
            (header,) = await headers(jet)
            with pytest.raises(Refused):
                await jet.transact(cups.decide("c-1", Cup.fill, 0), cups.decide("c-2", Cup.fill, 2))
        succeeded, refused = [span for span in exporter.get_finished_spans() if span.name == "transact"]
        attributes = dict(succeeded.attributes or {})
        assert attributes.pop(spans.APPEND_SECONDS) > 0  # pyright: ignore[reportOperatorIssue]
        assert attributes == {"eventjet.events": 2, "eventjet.position": commits[-1].position}
        assert header == header_of(succeeded)
        loads = of(exporter, spans.LOAD)[:2]
        assert [span.parent.span_id if span.parent else 0 for span in loads] == [ids(succeeded)[1]] * 2
        assert (refused.attributes or {})[spans.OUTCOME] == "failed"
        assert not refused.status.is_ok


class Ended(SpanProcessor):
    """A processor that collects the names of ended spans and raises for those in `faulty`."""

    def __init__(self, faulty: Sequence[str] = ()) -> None:
        self.names: list[str] = []
        self._faulty = faulty

    def on_end(self, span: ReadableSpan) -> None:
        if span.name in self._faulty:
            raise OSError("the disk is full")
        self.names.append(span.name)


async def test_a_failing_span_processor_is_reported_and_loses_no_other_span() -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, details: reported.append(details["exception"]))
    with traced() as (_, _, tracers):
        ended = Ended(faulty=["cup.several"])
        tracers.add_span_processor(ended)
        async with CUPS.in_memory() as jet:
            cups = jet.repository(Cup)

            def several(cup: Cup) -> list[Filled]:
                return [Filled(n=1)]

            several.__name__ = "several"
            await cups.execute("c-1", several)
            await cups.execute("c-1", Cup.fill, 1)
    assert [str(error) for error in reported] == ["the disk is full"]
    assert ended.names == ["eventjet.load", "cup.fill"]


def test_spans_left_by_a_loop_are_exported_by_the_next_loop_of_its_thread() -> None:
    async def end_a_command() -> None:
        telemetry = tracing.active()
        assert telemetry is not None
        command = telemetry.command("cup", "fill", None)
        assert command is not None
        command.ended(1)

    with traced() as (exporter, _, _):
        asyncio.run(end_a_command())
        assert of(exporter, spans.COMMAND) == []
        asyncio.run(end_a_command())
        assert len(of(exporter, spans.COMMAND)) == 1


async def test_spans_of_many_commands_are_exported_while_the_connection_is_open() -> None:
    with traced() as (exporter, _, _):
        async with CUPS.in_memory() as jet:
            for n in range(1, 41):
                await jet.repository(Cup).execute("c-1", Cup.fill, n)
            while len(of(exporter, spans.COMMAND)) < 40:
                await asyncio.sleep(0.01)
