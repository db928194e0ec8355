"""Check the options of the data source `jetstream`, which contain names and paths only, and no secrets.

A secret reaches tasks in two parts: a sealed file that is sent with the session, and its key. Executors keep a
session's files in work folders, for days after it has ended, so a file must be worthless without the key. The key is
part of the reference that tasks get by value; only a Connect server stores that, in its log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

from nacl.secret import SecretBox
from nacl.utils import random

from eventjet.codec.subjects import is_name, subject_of
from eventjet.errors import UsageError
from eventjet.log.predecessors import PredecessorReader
from eventjet.nats.endpoint import Endpoint, check_picklable
from eventjet.settings import Settings, SettingsOverrides
from eventjet.spark.columns import STORED, parse_columns

POSITIONS_PER_TRIGGER = 1_000_000
"""The default maximum of positions in one micro-batch; without it, a query's first batch would be the whole log."""

_PATHS = {"credentials": "credentials", "nkey": "nkey", "tlsCa": "tls_ca", "tlsCert": "tls_cert", "tlsKey": "tls_key"}
_FILES = {"passwordFile": "password", "tokenFile": "token"}
_TEXTS = {
    "servers": "servers",
    "user": "user",
    "inboxPrefix": "inbox_prefix",
    "jetstreamDomain": "jetstream_domain",
    "jetstreamPrefix": "jetstream_prefix",
}
_READ_OPTIONS = ("columns", "aggregate", "id", "fromPosition", "toPosition", "partitions", "maxPositionsPerTrigger")
_SOURCE_OPTIONS = ("stream", *_READ_OPTIONS, "pushFilters")
_STREAM = re.compile(r"[^\s.*>/\\]+")
_SEALED = re.compile(r"(?P<path>.+)#(?P<key>[0-9a-f]{64})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The options of one read, checked; they can be pickled."""

    stream: str
    connection: Mapping[str, str] = field(repr=False)
    """The options that name the server and the credentials."""
    columns: tuple[str, ...] = STORED
    subject: str | None = None
    """The subject of the records, which may end in a wildcard; None for all records."""
    first: int | None = None
    last: int | None = None
    partitions: int | None = None
    positions_per_trigger: int = POSITIONS_PER_TRIGGER
    push_filters: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> LogOptions:
        """Check options whose names may be in any case, as in Spark; raises `UsageError`."""
        names = {name.lower(): name for name in (*_PATHS, *_FILES, *_TEXTS, *_SOURCE_OPTIONS)}
        unknown = [name for name in options if name.lower() not in names and name.lower() != "path"]
        if unknown:
            raise UsageError(f"The source jetstream has no option {unknown[0]!r}. It has: {', '.join(names.values())}.")
        given = {names[name.lower()]: value for name, value in options.items() if name.lower() in names}
        if not given.get("stream"):
            raise UsageError('The source jetstream needs to know the stream. Add `.option("stream", "<app>")`.')
        if not _STREAM.fullmatch(given["stream"]):
            raise UsageError(f"{given['stream']!r} cannot be the name of a stream. Give the app's name.")
        if "@" in given.get("servers", ""):
            raise UsageError("A password in `servers` would show in Spark's plans. Name `user` and `passwordFile`.")
        return cls(
            stream=given["stream"],
            connection={name: value for name, value in given.items() if name not in _SOURCE_OPTIONS},
            columns=parse_columns(given["columns"]) if "columns" in given else STORED,
            subject=_subject(given),
            first=_number(given, "fromPosition"),
            last=_number(given, "toPosition"),
            partitions=_number(given, "partitions"),
            positions_per_trigger=_number(given, "maxPositionsPerTrigger") or POSITIONS_PER_TRIGGER,
            push_filters=_flag(given, "pushFilters"),
        )

    def endpoint(self) -> Endpoint:
        """Return the server's endpoint, with the secrets read from this machine's files."""
        overrides: dict[str, Any] = {}
        for name, value in self.connection.items():
            if name in _PATHS:
                overrides[_PATHS[name]] = Path(value)
            elif name in _FILES:
                overrides[_FILES[name]] = _secret(name, value)
            else:
                overrides[_TEXTS[name]] = value
        return Endpoint.of(Settings.load(cast("SettingsOverrides", overrides))).with_name("eventjet-spark")

    def earlier(self) -> PredecessorReader:
        """Return a reader with which a task looks up an event's predecessor; the caller closes it."""
        return PredecessorReader(self.endpoint(), self.stream)


def connection_options(settings: Settings, secrets: Path) -> dict[str, str]:
    """Return the options for the server of `settings`; a password or a token is sealed in the folder `secrets`."""
    endpoint = Endpoint.of(settings)
    check_picklable(endpoint)
    options = {
        "servers": ",".join(endpoint.servers),
        "inboxPrefix": endpoint.inbox_prefix,
        "jetstreamPrefix": endpoint.jetstream_prefix,
    }
    if endpoint.user is not None:
        options["user"] = endpoint.user
    for option, name in _PATHS.items():
        path: Path | None = getattr(endpoint, name)
        if path is not None:
            options[option] = str(path.absolute())
    for option, name in _FILES.items():
        secret: str | None = getattr(endpoint, name)
        if secret is not None:
            options[option] = seal(secrets, option, secret)
    return options


def seal(folder: Path, kind: str, secret: str) -> str:
    """Encrypt a secret into a new file in `folder`, with a random name, and return the reference: path and key."""
    key = random(SecretBox.KEY_SIZE)
    path = folder / f"{kind}-{token_hex(8)}"
    path.touch(mode=0o600)
    path.write_bytes(SecretBox(key).encrypt(secret.encode()))
    return f"{path}#{key.hex()}"


def is_sealed(reference: str) -> bool:
    """Tell whether a reference comes from `seal`; otherwise it is a path."""
    return _SEALED.fullmatch(reference) is not None


def unseal(reference: str) -> str:
    """Return the secret of a reference from `seal`, or of a plain file without its line end; raises `OSError`."""
    match = _SEALED.fullmatch(reference)
    if match is None:
        return _file_of_session(reference).read_text().strip("\r\n")
    return SecretBox(bytes.fromhex(match["key"])).decrypt(_file_of_session(match["path"]).read_bytes()).decode()


def _file_of_session(name: str) -> Path:
    """Return the path of a driver's file on this machine: the file itself, or the copy that came with the session."""
    path = Path(name)
    if path.exists():
        return path
    from pyspark import SparkFiles

    try:
        return Path(SparkFiles.get(path.name))
    except AssertionError:  # there is no session in this process
        return path


def _secret(option: str, reference: str) -> str:
    try:
        return unseal(reference)
    except OSError as error:
        # The message leaves the path out, because somebody may have given the secret instead of a path.
        raise UsageError(f"{option} names a file that cannot be read: {error.strerror}. Give a readable one.") from None


def _subject(options: Mapping[str, str]) -> str | None:
    """Return the subject of one aggregate, whose id is encoded as in the log, or the wildcard of an aggregate type.

    None when the options name no aggregate.
    """
    aggregate, aggregate_id = options.get("aggregate"), options.get("id")
    if aggregate is None:
        if aggregate_id is not None:
            raise UsageError("`id` is one aggregate's. Name that too, as `aggregate`.")
        return None
    if not is_name(aggregate):
        raise UsageError(f"{aggregate!r} is no aggregate: names are [a-z][a-z0-9_]*. Give the name of a declared one.")
    if aggregate_id is None:
        return f"{options['stream']}.{aggregate}.*"
    return subject_of(options["stream"], aggregate, aggregate_id)


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    counts = name in ("partitions", "maxPositionsPerTrigger")
    if not (text.isascii() and text.isdigit() and len(text) < 19) or (counts and int(text) < 1):
        raise UsageError(f"{name} is {text!r}, which is not a number that fits. Give a whole number.")
    return int(text)


def _flag(options: Mapping[str, str], name: str) -> bool:
    text = options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise UsageError(f"{name} is {text!r}. Give true or false.")
    return text == "true"
