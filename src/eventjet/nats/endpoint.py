"""`Endpoint`: the servers of a cluster and the credentials for them, as a value whose `repr` shows no secret."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from eventjet.errors import UsageError
from eventjet.settings import Settings
from eventjet.urls import WEBSOCKET, Url, parse, server_url

_PORTS = {"ws": 80, "wss": 443}
API_PREFIX = "$JS.API"
_ROUTED = (f"{API_PREFIX}.", "$KV.")
DEFAULT_INBOX, CALLER_INBOX = "_INBOX", "_INBOX_caller"
"""Inbox prefixes of callers: the default of NATS clients, and that of the user `caller` of `eventjet nats-config`."""


class Address(NamedTuple):
    """The address of one server."""

    host: str
    port: int
    tls: bool
    """Whether TLS is demanded."""
    name: str
    """The host name that the server's certificate must be issued for."""
    scheme: str = "nats"
    path: str = ""
    """Path of a WebSocket's URL."""

    @property
    def peer(self) -> str:
        """`host:port`, as errors name the server."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL, as `nats.connect` takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "tls" if self.tls and self.scheme == "nats" else self.scheme
        return f"{scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True, repr=False)
class Endpoint:
    """The servers of one cluster and the credentials for them.

    Userinfo in a URL (`nats://ada:secret@host`, `nats://token@host`) moves into `user`, `password` and `token`, so
    `servers` is fit for logs. Files are given as paths, and read anew at each connection, on the machine that connects.
    An endpoint can be pickled unless `check_picklable` refuses it. Raises `UsageError` for an invalid server URL.
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
    """A context that replaces the TLS files."""
    tls_first: bool = False
    """Whether the TLS handshake comes before the server's INFO, as the server's `handshake_first` demands."""
    user_jwt_cb: Callable[[], bytes | bytearray] | None = None
    signature_cb: Callable[[str], bytes] | None = None
    jetstream_prefix: str = API_PREFIX
    """Prefix of the subjects of JetStream's API."""
    inbox_prefix: str = "_INBOX"
    caller_inboxes: tuple[str, ...] = (DEFAULT_INBOX, CALLER_INBOX)
    """Prefixes of the inboxes to which a service over this endpoint answers."""
    discovered: tuple[str, ...] = ()
    """`host:port` of more servers of the cluster, from the INFO of its servers; tried after `servers`."""
    name: str = "eventjet"
    """Shown in the server's list of connections."""
    is_of_mirror: bool = False
    """Whether EVENTJET_READ_FROM names the servers or the JetStream domain: events are read there from a mirror."""
    is_user_in_url: bool = False
    """Whether user, password or token are from a server's URL."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise UsageError("No NATS server is named. Give at least one, for instance nats://127.0.0.1:4222.")
        urls: list[str] = []
        for url in self.servers:
            server = _parsed(url)
            path = server.path if server.scheme in WEBSOCKET else ""
            urls.append(f"{server.scheme}://{server.host}:{server.port or _PORTS.get(server.scheme, 4222)}{path}")
            if server.user is not None:
                self._take_userinfo(server.user, server.password)
        object.__setattr__(self, "servers", tuple(urls))
        if self.is_websocket and not all(url.startswith("ws") for url in urls):
            raise UsageError("Some servers are WebSockets and some are not. Give one kind.")

    @property
    def is_websocket(self) -> bool:
        """Whether the servers speak NATS within WebSockets, which only connections of nats-py support."""
        return self.servers[0].startswith("ws")

    def __reduce__(self) -> str | tuple[object, ...]:
        check_picklable(self)
        return (Endpoint, tuple(getattr(self, field.name) for field in fields(self)))

    def _take_userinfo(self, name: str, password: str | None) -> None:
        userinfo = {"token": name} if password is None else {"user": name, "password": password}
        for field, value in userinfo.items():
            if getattr(self, field) not in (None, value):
                raise UsageError(f"The servers name more than one {field}. Use the same for all of one cluster.")
            object.__setattr__(self, field, value)
        object.__setattr__(self, "is_user_in_url", True)

    def __repr__(self) -> str:
        # Paths are hidden, too: people put the seed itself where its file belongs.
        kinds = ("user", "password", "token", "nkey", "credentials", "tls_ca", "tls_cert", "tls_key", "signature_cb")
        return f"Endpoint({', '.join([*self.servers, *(f'{kind}=***' for kind in kinds if getattr(self, kind))])})"

    @classmethod
    def of(cls, settings: Settings) -> Endpoint:
        """Return the endpoint of an application's settings."""
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
            is_of_mirror=settings.is_for_reads,
        )

    @property
    def is_elsewhere(self) -> bool:
        """Whether the log's JetStream may be another than the connected server's."""
        return self.jetstream_prefix != API_PREFIX

    def routed(self, subject: str) -> str:
        """Return the subject on which a message for JetStream, `$JS.API.…` or `$KV.…`, reaches the log's JetStream.

        `$KV.>` crosses no link between two domains by itself; a server maps `$JS.<domain>.API.$KV.>` to it (ADR-19).
        Other subjects are returned as they are.
        """
        if not self.is_elsewhere or not subject.startswith(_ROUTED):
            return subject
        return f"{self.jetstream_prefix}.{subject.removeprefix(f'{API_PREFIX}.')}"

    @property
    def servers_from(self) -> str:
        """What names the servers: a variable, or an option of the command line, which comes first."""
        return "EVENTJET_READ_FROM" if self.is_of_mirror and not self.is_elsewhere else "--servers or EVENTJET_SERVERS"

    def with_name(self, name: str) -> Endpoint:
        """Return the endpoint with a name for another purpose, added to the name that the settings give."""
        return replace(self, name=name if self.name == "eventjet" else f"{self.name} ({name})")

    def with_discovered(self, connect_urls: Iterable[str]) -> Endpoint:
        """Return the endpoint with the servers added that an INFO names in its `connect_urls`."""
        configured_servers = {url.partition("://")[2] for url in self.servers}
        announced_servers = {url for url in connect_urls if (server := parse(f"nats://{url}")) and server.is_server}
        return replace(self, discovered=tuple(sorted({*self.discovered, *announced_servers} - configured_servers)))

    def addresses(self, *, shuffle: bool = False) -> list[Address]:
        """Return the addresses of all servers, in the order to try; with `shuffle`, from a random one on.

        If one server demands TLS, all do: they get the same credentials.
        """
        urls = [_parsed(url) for url in self.servers]
        tls = self.tls_first or bool(self.tls or self.tls_ca or self.tls_cert or self.tls_key)
        tls = tls or any(url.scheme in ("tls", "wss") for url in urls)
        addresses = [_address(url, tls, _bare(url)) for url in urls]
        for url in map(_parsed, self.discovered):
            # Servers announce addresses, but certificates are issued for names. And an attacker may have written what
            # a server says before TLS: the owner of any name has a certificate for it, but not from a CA of our own.
            has_own_name = not _is_ip(_bare(url)) and (self.tls_ca is not None or self.tls_first or not tls)
            addresses.append(_address(url, tls, _bare(url if has_own_name else urls[0])))
        start = secrets.randbelow(len(addresses)) if shuffle else 0
        return addresses[start:] + addresses[:start]


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


def check_picklable(endpoint: Endpoint) -> None:
    """Raise `UsageError` for an endpoint that no other process can use."""
    for name in ("tls", "user_jwt_cb", "signature_cb"):
        if getattr(endpoint, name) is not None:
            raise UsageError(
                f"`{name}` is an object of this process, and another process is to connect, too. Give its credentials "
                "and certificates as files."
            )


def is_file(path: Path) -> bool:
    """Return whether a path leads to a file; false for a value that cannot be a path."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False
