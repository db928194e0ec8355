"""The code, or the step of a deploy, that makes a change right: what a verdict ends with."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eventjet.codec.shape import DECIMAL_TEXT, Json
from eventjet.contracts.compare import Misfit, Weight

STOP_FIRST = "Stop the older release, and tell whoever else reads the log, before this one records: no rolling deploy."
READ_FIRST = (
    "Deploy a release first that declares and folds it without recording it, "
    "or stop the older one before this one records."
)
ASK_READERS = "Publish it under another name beside the old one, until nobody takes that any more."
UPCAST_ALL = "Let the upcaster take every body that its schema lets be, or show with --against-log that none is stored."
TRY_THE_LOG = "Try what is stored: eventjet schema check --against-log 100"
_FIELD = re.compile(r"[A-Za-z_]\w*")


def retired(name: str) -> str:
    """For an event that nobody needs any more."""
    return f'App(…, retired_events=["{name}"])'


def gone(name: str) -> str:
    """For an event that is not declared, and nothing looks like its new name."""
    return (
        f'If it was renamed: @event("NEW_NAME", formerly=("{name}",)). If nobody needs what it told: {retired(name)}, '
        "which passes over it."
    )


def renamed(name: str, new_name: str, schema: int) -> str:
    """For an event that has another name now."""
    number = f", schema={schema}" if schema != 1 else ""
    return f'@event("{new_name}"{number}, formerly=("{name}",))'


def moved(name: str, aggregate: str | None) -> str:
    """For an event that another aggregate claims."""
    return f"Leave {name!r} to the aggregate {aggregate!r}, and give the other one an event of its own with a new name."


def raised(name: str, schema: int, misfits: Sequence[Misfit], was: Json) -> str:
    """For a shape that changed while its schema did not."""
    return f'@event("{name}", schema={schema + 1})\n\n{upcaster(name, schema, misfits, was)}'


def upcaster(name: str, schema: int, misfits: Sequence[Misfit], was: Json) -> str:
    """The step from one schema to the next, as far as it can be known; what is left to say is `...`."""
    function = re.sub(r"\W+", "_", name.rpartition(".")[2]).strip("_") or "event"
    fields: dict[str, str] = {}
    for one in misfits:
        top = _FIELD.match(one.path)
        if top is not None and one.weight is not Weight.TOLD:
            fields.setdefault(*_entry(top[0], one, was))
    entries = "".join(f', "{key}": {value}' for key, value in fields.items())
    return (
        f'@upcaster("{name}", schema={schema})\n'
        f"def {function}_{schema}(body: dict[str, Any]) -> dict[str, Any]:\n"
        f"    return {{**body{entries or ', ...'}}}\n\n"
        f"App(…, upcasters=[{function}_{schema}])"
    )


def _entry(name: str, one: Misfit, was: Json) -> tuple[str, str]:
    """A field of the new body, and the expression that makes it of the old one."""
    before = was.get("properties", {}).get(name)
    if before is None:
        return name, "..."
    new_name = re.search(r"its new name is '(\w+)'", one.reason)
    if new_name is not None:
        is_sure = name in (was.get("required") or ())
        return new_name[1], f'body["{name}"]' if is_sure else f'body.get("{name}", {before.get("default")!r})'
    if "where it is not there" in one.reason:
        return name, f'body.get("{name}", {before.get("default", "...")!r})'
    if "takes a Decimal" in one.reason and before.get("pattern") != DECIMAL_TEXT:
        return name, f'str(body["{name}"])'
    if "is required, and was not" in one.reason:
        return name, f'body.get("{name}", {before.get("default", "...")!r})'
    return name, "..."
