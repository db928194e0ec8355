"""Ids made to break something: wildcards, control characters, other scripts, look-alikes, half characters, lengths."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

KNOWN = (
    "", "*", ">", ".", "..", "a.b", ".a", "a.", "a..b", "a.*", "a.>", "$JS", "$JS.API.STREAM.DELETE.x", "_INBOX.x",
    "$KV.x", " ", "\t", "a b", "\r\n", "a\r\nPUB x 0\r\n\r\n", "\x00", "a\x00b", "\x7f", "\x1b[2J",
    "=", "==", "=4", "=41", "=2A", "=2a", "é", "e\u0301", "ä" * 33, "ä" * 34, "日本語", "🏦",
    "\u202eabc", "\u2066x\u2069", "\ufeff", "\u2028", "\u00a0", "\ufb01", "\u0130", "\ud800", "a\udfffb", "\udcff",
    "\U0010ffff", "x" * 200, "x" * 201, "x" * 5_000, "*" * 66, "*" * 67, "." * 5_000, "../../etc/passwd", "%2e%2e",
    "'; DROP TABLE x; --", "{{7*7}}", "null", "None", "-", "--help", "CON", "a/b", "a\\b",
)  # fmt: skip
_ALPHABETS = (
    "*>. \t\r\n\x00=$_-/\\",
    "*.>",
    "=0123456789ABCDEFabcdef",
    "aB9_-",
    "äöü€",
    "日本語🏦",
    "\u202e\u2066\u2069\u200d\ufeff",
    "\ud800\udbff\udc00\udfff",
    "".join(map(chr, range(256))),
    "\x00\x01\x1f\x7f\x80\x9f",
)


def hostile_ids(count: int, seed: int) -> Iterator[str]:
    """Yield the known ones first, then mixtures of any length, around the limit too."""
    yield from KNOWN
    random = Random(seed)
    for _ in range(count - len(KNOWN)):
        alphabet = random.choice(_ALPHABETS) + ("" if random.random() < 0.7 else "abc.*")
        draw = random.random()
        length = random.randrange(8) if draw < 0.5 else random.randrange(90) if draw < 0.9 else random.randrange(260)
        yield "".join(random.choices(alphabet, k=5_000 if draw > 0.999 else length))
