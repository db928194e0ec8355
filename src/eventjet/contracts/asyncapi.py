"""Generate the AsyncAPI 3.0 document of an app: its log, publications, inboxes and served commands.

Schemas are those of an export, converted to JSON Schema draft 7, which every reader of AsyncAPI takes.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from typing import Any, cast

from eventjet.codec.cloud_events import CONTENT_TYPE
from eventjet.codec.commands import arguments_of
from eventjet.codec.headers import COMMAND, MSG_ID, SCHEMA, TYPE, VERSION
from eventjet.codec.shape import MEMBERS, UNKNOWN, Json, shape_of
from eventjet.contracts.contract import Contract, Declares, EventShape
from eventjet.domain.aggregate import event_info
from eventjet.domain.subscription import shown_name
from eventjet.errors import DefinitionError

_KEY = re.compile(r"[^A-Za-z0-9_.-]")
_JSON = "application/json"


def asyncapi_of(app: Declares, contract: Contract, release: str) -> Json:
    """Return the document of an app; `release` is the app's version in it."""
    document = _Document(app)
    for declared in contract.events:
        document.message(declared, f"{app.name}.{declared.aggregate}.{{id}}")
    for info in app.aggregates.values():
        document.log(info.name, [shape for shape in contract.events if shape.aggregate == info.name])
    for name in app.publications:
        document.publication(name, contract)
    for name in app.inboxes:
        document.inbox(name)
    for declared in app.served:
        document.command(app.aggregates[declared.aggregate].name, declared.name, declared.decide)
    about = {"title": app.name, "version": release, "description": f"What {app.name} records, tells, takes and serves."}
    components = {"messages": document.messages, "schemas": document.schemas}
    return {
        "asyncapi": "3.0.0",
        "info": about,
        "defaultContentType": _JSON,
        "channels": document.channels,
        "operations": document.operations,
        "components": components,
    }


class _Document:
    def __init__(self, app: Declares) -> None:
        self._app = app
        self._docs = {event_info(kind.event_type).name: kind.event_type for kind in app.catalog.kinds()}
        self.channels: dict[str, Any] = {}
        self.operations: dict[str, Any] = {}
        self.messages: dict[str, Any] = {}
        self.schemas: dict[str, Any] = {}

    def message(self, shape: EventShape, where: str) -> str:
        """Add an event as a message of the log; return the key of the message."""
        key = _key(shape.name)
        values = {MSG_ID: None, TYPE: shape.name, SCHEMA: str(shape.schema), VERSION: None, COMMAND: None}
        headers = {name: {"type": "string", **({"const": value} if value else {})} for name, value in values.items()}
        self.messages[key] = {
            "name": shape.name,
            "title": str(shape.body.get("title", shape.name)),
            "summary": f"Schema {shape.schema}, on {where}.",
            **_described(self._docs.get(shape.name)),
            "contentType": _JSON,
            "headers": {"type": "object", "properties": headers, "required": [MSG_ID, TYPE, SCHEMA, VERSION]},
            "payload": self._schema(f"{key}.{shape.schema}", shape.body),
        }
        return key

    def log(self, aggregate: str, events: list[EventShape]) -> None:
        """Add the channel of an aggregate's subjects."""
        about = f"One subject for each {aggregate}, whose events it holds in the order of their versions."
        self._channel(aggregate, f"{self._app.name}.{aggregate}.{{id}}", [_key(event.name) for event in events], about)
        self._operation(f"record_{aggregate}", "send", aggregate)

    def publication(self, name: str, contract: Contract) -> None:
        """Add a publication, whose messages are CloudEvents."""
        publication = self._app.publications[name]
        public_names = {event_info(kind).name for kind in publication.public}
        keys: list[str] = []
        for event in contract.public:
            if event.name not in public_names:
                continue
            key = f"{name}.{_key(event.name)}"
            data = self._schema(f"public.{_key(event.name)}.{event.schema}", event.body)
            self.messages[key] = {
                "name": event.name,
                "title": str(event.body.get("title", event.name)),
                **_described(next(kind for kind in publication.public if event_info(kind).name == event.name)),
                "contentType": CONTENT_TYPE,
                "payload": _cloud_event(event.name, publication.source, data),
            }
            keys.append(key)
        self._channel(f"publication.{name}", f"{publication.stream}.{name}.{{id}}", keys, "CloudEvents for others.")
        self._operation(f"publish_{name}", "send", f"publication.{name}")

    def inbox(self, name: str) -> None:
        """Add an inbox, which takes messages of another stream."""
        inbox = self._app.inboxes[name]
        key, kind = f"inbox.{name}", inbox.type
        try:
            body, title = shape_of(kind), event_info(kind).name
        except (DefinitionError, AttributeError):
            body, title = cast("Json", _adapted(kind)), _title(kind)
        about = f"The JSON itself, or the data of a CloudEvent; of the stream {inbox.stream}."
        payload = self._schema(key, body)
        self.messages[key] = {"name": title, "title": title, "description": about, "payload": payload}
        self._channel(key, inbox.subject, [key], f"Of the stream {inbox.stream}.")
        self._operation(f"take_{name}", "receive", key)

    def command(self, aggregate: str, name: str, decide: Any) -> None:
        """Add a served decision and its answers."""
        key = f"command.{aggregate}.{name}"
        payload = self._schema(key, arguments_of(decide).schema())
        self.messages[key] = {"name": name, "title": name, **_described(decide), "payload": payload}
        self.messages[f"{key}.done"] = {"name": f"{name}.done", "title": "What was recorded", "payload": _DONE}
        self.messages[f"{key}.problem"] = {"name": f"{name}.problem", "title": "Why not", "payload": _PROBLEM}
        self._channel(key, f"cmd.{self._app.name}.{aggregate}.{name}.{{id}}", [key], "A request, which is answered.")
        answers = f"{key}.answer"
        self.channels[answers] = _channel(None, [f"{key}.done", f"{key}.problem"], "The reply subject of a request.")
        self._operation(f"serve_{aggregate}_{name}", "receive", key)
        self.operations[f"serve_{aggregate}_{name}"]["reply"] = {"channel": {"$ref": f"#/channels/{answers}"}}

    def _channel(self, key: str, address: str, messages: list[str], about: str) -> None:
        self.channels[key] = _channel(address, messages, about)
        if "{id}" in address:
            self.channels[key]["parameters"] = {"id": {"description": "The id of the aggregate, encoded as a token."}}

    def _operation(self, name: str, action: str, channel: str) -> None:
        self.operations[name] = {"action": action, "channel": {"$ref": f"#/channels/{channel}"}}

    def _schema(self, key: str, body: Json) -> Json:
        """Add a schema and its definitions to the components; return the reference to the schema."""
        definitions = cast("dict[str, Any]", body.get("$defs") or {})
        schema = {name: value for name, value in body.items() if name not in ("$defs", "$schema")}
        for name, value in {f"{key}.{_key(definition)}": value for definition, value in definitions.items()}.items():
            self.schemas[name] = _draft_7(value, key)
        self.schemas[key] = _draft_7(schema, key)
        return {"$ref": f"#/components/schemas/{key}"}


