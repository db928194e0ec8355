"""PostgreSQL sessions: their settings, and the proof that each keeps them, whatever pooler is in between.

A pooler may drop the settings that a session is asked for, and may give the next transaction to another session of the
server. Dropped settings are set again. Changing sessions cannot be mended: what one transaction sets, names or prepares
would be missing in the next one, or be found by another program.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache
from ipaddress import ip_address
from typing import Any

import psycopg
from sqlalchemy import PoolProxiedConnection
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection

from eventjet.errors import Unreachable
from eventjet.observability import logs
from eventjet.sql.dialect import SessionLimits
from eventjet.urls import shown_database

_log = logging.getLogger(__name__)

_DEFAULTS = {
    "connect_timeout": 5,
    "tcp_user_timeout": 20_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}
"""Options of libpq where the URL does not say otherwise, in seconds, and `tcp_user_timeout` in milliseconds.

By default the system notices only after a quarter of an hour, or two hours, that a host is gone without a word.
"""
_SECOND_S = 15.0
"""How long a second connection may wait for a session while the first has its own."""
REMEDY = "Connect to the server itself, or to a pool of sessions (pool_mode = session)."
_ALWAYS = {
    "client_encoding": "UTF8",
    "timezone": "UTC",
    "datestyle": "ISO, MDY",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "standard_conforming_strings": "on",
    "default_transaction_isolation": "read committed",
}
"""Settings on which the meaning of values, literals and transactions depends; a role or a pooler may change them."""
_OPTION = re.compile(r"(?:-c\s*|--)([\w.-]+)=((?:\\.|[^\s\\])*)")
_ESCAPED = re.compile(r"[\s\\]")


def settings_of(url: URL, limits: SessionLimits) -> dict[str, str]:
    """Return the settings of a session by name: those of the URL's `options`, overridden by eventjet's own."""
    url_settings = {
        name.replace("-", "_"): re.sub(r"\\(.)", r"\1", value) for name, value in _OPTION.findall(_url_options(url))
    }
    return {
        **url_settings,
        **_ALWAYS,
        "lock_timeout": str(limits.lock_ms),
        "statement_timeout": str(limits.statement_ms),
        "idle_in_transaction_session_timeout": str(limits.idle_in_transaction_ms),
    }


def session_arguments(url: URL, purpose: str, limits: SessionLimits) -> dict[str, Any]:
    """Return the arguments with which a session is connected; its time zone is UTC."""
    _warn_of_trust(_libpq_arguments(url))
    escaped = {name: _ESCAPED.sub(r"\\\g<0>", value) for name, value in settings_of(url, limits).items()}
    options = " ".join([_url_options(url), *(f"-c {name}={value}" for name, value in escaped.items())]).strip()
    defaults = {name: value for name, value in _DEFAULTS.items() if name not in url.query}
    return {**defaults, "options": options, "application_name": purpose}


def _url_options(url: URL) -> str:
    options = url.query.get("options", "")
    return options if isinstance(options, str) else " ".join(options)


def prove(connection: Any, url: URL, settings: Mapping[str, str]) -> None:
    """Check that a new connection keeps these settings, and set them again; raises `Unreachable`, and closes it."""
    with ExitStack() as on_error:
        on_error.callback(connection.close)
        names = list(settings)
        # Set for this transaction alone, to learn how the server writes the values: the session may be a shared one.
        columns = ", ".join("current_setting(%s, true), set_config(%s, %s, true)" for _ in names)
        parameters = [parameter for name in names for parameter in (name, name, settings[name])]
        session, *values = _ask(connection, columns, parameters)
        expected = values[1::2]
        if values[0::2] != expected:
            setting = f"case when pg_backend_pid() = {int(session)} then set_config(%s, %s, false) end"
            parameters = [parameter for name in names for parameter in (name, settings[name])]
            if _ask(connection, ", ".join(setting for _ in names), parameters)[0] != session:
                raise _shared(url)
        last_session, *actual = _ask(connection, ", ".join("current_setting(%s, true)" for _ in names), names)
        if last_session != session:
            raise _shared(url)
        triples = zip(names, actual, expected, strict=True)
        differences = [f"{name} is {has}, not {should}" for name, has, should in triples if has != should]
        if differences:
            raise _refused(url, f"its sessions do not keep what they are told ({'; '.join(differences)})")
        on_error.pop_all()


def _shared(url: URL) -> Unreachable:
    """Return the error for a pooler that gives the transactions of one connection to several sessions."""
    return _refused(url, "a pooler gives its transactions several sessions, as pool_mode = transaction does")


def _refused(url: URL, reason: str, remedy: str = REMEDY) -> Unreachable:
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    return Unreachable(f"The database {shown_database(plain)}", reason, remedy)


def _ask(connection: Any, columns: str, parameters: Sequence[Any]) -> Sequence[Any]:
    """Query the session's process id and these columns, in a transaction of its own."""
    cursor = connection.cursor()
    try:
        cursor.execute(f"select pg_backend_pid(), {columns}", parameters)
        row = cursor.fetchone()
    finally:
        cursor.close()
    connection.commit()
    return row


