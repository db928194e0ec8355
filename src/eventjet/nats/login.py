"""What a login at a NATS server takes, and why one was refused. Seeds are never sent, and secrets not kept."""

from __future__ import annotations

import base64
import re
import socket
import ssl
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from nats.errors import Error as NatsError

from eventjet.errors import Unauthorized, UsageError
from eventjet.nats.endpoint import Endpoint, is_file
from eventjet.nats.protocol import server_fault
from eventjet.nats.tap import NO_TLS
from eventjet.settings import dev_hint
from eventjet.text import listed

_LOGINS = {
    "credentials": "EVENTJET_CREDENTIALS",
    "nkey": "EVENTJET_NKEY",
    "user": "EVENTJET_USER and EVENTJET_PASSWORD",
    "token": "EVENTJET_TOKEN",
    "user_jwt_cb": "`user_jwt_cb` and `signature_cb`",
}
"""The settings of a login, by the field of an endpoint."""
_NO_LOGIN = (
    "Set EVENTJET_CREDENTIALS, EVENTJET_NKEY, EVENTJET_USER and EVENTJET_PASSWORD, or EVENTJET_TOKEN; "
    "EVENTJET_TLS_CERT and EVENTJET_TLS_KEY where it asks for a certificate."
)
_CLIENT_CERTIFICATE = ("certificate required", "bad certificate", "unknown ca")
_JWT = re.compile(rb"-+BEGIN NATS USER JWT-+\s+([A-Za-z0-9._=-]+)\s+-+END")
_SEED = re.compile(rb"-+BEGIN USER NKEY SEED-+\s+(SU[A-Z2-7]+)\s+-+END")
_BARE_SEED = re.compile(rb"^\s*(SU[A-Z2-7]+)\s*$", re.MULTILINE)


def login(endpoint: Endpoint, nonce: str) -> dict[str, str]:
    """Return `jwt`, `nkey` and `sig` of CONNECT, if there are files for them; raises `UsageError`."""
    if endpoint.credentials is not None:
        jwt = _read(endpoint.credentials, _JWT, "credentials", "user JWT")
        seed = _read(endpoint.credentials, _SEED, "credentials", "seed")
        return {"jwt": jwt.decode(), "sig": _signed(seed, nonce.encode(), "credentials")[1]}
    if endpoint.nkey is not None:
        seed = _read(endpoint.nkey, _BARE_SEED, "nkey", "seed of a user (SU…)")
        public, signature = _signed(seed, nonce.encode(), "nkey")
        return {"nkey": public, "sig": signature}
    return {}


def _signed(seed: bytes, nonce: bytes, setting: str) -> tuple[str, str]:
    """Return (public key, signature of the nonce), and wipe the key pair."""
    # `nkeys` is untyped and slow to import, so it is imported only for a signature.
    nkeys: Any = import_module("nkeys")
    try:
        pair = nkeys.from_seed(bytearray(seed))
        public = bytes(pair.public_key).decode()
        signature = base64.urlsafe_b64encode(pair.sign(nonce)).rstrip(b"=").decode()
        pair.wipe()
    except (nkeys.NkeysError, ValueError, TypeError) as error:
        raise UsageError(
            f"The seed in the file of {_LOGINS[setting]} cannot sign ({type(error).__name__}). Create the key again."
        ) from None
    return public, signature


def _read(path: Path, pattern: re.Pattern[bytes], setting: str, content: str) -> bytes:
    try:
        match = pattern.search(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        # The path is not shown: it may be the secret that should stand in the file.
        reason = getattr(error, "strerror", None) or "it is no path"
        raise UsageError(
            f"The file of {_LOGINS[setting]} cannot be read: {reason}. Give the path of a readable one."
        ) from None
    if match is None:
        raise UsageError(
            f"{path}, the file of {_LOGINS[setting]}, holds no {content}. Give the file that `nsc` or `nk` wrote."
        )
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
        files = [
            f"EVENTJET_{name.upper()}" + (f" ({path})" if is_file(path) else "")
            for name in ("tls_ca", "tls_cert", "tls_key")
            if (path := getattr(endpoint, name)) is not None
        ]
        raise UsageError(f"The files of {listed(files)} cannot be used: {reason}. Give readable PEM.") from None
    return context


def refusal_of(error: Exception, endpoint: Endpoint, peer: str) -> Unauthorized | None:
    """Return the error of a server that refused login or certificate (in TLS 1.3, at the first read), or None."""
    if isinstance(error, NatsError) and isinstance(fault := server_fault(_text_of(error), peer), Unauthorized):
        return Unauthorized(fault.subject, fault.reason, login_remedy(endpoint))
    text = str(error).lower().replace("_", " ")
    if isinstance(error, ssl.SSLError) and "alert" in text and any(word in text for word in _CLIENT_CERTIFICATE):
        client = f"the client certificate {endpoint.tls_cert}" if endpoint.tls_cert else "a client without certificate"
        remedy = "Set EVENTJET_TLS_CERT and EVENTJET_TLS_KEY to a certificate that its CA has signed."
        return Unauthorized(f"the connection to {peer}", f"it refuses {client}", remedy)
    return None


def login_remedy(endpoint: Endpoint) -> str:
    """Return what to do about a login that a server refused, with the settings that it was made of."""
    used = [setting for field, setting in _LOGINS.items() if getattr(endpoint, field) is not None]
    if endpoint.is_user_in_url:
        return f"Correct the user or token in the URLs of {endpoint.servers_from}."
    if not used:
        return _NO_LOGIN
    own = ""
    if endpoint.servers_from == "EVENTJET_READ_FROM":
        own = " A user for the mirror alone belongs in the URLs of EVENTJET_READ_FROM."
    return f"The login is from {' and '.join(used)}. Correct it there.{own}"


def unreachable_remedy(endpoint: Endpoint, faults: Iterable[Exception]) -> str:
    """Return what to do if no server could be connected to, by what was wrong with each."""
    variable, faults = endpoint.servers_from, tuple(faults)
    if any(NO_TLS in str(fault) for fault in faults):
        demanded = [f"EVENTJET_{name.upper()}" for name in ("tls_ca", "tls_cert", "tls_key") if getattr(endpoint, name)]
        demanded += ["`tls`"] if endpoint.tls else []
        demanded += [f"tls:// in {variable}"] if any(url.startswith("tls:") for url in endpoint.servers) else []
        return f"TLS is demanded by {listed(demanded)}. Take that away, or let the server offer TLS."
    if any(isinstance(fault, ssl.SSLCertVerificationError) for fault in faults):
        authority = "`tls`" if endpoint.tls else "EVENTJET_TLS_CA"
        return f"Give the certificate of its CA in {authority}, and in {variable} a name that its certificate is for."
    if endpoint.is_websocket:
        return f"Look at the URL in {variable}, and at `websocket {{}}` of the server."
    if variable == "EVENTJET_READ_FROM":
        return f"Start it, or set {variable} to where the mirror is; without {variable} the log itself is read."
    if hint := dev_hint("servers", endpoint.servers):
        return hint
    return f"Start it, or set {variable} to where it is; `eventjet dev` starts one on this machine."


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
        case NatsError() if not _text_of(error).startswith("'"):
            return f"does not speak NATS as expected: {_text_of(error)}"
        case NatsError():
            return f"said {_text_of(error)}"
        case _:
            return str(error)


def _text_of(error: NatsError) -> str:
    """Return the text of an error of nats-py: in quotes if the server has sent it as an `-ERR`."""
    return str(error).removeprefix("nats: ").strip()
