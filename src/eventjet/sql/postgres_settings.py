"""What PostgreSQL says of its version and of the settings that decide whether a commit is one."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, text

from eventjet.sql.soundness import Soundness, Weakness, numbers_of

OLDEST, MAINTAINED = (10,), (15,)
"""What psycopg 3 speaks to, and what its makers still mend; PostgreSQL 14 ended in November 2026. Tests run on 18."""

_TORN = "a power cut may lose or break rows, checkpoints among them: every read model would have to be rebuilt"
_FAULTS = {
    "fsync": ("on", _TORN, "Set `fsync = on` in postgresql.conf and reload."),
    "full_page_writes": ("on", _TORN, "Set `full_page_writes = on` in postgresql.conf and reload."),
    "transaction_read_only": (
        "off",
        "workers can write nothing, so read models stand still",
        "Point EVENTJET_DATABASE at the primary, or set `default_transaction_read_only = off`.",
    ),
}
_WARNINGS = {
    "synchronous_commit": (
        ("on", "local", "remote_write", "remote_apply"),
        "a crash takes back the last commits, rows and checkpoint together; whoever was told of them sees them gone",
        "Set `synchronous_commit = on` for the role of the workers.",
    ),
    "server_encoding": (
        ("UTF8",),
        "text that this encoding lacks stops the projection that writes it",
        "Make the database again with `encoding 'UTF8'`, and rebuild into it.",
    ),
}
_SETTINGS = text("select name, setting from pg_settings where name = any(:names)")


def soundness(connection: Connection) -> Soundness:
    """By its settings as this session has them; anybody may read those."""
    names = ["server_version", *_FAULTS, *_WARNINGS]
    found = {str(name): str(setting) for name, setting in connection.execute(_SETTINGS, {"names": names})}
    # This session may write nothing by its own wish.
    found["transaction_read_only"] = str(connection.scalar(text("show default_transaction_read_only")))
    if connection.scalar(text("select pg_is_in_recovery()")):
        found["transaction_read_only"] = "on"
    return judged(found)


def judged(found: Mapping[str, str]) -> Soundness:
    """Of settings by name, with `server_version`. PURE."""
    version = found["server_version"]
    weaknesses = [
        Weakness(f"{name} is {found[name]}", cost, remedy, is_fault=True)
        for name, (wanted, cost, remedy) in _FAULTS.items()
        if found.get(name, wanted) != wanted
    ]
    weaknesses += [
        Weakness(f"{name} is {found[name]}", cost, remedy)
        for name, (wanted, cost, remedy) in _WARNINGS.items()
        if found.get(name, wanted[0]) not in wanted
    ]
    numbers = numbers_of(version)
    if numbers < MAINTAINED:
        weaknesses.append(
            Weakness(
                f"PostgreSQL {version} is no longer maintained",
                "eventjet cannot use it" if numbers < OLDEST else "faults of its own that lose data stay unmended",
                f"Upgrade to PostgreSQL {MAINTAINED[0]} or newer.",
                is_fault=numbers < OLDEST,
            )
        )
    return Soundness(f"PostgreSQL {version}", tuple(weaknesses))
