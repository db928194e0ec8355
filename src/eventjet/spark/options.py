"""The options of the data source `jetstream`, checked; they hold names and paths only, and no secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from eventjet.codec.subjects import is_name, subject_of
from eventjet.errors import UsageError
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings, SettingsOverrides
from eventjet.spark.columns import STORED, parse_columns
from eventjet.spark.sealed import seal, unseal

POSITIONS_PER_TRIGGER = 1_000_000
"""What one micro-batch reads at most unless told: the first one of a query would read the whole log."""

_PATHS = {"credentials": "credentials", "nkey": "nkey", "tlsCa": "tls_ca", "tlsCert": "tls_cert", "tlsKey": "tls_key"}
_FILES = {"passwordFile": "password", "tokenFile": "token"}
_PLAIN = {"servers": "servers", "user": "user"}
_READING = ("columns", "aggregate", "id", "fromPosition", "toPosition", "partitions", "maxPositionsPerTrigger")
_OTHER = ("stream", *_READING, "pushFilters")
_STREAM = re.compile(r"[^\s.*>/\\]+")


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What to read; it can be pickled."""

    stream: str
    connection: Mapping[str, str]
    """Options that say where the server is and how to prove who we are."""
    columns: tuple[str, ...] = STORED
    subject: str | None = None
    """Only records of this subject, which may end in a wildcard."""
    first: int | None = None
    last: int | None = None
    partitions: int | None = None
    positions_per_trigger: int = POSITIONS_PER_TRIGGER
    push_filters: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> LogOptions:
        """Names in any case, as Spark has it; raises `UsageError`."""
        names = {name.lower(): name for name in (*_PATHS, *_FILES, *_PLAIN, *_OTHER)}
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
            connection={name: value for name, value in given.items() if name not in _OTHER},
            columns=parse_columns(given["columns"]) if "columns" in given else STORED,
            subject=_subject(given),
            first=_number(given, "fromPosition"),
            last=_number(given, "toPosition"),
            partitions=_number(given, "partitions"),
            positions_per_trigger=_number(given, "maxPositionsPerTrigger") or POSITIONS_PER_TRIGGER,
            push_filters=_flag(given, "pushFilters"),
        )

    def endpoint(self) -> Endpoint:
        """Where the server is, with the secrets that this machine has."""
        overrides: dict[str, Any] = {_PLAIN[name]: value for name, value in self.connection.items() if name in _PLAIN}
        for name, value in self.connection.items():
            if name in _PATHS:
                overrides[_PATHS[name]] = Path(value)
            elif name in _FILES:
                overrides[_FILES[name]] = _secret(name, value)
        return Endpoint.of(Settings.load(cast("SettingsOverrides", overrides))).with_name("eventjet-spark")


def connection_options(settings: Settings, secrets: Path) -> dict[str, str]:
    """The options that reach the same server as `settings` do; a password or a token is sealed in `secrets`."""
    endpoint = Endpoint.of(settings)
    found = {"servers": ",".join(endpoint.servers), "user": endpoint.user}
    found |= {option: _absolute(getattr(endpoint, name)) for option, name in _PATHS.items()}
    found |= {option: _kept(secrets, option, getattr(endpoint, name)) for option, name in _FILES.items()}
    return {name: value for name, value in found.items() if value is not None}


def _kept(secrets: Path, option: str, secret: str | None) -> str | None:
    return None if secret is None else seal(secrets, option, secret)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _secret(option: str, reference: str) -> str:
    try:
        return unseal(reference)
    except OSError as error:
        raise UsageError(
            f"{option} names {error.filename}, which cannot be read: {error.strerror}. Give a readable file."
        ) from None


def _subject(given: Mapping[str, str]) -> str | None:
    """The subjects of one aggregate, or the one of one id, which is encoded as the store does it."""
    aggregate, aggregate_id = given.get("aggregate"), given.get("id")
    if aggregate is None:
        if aggregate_id is not None:
            raise UsageError("`id` is one aggregate's. Name that too, as `aggregate`.")
        return None
    if not is_name(aggregate):
        raise UsageError(f"{aggregate!r} is no aggregate: names are [a-z][a-z0-9_]*. Give the name of a declared one.")
    if aggregate_id is None:
        return f"{given['stream']}.{aggregate}.*"
    return subject_of(given["stream"], aggregate, aggregate_id)


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    counts = name in ("partitions", "maxPositionsPerTrigger")
    if not (text.isascii() and text.isdigit() and len(text) < 19) or (counts and int(text) < 1):
        raise UsageError(f"{name} is {text!r}, which is not a number that fits. Give a whole number.")
    return int(text)


def _flag(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in ("true", "false"):
        raise UsageError(f"{name} is {text!r}. Give true or false.")
    return text == "true"
