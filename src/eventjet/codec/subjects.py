"""PURE: names on the server. One stream an app, one subject an entity."""

from __future__ import annotations

import re

from eventjet.domain.identity import encode_id

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")

SERVER_MESSAGE_MAX = 900_000
"""Bytes of one message, headers included, that the stream takes."""


def is_name(text: str) -> bool:
    """Whether apps, aggregates and projections may be called so: `[a-z][a-z0-9_]*`, 63 characters at most."""
    return _NAME.fullmatch(text) is not None


def stream_subjects(app: str) -> str:
    """What the stream of an app listens to."""
    return f"{app}.*.*"


def subject_of(app: str, aggregate: str, aggregate_id: str) -> str:
    """The subject of one entity; raises `Refused` for an id that cannot be a token."""
    return f"{app}.{aggregate}.{encode_id(aggregate_id)}"


def snapshot_bucket(app: str) -> str:
    """The key-value bucket that holds an app's snapshots."""
    return f"{app}_snapshots"
