"""Verdicts as SARIF 2.1.0, which reviewers of code see beside the lines that they are about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eventjet.codec.shape import Json
from eventjet.contracts.verdicts import Effect, Judged, Remark

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVEL = {
    Effect.SAFE: "note",
    Effect.OLD_READERS: "warning",
    Effect.UPCASTER: "error",
    Effect.OLD_EVENTS: "error",
}
Locate = Callable[[Judged], tuple[str, int]]
"""The file of an event, relative to the repository, and the line."""


def sarif_of(judged: Sequence[Judged], locate: Locate, version: str) -> Json:
    """The log; remarks that need nothing done are left out."""
    rules = [
        {
            "id": _rule(one),
            "shortDescription": {"text": f"This change {one.value}."},
            "defaultConfiguration": {"level": _LEVEL[one]},
        }
        for one in Effect
        if one is not Effect.SAFE
    ]
    results = [
        _result(one, remark, *locate(one))
        for one in judged
        for remark in one.remarks
        if remark.verdict is not Effect.SAFE
    ]
    driver = {"name": "eventjet schema check", "version": version, "rules": rules}
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _result(one: Judged, remark: Remark, file: str, line: int) -> Json:
    text = f"{one.event} {remark.what}" + (f"\n\n{remark.fix}" if remark.fix else "")
    place = {"artifactLocation": {"uri": file}, "region": {"startLine": line}}
    return {
        "ruleId": _rule(remark.verdict),
        "level": _LEVEL[remark.verdict],
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
        "partialFingerprints": {"eventjet/v1": f"{one.event}: {remark.what}"},
    }


def _rule(verdict: Effect) -> str:
    return verdict.value.replace(" ", "-")
