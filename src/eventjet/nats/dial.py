"""Open one connection to NATS: TCP, INFO, TLS, CONNECT, PONG. Blocking, and bounded by one deadline."""

from __future__ import annotations

import json
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any, cast

from eventjet.errors import StoreError, StoreUnavailable, Unauthorized, Unreachable, UsageError
from eventjet.nats.auth import connect_options
from eventjet.nats.endpoint import Address, Endpoint
from eventjet.nats.protocol import Control, FrameParser, server_fault

_CLIENT_CERTIFICATE = ("certificate required", "bad certificate", "unknown ca")
_CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class Dialled:
    """A connection the server has let in."""

    sock: socket.socket
    parser: FrameParser
    controls: list[Control]
    """What the server said right after the greeting, for whoever goes on."""
    info: dict[str, Any]
    peer: str
    """host:port, for errors."""


def dial(endpoint: Endpoint, timeout_s: float) -> Dialled:
    """Try the servers in order; raises `Unreachable` when none answers, `Unauthorized` as soon as one says no."""
    deadline = time.monotonic() + timeout_s
    faults: list[str] = []
    addresses = endpoint.addresses()
    for index, address in enumerate(addresses):
        share_s = (deadline - time.monotonic()) / (len(addresses) - index)
        if share_s <= 0:
            break
        try:
            return _dial_one(endpoint, address, time.monotonic() + share_s)
        except (Unauthorized, UsageError):
            raise
        except (OSError, ValueError, StoreError) as error:
            _raise_if_client_is_unknown(error, endpoint, address.peer)
            faults.append(f"{address.peer} {_reason(error)}")
    raise Unreachable(
        "NATS",
        "; ".join(faults) or f"no time left after {timeout_s:g} s",
        "Start it, or set EVENTJET_SERVERS to where it is; `eventjet dev` starts one on this machine.",
    )


def _dial_one(endpoint: Endpoint, address: Address, deadline: float) -> Dialled:
    sock = socket.create_connection((address.host, address.port), timeout=_left(deadline))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    greeting = _Greeting(sock, address, deadline)
    try:
        return _greet(endpoint, greeting, address.tls)
    except BaseException:
        greeting.sock.close()
        raise


def _greet(endpoint: Endpoint, greeting: _Greeting, tls: bool) -> Dialled:
    encrypted = endpoint.tls_first
    if encrypted:
        greeting.encrypt(endpoint)
    info = cast("dict[str, Any]", json.loads(greeting.await_control(b"INFO")))
    if not encrypted and (tls or info.get("tls_required")):
        if not (info.get("tls_required") or info.get("tls_available")):
            raise ValueError("it does not offer TLS, which this endpoint demands")
        greeting.encrypt(endpoint)
        encrypted = True
    if not info.get("headers"):
        raise ValueError("it does not know headers, so it is older than NATS 2.2")
    options = connect_options(endpoint, info, encrypted=encrypted)
    greeting.send(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
    greeting.await_control(b"PONG")
    return Dialled(greeting.sock, greeting.parser, greeting.controls, info, greeting.peer)


class _Greeting:
    """The conversation before the first message."""

    def __init__(self, sock: socket.socket, address: Address, deadline: float) -> None:
        self.sock = sock
        self.parser = FrameParser()
        self.controls: list[Control] = []
        self.peer = address.peer
        self._name = address.name
        self._deadline = deadline

    def encrypt(self, endpoint: Endpoint) -> None:
        """Go on over TLS, and forget what came in the clear: nobody vouches for it."""
        self.sock.settimeout(_left(self._deadline))
        self.sock = tls_context(endpoint).wrap_socket(self.sock, server_hostname=self._name)
        self.parser = FrameParser()
        self.controls.clear()

    def send(self, data: bytes) -> None:
        self.sock.settimeout(_left(self._deadline))
        self.sock.sendall(data)

    def await_control(self, verb: bytes) -> bytes:
        """The argument of the first `verb`; raises what an `-ERR` before it means."""
        while True:
            while self.controls:
                found, argument = self.controls.pop(0)
                if found == b"-ERR":
                    raise server_fault(argument.decode("utf-8", "replace"), self.peer)
                if found == verb:
                    return argument
            self.sock.settimeout(_left(self._deadline))
            data = self.sock.recv(_CHUNK)
            if not data:
                raise ConnectionResetError("closed the connection during the greeting")
            self.controls += self.parser.feed(data)[1]


def tls_context(endpoint: Endpoint) -> ssl.SSLContext:
    """What the endpoint's files say of TLS; raises `UsageError` for files that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=endpoint.tls_ca)
        if endpoint.tls_cert is not None:
            context.load_cert_chain(endpoint.tls_cert, endpoint.tls_key)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"The TLS files of {endpoint!r} cannot be used: {reason}. Give readable PEM.") from None
    return context


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("gave no answer in time")
    return left


def _raise_if_client_is_unknown(error: Exception, endpoint: Endpoint, peer: str) -> None:
    """A server that verifies clients refuses them inside TLS, which in TLS 1.3 shows at the first read."""
    text = str(error).lower().replace("_", " ")
    if isinstance(error, ssl.SSLError) and "alert" in text and any(word in text for word in _CLIENT_CERTIFICATE):
        which = f"the client certificate {endpoint.tls_cert}" if endpoint.tls_cert else "a client without certificate"
        raise Unauthorized(f"the connection to {peer}", f"it refuses {which}") from None


_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (ConnectionRefusedError, "refused the connection"),
    (socket.gaierror, "is a name that does not resolve"),
    (TimeoutError, "gave no answer in time"),
)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"has a certificate that is not trusted ({error.verify_message})"
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    if isinstance(error, ssl.SSLError):
        return f"failed at TLS ({error.reason or error})"
    if isinstance(error, ValueError):
        return f"does not speak NATS as expected: {error}"
    return str(error.reason if isinstance(error, StoreUnavailable) else error)