def _channel(address: str | None, messages: list[str], about: str) -> Json:
    refs = {name: {"$ref": f"#/components/messages/{name}"} for name in messages}
    return {"address": address, "description": about, "messages": refs}


def _draft_7(node: Any, key: str) -> Any:
    if isinstance(node, list):
        return [_draft_7(item, key) for item in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    schema = cast("Json", node)
    converted: Json = {}
    for name, value in schema.items():
        if name in ("default", "const", "enum", MEMBERS):
            converted[name] = value
        elif name in ("properties", "patternProperties"):
            converted[name] = {field: _draft_7(part, key) for field, part in cast("Json", value).items()}
        elif name == "prefixItems":
            converted["items"] = _draft_7(value, key)
        elif name == "items" and "prefixItems" in schema:
            converted["additionalItems"] = _draft_7(value, key)
        elif name == "$ref":
            converted[name] = f"#/components/schemas/{key}.{_key(str(value).rpartition('/')[2])}"
        else:
            converted[name] = _draft_7(value, key)
    if "$ref" in converted and len(converted) > 1:
        reference = converted.pop("$ref")
        return {**converted, "allOf": [{"$ref": reference}]}
    return converted


def _cloud_event(name: str, source: str, data: Json) -> Json:
    text = {"type": "string"}
    properties: Json = {
        "specversion": {"type": "string", "const": "1.0"},
        "id": text,
        "source": {"type": "string", "const": source},
        "type": {"type": "string", "const": name},
        "subject": text,
        "time": {"type": "string", "format": "date-time"},
        "datacontenttype": {"type": "string", "const": _JSON},
        "sequence": text,
        "data": data,
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


_INTEGER = {"type": "integer"}
_DONE: Json = {
    "type": "object",
    "properties": {"position": _INTEGER, "version": _INTEGER, "token": {"type": "string"}, "events": _INTEGER},
    "required": ["position", "version", "token", "events"],
}
_PROBLEM: Json = {
    "type": "object",
    "properties": {"type": {"type": "string"}, "detail": {"type": "string"}},
    "required": ["type", "detail"],
}


def _adapted(kind: Any) -> Mapping[str, Any]:
    from pydantic import TypeAdapter

    try:
        return shape_of(kind, cast("Any", TypeAdapter(kind)).core_schema)
    except Exception:  # noqa: BLE001 - whatever a type of the application's own does
        return {UNKNOWN: _title(kind)}


def _title(kind: Any) -> str:
    return str(kind) if typing.get_origin(kind) else shown_name(kind)


def _described(thing: Any) -> Json:
    description = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    generated = description.startswith(f"{getattr(thing, '__name__', '')}(")
    return {"description": description} if description and not generated else {}


def _key(name: str) -> str:
    """Return a name with the characters that a key of AsyncAPI's components may have."""
    return _KEY.sub("_", name)
