"""Pages: templates that escape everything, their paths, filters for values, and checked values of the query.

Values from the log or a database are not trusted: they are escaped and cut, and characters that could reorder or hide
text are made visible.
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
"""The most characters of an event's body on the event's own page."""


@cache
def environment() -> Environment:
    """Return the environment of the templates, which compiles each template once."""
    templates = Environment(
        loader=PackageLoader("eventjet.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "text": text,
        "json": shown_json,
        "number": number,
        "moment": moment,
        "duration": duration,
        "counted": counted,
        "sentence": sentence,
    }
    templates.filters.update(filters)
    return templates


def page(request: Request, template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    """Return a response with a page, or a part of a page, from a template and its values."""
    return HTMLResponse(rendered(request, template, **values), status)


def rendered(request: Request, template: str, /, **values: Any) -> str:
    """Return the HTML of a template with these values and those that every page has."""
    visitor = visitor_of(request)
    common = {
        "app": request.app.state.sources.app,
        "link": linker(request),
        "screens": SCREENS,
        "is_here": partial(_is_here, request),
        "visitor": visitor,
        "token_field": TOKEN,
        "now": datetime.now(UTC),
    }
    return environment().get_template(template).render(common | values)


def linker(request: Request) -> Callable[..., str]:
    """Return a function from a page's name, and keywords for the query, to its path below the console's own."""
    root = request.scope.get("root_path", "")

    def link(name: str, /, **query: Any) -> str:
        parameters = {key.rstrip("_"): value for key, value in query.items() if value is not None and value != ""}
        path = root + PATHS[name]
        return f"{path}?{urlencode(parameters)}" if parameters else path

    return link


PATHS: Mapping[str, str] = {
    "overview": "/",
    "overview_live": "/live/overview",
    "aggregates": "/aggregates",
    "aggregate": "/aggregates/one",
    "aggregate_state": "/aggregates/state",
    "event": "/events/one",
    "body": "/events/body",
    "log": "/log",
    "log_live": "/live/log",
    "models": "/models",
    "model": "/models/one",
    "row": "/models/row",
    "quarantine": "/quarantine",
    "quarantined": "/quarantine/one",
    "processes": "/processes",
    "instances": "/processes/list",
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
"""The path of every page by the page's name. Names and ids are in the query, since an id may contain any character."""


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
"""(name, title) of the pages that the head of every page links to."""


def _is_here(request: Request, name: str) -> bool:
    path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
    return path == PATHS[name] or (name != "overview" and path.startswith(f"{PATHS[name]}/"))


def text(value: object, most: int = VALUE_MAX) -> str:
    """Return untrusted text, cut, with characters that could mislead a reader made visible (UTS 55)."""
    return printable(cut(value if isinstance(value, str) else str(value), most))


def shown_json(value: Any, most: int = BODY_MAX) -> str:
    """Return a value as JSON on several lines, cut; text is returned as text."""
    if isinstance(value, str):
        return text(value, most)
    written = json.dumps(cut_values(value, 4_000), indent=2, ensure_ascii=False, default=str)
    return "\n".join(map(printable, cut(written, most).split("\n")))


def sentence(value: str) -> Markup:
    """Return untrusted text as HTML with a capital first letter, in which commands between backticks are code."""
    parts = text(value[:1].upper() + value[1:], 2_000).split("`")
    marked = (Markup("<code>{}</code>") if number % 2 else Markup("{}") for number in range(len(parts)))
    return Markup("").join(mark.format(part) for mark, part in zip(marked, parts, strict=True))


def number(value: float | None) -> str:
    """Format a number as `12,345` or `0.4`, and None as a dash."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def moment(at: datetime | float | str | None) -> str:
    """Format a time, seconds since 1970 or ISO text as `2026-01-31 12:00:00Z` in HTML, and None as a dash."""
    if at is None:
        return "–"
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    if isinstance(at, float | int):
        at = datetime.fromtimestamp(at, UTC)
    at = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(at.isoformat(), at.strftime("%Y-%m-%d %H:%M:%SZ"))


TEXT_MAX = 5_000
"""The most characters of a value in the query, such as a key with several parts."""
ID_MAX = 1_000
"""The most characters of an id, which may have 200, or of its encoded form."""
_DIGITS_MAX = 19
NUMBER_MAX = 2**63 - 1


def query_text(request: Request, name: str, most: int = TEXT_MAX) -> str:
    """Return a text of the query, or empty text; raises `HTTPException` 400 for text that is too long or impossible."""
    value = request.query_params.get(name, "")
    if len(value) > most:
        raise HTTPException(400, f"`{name}` has {len(value):,} characters; {most:,} are the most.")
    if "\0" in value or (not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value)):
        raise HTTPException(400, f"`{name}` holds a character that no log and no database takes as text.")
    return value


def query_number(request: Request, name: str, *, least: int = 0, most: int = NUMBER_MAX) -> int | None:
    """Return a number of the query, perhaps with commas, or None; raises `HTTPException` 400 for any other text."""
    digits = request.query_params.get(name, "").replace(",", "").strip()
    if not digits:
        return None
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX):
        raise HTTPException(400, f"`{name}` is {printable(cut(digits, 40))!r}, which is not a number.")
    value = int(digits)
    if not least <= value <= most:
        raise HTTPException(400, f"`{name}` is {value:,}; it can be from {least:,} to {most:,}.")
    return value
