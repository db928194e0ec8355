"""The state of a stream shows which events of a log are missing, and is refused without a leader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest

from eventjet.errors import LogIncomplete, StoreUnavailable
from eventjet.jetstream.api import StreamState, stream_info
from eventjet.jetstream.client import Client
from eventjet.log.integrity import FIRST, MISSING, StreamIdentity, check_integrity, missing_range
from eventjet.log.topology import IDENTITY, stream_config


def stream(
    first: int, last: int, messages: int, *, metadata: dict[str, str] | None = None, **config: Any
) -> StreamState:
    deleted = max(0, last - max(first, 1) + 1 - messages)
    return StreamState("bank", first, last, messages, deleted, 0, 0, metadata or {}, {"name": "bank", **config})


@pytest.mark.parametrize(
    "state",
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
def test_a_whole_log_passes_the_check(state: StreamState) -> None:
    check_integrity(state)


@pytest.mark.parametrize(
    ("damaged", "text"),
    [
        (stream(61, 100, 40, max_msgs=40), "positions 1 to 60 from its beginning are gone (max_msgs is 40)"),
        (stream(2, 1, 0), "position 1 from its beginning are gone"),
        (stream(101, 100, 0, metadata={FIRST: "100"}), "position 100 from its beginning are gone"),
        (stream(1, 100, 97), "3 between 1 and 100 are gone"),
        (stream(1, 100, 96, metadata={MISSING: "3"}), "4 between 1 and 100 are gone"),
        (stream(3, 9, 6, metadata={FIRST: "x"}), "positions 1 to 2 from its beginning and 1 between 3 and 9 are gone"),
    ],
)
def test_missing_positions_are_named(damaged: StreamState, text: str) -> None:
    assert missing_range(damaged) == text
    with pytest.raises(LogIncomplete, match="The log 'bank' is not whole"):
        check_integrity(damaged)


def stream_info_of(cluster: dict[str, Any]) -> StreamState:
    """Return the state in an answer of the server, as `STREAM.INFO` reads it."""
    answer = {
        "type": "io.nats.jetstream.api.v1.stream_info_response",
        "config": {"name": "bank"},
        "state": {"messages": 0, "bytes": 0, "first_seq": 0, "last_seq": 0},
        "cluster": cluster,
    }
    return stream_info("bank").parse((b"", b"", b"", b"", orjson.dumps(answer)))


def test_an_answer_of_a_stream_without_a_leader_is_refused() -> None:
    replicas = [{"name": name, "current": True} for name in ("n1", "n2", "n3")]
    with pytest.raises(StoreUnavailable, match=r"the stream has no leader.*n1, n2, n3 that are away"):
        stream_info_of({"name": "east", "replicas": replicas})
    assert stream_info_of({"name": "east", "leader": "n1", "replicas": replicas[1:]}).name == "bank"
    # The stream gets its second replica, and only the first one has its messages.
    assert stream_info_of({"name": "east", "replicas": replicas[:1], "desired": {"replicas": replicas}}).name == "bank"


class AdvisedClient:
    """A client whose server may announce a change of the stream before it answers a question that came earlier."""

    def __init__(self) -> None:
        self.on_lost: list[Callable[[], object]] = []
        self.is_changing = False

    async def serve(self, _: str, handler: Callable[[Any], object]) -> None:
        self._handler = handler

    async def run(self, _: object) -> StreamState:
        if self.is_changing:
            self._handler(None)
        return StreamState("bank", 1, 9, 9, 0, 0, 0, {IDENTITY: "first"}, stream_config("bank", 1))


async def test_a_look_that_is_older_than_an_announced_change_does_not_count() -> None:
    client = AdvisedClient()
    identity = StreamIdentity("bank", cast("Client", client))
    assert await identity.confirm()
    client.is_changing = True
    await identity.look()
    assert identity.is_forgotten
    assert not await identity.confirm()
    client.is_changing = False
    assert await identity.confirm()
