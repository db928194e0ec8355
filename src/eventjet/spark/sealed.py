"""Secrets on their way to tasks, in two halves: a sealed file that travels with the session, and its key.

Executors keep a session's files in work folders, for days after it has ended, so what lies there must be worth nothing
by itself. The key is part of the reference that tasks get by value; only a Connect server writes that down, in its log.
"""

from __future__ import annotations

import re
from pathlib import Path
from secrets import token_hex

from nacl.secret import SecretBox
from nacl.utils import random

from eventjet.spark.session import session_file

_REFERENCE = re.compile(r"(?P<path>.+)#(?P<key>[0-9a-f]{64})", re.DOTALL)


def seal(folder: Path, kind: str, secret: str) -> str:
    """The reference to a new file of `folder`, under a name no other session has."""
    key = random(SecretBox.KEY_SIZE)
    path = folder / f"{kind}-{token_hex(8)}"
    path.touch(mode=0o600)
    path.write_bytes(SecretBox(key).encrypt(secret.encode()))
    return f"{path}#{key.hex()}"


def is_sealed(reference: str) -> bool:
    """Whether `seal` made it; otherwise it is a path."""
    return _REFERENCE.fullmatch(reference) is not None


def unseal(reference: str) -> str:
    """The secret: of `seal`, or from a plain file without its line end; raises `OSError`."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        return session_file(Path(reference)).read_text().strip("\r\n")
    return SecretBox(bytes.fromhex(match["key"])).decrypt(session_file(Path(match["path"])).read_bytes()).decode()
