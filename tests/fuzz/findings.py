"""Inputs that were findings once, by target: each broke its law before the fault was mended."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.targets import INNER, RECORD, line_of

FINDINGS: dict[str, list[Any]] = {
    # Errors of JetStream whose codes are no numbers: `AttributeError`, `TypeError`, `ValueError`. Headers of a direct
    # get that end early: `IndexError`, and a bare `ValueError`.
    "replies": [
        b'{"error": 1.0}',
        b'{"error": {"code": null}}',
        b'{"error": {"code": ""}}',
        b"\r\nNats-Stream: x\r\n{}",
        RECORD % b"yesterday",
    ],
    # Positions and versions that are numbers of another kind, under a checksum that fits.
    "snapshots": [json.dumps({**INNER, name: -9223372036854776833}).encode() for name in ("position", "version")],
    # Lines of a manifest that have all their names, and values of other types: `TypeError`.
    "manifests": [[line_of({"last": None}, {})], [line_of({}, {"last": None})], [line_of({"first": "1"}, {})]],
}
