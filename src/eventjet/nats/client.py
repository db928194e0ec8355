"""A connection to NATS, from settings, with errors that say which component is missing and what to do."""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import suppress
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError

from eventjet.codec.subjects import SERVER_MESSAGE_MAX
from eventjet.errors import Unreachable
from eventjet.nats.auth import connect_options
from eventjet.nats.endpoint import Endpoint
from eventjet.nats.requests import ApiError, Denied, Lost, Requests
from eventjet.settings import Settings, redacted

MINIMUM_SERVER = (2, 14, 4)
"""Atomic batches came with 2.12; distinct expectations in one batch are right from 2.14.4 on (nats-server #8376)."""
_CONNECT_TIMEOUT_S = 3.0
_PING_S = 10


async def connect(settings: Settings) -> tuple[Client, Requests]:
    """A connection that reconnects for ever, and its request inbox; raises `Unreachable`.

    Checked at once: the credentials (`UsageError` for a file without any), the server's version, the size of its
    messages, and that JetStream is on.
    """
    if settings.credentials or settings.nkey:
        _files_exist(settings)
        # It says what is wrong with them; nats-py does not.
        connect_options(Endpoint.of(settings), {}, encrypted=False)
    client = Client()
    requests = Requests(client, settings.request_timeout_s)
    last_error: list[Exception] = []

    async def on_error(error: Exception) -> None:
        last_error[:] = [error]
        requests.failed(error)

    async def on_lost() -> None:
        requests.disconnected()

    options: dict[str, Any] = {
        "servers": list(settings.servers),
        "error_cb": on_error,
        "disconnected_cb": on_lost,
        "closed_cb": on_lost,
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "reconnect_time_wait": 0.2,
        "ping_interval": _PING_S,
        "name": "eventjet",
        **_credentials(settings),
    }
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S * len(settings.servers) + 1):
            # Each server twice, then give up: waiting for ever would hide a wrong address.
            await client.connect(**options, max_reconnect_attempts=1)
        client.options["max_reconnect_attempts"] = -1  # once connected, never give up
        await requests.start()
        await _check(client, requests, settings)
    except (NatsError, OSError, TimeoutError, ssl.SSLError) as error:
        await _close(client)
        raise _unreachable(settings, last_error[0] if last_error else error) from None
    except BaseException:
        await _close(client)
        raise
    return client, requests


async def _close(client: Client) -> None:
    if not client.is_closed:
        with suppress(AssertionError):  # it had not begun
            await client.close()


def version_of(text: str) -> tuple[int, int, int]:
    """The numbers of a version such as `2.15.1` or `2.15.0-RC.1`; zeros for what is missing."""
    numbers = [int(number) for number in re.findall(r"\d+", text.partition("-")[0])[:3]]
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    return major, minor, patch


async def _check(client: Client, requests: Requests, settings: Settings) -> None:
    version = str(client.connected_server_version)
    where = ", ".join(map(redacted, settings.servers))
    if version_of(version) < MINIMUM_SERVER:
        needed = ".".join(map(str, MINIMUM_SERVER))
        raise Unreachable(
            f"The NATS server at {where}",
            f"it is version {version}, and eventjet needs {needed}: older ones reject or misjudge atomic batches",
            f"Upgrade nats-server to {needed} or newer.",
        )
    if client.max_payload < SERVER_MESSAGE_MAX:
        raise Unreachable(
            f"The NATS server at {where}",
            f"it takes messages of {client.max_payload:,} bytes, and events may have {SERVER_MESSAGE_MAX:,}",
            "Set `max_payload: 1MB` in its configuration.",
        )
    try:
        await requests.api("INFO")
    except Denied:
        return  # credentials without this right may still append and read
    except (Lost, ApiError) as error:
        raise Unreachable(
            f"JetStream on the NATS server at {where}",
            f"it is not available ({error})",
            "Start the server with `-js`, or with a `jetstream { store_dir: … sync_interval: always }` block.",
        ) from None


def _credentials(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {
        "user": settings.user,
        "password": settings.password,
        "token": settings.token,
        "user_credentials": str(settings.credentials) if settings.credentials else None,
        "nkeys_seed": str(settings.nkey) if settings.nkey else None,
    }
    _files_exist(settings)
    if settings.tls_ca or settings.tls_cert or any(url.startswith("tls://") for url in settings.servers):
        found["tls"] = _tls(settings)
    return {key: value for key, value in found.items() if value is not None}


def _files_exist(settings: Settings) -> None:
    for path in (settings.credentials, settings.nkey, settings.tls_ca, settings.tls_cert, settings.tls_key):
        if path is not None and not path.is_file():
            raise Unreachable(f"The file {path}", "it does not exist", "Name the file in EVENTJET_* anew.")


def _tls(settings: Settings) -> ssl.SSLContext:
    file = settings.tls_ca
    try:
        context = ssl.create_default_context(cafile=str(file) if file else None)
        if settings.tls_cert:
            file = settings.tls_cert
            context.load_cert_chain(file, settings.tls_key)
    except (OSError, ValueError) as error:
        reason = f"it cannot be used for TLS ({error})"
        raise Unreachable(f"The file {file}", reason, "Give certificates and keys in PEM form.") from None
    return context


def _unreachable(settings: Settings, error: Exception) -> Unreachable:
    where = ", ".join(map(redacted, settings.servers))
    text = redacted(str(error)) or type(error).__name__
    if "authorization" in text.lower():
        return Unreachable(
            f"The NATS server at {where}",
            "it refused the credentials",
            "Set EVENTJET_CREDENTIALS, EVENTJET_NKEY, EVENTJET_USER and EVENTJET_PASSWORD, or EVENTJET_TOKEN.",
        )
    return Unreachable(
        f"The NATS server at {where}",
        f"no connection ({text})",
        "Start it, or set EVENTJET_SERVERS to where it is; `eventjet dev` starts one on this machine.",
    )
