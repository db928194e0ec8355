"""Running a server that refuses root, when root is all there is.

The user is `nobody`: every system has it, so none is created. Nothing of the machine's is opened up to it: what it
must read and cannot is copied into the server's own folder.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from eventjet.dev.process import Account
from eventjet.errors import Unreachable

_USER = "nobody"


def account_for(component: str) -> Account | None:
    """None for a process that is not root's: the server runs as that user."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(_USER)
    except KeyError:
        raise Unreachable(
            component, f"it refuses to run as root, and this system has no user {_USER}", "Start as another user."
        ) from None
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def own(path: Path, account: Account | None, mode: int) -> None:
    """Give a file or folder to the account (to nobody else), with the mode."""
    path.chmod(mode)
    if account is not None:
        os.chown(path, account.uid, account.gid)


def can_reach(path: Path, account: Account | None) -> bool:
    """Whether the account may read the path and pass through all the folders above it."""
    if account is None:
        return True
    path = path.resolve()
    readable = stat.S_IROTH | stat.S_IXOTH if path.is_dir() else stat.S_IROTH
    return _allows(path, account, readable) and can_pass(path.parent, account)


def can_pass(path: Path, account: Account | None) -> bool:
    """Whether the account may pass through the folder and all above it."""
    if account is None:
        return True
    path = path.resolve()
    return all(_allows(folder, account, stat.S_IXOTH) for folder in (path, *path.parents))


def open_to_all(tree: Path) -> None:
    """Let everyone read a tree that holds no secret, whatever the umask it was made under."""
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            executable = path.is_dir() or bool(path.stat().st_mode & stat.S_IXUSR)
            path.chmod(0o755 if executable else 0o644)


def _allows(path: Path, account: Account, others: int) -> bool:
    """Whether the bits that `others` names are set in the class the account falls into."""
    entry = path.stat()
    shift = 6 if entry.st_uid == account.uid else 3 if entry.st_gid == account.gid else 0
    return entry.st_mode >> shift & others == others
