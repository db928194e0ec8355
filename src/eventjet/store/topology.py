"""What an app has on the server: declared once, compared ever after, never purged or deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from eventjet.codec.subjects import SERVER_MESSAGE_MAX, snapshot_bucket, stream_subjects
from eventjet.errors import Unreachable
from eventjet.nats.requests import ApiError, Requests

IDENTITY = "eventjet.log"
"""Key of the log's UUID in the stream's metadata; a restore copies it."""
_NOT_FOUND = 10059
_NAME_IN_USE = 10058


@dataclass(frozen=True, slots=True)
class Drift:
    """One setting of a stream that is not as declared."""

    stream: str
    setting: str
    declared: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.stream}: {self.setting} is {self.found!r}, declared is {self.declared!r}"


@dataclass(frozen=True, slots=True)
class Topology:
    """What `declare` found or made."""

    identity: str
    created: tuple[str, ...]
    drifts: tuple[Drift, ...]


def stream_config(app: str, replicas: int) -> dict[str, Any]:
    """The stream of an app, as the JetStream API takes it."""
    return {
        "name": app,
        "subjects": [stream_subjects(app)],
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "max_consumers": -1,
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msg_size": SERVER_MESSAGE_MAX,
        "num_replicas": replicas,
        "duplicate_window": 120_000_000_000,
        "deny_delete": True,
        "deny_purge": True,
        "allow_rollup_hdrs": False,
        "allow_msg_ttl": False,
        "allow_direct": True,
        "allow_atomic": True,
    }


def bucket_config(app: str, replicas: int) -> dict[str, Any]:
    """The key-value bucket of an app's snapshots: disposable, one value a key."""
    bucket = snapshot_bucket(app)
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "max_msgs_per_subject": 1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_consumers": -1,
        "max_msg_size": SERVER_MESSAGE_MAX,
        "num_replicas": replicas,
        "duplicate_window": 120_000_000_000,
        "deny_delete": True,
        "deny_purge": False,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
    }


async def declare(requests: Requests, app: str, replicas: int) -> Topology:
    """Create what is missing and report what differs; nothing that exists is changed. Raises `Unreachable`."""
    created: list[str] = []
    drifts: list[Drift] = []
    identity = ""
    for config in (stream_config(app, replicas), bucket_config(app, replicas)):
        name = str(config["name"])
        found = await _find(requests, name)
        if found is None:
            fresh = {**config, "metadata": {IDENTITY: str(uuid4())}} if name == app else config
            found = await _create(requests, fresh)
            created.append(name)
        else:
            drifts += compare(config, found["config"])
        if name == app:
            identity = _identity(app, found)
    return Topology(identity, tuple(created), tuple(drifts))


async def info(requests: Requests, app: str) -> dict[str, Any]:
    """The stream's configuration and state; raises `Unreachable` when `init` has not run or it is not eventjet's."""
    found = await _find(requests, app)
    if found is None:
        raise Unreachable(f"The stream {app!r}", "it does not exist on this server", "Run `eventjet init` once.")
    _identity(app, found)
    return found


def _identity(app: str, found: Mapping[str, Any]) -> str:
    metadata = cast("Mapping[str, Any]", found["config"].get("metadata") or {})
    if IDENTITY not in metadata:
        raise Unreachable(
            f"The stream {app!r}",
            "it carries no log identity, so eventjet did not make it",
            "Give the app another name, or another account on this server.",
        )
    return str(metadata[IDENTITY])


async def _find(requests: Requests, name: str) -> dict[str, Any] | None:
    try:
        return await requests.read(f"The stream {name}", f"STREAM.INFO.{name}")
    except ApiError as error:
        if error.code == _NOT_FOUND:
            return None
        raise Unreachable(f"The stream {name!r}", str(error), "Look at the server's log.") from None


async def _create(requests: Requests, config: Mapping[str, Any]) -> dict[str, Any]:
    name = str(config["name"])
    try:
        return await requests.read(f"Creating {name}", f"STREAM.CREATE.{name}", config)
    except ApiError as error:
        found = await _find(requests, name) if error.code == _NAME_IN_USE else None
        if found is not None:
            return found  # another `init` was quicker
        raise Unreachable(
            f"The stream {name!r}",
            f"the server would not create it: {error}",
            "Look at the account's limits and the number of servers for its replicas.",
        ) from None


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
