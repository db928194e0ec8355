"""Only a repeated message gets the same command key, whatever its source and id contain."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventjet import App, Incoming, Jet, Metadata, aggregate, event
from eventjet.codec.cloud_events import IncomingDecoder
from eventjet.errors import Refused, UndecodableMessage
from eventjet.subscriptions.handlers import Cause, EventReaction


@event("till.paid")
class Paid:
    cents: int


@aggregate("till")
class Till:
    cents: int = 0

    def pay(self, cents: int) -> Paid:
        return Paid(cents=cents)

    def evolve(self, event: Paid) -> Till:
        return replace(self, cents=self.cents + event.cents)


@pytest.fixture
async def jet() -> AsyncGenerator[Jet]:
    async with App("shop", aggregates=[Till]).in_memory() as jet:
        yield jet


def message(source: str, name: str) -> Incoming[Any]:
    return Incoming(None, name, source, "town.x", 1, datetime(2026, 1, 1, tzinfo=UTC))


async def pays(jet: Jet, source: str, name: str, word: str = "") -> int:
    """Handle a message once; return what the till has then."""
    reaction = EventReaction(jet._repositories, None, Cause.of_message("payments", message(source, name)), 1)
    await (reaction.named(word) if word else reaction).repository(Till).execute("t", Till.pay, 1)
    return (await jet.repository(Till).load("t")).cents


async def paid_by_an_earlier_release(jet: Jet, source: str, name: str, word: str = "") -> int:
    """Record what release 0.1.0 recorded for a message."""
    whole = f"{source}/{name}" if source else name
    metadata = Metadata(causation=whole[:500], correlation=whole[:500], actor="inbox:payments")
    command_id = f"payments/{whole}{f'/{word}' if word else ''}/1"
    await jet.repository(Till).command(command_id, metadata=metadata).execute("t", Till.pay, 1)
    return (await jet.repository(Till).load("t")).cents


MESSAGES = [
    ("https://x.example/a", "b/c"),
    ("https://x.example/a/b", "c"),
    ("https://x.example/a", "b%2Fc"),
    ("https://x.example/a/b", "%63"),
    ("https://x.example/a", "b"),
    ("s" * 600, "1"),
    ("s" * 600, "2"),
]


async def test_two_messages_are_never_mistaken_for_each_other(jet: Jet) -> None:
    for count, (source, name) in enumerate(MESSAGES, 1):
        assert await pays(jet, source, name) == count
        assert await pays(jet, source, name) == count, "a repetition"


@given(
    st.lists(st.tuples(st.text("ab/%", min_size=1, max_size=4), st.text("ab/%2F5", min_size=1, max_size=4)), max_size=9)
)
def test_two_cloud_events_never_share_a_key(messages: list[tuple[str, str]]) -> None:
    causes = [Cause.of_message("payments", message(*arguments)) for arguments in dict.fromkeys(messages)]
    assert all(left.key != right.key for left, right in combinations(causes, 2))
    assert all(left.causations[0] != right.causations[0] for left, right in combinations(causes, 2))


@pytest.mark.parametrize("source", ["https://x.example/a", "plain", ""])
@pytest.mark.parametrize(
    "name", ["1", "2026-01-01T00:00:00Z/5", "a%20b", "0197f3a0-0000-7000-8000-000000000001.bells.0"]
)
@pytest.mark.parametrize("word", ["", "line"])
async def test_a_message_that_an_earlier_release_handled_is_not_handled_again(
    jet: Jet, source: str, name: str, word: str
) -> None:
    assert await paid_by_an_earlier_release(jet, source, name, word) == 1
    assert await pays(jet, source, name, word) == 1


async def test_a_message_with_the_former_key_of_another_is_handled(jet: Jet) -> None:
    assert await pays(jet, "https://x.example/a/b", "c") == 1
    assert await pays(jet, "https://x.example/a", "b/c") == 2
    assert await pays(jet, "https://x.example/a", "b/c") == 2
    assert await pays(jet, "https://x.example/a/b", "c") == 2


@pytest.mark.parametrize("first", [pays, paid_by_an_earlier_release])
async def test_a_message_with_the_key_of_another_message_is_refused(jet: Jet, first: Any) -> None:
    await first(jet, "https://x.example/a", "b", "c")
    with pytest.raises(Refused, match=r"its id recorded a command of 'https://x\.example/a.b', and this one is of"):
        await pays(jet, "https://x.example/a/b", "c")


def test_keys_of_messages_with_ordinary_ids_are_unchanged() -> None:
    cause = Cause.of_message("payments", message("https://pay.example/a", "c-1"))
    assert (cause.key, cause.former_key) == ("payments/https://pay.example/a/c-1", None)
    assert cause.metadata.correlation == "https://pay.example/a/c-1"


def test_a_cloud_event_without_a_source_does_not_share_ids_with_plain_messages() -> None:
    decode = IncomingDecoder(int, "2026-01-01T00:00:00Z")
    body = b'{"specversion":"1.0","id":"%s","source":"","type":"t","data":1}'
    assert decode((5, 1, b"s", b"", body % b"a-1")).id == "a-1"
    with pytest.raises(UndecodableMessage, match="its source is empty"):
        decode((6, 1, b"s", b"", body % b"2026-01-01T00:00:00Z/5"))
