"""Giving a stream that another program changed the settings back that are declared. For an administrator; blocks."""

from __future__ import annotations

from eventjet.errors import ApiRefused, StreamMissing, Unreachable
from eventjet.jetstream.api import StreamState, stream_info, update_stream
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.topology import IDENTITY, compare, every_config
from eventjet.log.wholeness import FIRST, MISSING


def found(connection: NatsConnection, name: str) -> StreamState | None:
    """A stream as it is; None when there is none."""
    try:
        return connection.ask(stream_info(name))
    except StreamMissing:
        return None


def repair(connection: NatsConnection, app: str, replicas: int, identity: str, *, accept_loss: bool) -> list[str]:
    """Heal the app's streams and buckets; each setting that was healed. Raises `Unreachable` for one that cannot be.

    To `accept_loss` says that what is gone from the log by now was not part of it.
    """
    healed: list[str] = []
    for declared in every_config(app, replicas):
        name = str(declared["name"])
        state = found(connection, name)
        if state is None:
            continue
        drifts = compare(declared, state.config)
        metadata = dict(state.metadata)
        if name == app:
            metadata[IDENTITY] = identity
            if accept_loss:
                first, missing = max(state.first, 1), state.deleted
                metadata |= {FIRST: str(first), MISSING: str(missing)}
                healed.append(f"{name}: it begins at position {first:,}, and {missing:,} later ones are missing")
        config = {**state.config, **{drift.setting: drift.declared for drift in drifts}, "metadata": metadata}
        for drift in drifts:
            if drift.setting not in declared:
                del config[drift.setting]  # a setting that a stream of eventjet's does not mention
        if config == state.config:
            continue
        try:
            connection.ask(update_stream(config))
        except ApiRefused as refusal:
            raise Unreachable(
                f"The stream {name!r}",
                f"the server would not change {', '.join(drift.setting for drift in drifts)}: {refusal.description}",
                "Restore an archive of it to another server or account.",
            ) from None
        healed += map(str, drifts)
    return healed
