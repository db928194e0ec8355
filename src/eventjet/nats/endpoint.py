"""Where the server is and how to prove who we are: a value that can be pickled, and whose `repr` holds no secret."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from eventjet.errors import UsageError
from eventjet.settings import Settings
from eventjet.urls import WEBSOCKET, Url, parse, server_url

_PORTS = {"ws": 80, "wss": 443}
API_PREFIX = "$JS.API"
_ROUTED = (f"{API_PREFIX}.", "$KV.")
DEFAULT_INBOX, CALLER_INBOX = "_INBOX", "_INBOX_caller"
"""Where callers hear their answers: clients that were told nothing, and the user `caller` of `eventjet nats-config`."""


class Address(NamedTuple):
    """One server."""

    host: str
    port: int
    tls: bool
    """Whether TLS is demanded."""
    name: str
    """What its certificate must be of."""
    scheme: str = "nats"
    path: str = ""
    """Of a WebSocket's URL."""

    @property
    def peer(self) -> str:
        """As errors name it."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """As `nats.connect` takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "tls" if self.tls and self.scheme == "nats" else self.scheme
        return f"{scheme}://{host}:{self.port}{self.path}"


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
    tls: ssl.SSLContext | None = None
    """In place of the files of TLS."""
    tls_first: bool = False
    """Shake hands before the server's INFO, as its `handshake_first` asks."""
    user_jwt_cb: Callable[[], bytes | bytearray] | None = None
    signature_cb: Callable[[str], bytes] | None = None
    jetstream_prefix: str = API_PREFIX
    """What JetStream's API is asked below."""
    inbox_prefix: str = "_INBOX"
    caller_inboxes: tuple[str, ...] = (DEFAULT_INBOX, CALLER_INBOX)
    """Prefixes of the inboxes to which a service over this endpoint answers."""
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
            found = _parsed(url)
            path = found.path if found.scheme in WEBSOCKET else ""
            plain.append(f"{found.scheme}://{found.host}:{found.port or _PORTS.get(found.scheme, 4222)}{path}")
            if found.user is not None:
                self._take_userinfo(found.user, found.password)
        object.__setattr__(self, "servers", tuple(plain))
        if self.is_websocket and not all(url.startswith("ws") for url in plain):
            raise UsageError("Some servers are WebSockets and some are not. Give one kind.")

    @property
    def is_websocket(self) -> bool:
        """Whether its servers speak NATS within WebSockets, which only nats-py does here."""
        return self.servers[0].startswith("ws")

    def __reduce__(self) -> str | tuple[object, ...]:
        check_picklable(self)
        return (_endpoint, tuple(getattr(self, each.name) for each in fields(self)))

    def _take_userinfo(self, name: str, password: str | None) -> None:
        userinfo = {"token": name} if password is None else {"user": name, "password": password}
        for field, value in userinfo.items():
            if getattr(self, field) not in (None, value):
                raise UsageError(f"The servers name more than one {field}. Use the same for all of one cluster.")
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        # Of a path too: people put the seed itself where its file belongs.
        kinds = ("user", "password", "token", "nkey", "credentials", "tls_ca", "tls_cert", "tls_key", "signature_cb")
        return f"Endpoint({', '.join([*self.servers, *(f'{kind}=***' for kind in kinds if getattr(self, kind))])})"

    @classmethod
    def of(cls, settings: Settings) -> Endpoint:
        """The endpoint that the application's settings name."""
        domain = settings.jetstream_domain
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
            tls=settings.tls,
            user_jwt_cb=settings.user_jwt_cb,
            signature_cb=settings.signature_cb,
            name=settings.name or "eventjet",
            jetstream_prefix=f"$JS.{domain}.API" if domain else settings.jetstream_prefix or API_PREFIX,
            inbox_prefix=settings.inbox_prefix,
            caller_inboxes=settings.caller_inboxes or (DEFAULT_INBOX, CALLER_INBOX),
        )

    @property
    def is_elsewhere(self) -> bool:
        """Whether the JetStream that is meant may be another than the connected server's."""
        return self.jetstream_prefix != API_PREFIX

    def routed(self, subject: str) -> str:
        """Where a message for JetStream, `$JS.API.…` or `$KV.…`, goes for the JetStream that is meant (ADR-19).

        `$KV.>` crosses no link between two domains by itself; a server maps `$JS.<domain>.API.$KV.>` to it. What
        streams hear on other subjects goes there as it is.
        """
        if not self.is_elsewhere or not subject.startswith(_ROUTED):
            return subject
        return f"{self.jetstream_prefix}.{subject.removeprefix(f'{API_PREFIX}.')}"

    def with_name(self, name: str) -> Endpoint:
        """The same endpoint for another purpose, which its connection's name says beside what the settings call it."""
        return replace(self, name=name if self.name == "eventjet" else f"{self.name} ({name})")

    def with_discovered(self, connect_urls: Iterable[str]) -> Endpoint:
        """The same endpoint, knowing what a server says of its cluster in `connect_urls`."""
        named = {url.partition("://")[2] for url in self.servers}
        told = {url for url in connect_urls if (found := parse(f"nats://{url}")) and found.is_server}
        return replace(self, discovered=tuple(sorted({*self.discovered, *told} - named)))

    def addresses(self) -> list[Address]:
        """In the order to try. One server with TLS means all with TLS: they get the same credentials."""
        named = [_parsed(url) for url in self.servers]
        tls = self.tls_first or bool(self.tls or self.tls_ca or self.tls_cert or self.tls_key)
        tls = tls or any(url.scheme in ("tls", "wss") for url in named)
        found = [_address(url, tls, _bare(url)) for url in named]
        for url in map(_parsed, self.discovered):
            # Servers tell their addresses, and certificates tell names. And what a server says before TLS anyone on
            # the way may have said: any name has a certificate of its owner's, but not one of a CA of our own.
            own_name = not _is_ip(_bare(url)) and (self.tls_ca is not None or self.tls_first or not tls)
            found.append(_address(url, tls, _bare(url if own_name else named[0])))
        start = secrets.randbelow(len(found)) if self.shuffle else 0
        return found[start:] + found[:start]


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _parsed(url: str) -> Url:
    return server_url(url if "://" in url else f"nats://{url}")


def _bare(url: Url) -> str:
    return url.host.strip("[]")


def _address(url: Url, tls: bool, name: str) -> Address:
    scheme = url.scheme if url.scheme in WEBSOCKET else "nats"
    return Address(_bare(url), url.port or _PORTS.get(scheme, 4222), tls, name, scheme, url.path)


def _endpoint(*values: Any) -> Endpoint:
    return Endpoint(*values)


def check_picklable(endpoint: Endpoint) -> None:
    """Raise `UsageError` for an endpoint that no other process can use."""
    for name in ("tls", "user_jwt_cb", "signature_cb"):
        if getattr(endpoint, name) is not None:
            raise UsageError(
                f"`{name}` is an object of this process, and another process is to connect, too. Give its credentials "
                "and certificates as files."
            )


def is_file(path: Path) -> bool:
    """Whether a setting leads to a file; false for what is no path at all."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False
