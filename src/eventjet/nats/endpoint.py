"""Where the server is and how to prove who we are: a value that can be pickled, and whose `repr` holds no secret."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from eventjet.errors import UsageError
from eventjet.settings import Settings

_SCHEMES = ("nats", "tls")
_PORT = 4222


class Address(NamedTuple):
    """One server."""

    host: str
    port: int
    tls: bool
    """Whether TLS is demanded."""
    name: str
    """What its certificate must be of."""

    @property
    def peer(self) -> str:
        """As errors name it."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, repr=False)
class Endpoint:
    """Servers of one cluster and the credentials for them.

    Userinfo in a URL (`nats://ada:secret@host`, `nats://token@host`) moves into `user`, `password` and `token`, so
    `servers` is fit for logs. Files are named, and read anew at each connection, on the machine that connects.
    Raises `UsageError` for what cannot be a server.
    """

    servers: tuple[str, ...]
    """`nats://host:port` or `tls://host:port`, tried in order."""
    user: str | None = None
    password: str | None = None
    token: str | None = None
    nkey: Path | None = None
    """A file with the seed of a user nkey."""
    credentials: Path | None = None
    """A creds file: JWT and seed."""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_first: bool = False
    """Shake hands before the server's INFO, as its `handshake_first` asks."""
    inbox_prefix: str = "_INBOX"
    shuffle: bool = False
    """Start with a random server instead of the first."""
    discovered: tuple[str, ...] = ()
    """`host:port` of more servers of the cluster, as its servers tell them; tried after the named ones."""
    name: str = "eventjet"
    """Shown in the server's list of connections."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise UsageError("No NATS server is named. Give at least one, for instance nats://127.0.0.1:4222.")
        plain: list[str] = []
        for url in self.servers:
            parts = _split(url)
            plain.append(f"{parts.scheme}://{_host_port(parts)}")
            if parts.username is not None:
                self._take_userinfo(unquote(parts.username), parts.password)
        object.__setattr__(self, "servers", tuple(plain))

    def _take_userinfo(self, name: str, password: str | None) -> None:
        userinfo = {"token": name} if password is None else {"user": name, "password": unquote(password)}
        for field, value in userinfo.items():
            if getattr(self, field) not in (None, value):
                raise UsageError(f"The servers name more than one {field}. Use the same for all of one cluster.")
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        who = [f"user={self.user!r}"] if self.user else []
        who += [f"{kind}=***" for kind in ("password", "token") if getattr(self, kind)]
        who += [
            f"{kind}={str(value)!r}"
            for kind in ("nkey", "credentials", "tls_ca", "tls_cert", "tls_key")
            if (value := getattr(self, kind))
        ]
        return f"Endpoint({', '.join([', '.join(self.servers), *who])})"

    @classmethod
    def of(cls, settings: Settings) -> Endpoint:
        """The endpoint that the application's settings name."""
        return cls(
            settings.servers,
            user=settings.user,
            password=settings.password,
            token=settings.token,
            nkey=settings.nkey,
            credentials=settings.credentials,
            tls_ca=settings.tls_ca,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
        )

    def with_name(self, name: str) -> Endpoint:
        """The same endpoint under another connection name."""
        return replace(self, name=name)

    def with_discovered(self, connect_urls: Iterable[str]) -> Endpoint:
        """The same endpoint, knowing what a server says of its cluster in `connect_urls`."""
        named = {url.partition("://")[2] for url in self.servers}
        return replace(self, discovered=tuple(sorted({*self.discovered, *connect_urls} - named)))

    def addresses(self) -> list[Address]:
        """In the order to try."""
        wants_tls = self.tls_first or bool(self.tls_ca or self.tls_cert)
        scheme, host = urlsplit(self.servers[0]).scheme, urlsplit(self.servers[0]).hostname or ""
        found: list[Address] = []
        for url in (*self.servers, *(f"{scheme}://{address}" for address in self.discovered)):
            parts = urlsplit(url)
            is_discovered = len(found) >= len(self.servers)
            # Servers tell their addresses, and certificates tell names.
            name = host if is_discovered and _is_ip(parts.hostname or "") else parts.hostname or ""
            found.append(Address(parts.hostname or "", parts.port or _PORT, parts.scheme == "tls" or wants_tls, name))
        start = secrets.randbelow(len(found)) if self.shuffle else 0
        return found[start:] + found[:start]


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        fits = parts.scheme in _SCHEMES and parts.hostname and parts.port != 0 and parts.path in ("", "/")
    except ValueError:
        fits, parts = False, urlsplit("")
    if not fits:
        shown = url.rpartition("@")[2]
        raise UsageError(f"{shown!r} is not a NATS server. Write it as nats://host:4222 or tls://host:4222.")
    return parts


def _host_port(parts: SplitResult) -> str:
    host = parts.hostname or ""
    return f"[{host}]:{parts.port or _PORT}" if ":" in host else f"{host}:{parts.port or _PORT}"
