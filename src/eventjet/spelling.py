"""A name that is not there, answered with those that are."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

NAMED_MAX = 10
"""Names that a message lists; the others are counted."""


def listed(names: Iterable[str]) -> str:
    """`balances, postings and 3 more`; `none` where there are none."""
    found = list(dict.fromkeys(names))
    more = len(found) - NAMED_MAX
    return (", ".join(found[:NAMED_MAX]) or "none") + (f" and {more:,} more" if more > 0 else "")


def meant(name: str, known: Iterable[str]) -> str:
    """The sentence `Did you mean 'balances'? ` with a blank after it; empty where nothing is near."""
    near = get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}? " if near else ""
