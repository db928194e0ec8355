"""Create the streams that an app shares with others, on a local server where nobody else would.

In production an operator creates the stream of a publication, and another app has the one that an inbox reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eventjet.codec.subjects import without_covered
from eventjet.errors import ApiRefused
from eventjet.jetstream.api import create_stream, update_stream
from eventjet.jetstream.client import Client
from eventjet.log.topology import finding_stream
from eventjet.projections.app_ref import Application
from eventjet.text import listed


async def make_streams(client: Client, app: Application) -> list[str]:
    """Create the streams of an app's publications and inboxes that the server lacks; return what was done, in words.

    A stream that exists gets the subjects that it lacks, and atomic batches. What the server refuses is in the returned
    words, and `Jet.init` names that stream as it does in production. Raises `StoreUnavailable` and `Forbidden`.
    """
    words: list[str] = []
    for stream, uses in _uses(app).items():
        state = await client.run(finding_stream(stream))
        existing = [] if state is None else [str(subject) for subject in state.config.get("subjects") or ()]
        subjects = without_covered([*existing, *uses])  # those of a stream may not overlap
        purposes = listed(list(dict.fromkeys(uses.values())))
        try:
            if state is None:
                await client.ask(create_stream({"name": stream, "subjects": subjects, **_CONFIG}))
                inboxes = [subject for subject, purpose in uses.items() if purpose.startswith(_INBOX)]
                empty = f" It is empty: publish to {listed(inboxes)} to try it." if inboxes else ""
                words.append(
                    f"Created the stream {stream} for {purposes}; elsewhere it is not eventjet's to create.{empty}"
                )
            elif subjects != existing or not state.config.get("allow_atomic"):
                await client.ask(update_stream({**state.config, "subjects": subjects, "allow_atomic": True}))
                words.append(f"Gave the stream {stream} what it lacked for {purposes}.")
        except ApiRefused as refusal:
            words.append(f"The server refused the stream {stream} for {purposes}: {refusal.description}.")
    return words


_INBOX = "the inbox "
_CONFIG: Mapping[str, Any] = {
    "storage": "file",
    "retention": "limits",
    "num_replicas": 1,
    "allow_direct": True,
    "allow_atomic": True,
}


def _uses(app: Application) -> dict[str, dict[str, str]]:
    """Return stream → subject → what takes or gives it, in words; the app's own log is none of them."""
    uses: dict[str, dict[str, str]] = {}
    for inbox in app.inboxes.values():
        if not inbox.sources:  # the stream that is gathered from others is made by `Jet.init`
            uses.setdefault(inbox.stream, {})[inbox.subject] = f"{_INBOX}{inbox.name}"
    for publication in app.publications.values():
        subject = f"{publication.stream}.{publication.name}.>"
        uses.setdefault(publication.stream, {})[subject] = f"the publication {publication.name}"
    uses.pop(app.name, None)
    return uses