def connect(url: URL, purpose: str, limits: SessionLimits) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a blocking psycopg connection."""
    # By keyword: an error in parsing a connection string would quote it, with the password.
    connection = psycopg.connect(
        **{**_libpq_arguments(url), **session_arguments(url, purpose, limits)}, autocommit=False
    )
    prove(connection, url, settings_of(url, limits))
    return connection


def look_first_in(connection: PoolProxiedConnection | DBAPIConnection, schema: str) -> None:
    """Put a schema first in the search path of a connection of the driver, for the rest of its session."""
    cursor = connection.cursor()
    path = "quote_ident(%s) || ', ' || current_setting('search_path')"
    cursor.execute(f"select set_config('search_path', {path}, false)", (schema,))
    cursor.close()
    connection.commit()


@cache
def check_sessions(url: URL) -> None:
    """Check that two connections have two sessions; once in a process. Blocks. Raises `Unreachable`."""
    with closing(connect(url, "eventjet", SessionLimits())) as first:
        timer = threading.Timer(_SECOND_S, first.close)
        session = _session_of(first)
        timer.start()
        try:
            with closing(connect(url, "eventjet", SessionLimits())) as second:
                is_shared = _session_of(second) == session
        finally:
            timer.cancel()
        if first.closed:
            reason = f"a second connection was given no session within {_SECOND_S:g} s"
            remedy = "Give the pool as many sessions as there are connections, or connect to the server."
            raise _refused(url, reason, remedy)
        if is_shared:
            raise _shared(url)


def _session_of(connection: psycopg.Connection[tuple[Any, ...]]) -> int:
    (session,) = connection.execute("select pg_backend_pid()").fetchone() or (0,)
    connection.commit()
    return int(session)


def _libpq_arguments(url: URL) -> Mapping[str, Any]:
    """Return the contents of a URL as keywords of libpq."""
    return url.set(drivername="postgresql+psycopg").get_dialect()().create_connect_args(url)[1]


def _warn_of_trust(arguments: Mapping[str, Any]) -> None:
    """Warn of an `sslmode` below `verify-full`: libpq sends the password and all rows to whoever answers there."""
    hosts = str(arguments.get("hostaddr") or arguments.get("host") or os.environ.get("PGHOST", ""))
    default = "verify-full" if arguments.get("sslrootcert") == "system" else "prefer"
    mode = str(arguments.get("sslmode") or os.environ.get("PGSSLMODE") or default)
    if mode != "verify-full" and not all(map(_is_here, hosts.split(","))):
        warn_once(hosts, mode)


@cache
def warn_once(hosts: str, mode: str) -> None:
    """Log that the server at these hosts need not prove its identity; once in a process."""
    logs.UNPROVEN_PEER.log(_log, hosts=hosts, mode=mode)


def _is_here(host: str) -> bool:
    """Whether a host is this machine, by a Unix socket or a loopback address, so that nobody can be in between."""
    try:
        return host in ("", "localhost") or host[0] in "/@" or ip_address(host).is_loopback
    except ValueError:
        return False
