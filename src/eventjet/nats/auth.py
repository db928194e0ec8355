"""What a client says in CONNECT: who it is, proved without sending a seed. Secrets are read, used and dropped here."""

from __future__ import annotations

import base64
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from eventjet.errors import UsageError
from eventjet.nats.endpoint import Endpoint

_JWT = re.compile(rb"-+BEGIN NATS USER JWT-+\s+([A-Za-z0-9._=-]+)\s+-+END")
_SEED = re.compile(rb"-+BEGIN USER NKEY SEED-+\s+(SU[A-Z2-7]+)\s+-+END")
_BARE_SEED = re.compile(rb"^\s*(SU[A-Z2-7]+)\s*$", re.MULTILINE)


def connect_options(endpoint: Endpoint, info: dict[str, Any], *, encrypted: bool) -> dict[str, Any]:
    """The object to send after CONNECT; raises `UsageError` for a credentials file that cannot be used."""
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
    nonce = str(info.get("nonce", "")).encode()
    if endpoint.credentials is not None:
        content = _read(endpoint.credentials)
        jwt = _found(_JWT, content, endpoint.credentials, "user JWT")
        seed = _found(_SEED, content, endpoint.credentials, "seed")
        options |= {"jwt": jwt.decode(), "sig": _signed(seed, nonce, endpoint.credentials)[1]}
    elif endpoint.nkey is not None:
        seed = _found(_BARE_SEED, _read(endpoint.nkey), endpoint.nkey, "seed of a user (SU…)")
        public, signature = _signed(seed, nonce, endpoint.nkey)
        options |= {"nkey": public, "sig": signature}
    if endpoint.user is not None:
        options |= {"user": endpoint.user, "pass": endpoint.password or ""}
    if endpoint.token is not None:
        options["auth_token"] = endpoint.token
    return options


def _signed(seed: bytes, nonce: bytes, path: Path) -> tuple[str, str]:
    """(public key, signature of the nonce); the key pair is wiped."""
    # Untyped, and slow to import: only who signs pays for it.
    nkeys: Any = import_module("nkeys")
    try:
        pair = nkeys.from_seed(bytearray(seed))
        public = bytes(pair.public_key).decode()
        signature = base64.urlsafe_b64encode(pair.sign(nonce)).rstrip(b"=").decode()
        pair.wipe()
    except (nkeys.NkeysError, ValueError, TypeError) as error:
        raise UsageError(f"The seed in {path} cannot sign ({type(error).__name__}). Create the key again.") from None
    return public, signature


def _read(path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give a readable credentials file.") from None


def _found(pattern: re.Pattern[bytes], content: bytes, path: Path, what: str) -> bytes:
    match = pattern.search(content)
    if match is None:
        raise UsageError(f"{path} holds no {what}. Give the file that `nsc` or `nk` wrote.")
    return match[1]
