"""What a stream's numbers say of what is gone from a log."""

from __future__ import annotations

from typing import Any

import pytest

from eventjet.errors import LogIncomplete
from eventjet.jetstream.api import StreamState
from eventjet.log.integrity import FIRST, MISSING, check_integrity, missing_range


def stream(
    first: int, last: int, messages: int, *, metadata: dict[str, str] | None = None, **config: Any
) -> StreamState:
    deleted = max(0, last - max(first, 1) + 1 - messages)
    return StreamState("bank", first, last, messages, deleted, 0, 0, metadata or {}, {"name": "bank", **config})


@pytest.mark.parametrize(
    "whole",
    [
        stream(0, 0, 0),
        stream(1, 100, 100),
        stream(1, 100, 100, metadata={FIRST: "1"}, max_msgs=100),
        stream(61, 100, 40, metadata={FIRST: "61"}),
        stream(61, 60, 0, metadata={FIRST: "61"}),
        stream(61, 100, 40, first_seq=61),
        stream(1, 100, 97, metadata={MISSING: "3"}),
    ],
)
def test_nothing_is_gone_from_a_whole_log(whole: StreamState) -> None:
    check_integrity(whole)


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        (stream(61, 100, 40, max_msgs=40), "positions 1 to 60 from its beginning are gone (max_msgs is 40)"),
        (stream(2, 1, 0), "position 1 from its beginning are gone"),
        (stream(101, 100, 0, metadata={FIRST: "100"}), "position 100 from its beginning are gone"),
        (stream(1, 100, 97), "3 between 1 and 100 are gone"),
        (stream(1, 100, 96, metadata={MISSING: "3"}), "4 between 1 and 100 are gone"),
        (stream(3, 9, 6, metadata={FIRST: "x"}), "positions 1 to 2 from its beginning and 1 between 3 and 9 are gone"),
    ],
)
def test_what_is_gone_is_named(damaged: StreamState, told: str) -> None:
    assert missing_range(damaged) == told
    with pytest.raises(LogIncomplete, match="The log 'bank' is not whole"):
        check_integrity(damaged)
