"""`eventjet history` and `eventjet tail`: all events of one aggregate, and the end of the log."""

from __future__ import annotations

import asyncio
import json as jsonlib
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventjet.cli.target import AppTarget, JsonOption, on_app
from eventjet.cli.terminal import answer, note, print_json, printable, stored_json, terminal_width
from eventjet.errors import CodecError, UsageError

if TYPE_CHECKING:
    from eventjet.codec.envelope import RawRecord
    from eventjet.jet import Jet

_LAST = 10
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INDENT = " " * 9
_WHERE_GIVEN = ("command_id", "metadata", "fault")


@on_app()
def history(
    at: AppTarget,
    aggregate: Annotated[str, typer.Argument(help="The aggregate's name, for instance account.")],
    aggregate_id: Annotated[str, typer.Argument(metavar="ID", help="Which one.")],
    json: JsonOption = False,
) -> None:
    """Show what happened to one aggregate; exit status 1 when it has no events."""
    events = asyncio.run(_history(at, aggregate, aggregate_id))

    def show() -> None:
        for event in events:
            print(event.line(terminal_width(), named=False))
        if not events:
            note(f"There are no events of {aggregate} {aggregate_id}.")

    answer([event.as_json() for event in events], show, as_json=json, ok=bool(events))


async def _history(at: AppTarget, aggregate: str, aggregate_id: str) -> list[ShownEvent]:
    app = at.app()
    names = sorted(info.name for info in app.aggregates.values())
    if aggregate not in names:
        raise UsageError(f"The app {app.name!r} has no aggregate {aggregate!r}. It has {', '.join(names)}.")
    async with app.connect(at.settings) as jet:
        await jet.log()  # says that `init` is missing, where it is
        return [shown(jet, record) for record in await jet.store.history(aggregate, aggregate_id)]


@on_app()
def tail(
    at: AppTarget,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is recorded from now on.")] = False,
    start: Annotated[
        int | None,
        typer.Option("--from", metavar="N", min=1, help=f"Begin at this position; else with the last {_LAST} events."),
    ] = None,
) -> None:
    """Show the log's events in order: the last ones, or from a position on."""
    asyncio.run(_tail(at, start, follow=follow, as_json=json))


async def _tail(at: AppTarget, start: int | None, *, follow: bool, as_json: bool) -> None:
    async with at.app().connect(at.settings) as jet:
        log = await jet.log()
        first = start if start is not None else max(log.first, log.last - _LAST + 1)
        async for record in jet.store.records(start=first, follow=follow):
            event = shown(jet, record)
            if as_json:
                print_json(event.as_json(), indent=None)
            else:
                print(event.line(terminal_width(), named=True), flush=True)


@dataclass(frozen=True, slots=True)
class ShownEvent:
    """One record of the log, its body as it is stored; names as in the vocabulary."""

    position: int
    recorded_at: datetime
    aggregate: str
    aggregate_id: str
    version: int | None
    event_id: str
    type: str
    schema: int | None
    data: Any
    """The stored JSON; text when it is none."""
    command_id: str | None
    metadata: Mapping[str, str]
    fault: str | None
    """Why the app cannot read it."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        value["recorded_at"] = self.recorded_at.isoformat().replace("+00:00", "Z")
        return {name: held for name, held in value.items() if name not in _WHERE_GIVEN or held not in (None, {})}

    def line(self, width: int, *, named: bool) -> str:
        """One event in one line, or more where the width asks for it; `named` says whose it is."""
        when = self.recorded_at.strftime("%Y-%m-%d %H:%M:%SZ")
        whose = f"{self.aggregate} {self.aggregate_id}  " if named else ""
        version = "v?" if self.version is None else f"v{self.version}"
        schema = "" if self.schema in (None, 1) else f" (schema {self.schema})"
        data = self.data
        if not isinstance(data, str):
            data = jsonlib.dumps(data, ensure_ascii=False, separators=(",", ":"))
        head = printable(f"{self.position:>7}  {when}  {whose}{version}  {self.type}{schema}")
        rest = printable(data) + ("" if self.fault is None else f"  unreadable: {printable(self.fault)}")
        if len(head) + 2 + len(rest) <= width:
            return f"{head}  {rest}"
        lines = [_filled(head, width, ""), _filled(rest, width, _INDENT)]
        return "\n".join(line for line in lines if line)


def shown(jet: Jet, record: RawRecord) -> ShownEvent:
    """What can be said of a record; never raises for what is in it."""
    from eventjet.codec.envelope import MSG_ID, SCHEMA, TYPE, VERSION, header, metadata_of, recorded_at

    position, time_ns, subject, block, body = record
    aggregate, aggregate_id, fault = _named(subject)
    when = _EPOCH + timedelta(microseconds=time_ns // 1000)
    try:
        when = recorded_at(record)
        jet.decode(record)
    except CodecError as error:
        fault = fault or str(error)
    command_id, metadata = None, dict[str, str]()
    try:
        command_id, known = metadata_of(block)
    except ValueError as error:
        fault = fault or str(error)
    else:
        values = asdict(known)
        extra = values.pop("extra")
        metadata = {name: value for name, value in values.items() if value} | extra
    return ShownEvent(
        position=position,
        recorded_at=when,
        aggregate=aggregate,
        aggregate_id=aggregate_id,
        version=_number(header(block, VERSION)),
        event_id=header(block, MSG_ID) or "",
        type=header(block, TYPE) or "?",
        schema=_number(header(block, SCHEMA)),
        data=stored_json(body),
        command_id=command_id,
        metadata=metadata,
        fault=fault,
    )


def _named(subject: bytes) -> tuple[str, str, str | None]:
    """(aggregate, its id, what is wrong with the subject)."""
    from eventjet.codec.subjects import entity_of

    try:
        return *entity_of(subject), None
    except ValueError as error:
        text = subject.decode("utf-8", "replace")
        return "?", text, f"the subject {text!r} names no entity: {error}"


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _filled(text: str, width: int, indent: str) -> str:
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=_INDENT, break_on_hyphens=False)
