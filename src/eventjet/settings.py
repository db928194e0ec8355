"""Settings of a connection, from keywords first, then from environment variables `EVENTJET_*`.

Secrets come from files or from the environment, never from a command line, and no secret is in a `repr`.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, TypedDict, cast

from eventjet.errors import UsageError
from eventjet.text import suggestion
from eventjet.urls import database_url, server_url, shown_database

_PREFIX = "EVENTJET_"
_CODE_ONLY = ("tls", "user_jwt_cb", "signature_cb")
"""Settings that are objects, and so have no environment variable."""
_EXCLUSIVE = ("jetstream_domain", "jetstream_prefix")
_CHARACTER = r"[^\s.*>\x00-\x1f\x7f]"
"""Pattern of one character of a subject's token."""


class SettingsOverrides(TypedDict, total=False):
    """The settings as keywords: each a value of its field, or text as in the environment; None changes nothing."""

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
    tls: ssl.SSLContext | None
    user_jwt_cb: Callable[[], bytes | bytearray] | None
    signature_cb: Callable[[str], bytes] | None
    name: str | None
    jetstream_domain: str | None
    jetstream_prefix: str | None
    read_from: Sequence[str] | str | None
    inbox_prefix: str | None
    caller_inboxes: Sequence[str] | str | None
    replicas: int | str | None
    save_timeout_s: float | str | None
    request_timeout_s: float | str | None
    lake: str | None
    lake_format: str | None
    lake_catalog: str | None


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a connection: servers, database, credentials, timeouts. Immutable; made by `Settings.load`.

    ```python
    settings = Settings.load({"servers": "nats://one.example:4222"}, environ={"EVENTJET_REPLICAS": "3"})
    assert (settings.servers, settings.replicas) == (("nats://one.example:4222",), 3)
    ```
    """

    is_for_reads: ClassVar[bool] = False
    """Whether they lead to a mirror of the log, as `for_reads` makes them."""

    servers: tuple[str, ...] = field(default=("nats://127.0.0.1:4222",), repr=False)
    """NATS URLs, tried in order (`EVENTJET_SERVERS`, separated by commas)."""
    database: str = field(default="sqlite:///eventjet.db", repr=False)
    """SQLAlchemy URL of the read models: `postgresql://…` or `sqlite:///…` (`EVENTJET_DATABASE`)."""
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials: Path | None = field(default=None, repr=False)
    """Path of a NATS creds file, JWT and seed (`EVENTJET_CREDENTIALS`)."""
    nkey: Path | None = field(default=None, repr=False)
    """Path of a file that holds an nkey seed (`EVENTJET_NKEY`)."""
    tls_ca: Path | None = field(default=None, repr=False)
    """Path of a CA's certificate (`EVENTJET_TLS_CA`). With it, or with a `tls://` URL, TLS is required."""
    tls_cert: Path | None = field(default=None, repr=False)
    tls_key: Path | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """TLS context in place of the files; with it, TLS is required. Only in code."""
    user_jwt_cb: Callable[[], bytes | bytearray] | None = field(default=None, repr=False)
    """Function that returns a user's JWT at each connection, as for `nats.connect`: from Vault, say. Only in code."""
    signature_cb: Callable[[str], bytes] | None = field(default=None, repr=False)
    """Function that signs the server's nonce, in base64, together with `user_jwt_cb`. Only in code."""
    name: str | None = None
    """Name of the connection in the server's list (`EVENTJET_NAME`); by default `eventjet` and its purpose."""
    jetstream_domain: str | None = None
    """Domain of the JetStream that has the log (`EVENTJET_JETSTREAM_DOMAIN`), such as that of a leaf node's hub."""
    jetstream_prefix: str | None = None
    """Prefix in place of `$JS.API` (`EVENTJET_JETSTREAM_PREFIX`), if this account imports the API from another."""
    read_from: tuple[str, ...] | None = field(default=None, repr=False)
    """NATS URLs of the servers, or the JetStream domain, that have a mirror of the log (`EVENTJET_READ_FROM`).

    Workers, rebuilds, Spark and `tail` read events there (ADR 0071); commands go to the log."""
    inbox_prefix: str = "_INBOX"
    """Prefix of the subjects on which answers arrive (`EVENTJET_INBOX_PREFIX`). Give each role its own, so that no role
    can read the answers of another."""
    caller_inboxes: tuple[str, ...] | None = None
    """Prefixes of the inboxes to which a service answers (`EVENTJET_CALLER_INBOXES`, separated by commas); by default
    `_INBOX` and `_INBOX_caller`."""
    replicas: int = 1
    """Replicas of the stream and the bucket that `init` creates: 1 embedded, 3 in production."""
    save_timeout_s: float = 20.0
    """Seconds that a command may take from its call on, waiting for its turn included, and that a read may wait.

    A leader election takes 4 to 8 s."""
    request_timeout_s: float = 4.0
    """Seconds that one request to the server may take."""
    lake: str | None = None
    """URL of the lake at which the doctor and the console look, as `eventjet lake` takes it (`EVENTJET_LAKE`)."""
    lake_format: str = "delta"
    """Its format: `delta` or `iceberg`."""
    lake_catalog: str | None = None
    """Name of its Iceberg catalog in pyiceberg's configuration."""

    @classmethod
    def load(cls, overrides: SettingsOverrides | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from `EVENTJET_*` and replace those that `overrides` gives; raises `UsageError`.

        An override that is None changes nothing. `environ` replaces the environment of the process.
        """
        environ = os.environ if environ is None else environ
        _check_names([setting.name for setting in fields(cls) if setting.name not in _CODE_ONLY], environ)
        names = [setting.name for setting in fields(cls) if setting.name not in _CODE_ONLY]
        environment = {name: environ.get(_PREFIX + name.upper()) or None for name in names}
        changes = {name: value for name, value in (overrides or {}).items() if value is not None}
        for name, alternative in (_EXCLUSIVE, _EXCLUSIVE[::-1]):
            if name in changes:
                environment[alternative] = None  # the two settings exclude each other
        return _overridden(cls(), environment | changes)

    def with_overrides(self, overrides: SettingsOverrides) -> Settings:
        """Return a copy of the settings with the overrides that are not None; raises `UsageError`."""
        return _overridden(self, overrides)

    def for_reads(self) -> Settings:
        """Return the settings for reading events in the order of the log: those of the mirror, if there is one."""
        if self.read_from is None:
            return self
        changes: dict[str, Any] = {"jetstream_domain": None, "jetstream_prefix": None, "read_from": None}
        if is_domain(self.read_from):
            changes["jetstream_domain"] = self.read_from[0]
        else:
            changes["servers"] = self.read_from
            if any(server_url(url).user is not None for url in self.read_from):
                changes |= {"user": None, "password": None, "token": None}
        return _MirrorSettings(**{setting.name: getattr(self, setting.name) for setting in fields(self)} | changes)

    def for_log(self) -> Settings:
        """Return the settings for work that reads the log itself although there may be a mirror."""
        return replace(self, read_from=None)

    def shown(self) -> dict[str, str]:
        """Return the addresses of servers and database as they may be printed, without user names and secrets."""
        servers = ", ".join(server_url(url).shown for url in self.servers)
        return {"servers": servers, "database": shown_database(self.database)}


@dataclass(frozen=True, slots=True)
class _MirrorSettings(Settings):
    is_for_reads: ClassVar[bool] = True


def dev_hint(name: str, value: object) -> str:
    """Return the way to what `eventjet dev` runs in this folder where a setting is left at its default; else empty."""
    variable = _PREFIX + name.upper()
    if value != getattr(Settings(), name) or os.environ.get(variable) or not Path(".eventjet", "env").is_file():
        return ""
    return f"{variable} is not set. While `eventjet dev` runs here, set it by `. .eventjet/env`."


def is_domain(read_from: Sequence[str]) -> bool:
    """Return whether `read_from` names the JetStream domain of a mirror, and not its servers."""
    return "://" not in read_from[0]


def _check_names(setting_names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise `UsageError` for a variable whose name is nearly that of a setting; others may be of another program."""
    names = [_PREFIX + name.upper() for name in setting_names]
    for variable in sorted(environ):
        if variable.startswith(_PREFIX) and variable not in names:
            matches = get_close_matches(
                variable[len(_PREFIX) :], [name[len(_PREFIX) :] for name in names], n=1, cutoff=0.85
            )
            if matches:
                raise UsageError(
                    f"{variable} is set, and no setting is called so. Did you mean {_PREFIX}{matches[0]}? "
                    "Rename or unset it."
                )


def _overridden(settings: Settings, overrides: Mapping[str, object]) -> Settings:
    kinds = {setting.name: str(setting.type) for setting in fields(settings)}
    values: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in kinds:
            raise UsageError(
                f"There is no setting {name!r}. {suggestion(name, kinds)}Known settings: {', '.join(sorted(kinds))}."
            )
        if value is not None:
            values[name] = _parse(name, kinds[name], value) if isinstance(value, str) else value
    for name in ("servers", "caller_inboxes", "read_from"):
        if isinstance(values.get(name), list):
            values[name] = tuple(cast("list[str]", values[name]))
    for name, alternative in (_EXCLUSIVE, _EXCLUSIVE[::-1]):
        if name in values:
            values.setdefault(alternative, None)
    return _check(replace(settings, **values))


def _parse(name: str, kind: str, text: str) -> Any:
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


def _check(settings: Settings) -> Settings:
    if not settings.servers:
        raise UsageError(
            "No NATS server is named. Set --servers or EVENTJET_SERVERS, for instance nats://127.0.0.1:4222."
        )
    for number, url in enumerate(settings.servers, 1):
        server_url(url, f"Server {number} of --servers or EVENTJET_SERVERS")
    database_url(settings.database)
    if settings.tls_key is not None and settings.tls_cert is None:
        raise UsageError("EVENTJET_TLS_KEY is set and EVENTJET_TLS_CERT is not. Name the certificate that it is of.")
    if settings.tls is not None and (settings.tls_ca or settings.tls_cert):
        raise UsageError("tls is given beside tls_ca or tls_cert. Give the context or the files.")
    if (settings.user_jwt_cb is None) != (settings.signature_cb is None):
        raise UsageError("Of user_jwt_cb and signature_cb one is given. Give both: one has the JWT, one signs with it.")
    _check_jetstream(settings)
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", settings.inbox_prefix):
        raise UsageError("EVENTJET_INBOX_PREFIX is no subject. Write letters, digits, _ and -, such as _INBOX_worker.")
    for prefix in settings.caller_inboxes or ():
        if not re.fullmatch(r"_INBOX[A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*", prefix):
            raise UsageError(
                f"EVENTJET_CALLER_INBOXES names {prefix[:60]!r}, which is no inbox: a service would answer into "
                "streams, or to the server. Write prefixes that begin with _INBOX, such as _INBOX_shop."
            )
    if settings.lake_format not in ("delta", "iceberg"):
        raise UsageError(f"EVENTJET_LAKE_FORMAT is {settings.lake_format[:60]!r}. Write delta or iceberg.")
    if settings.replicas not in (1, 3, 5):
        raise UsageError(f"EVENTJET_REPLICAS is {settings.replicas}. JetStream replicates 1, 3 or 5 times.")
    for name in ("save_timeout_s", "request_timeout_s"):
        if not 0 < (seconds := getattr(settings, name)) < float("inf"):
            raise UsageError(f"{_PREFIX}{name.upper()} is {seconds}. Give a number of seconds above 0.")
    return settings


def _check_jetstream(settings: Settings) -> None:
    domain, prefix = settings.jetstream_domain, settings.jetstream_prefix
    _check_read_from(settings.read_from)
    if domain is not None and prefix is not None:
        raise UsageError(
            "EVENTJET_JETSTREAM_DOMAIN and EVENTJET_JETSTREAM_PREFIX are both set. Set one of them: the domain hub is "
            "the prefix $JS.hub.API."
        )
    if domain is not None and not re.fullmatch(rf"{_CHARACTER}+", domain):
        raise UsageError(
            f"EVENTJET_JETSTREAM_DOMAIN is {domain[:60]!r}, which cannot be a domain. Write the `domain` of the "
            "server's jetstream block, without dots, blanks or wildcards."
        )
    if prefix is not None and not re.fullmatch(rf"{_CHARACTER}+(\.{_CHARACTER}+)*", prefix):
        raise UsageError(
            f"EVENTJET_JETSTREAM_PREFIX is {prefix[:60]!r}, which cannot begin a subject. Write what stands for "
            "$JS.API in this account, such as hub.API, without wildcards or a dot at its end; a shell takes $JS for a "
            "variable unless single quotes are around it."
        )


def _check_read_from(read_from: tuple[str, ...] | None) -> None:
    if read_from is None:
        return
    if not read_from:
        raise UsageError("EVENTJET_READ_FROM names nothing. Write the URLs of the mirror's servers, or unset it.")
    if is_domain(read_from):
        domain, *others = read_from
        if others or not re.fullmatch(rf"{_CHARACTER}+", domain):
            raise UsageError(
                f"EVENTJET_READ_FROM is {','.join(read_from)[:60]!r}. Write the URLs of the servers that have the "
                "mirror, such as nats://west.example:4222, or the one JetStream domain that has it."
            )
        return
    for number, url in enumerate(read_from, 1):
        server_url(url, f"Server {number} of EVENTJET_READ_FROM")
