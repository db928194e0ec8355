"""Keys, JWTs and certificates for tests: an operator's chain of trust, and a certificate authority."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

nkeys: Any = import_module("nkeys")


@dataclass(frozen=True)
class Key:
    """An nkey with its pair and its seed as text."""

    pair: Any
    seed: str

    @property
    def public(self) -> str:
        return bytes(self.pair.public_key).decode()


def make_key(kind: int) -> Key:
    """Make a key; `kind` is one of `nkeys.PREFIX_BYTE_*`."""
    seed = nkeys.encode_seed(os.urandom(32), kind)
    return Key(nkeys.from_seed(bytearray(seed)), bytes(seed).decode())


def signed_jwt(issuer: Key, subject: str, name: str, claims: dict[str, Any], *, expires_in_s: int = 0) -> str:
    """Return a NATS JWT of version 2."""
    now = int(time.time())
    payload: dict[str, Any] = {
        "jti": base64.b32encode(os.urandom(32)).decode().rstrip("="),
        "iat": now,
        "iss": issuer.public,
        "name": name,
        "sub": subject,
        "nats": {"version": 2, **claims},
    }
    if expires_in_s:
        payload["exp"] = now + expires_in_s
    parts = [_encoded(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, payload)]
    text = ".".join(parts)
    return f"{text}.{_encoded(issuer.pair.sign(text.encode()))}"


def trust_chain(directory: Path, *, expires_in_s: int = 0, payload: int = -1) -> tuple[str, Path, Path]:
    """(server configuration, creds file of a user it knows, creds file of one signed by a stranger).

    `payload` is the size of what that user may send.
    """
    operator, account, system = (make_key(kind) for kind in (_OPERATOR, _ACCOUNT, _ACCOUNT))
    limits: dict[str, Any] = dict.fromkeys(
        ("subs", "data", "payload", "imports", "exports", "conn", "leaf", "mem_storage", "disk_storage"), -1
    )
    limits |= {"streams": -1, "consumer": -1, "wildcards": True}
    plain = {key: value for key, value in limits.items() if key not in ("mem_storage", "disk_storage", "streams")}
    operator_jwt = signed_jwt(operator, operator.public, "op", {"type": "operator", "system_account": system.public})
    account_jwt = signed_jwt(operator, account.public, "app", {"type": "account", "limits": limits})
    system_jwt = signed_jwt(operator, system.public, "SYS", {"type": "account", "limits": plain})
    config = "\n".join(
        [
            f"operator: {operator_jwt}",
            f"system_account: {system.public}",
            "resolver: MEMORY",
            f"resolver_preload: {{ {account.public}: {account_jwt}, {system.public}: {system_jwt} }}",
        ]
    )
    good = _creds(directory / "app.creds", account, expires_in_s, payload)
    bad = _creds(directory / "stranger.creds", make_key(_ACCOUNT), 0, -1)
    return config, good, bad


def certificates(directory: Path) -> dict[str, Path]:
    """A CA, a server's and a client's certificate of it, and the certificate of another CA, by name.

    They have the extensions that RFC 5280 asks for, because Python 3.13 and newer verify by `VERIFY_X509_STRICT`.
    """
    for name in ("ca", "other"):
        _openssl(
            directory,
            f"req -x509 {_NEW_KEY} -days 2 -keyout {name}.key -out {name}.pem -subj /CN={name} "
            "-addext keyUsage=critical,keyCertSign,cRLSign",
        )
    (directory / "extensions").write_text(
        "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\n"
        "keyUsage=critical,digitalSignature,keyEncipherment\nextendedKeyUsage=serverAuth,clientAuth\n"
        "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    )
    for name in ("server", "client"):
        _openssl(
            directory,
            f"req {_NEW_KEY} -keyout {name}.key -out {name}.csr -subj /CN={name}",
        )
        _openssl(
            directory,
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions "
            f"-out {name}.pem",
        )
    return {path.name: path for path in directory.iterdir()}


def tls_config(pems: dict[str, Path], extra: str = "") -> str:
    """Return the TLS configuration of a server with `certificates`."""
    return f'tls {{ cert_file: "{pems["server.pem"]}", key_file: "{pems["server.key"]}", timeout: 30{extra} }}'


_NEW_KEY = "-newkey rsa:2048 -nodes"
_OPERATOR: int = nkeys.PREFIX_BYTE_OPERATOR
_ACCOUNT: int = nkeys.PREFIX_BYTE_ACCOUNT
_USER: int = nkeys.PREFIX_BYTE_USER


def user_key() -> Key:
    """Make the nkey of a user."""
    return make_key(_USER)


def _creds(path: Path, account: Key, expires_in_s: int, payload: int) -> Path:
    user = make_key(_USER)
    limits = {"subs": -1, "data": -1, "payload": payload}
    jwt = signed_jwt(
        account, user.public, "ada", {"type": "user", "pub": {}, "sub": {}, **limits}, expires_in_s=expires_in_s
    )
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    return path


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _openssl(directory: Path, command: str) -> None:
    subprocess.run(["openssl", *command.split()], cwd=directory, check=True, capture_output=True, timeout=60)
