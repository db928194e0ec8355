"""Open one blocking connection to NATS: TCP, INFO, TLS, CONNECT, PONG, all of it within one deadline.

Seeds are never sent: they sign the server's nonce. Secrets are read for each login and not kept.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import ssl
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from eventjet.errors import StoreError, StoreUnavailable, Unauthorized, Unreachable, UsageError
from eventjet.nats.endpoint import Address, Endpoint, is_file
from eventjet.nats.protocol import Control, FrameParser, server_fault

_CLIENT_CERTIFICATE = ("certificate required", "bad certificate", "unknown ca")
_CHUNK = 65_536
_JWT = re.compile(rb"-+BEGIN NATS USER JWT-+\s+([A-Za-z0-9._=-]+)\s+-+END")
_SEED = re.compile(rb"-+BEGIN USER NKEY SEED-+\s+(SU[A-Z2-7]+)\s+-+END")
_BARE_SEED = re.compile(rb"^\s*(SU[A-Z2-7]+)\s*$", re.MULTILINE)


@dataclass(slots=True)
class Dialled:
    """A connection, which the server has let in once `dial` returns it."""

    sock: socket.socket
    peer: str
    """`host:port` of the server, for errors."""
    parser: FrameParser = field(default_factory=FrameParser)
    controls: list[Control] = field(default_factory=list[Control])
    """Control lines from the server that are not handled yet; after the greeting the connection's user handles them."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])


def dial(endpoint: Endpoint, timeout_s: float) -> Dialled:
    """Connect to the first server, in order, that lets this client in.

    Raises `Unauthorized` when a server refused the credentials and no other let the client in, else `Unreachable`:
    while credentials are changed, some servers may know them and others not.
    """
    if endpoint.is_websocket:
        raise UsageError(
            f"{endpoint.servers[0]} is a WebSocket, which carries the commands and histories of an application, and "
            "nothing else. Workers, rebuilds and the tools need a server's nats:// or tls:// URL."
        )
    deadline = time.monotonic() + timeout_s
    faults: list[str] = []
    refusal: Unauthorized | None = None
    addresses = endpoint.addresses()
    for index, address in enumerate(addresses):
        share_s = (deadline - time.monotonic()) / (len(addresses) - index)
        if share_s <= 0:
            break
        try:
            return dial_at(endpoint, address, time.monotonic() + share_s)
        except Unauthorized as error:
            refusal = error
        except (OSError, ValueError, StoreError) as error:
            refusal = _refusal_of_client(error, endpoint, address.peer) or refusal
            faults.append(f"{address.peer} {fault_of(error)}")
    if refusal is not None:
        raise refusal
    raise Unreachable(
        "NATS",
        "; ".join(faults) or f"no time left after {timeout_s:g} s",
        "Start it, or set EVENTJET_SERVERS to where it is; `eventjet dev` starts one on this machine.",
    )


def dial_at(endpoint: Endpoint, address: Address, deadline: float) -> Dialled:
    """Connect to one server; raises `Unauthorized`, and errors that `fault_of` describes."""
    sock = socket.create_connection((address.host, address.port), timeout=_remaining_s(deadline))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    dialled = Dialled(sock, address.peer)
    try:
        _greet(dialled, endpoint, address, deadline)
    except BaseException:
        dialled.sock.close()
        raise
    return dialled


def _greet(dialled: Dialled, endpoint: Endpoint, address: Address, deadline: float) -> None:
    encrypted = endpoint.tls_first
    if encrypted:
        _encrypt(dialled, endpoint, address, deadline)
    # An attacker may have written what comes before TLS, so this INFO can demand TLS but never waive it.
    info = dialled.info = cast("dict[str, Any]", json.loads(_await_control(dialled, b"INFO", deadline)))
    if not encrypted and (address.tls or info.get("tls_required")):
        if not (info.get("tls_required") or info.get("tls_available")):
            raise ValueError("it does not offer TLS, which this endpoint demands")
        _encrypt(dialled, endpoint, address, deadline)
        encrypted = True
    if not info.get("headers"):
        raise ValueError("it does not know headers, so it is older than NATS 2.2")
    options = _connect_options(endpoint, info, encrypted=encrypted)
    dialled.sock.settimeout(_remaining_s(deadline))
    dialled.sock.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
    _await_control(dialled, b"PONG", deadline)


def _encrypt(dialled: Dialled, endpoint: Endpoint, address: Address, deadline: float) -> None:
    """Switch to TLS, and discard what was received in the clear, since anybody may have sent it."""
    dialled.sock.settimeout(_remaining_s(deadline))
    dialled.sock = tls_context(endpoint).wrap_socket(dialled.sock, server_hostname=address.name)
    dialled.parser = FrameParser()
    dialled.controls.clear()


def _await_control(dialled: Dialled, verb: bytes, deadline: float) -> bytes:
    """Wait for the first control line of this verb and return its argument; raises the error of an `-ERR` before it."""
    while True:
        while dialled.controls:
            received_verb, argument = dialled.controls.pop(0)
            if received_verb == b"-ERR":
                raise server_fault(argument.decode("utf-8", "replace"), dialled.peer)
            if received_verb == verb:
                return argument
            if received_verb == b"INFO":
                # After the login: the limits of the account and the user.
                dialled.info |= json.loads(argument)
        dialled.sock.settimeout(_remaining_s(deadline))
        data = dialled.sock.recv(_CHUNK)
        if not data:
            raise ConnectionResetError("closed the connection during the greeting")
        dialled.controls += dialled.parser.feed(data)[1]


