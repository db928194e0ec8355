"""What an app writes and serves, as values: taken from its declarations, written as JSON documents, read back."""

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
"""Folders of an export."""
FORMAT = 1
_EVENT_FILE = re.compile(r"(?:public/)?[^/]+\.[0-9]{1,8}\.json")


class Declares(Protocol):
    """What is needed of an application."""

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
    """One event at one schema, as it is on the wire."""

    name: str
    schema: int
    aggregate: str | None
    """Whose event it is; None for a public one."""
    formerly: tuple[str, ...]
    body: Json
    """JSON Schema of its body."""

    @property
    def file(self) -> str:
        """Its file in an export."""
        folder = PUBLIC if self.aggregate is None else ""
        return f"{folder}{self.name.replace(':', '=3A')}.{self.schema}.json"

    def document(self) -> Json:
        """The JSON Schema with what the envelope says."""
        told = {"name": self.name, "schema": self.schema, "formerly": list(self.formerly)}
        whose = {"aggregate": self.aggregate} if self.aggregate else {}
        return {"$schema": DIALECT, EVENT: told | whose, **self.body}


@dataclass(frozen=True, slots=True)
class Contract:
    """All of it. An export that was kept over releases has events at several schemas, and some that are no more."""

    app: str
    events: tuple[EventShape, ...]
    public: tuple[EventShape, ...] = ()
    """What publications tell others."""
    retired: tuple[str, ...] = ()
    commands: Mapping[str, Json] | None = None
    """`aggregate.command` → JSON Schema of its arguments."""

    def documents(self) -> dict[str, Json]:
        """File → document, sorted; the same contract always gives the same."""
        found: dict[str, Json] = {APP: {"app": self.app, "format": FORMAT, "retired_events": sorted(self.retired)}}
        found |= {one.file: one.document() for one in (*self.events, *self.public)}
        found |= {
            f"{COMMANDS}{name}.json": {"$schema": DIALECT, **body} for name, body in (self.commands or {}).items()
        }
        return dict(sorted(found.items()))

    def at(self, name: str) -> dict[int, EventShape]:
        """An event by its schemas, the newest last."""
        return {one.schema: one for one in sorted(self.events, key=lambda one: one.schema) if one.name == name}

    def names(self) -> list[str]:
        """Of its events, each once."""
        return sorted({one.name for one in self.events})


def contract_of(app: Declares) -> Contract:
    """What the declarations of an app come to; eventjet's own events are not the app's to change."""
    kinds = [kind for kind in app.catalog.kinds() if kind.aggregate != CLAIMS]
    events = [_shape(kind.event_type, kind.info, kind.aggregate) for kind in kinds]
    told = {kind: event_info(kind) for one in app.publications.values() for kind in one.public}
    public = [_shape(kind, info, None) for kind, info in told.items()]
    commands = {
        f"{app.aggregates[one.aggregate].name}.{one.name}": arguments_of(one.decide).schema() for one in app.served
    }
    return Contract(app.name, _sorted(events), _sorted(public), tuple(sorted(app.catalog.retired)), commands)


def contract_in(documents: Mapping[str, Any], where: str) -> Contract:
    """The inverse of `Contract.documents`; raises `UsageError` for what is no export."""
    try:
        about = documents[APP]
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}, and this release reads {FORMAT}")
        shapes = [_read(body) for name, body in documents.items() if _EVENT_FILE.fullmatch(name)]
        events = [one for one in shapes if one.aggregate is not None]
        public = [one for one in shapes if one.aggregate is None]
        start, end = len(COMMANDS), -len(".json")
        commands = {
            name[start:end]: _without_dialect(body) for name, body in documents.items() if name.startswith(COMMANDS)
        }
        retired = tuple(map(str, about["retired_events"]))
        return Contract(str(about["app"]), _sorted(events), _sorted(public), retired, commands)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{where} cannot be read as an export: {reason}. Write one with `eventjet schema export --out schemas`."
        ) from None


def text_of(document: object) -> str:
    """A document as its file holds it: sorted, a key a line, so that a change is a small diff."""
    option = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return dump_json(document, option).decode()


def _shape(cls: type, info: EventInfo, aggregate: str | None) -> EventShape:
    return EventShape(info.name, info.schema, aggregate, info.formerly, shape_of(cls))


def _read(document: Any) -> EventShape:
    body = dict(cast("Json", document))
    told = body.pop(EVENT)
    body.pop("$schema", None)
    formerly = tuple(map(str, told["formerly"]))
    return EventShape(str(told["name"]), int(told["schema"]), told.get("aggregate"), formerly, body)


def _without_dialect(document: Json) -> Json:
    return {name: value for name, value in document.items() if name != "$schema"}


def _sorted(shapes: Sequence[EventShape]) -> tuple[EventShape, ...]:
    return tuple(sorted(shapes, key=lambda one: (one.name, one.schema)))
