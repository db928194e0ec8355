"""The contract of an app, its events, public events and commands: build it, and write and read its JSON documents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import orjson

from eventjet.codec.catalog import Catalog
from eventjet.codec.commands import arguments_of
from eventjet.codec.json import dump_json
from eventjet.codec.shape import DIALECT, Json, shape_of
from eventjet.domain.aggregate import AggregateInfo, EventInfo, event_info
from eventjet.domain.decision import Served
from eventjet.domain.reactor import Inbox, Publication
from eventjet.domain.unique import CLAIMS
from eventjet.errors import UsageError

EVENT, APP = "x-event", "app.json"
PUBLIC, COMMANDS = "public/", "commands/"
"""Folders of an export for public events and for commands."""
FORMAT = 1
_EVENT_FILE = re.compile(r"(?:public/)?[^/]+\.[0-9]{1,8}\.json")


class Declares(Protocol):
    """The attributes of an application from which its contract is built."""

    @property
    def name(self) -> str: ...
    @property
    def catalog(self) -> Catalog: ...
    @property
    def aggregates(self) -> Mapping[Any, AggregateInfo]: ...
    @property
    def publications(self) -> Mapping[str, Publication[Any]]: ...
    @property
    def inboxes(self) -> Mapping[str, Inbox[Any, Any]]: ...
    @property
    def served(self) -> Sequence[Served]: ...


@dataclass(frozen=True, slots=True)
class EventShape:
    """The shape of one event at one schema on the wire."""

    name: str
    schema: int
    aggregate: str | None
    """The aggregate of the event; None for a public event."""
    formerly: tuple[str, ...]
    body: Json
    """The JSON Schema of the body."""

    @property
    def file(self) -> str:
        """The path of the event's file in an export."""
        folder = PUBLIC if self.aggregate is None else ""
        return f"{folder}{self.name.replace(':', '=3A')}.{self.schema}.json"

    def document(self) -> Json:
        """Return the JSON Schema with name, schema, former names and aggregate of the event."""
        identity = {"name": self.name, "schema": self.schema, "formerly": list(self.formerly)}
        owner = {"aggregate": self.aggregate} if self.aggregate else {}
        return {"$schema": DIALECT, EVENT: identity | owner, **self.body}


@dataclass(frozen=True, slots=True)
class Contract:
    """The contract of an app; one kept over releases has events at several schemas, and events since dropped."""

    app: str
    events: tuple[EventShape, ...]
    public: tuple[EventShape, ...] = ()
    """The public events of the publications."""
    retired: tuple[str, ...] = ()
    commands: Mapping[str, Json] | None = None
    """`aggregate.command` → JSON Schema of the arguments."""

    def documents(self) -> dict[str, Json]:
        """Return file → document, sorted, and always the same for the same contract."""
        documents: dict[str, Json] = {APP: {"app": self.app, "format": FORMAT, "retired_events": sorted(self.retired)}}
        documents |= {event.file: event.document() for event in (*self.events, *self.public)}
        documents |= {
            f"{COMMANDS}{name}.json": {"$schema": DIALECT, **body} for name, body in (self.commands or {}).items()
        }
        return dict(sorted(documents.items()))

    def at(self, name: str) -> dict[int, EventShape]:
        """Return the shapes of an event by schema number, the newest last."""
        return {
            event.schema: event for event in sorted(self.events, key=lambda event: event.schema) if event.name == name
        }

    def names(self) -> list[str]:
        """Return the names of the events, sorted and without duplicates."""
        return sorted({event.name for event in self.events})


def contract_of(app: Declares) -> Contract:
    """Return the contract of an app's declarations, without eventjet's own events, which the app cannot change."""
    kinds = [kind for kind in app.catalog.kinds() if kind.aggregate != CLAIMS]
    events = [_shape(kind.event_type, kind.info, kind.aggregate) for kind in kinds]
    infos = {kind: event_info(kind) for publication in app.publications.values() for kind in publication.public}
    public = [_shape(kind, info, None) for kind, info in infos.items()]
    commands = {
        f"{app.aggregates[served.aggregate].name}.{served.name}": arguments_of(served.decide).schema()
        for served in app.served
    }
    return Contract(app.name, _sorted(events), _sorted(public), tuple(sorted(app.catalog.retired)), commands)


def contract_in(documents: Mapping[str, Any], where: str) -> Contract:
    """Return the contract in documents, the inverse of `Contract.documents`; raises `UsageError` for no export."""
    try:
        about = documents[APP]
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}, and this release reads {FORMAT}")
        shapes = [_read(body) for name, body in documents.items() if _EVENT_FILE.fullmatch(name)]
        events = [shape for shape in shapes if shape.aggregate is not None]
        public = [shape for shape in shapes if shape.aggregate is None]
        start, end = len(COMMANDS), -len(".json")
        commands = {
            name[start:end]: {key: value for key, value in body.items() if key != "$schema"}
            for name, body in documents.items()
            if name.startswith(COMMANDS)
        }
        retired = tuple(map(str, about["retired_events"]))
        return Contract(str(about["app"]), _sorted(events), _sorted(public), retired, commands)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{where} cannot be read as an export: {reason}. Write one with `eventjet schema export --out schemas`."
        ) from None


def text_of(document: object) -> str:
    """Return the text of a document's file, sorted and with one key a line, so that changes have small diffs."""
    option = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return dump_json(document, option).decode()


def _shape(cls: type, info: EventInfo, aggregate: str | None) -> EventShape:
    return EventShape(info.name, info.schema, aggregate, info.formerly, shape_of(cls))


def _read(document: Any) -> EventShape:
    body = dict(cast("Json", document))
    info = body.pop(EVENT)
    body.pop("$schema", None)
    formerly = tuple(map(str, info["formerly"]))
    return EventShape(str(info["name"]), int(info["schema"]), info.get("aggregate"), formerly, body)


def _sorted(shapes: Sequence[EventShape]) -> tuple[EventShape, ...]:
    return tuple(sorted(shapes, key=lambda shape: (shape.name, shape.schema)))
