"""Parse the URLs of servers, databases and archives by one strict grammar. PURE.

A secret may be in a wrong place of a URL. So a text that does not fit the grammar is never shown, and of a URL that
fits only scheme, host, port and path are.
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
    """One URL. `user` and `password` are decoded, and neither is in the `repr`."""

    scheme: str
    host: str
    """Name or address of the host; an IPv6 address is in brackets."""
    port: int | None
    path: str
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Options of the query, as they are written."""

    @property
    def shown(self) -> str:
        """The URL without secrets, for logs, errors and `repr`."""
        query = "&".join(f"{name}={value}" for name, value in self.options if name in _SHOWN_OPTIONS)
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path}{'?' if query else ''}{query}"

    @property
    def is_server(self) -> bool:
        """Whether this is the URL of a NATS server. Only a WebSocket URL may have a path, because of proxies."""
        if self.host == "" or self.options:
            return False
        return self.scheme in WEBSOCKET or (self.scheme in _NATS and self.path in ("", "/"))

    @property
    def holds_secret(self) -> bool:
        """Whether the URL contains a password."""
        return bool(self.password) or any(name.lower() in _SECRET_OPTIONS for name, _ in self.options)


def parse(text: str) -> Url | None:
    """Parse a URL; None if any part of the text does not fit the grammar, and then the text may not be shown."""
    match = _URL.fullmatch(text)
    if match is None or not _has_port(match):
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


def _has_port(match: re.Match[str]) -> bool:
    return match["port"] is None or 0 < int(match["port"]) < 65_536


def _port_fault(text: str) -> str:
    """Return a sentence about the port where that is the fault; the number is not shown, for it may be a password."""
    match = _URL.fullmatch(text)
    return "" if match is None or _has_port(match) else "Its port is not one of 1 to 65535. "


def _kind(text: str) -> str:
    """Return a sentence about the kind of a database whose URL cannot be used; empty where that is not the fault."""
    scheme = text.partition("://")[0]
    if scheme == "postgres":
        return "`postgres://` is written `postgresql://` here. "
    if scheme in (*_POSTGRES, *_SQLITE) or "://" not in text:
        return ""
    return "Read models are in PostgreSQL or in SQLite. "


def server_url(text: str, which: str = "What is given") -> Url:
    """Parse the URL of a NATS server; raises `UsageError`, whose message begins with `which` and hides the text."""
    url = parse(text)
    if url is None or not url.is_server:
        separated = "Separate several with commas, not with blanks. " if len(text.split()) > 1 else ""
        raise UsageError(
            f"{which} is not a NATS server. {separated}{_port_fault(text)}Write it as nats://host:4222, "
            f"tls://host:4222 or wss://host. {_ESCAPES} It is not shown here, for it may hold a password."
        )
    return url


def database_url(text: str) -> Url:
    """Parse the URL of a database; raises `UsageError`, whose message hides the text."""
    file = _FILE.fullmatch(text)
    if file is not None and file["scheme"] in _SQLITE:
        return Url(file["scheme"], "", None, file["path"])
    url = parse(text)
    if url is None or url.scheme not in _POSTGRES or "/" in url.path[1:]:
        raise UsageError(
            f"The database's URL, of --database or EVENTJET_DATABASE, cannot be used. {_port_fault(text)}{_kind(text)}"
            f"Write postgresql://user@host/name or sqlite:///path/to/file.db. {_ESCAPES} "
            "It is not shown here, for it may hold a password."
        )
    return url


def shown_database(text: str) -> str:
    """Return the part of a database's URL that may be shown; `***` if the text is not such a URL."""
    try:
        return database_url(text).shown
    except UsageError:
        return "***"


def shown_master(text: str) -> str:
    """Return the part of a Spark master that may be shown: the parameters of `sc://host:port/;token=…` are left out."""
    match = _MASTER.fullmatch(text)
    return "***" if match is None else match["shown"]
