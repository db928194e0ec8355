"""What an app has on the server: declared once, compared ever after, never purged or deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from eventjet.codec.subjects import (
    SERVER_MESSAGE_MAX,
    cursor_bucket,
    snapshot_bucket,
    stream_subjects,
)
from eventjet.errors import ApiRefused, IdentityLost, LogUnusable, StreamMissing
from eventjet.nats.api import NAME_IN_USE, StreamState, create_stream, stream_info, update_stream
from eventjet.nats.client import Client
from eventjet.store.timers import timer_config
from eventjet.store.wholeness import FIRST

IDENTITY = "eventjet.log"
"""Key of the log's UUID in the stream's metadata; a restore copies it."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One setting of a stream that is not as declared."""

    stream: str
    setting: str
    declared: Any
    found: Any

    @property
    def is_harmless(self) -> bool:
        """Whether what is stored, dropped and read is the same nevertheless."""
        return self.setting in _HARMLESS

    def __str__(self) -> str:
        return f"{self.stream}: {self.setting} is {self.found!r}, declared is {self.declared!r}"


@dataclass(frozen=True, slots=True)
class Topology:
    """What is there of an app's streams and buckets, found or made: `Jet.init`."""

    identity: str
    created: tuple[str, ...]
    drifts: tuple[Drift, ...]
    cursors: tuple[tuple[str, int], ...] = ()
    """Name and position of what follows the log from now on."""
    others: tuple[str, ...] = ()
    """Who else answers what is published for them, in words: streams of other JetStream domains, and subscribers."""


_COMMON = {
    "storage": "file",
    "retention": "limits",
    "discard": "new",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msg_size": SERVER_MESSAGE_MAX,
    "duplicate_window": 120_000_000_000,
    "deny_delete": True,
    "allow_direct": True,
}


def stream_config(app: str, replicas: int) -> dict[str, Any]:
    """The stream of an app, as the JetStream API takes it."""
    return {
        "name": app,
        "subjects": [stream_subjects(app)],
        "num_replicas": replicas,
        **_COMMON,
        "max_msgs_per_subject": -1,
        "deny_purge": True,
        "allow_rollup_hdrs": False,
        "allow_msg_ttl": False,
        "allow_atomic": True,
    }


def bucket_config(app: str, replicas: int) -> dict[str, Any]:
    """The key-value bucket of an app's snapshots: disposable, one value a key."""
    bucket = snapshot_bucket(app)
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "num_replicas": replicas,
        **_COMMON,
        "max_msgs_per_subject": 1,
        "deny_purge": False,
        "allow_rollup_hdrs": True,
    }


def cursors_config(app: str, replicas: int) -> dict[str, Any]:
    """The key-value bucket of an app's cursors: one value a key, replaced by compare-and-set, several in a batch."""
    bucket = cursor_bucket(app)
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "num_replicas": replicas,
        **_COMMON,
        "max_msgs_per_subject": 1,
        "deny_purge": False,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "allow_atomic": True,
    }


def every_config(app: str, replicas: int) -> tuple[dict[str, Any], ...]:
    """All that an app may have on the server: its log, snapshots, cursors and timers."""
    made = (stream_config, bucket_config, cursors_config, timer_config)
    return tuple(config(app, replicas) for config in made)


def needed_configs(app: str, replicas: int, *, cursors: bool, timers: bool) -> tuple[dict[str, Any], ...]:
    """What it has to have there, the log first: what keeps `cursors`, and what `timers` need, only where asked for."""
    log, snapshots, of_cursors, of_timers = every_config(app, replicas)
    return (log, snapshots, *([of_cursors] if cursors else []), *([of_timers] if timers else []))


