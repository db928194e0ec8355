"""What a page is asked about, out of its query: checked, and refused in plain words."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request

TEXT_MAX = 5_000
_DIGITS_MAX = 19


def text_asked(request: Request, name: str, most: int = TEXT_MAX) -> str:
    """Text, empty where nothing is asked; raises `HTTPException` 400 for one that is too long, or no text."""
    given = request.query_params.get(name, "")
    if len(given) > most:
        raise HTTPException(400, f"`{name}` in the address holds {len(given):,} characters; {most:,} is the most.")
    if "\0" in given or not _is_text(given):
        raise HTTPException(400, f"`{name}` in the address is no text that a log or a database could hold.")
    return given


def number_asked(request: Request, name: str) -> int | None:
    """A number from 0 on; None where none is asked. Raises `HTTPException` 400 for anything else."""
    given = request.query_params.get(name, "").strip()
    if not given:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < _DIGITS_MAX):
        raise HTTPException(400, f"`{name}` in the address is to be a number from 0 on.")
    return int(given)


def _is_text(given: str) -> bool:
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True