def _connect_options(endpoint: Endpoint, info: dict[str, Any], *, encrypted: bool) -> dict[str, Any]:
    """Return the options of CONNECT; raises `UsageError` for a credentials file that cannot be used."""
    options: dict[str, Any] = {
        "verbose": False,
        "pedantic": False,
        "headers": True,
        "no_responders": True,
        "protocol": 1,
        "lang": "python-eventjet",
        "version": "1",
        "name": endpoint.name,
        "tls_required": encrypted,
    }
    options |= login(endpoint, str(info.get("nonce", "")))
    if endpoint.user is not None:
        options |= {"user": endpoint.user, "pass": endpoint.password or ""}
    if endpoint.token is not None:
        options["auth_token"] = endpoint.token
    return options


def login(endpoint: Endpoint, nonce: str) -> dict[str, str]:
    """Return `jwt`, `nkey` and `sig` of CONNECT, reading the files anew; raises `UsageError` for an unusable file."""
    if endpoint.credentials is not None:
        jwt = _read(endpoint.credentials, _JWT, "credentials", "user JWT")
        seed = _read(endpoint.credentials, _SEED, "credentials", "seed")
        return {"jwt": jwt.decode(), "sig": _signed(seed, nonce.encode(), endpoint.credentials)[1]}
    if endpoint.nkey is not None:
        seed = _read(endpoint.nkey, _BARE_SEED, "nkey", "seed of a user (SU…)")
        public, signature = _signed(seed, nonce.encode(), endpoint.nkey)
        return {"nkey": public, "sig": signature}
    if endpoint.user_jwt_cb is not None and endpoint.signature_cb is not None:
        return {
            "jwt": bytes(endpoint.user_jwt_cb()).decode(),
            "sig": bytes(endpoint.signature_cb(nonce)).decode(),
        }
    return {}


def _signed(seed: bytes, nonce: bytes, path: Path) -> tuple[str, str]:
    """Return (public key, signature of the nonce), and wipe the key pair."""
    # `nkeys` is untyped and slow to import, so it is imported only for a signature.
    nkeys: Any = import_module("nkeys")
    try:
        pair = nkeys.from_seed(bytearray(seed))
        public = bytes(pair.public_key).decode()
        signature = base64.urlsafe_b64encode(pair.sign(nonce)).rstrip(b"=").decode()
        pair.wipe()
    except (nkeys.NkeysError, ValueError, TypeError) as error:
        raise UsageError(f"The seed in {path} cannot sign ({type(error).__name__}). Create the key again.") from None
    return public, signature


def _read(path: Path, pattern: re.Pattern[bytes], setting: str, what: str) -> bytes:
    try:
        match = pattern.search(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        # The path is not shown: it may be the secret that should stand in the file.
        reason = getattr(error, "strerror", None) or "it is no path"
        raise UsageError(
            f"The file of `{setting}` cannot be read: {reason}. Give the path of a readable one."
        ) from None
    if match is None:
        raise UsageError(f"{path} holds no {what}. Give the file that `nsc` or `nk` wrote.")
    return match[1]


def tls_context(endpoint: Endpoint) -> ssl.SSLContext:
    """Return the TLS context of an endpoint; raises `UsageError` for files that cannot be used."""
    if endpoint.tls is not None:
        return endpoint.tls
    try:
        context = ssl.create_default_context(cafile=endpoint.tls_ca)
        if endpoint.tls_cert is not None:
            context.load_cert_chain(endpoint.tls_cert, endpoint.tls_key)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no path"
        # Only files that exist are named: a path may be the secret that should stand in the file.
        files = [path for path in (endpoint.tls_ca, endpoint.tls_cert, endpoint.tls_key) if path and is_file(path)]
        file_list = ", ".join(map(str, files)) or f"of {endpoint!r}"
        raise UsageError(f"The TLS files {file_list} cannot be used: {reason}. Give readable PEM.") from None
    return context


def _remaining_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("gave no answer in time")
    return left_s


def _refusal_of_client(error: Exception, endpoint: Endpoint, peer: str) -> Unauthorized | None:
    """Return the error of a server that refused the client's certificate, None for another error.

    Such a server refuses clients inside TLS, which in TLS 1.3 shows at the first read.
    """
    text = str(error).lower().replace("_", " ")
    if isinstance(error, ssl.SSLError) and "alert" in text and any(word in text for word in _CLIENT_CERTIFICATE):
        client = f"the client certificate {endpoint.tls_cert}" if endpoint.tls_cert else "a client without certificate"
        return Unauthorized(f"the connection to {peer}", f"it refuses {client}")
    return None


def fault_of(error: Exception) -> str:
    """Return what is wrong with a server that did not let us in, as the predicate of a sentence about the server."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"has a certificate that is not trusted ({error.verify_message})"
        case ConnectionRefusedError():
            return "refused the connection"
        case socket.gaierror():
            return "is a name that does not resolve"
        case TimeoutError():
            return "gave no answer in time"
        case ssl.SSLError():
            return f"failed at TLS ({error.reason or error})"
        case ValueError():
            return f"does not speak NATS as expected: {error}"
        case _:
            return str(error.reason if isinstance(error, StoreUnavailable) else error)
