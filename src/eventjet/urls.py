"""URLs of servers, databases and archives, taken apart by one strict grammar. PURE.

A secret in a place where none belongs must not show, so what does not fit the grammar is never shown, and of what does
fit only host, port and path are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from eventjet.errors import UsageError

_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://"
    r"(?:(?P<user>[^:@/?#\s]*)(?::(?P<password>[^@/?#\s]*))?@)?"
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[\w.,~-]*)(?::(?P<port>\d{1,5}))?"
    r"(?P<path>/[^@?#\s]*)?"
    r"(?:\?(?P<query>\w+=[^@#&\s]*(?:&\w+=[^@#&\s]*)*))?"
)
_FILE = re.compile(r"(?P<scheme>sqlite(?:\+\w+)?)://(?P<path>/[^?]*)(?:\?(?P<query>.*))?", re.DOTALL)
_POSTGRES = ("postgresql", "postgresql+psycopg")
_SQLITE = ("sqlite", "sqlite+aiosqlite", "sqlite+pysqlite")
_SHOWN_OPTIONS = ("host", "port")
_SECRET_OPTIONS = ("password", "sslpassword")
_NATS = ("nats", "tls")
WEBSOCKET = ("ws", "wss")
_MASTER = re.compile(
    r"(?P<shown>local(?:\[[\w*, ]+\])?|local-cluster\[[\w, ]+\]|yarn|(?:k8s://)?[a-z][a-z0-9]*://[\w.,:\[\]-]+)"
    r"(?P<rest>/.*)?",
    re.DOTALL,
)
_ESCAPES = "In a user or a password write each of : / ? # @ as %3A %2F %3F %23 %40."


@dataclass(frozen=True, slots=True)
class Url:
    """One URL; `user` and `password` are decoded, and neither shows."""

    scheme: str
    host: str
    """In brackets if it is an IPv6 address."""
    port: int | None
    path: str
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Of the query, as they are written."""

    @property
    def shown(self) -> str:
        """Fit for logs, errors and `repr`."""
        told = "&".join(f"{name}={value}" for name, value in self.options if name in _SHOWN_OPTIONS)
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path}{'?' if told else ''}{told}"

    @property
    def is_server(self) -> bool:
        """Whether it is a NATS server's. One that listens for WebSockets may have a path, behind a proxy."""
        if self.host == "" or self.options:
            return False
        return self.scheme in WEBSOCKET or (self.scheme in _NATS and self.path in ("", "/"))

    @property
    def holds_secret(self) -> bool:
        """Whether a password is in it."""
        return bool(self.password) or any(name.lower() in _SECRET_OPTIONS for name, _ in self.options)


def parse(text: str) -> Url | None:
    """None for what is not a URL in every part; whatever it is, it may not be shown."""
    match = _URL.fullmatch(text)
    if match is None or (match["port"] is not None and not 0 < int(match["port"]) < 65_536):
        return None
    decoded = {name: None if match[name] is None else unquote(match[name]) for name in ("user", "password")}
    pairs = (pair.partition("=") for pair in (match["query"] or "").split("&") if pair)
    return Url(
        match["scheme"],
        match["host"],
        None if match["port"] is None else int(match["port"]),
        match["path"] or "",
        decoded["user"],
        decoded["password"],
        tuple((name, value) for name, _, value in pairs),
    )


def server_url(text: str, which: str = "What is given") -> Url:
    """The URL of a NATS server; raises `UsageError`, which calls it `which` and does not show it."""
    found = parse(text)
    if found is None or not found.is_server:
        raise UsageError(
            f"{which} is not a NATS server. Write it as nats://host:4222, tls://host:4222 or wss://host. {_ESCAPES} "
            "It is not shown here, for it may hold a password."
        )
    return found


def database_url(text: str) -> Url:
    """The URL of a database; raises `UsageError`, which does not show it."""
    file = _FILE.fullmatch(text)
    if file is not None and file["scheme"] in _SQLITE:
        return Url(file["scheme"], "", None, file["path"])
    found = parse(text)
    if found is None or found.scheme not in _POSTGRES or "/" in found.path[1:]:
        raise UsageError(
            "The database's URL cannot be used. Write postgresql://user@host/name or sqlite:///path/to/file.db. "
            f"{_ESCAPES} It is not shown here, for it may hold a password."
        )
    return found


def shown_database(text: str) -> str:
    """What may be shown of a database's URL, whatever it is."""
    try:
        return database_url(text).shown
    except UsageError:
        return "***"


def shown_master(text: str) -> str:
    """What may be shown of a Spark master: of `sc://host:port/;token=…` no parameter."""
    match = _MASTER.fullmatch(text)
    return "***" if match is None else match["shown"]