async def declare(client: Client, app: str, replicas: int, *, cursors: bool = False, timers: bool = False) -> Topology:
    """Create what is missing and report what differs; nothing that exists is changed. Raises `LogUnusable`.

    What keeps `cursors`, and what `timers` need, is made for an app that has something for them.
    """
    created: list[str] = []
    drifts: list[Drift] = []
    identity = ""
    for config in needed_configs(app, replicas, cursors=cursors, timers=timers):
        name = str(config["name"])
        found = await _find(client, name)
        if found is None:
            fresh = {**config, "metadata": {IDENTITY: str(uuid4()), FIRST: "1"}} if name == app else config
            found = await _create(client, fresh)
            if name == app and found.last and identity_of(found) == fresh["metadata"][IDENTITY]:
                raise await _not_new(client, config, found)
            created.append(name)
        else:
            drifts += compare(config, found.config)
        if name == app:
            identity = identity_of(found)
    return Topology(identity, tuple(created), tuple(drifts))


async def others_answering(client: Client, kinds: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Who else answers what is published there. What comes later than in a moment is only logged."""
    for stream, subject in kinds:
        client.probe(stream, subject)
    # Where there is a domain there are others, perhaps far away.
    await asyncio.sleep(0.5 if client.domain else 0.05)
    return client.answerers.strangers


async def info(client: Client, app: str) -> StreamState:
    """The app's stream; raises `LogUnusable` when `init` has not run."""
    found = await _find(client, app)
    if found is None:
        raise missing(app)
    return found


def missing(stream: str) -> LogUnusable:
    """The error for a stream that is not there."""
    remedy = "Run `eventjet init` once; a log that was lost comes back with `eventjet restore` instead."
    return LogUnusable(f"The stream {stream!r}", "it does not exist", remedy)


def identity_of(found: StreamState) -> str:
    """The UUID of the log in a stream; raises `IdentityLost` for one that carries none."""
    if IDENTITY not in found.metadata:
        raise IdentityLost(found.name)
    return found.metadata[IDENTITY]


async def _find(client: Client, name: str) -> StreamState | None:
    try:
        return await client.ask(stream_info(name))
    except StreamMissing:
        return None
    except ApiRefused as refusal:
        raise LogUnusable(f"The stream {name!r}", str(refusal), "Look at the server's log.") from None


async def _create(client: Client, config: Mapping[str, Any]) -> StreamState:
    name = str(config["name"])
    try:
        return await client.ask(create_stream(config))
    except ApiRefused as refusal:
        found = await _find(client, name) if refusal.err_code == NAME_IN_USE else None
        if found is not None:
            return found  # another `init` was quicker
        raise not_created(name, refusal) from None


async def _not_new(client: Client, config: Mapping[str, Any], found: StreamState) -> LogUnusable:
    """The error for a stream that had events when it was made, which gets no identity: it is not known whose they are.

    The server takes files that it finds in its folder for the stream's own: of one that was deleted a moment ago, or
    whose configuration was lost.
    """
    await client.ask(update_stream(config))
    return LogUnusable(
        f"The stream {found.name!r}",
        f"it was not there, and the server made it with events up to position {found.last} in it",
        "If they are the app's, its configuration was lost: run `eventjet init --repair`. If it was deleted a moment "
        "ago, delete it again, wait until its folder is gone from the server's store, and run `eventjet init`.",
    )


def not_created(stream: str, refusal: ApiRefused) -> LogUnusable:
    """The error for a stream that the server would not create."""
    return LogUnusable(
        f"The stream {stream!r}",
        f"the server would not create it: {refusal.description} ({refusal.err_code})",
        "Look at the account's limits and the number of servers for its replicas.",
    )


def drifts_of(found: StreamState) -> tuple[Drift, ...]:
    """What has drifted of an app's stream and concerns who writes to it: what is stored, dropped and read."""
    drifts = compare(stream_config(found.name, 1), found.config)
    return tuple(drift for drift in drifts if not drift.is_harmless)


_HARMLESS = ("num_replicas", "duplicate_window", "max_consumers")


def compare(declared: Mapping[str, Any], found: Mapping[str, Any]) -> list[Drift]:
    """The settings that are not as declared; room for larger messages than events can be is harmless."""
    name = str(declared["name"])
    return [
        Drift(name, key, value, found.get(key))
        for key, value in declared.items()
        if found.get(key) != value
        and not (not value and not found.get(key))
        and not (key == "max_msg_size" and found.get(key, 0) > value)
    ]
