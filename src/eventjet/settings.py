"""Where an application finds its server and its database: keywords first, then `EVENTJET_*`.

Secrets come by path or by environment, never on a command line, and no secret shows in a `repr`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict, cast
from urllib.parse import urlsplit

from eventjet.errors import UsageError

_PREFIX = "EVENTJET_"
_USERINFO = re.compile(r"(?<!/)//(?!/)\S*@")
_SECRET_OPTION = re.compile(r"((?:pass\w*|pwd|sslpassword|token|secret)=)[^&\s]*", re.IGNORECASE)


class SettingsOverrides(TypedDict, total=False):
    """The settings as keywords, each a value of its field or, as in the environment, text; None leaves it as it is."""

    servers: Sequence[str] | str | None
    database: str | None
    user: str | None
    password: str | None
    token: str | None
    credentials: Path | str | None
    nkey: Path | str | None
    tls_ca: Path | str | None
    tls_cert: Path | str | None
    tls_key: Path | str | None
    replicas: int | str | None
    save_timeout_s: float | str | None
    request_timeout_s: float | str | None


@dataclass(frozen=True, slots=True)
class Settings:
    """Immutable; built once by `Settings.load` and handed down."""

    servers: tuple[str, ...] = field(default=("nats://127.0.0.1:4222",), repr=False)
    """NATS URLs, tried in order (`EVENTJET_SERVERS`, separated by commas)."""
    database: str = field(default="sqlite:///eventjet.db", repr=False)
    """SQLAlchemy URL of the read models: `postgresql://…` or `sqlite:///…` (`EVENTJET_DATABASE`)."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials: Path | None = None
    """Path of a NATS creds file, JWT and seed (`EVENTJET_CREDENTIALS`)."""
    nkey: Path | None = None
    """Path of a file that holds an nkey seed (`EVENTJET_NKEY`)."""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    replicas: int = 1
    """Replicas of the stream and the bucket that `init` creates: 1 embedded, 3 in production."""
    save_timeout_s: float = 20.0
    """How long a save may look for its outcome: a leader election takes 4 to 8 s."""
    request_timeout_s: float = 4.0
    """How long one request to the server may take."""

    @classmethod
    def load(cls, overrides: SettingsOverrides | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read `EVENTJET_*`, then lay the keywords that are not None over it; raises `UsageError`."""
        environment = {one.name: environ.get(_PREFIX + one.name.upper()) or None for one in fields(cls)}
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        return _laid_over(cls(), environment | given)

    def with_overrides(self, overrides: SettingsOverrides) -> Settings:
        """These settings with the keywords that are not None laid over them; raises `UsageError`."""
        return _laid_over(self, overrides)

    def shown(self) -> dict[str, str]:
        """What may be printed: addresses without userinfo, no secret."""
        return {"servers": ", ".join(map(redacted, self.servers)), "database": redacted(self.database)}


def redacted(url: str) -> str:
    """The URL without its userinfo and secret options: fit for logs, errors and `repr`."""
    return _SECRET_OPTION.sub(r"\1***", _USERINFO.sub("//***@", url))


def _laid_over(settings: Settings, overrides: Mapping[str, object]) -> Settings:
    kinds = {one.name: str(one.type) for one in fields(settings)}
    values: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in kinds:
            raise UsageError(f"There is no setting {name!r}. Known settings: {', '.join(sorted(kinds))}.")
        if value is not None:
            values[name] = _parsed(name, kinds[name], value) if isinstance(value, str) else value
    if isinstance(values.get("servers"), list):
        values["servers"] = tuple(cast("list[str]", values["servers"]))
    return _checked(replace(settings, **values))


def _parsed(name: str, kind: str, text: str) -> Any:
    try:
        if kind.startswith("tuple"):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except ValueError:
        raise UsageError(f"{_PREFIX}{name.upper()} is {text!r}, which is not a number. Give a number.") from None
    return Path(text) if kind.startswith("Path") else text


def _checked(settings: Settings) -> Settings:
    if not settings.servers:
        raise UsageError("No NATS server is named. Set EVENTJET_SERVERS, for instance nats://127.0.0.1:4222.")
    for url in settings.servers:
        if not re.fullmatch(r"(nats|tls)://[^\s/]+/?", url) or not _port_fits(url):
            shown = redacted(url) if "@" not in url or _USERINFO.search(url) else "***"
            raise UsageError(
                f"{shown!r} is not the URL of a NATS server. Write it as nats://host:4222 or tls://host:4222."
            )
    database = settings.database
    if not re.match(r"(postgresql(\+psycopg)?|sqlite(\+aiosqlite)?)://", database) or not _port_fits(database):
        raise UsageError(
            f"{redacted(database)!r} is not a database eventjet can use. "
            "Write postgresql://user@host/name or sqlite:///path/to/file.db."
        )
    if settings.replicas not in (1, 3, 5):
        raise UsageError(f"replicas is {settings.replicas}. JetStream replicates 1, 3 or 5 times.")
    for name in ("save_timeout_s", "request_timeout_s"):
        if not 0 < (seconds := getattr(settings, name)) < float("inf"):
            raise UsageError(f"{name} is {seconds}. Give a number of seconds above 0.")
    return settings


def _port_fits(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False
