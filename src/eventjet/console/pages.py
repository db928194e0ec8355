"""Pages: templates that escape everything, their paths, filters for values, and checked values of the query.

What comes from the log or a database is hostile: it is escaped, cut, and what could steer text is made visible.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from eventjet.console.access import TOKEN, visitor_of
from eventjet.text import VALUE_MAX, counted, cut, cut_values, duration, printable

BODY_MAX = 20_000
"""Characters of one event's body on a page of its own."""


@cache
def environment() -> Environment:
    """The templates, each compiled once."""
    made = Environment(
        loader=PackageLoader("eventjet.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    own: dict[str, Any] = {
        "text": text,
        "json": shown_json,
        "number": number,
        "moment": moment,
        "duration": duration,
        "counted": counted,
    }
    made.filters.update(own)
    return made


def page(request: Request, template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    """One page, or one part of a page, from a template and its values."""
    return HTMLResponse(rendered(request, template, **values), status)


def rendered(request: Request, template: str, /, **values: Any) -> str:
    """The HTML of it."""
    visitor = visitor_of(request)
    known = {
        "app": request.app.state.sources.app,
        "link": linker(request),
        "screens": SCREENS,
        "is_here": partial(_is_here, request),
        "visitor": visitor,
        "token_field": TOKEN,
        "now": datetime.now(UTC),
    }
    return environment().get_template(template).render(known | values)


def linker(request: Request) -> Callable[..., str]:
    """Gives the path of a page by its route's name, below wherever the console is mounted; other keywords are query."""
    root = request.scope.get("root_path", "")

    def link(name: str, /, **query: Any) -> str:
        given = {key.rstrip("_"): value for key, value in query.items() if value is not None and value != ""}
        path = root + PATHS[name]
        return f"{path}?{urlencode(given)}" if given else path

    return link


PATHS: Mapping[str, str] = {
    "overview": "/",
    "overview_live": "/live/overview",
    "aggregates": "/aggregates",
    "aggregate": "/aggregates/one",
    "aggregate_state": "/aggregates/state",
    "event": "/events/one",
    "log": "/log",
    "log_live": "/live/log",
    "models": "/models",
    "model": "/models/one",
    "row": "/models/row",
    "quarantine": "/quarantine",
    "parked": "/quarantine/one",
    "processes": "/processes",
    "process": "/processes/one",
    "jobs": "/jobs",
    "job": "/jobs/one",
    "job_live": "/live/job",
    "actions": "/actions",
    "action": "/actions/one",
    "action_live": "/live/action",
    "act": "/actions/new",
    "static": "/static/",
}
"""Every page by its name. What is asked about is in the query: an id may hold any character."""


SCREENS = (
    ("overview", "Overview"),
    ("aggregates", "Aggregates"),
    ("log", "Log"),
    ("models", "Read models"),
    ("quarantine", "Quarantine"),
    ("processes", "Processes"),
    ("jobs", "Jobs"),
    ("actions", "Actions"),
)
"""What the head of every page leads to."""


def _is_here(request: Request, name: str) -> bool:
    here = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
    return here == PATHS[name] or (name != "overview" and here.startswith(f"{PATHS[name]}/"))


def text(value: object, most: int = VALUE_MAX) -> str:
    """Text that others wrote: cut, and with what could steer a reader's eye made visible (UTS 55)."""
    return printable(cut(value if isinstance(value, str) else str(value), most))


def shown_json(value: Any, most: int = BODY_MAX) -> str:
    """JSON on several lines, cut; text as it is."""
    if isinstance(value, str):
        return text(value, most)
    written = json.dumps(cut_values(value, 4_000), indent=2, ensure_ascii=False, default=str)
    return "\n".join(map(printable, cut(written, most).split("\n")))


def number(value: float | None) -> str:
    """`12,345`, `0.4`; a dash for what is not known."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def moment(at: datetime | float | str | None) -> str:
    """`2026-01-31 12:00:00Z`; from a time, from seconds since 1970, or from ISO text."""
    if at is None:
        return "–"
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    if isinstance(at, float | int):
        at = datetime.fromtimestamp(at, UTC)
    at = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(at.isoformat(), at.strftime("%Y-%m-%d %H:%M:%SZ"))


TEXT_MAX = 5_000
"""Characters: of a key with several parts, for instance."""
ID_MAX = 1_000
"""Of an id, which may have 200, or of what stands for it."""
_DIGITS_MAX = 19
NUMBER_MAX = 2**63 - 1


def query_text(request: Request, name: str, most: int = TEXT_MAX) -> str:
    """One text of the query, empty where it is not there.

    Raises `HTTPException` 400 for one that is too long, or that nothing in a log or a table can equal.
    """
    value = request.query_params.get(name, "")
    if len(value) > most:
        raise HTTPException(400, f"`{name}` has {len(value):,} characters; {most:,} are the most.")
    if "\0" in value or (not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value)):
        raise HTTPException(400, f"`{name}` holds a character that no log and no database takes as text.")
    return value


def query_number(request: Request, name: str, *, least: int = 0, most: int = NUMBER_MAX) -> int | None:
    """One number of the query, None where it is not there; raises `HTTPException` 400 for anything else."""
    given = request.query_params.get(name, "").strip()
    if not given:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= _DIGITS_MAX):
        raise HTTPException(400, f"`{name}` is {printable(cut(given, 40))!r}, which is not a number.")
    number = int(given)
    if not least <= number <= most:
        raise HTTPException(400, f"`{name}` is {number:,}; it can be from {least:,} to {most:,}.")
    return number
