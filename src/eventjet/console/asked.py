"""What a page's query asks for, checked: whatever is wrong with it is said on a page with status 400."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request

from eventjet.shown import cut, printable

TEXT_MAX = 5_000
"""Characters: of a key with several parts, for instance."""
ID_MAX = 1_000
"""Of an id, which may have 200, or of what stands for it."""
_DIGITS_MAX = 19
NUMBER_MAX = 2**63 - 1


def text_asked(request: Request, name: str, most: int = TEXT_MAX) -> str:
    """One text of the query, empty where it is not there.

    Raises `HTTPException` 400 for one that is too long, or that nothing in a log or a table can equal.
    """
    value = request.query_params.get(name, "")
    if len(value) > most:
        raise HTTPException(400, f"`{name}` has {len(value):,} characters; {most:,} are the most.")
    if "\0" in value or (not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value)):
        raise HTTPException(400, f"`{name}` holds a character that no log and no database takes as text.")
    return value


def number_asked(request: Request, name: str, *, least: int = 0, most: int = NUMBER_MAX) -> int | None:
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
