"""Where an export is: files written, and read again from a folder, a file or a commit of git."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

from eventjet.errors import UsageError

_FILES_MAX = 20_000
_GIT_S = 60.0
_OWN = "commands"
"""The folder whose files are of the present alone. Those of events stay, since the log has events of all shapes."""


def write(documents: Mapping[str, str], folder: Path) -> list[str]:
    """Write what changed; the files that are new, other than before, or gone, each as `new app.json`."""
    changed: list[str] = []
    try:
        for name, text in documents.items():
            path = folder / name
            before = path.read_text(encoding="utf-8") if path.is_file() else None
            if before != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                changed.append(f"{'new' if before is None else 'changed'} {name}")
        for path in sorted((folder / _OWN).glob("*.json")):
            if f"{_OWN}/{path.name}" not in documents:
                path.unlink()
                changed.append(f"removed {_OWN}/{path.name}")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}. Name a folder with --out.") from None
    return changed


def read(where: str, folder: str) -> tuple[str, dict[str, Any]]:
    """What was read, in words, and its documents by file; `folder` is where a commit has its export."""
    path = Path(where)
    if path.is_dir():
        files = [one for one in sorted(path.rglob("*.json")) if one.is_file()]
        _check_count(len(files), where)
        texts = {one.relative_to(path).as_posix(): one.read_bytes() for one in files}
        return f"the folder {where}", _parsed(texts, where)
    if path.is_file():
        documents = _parsed({path.name: path.read_bytes()}, where)[path.name]
        if not isinstance(documents, dict):
            raise UsageError(f"{where} is no export. Write one with `eventjet schema export > FILE`.")
        return f"the file {where}", cast("dict[str, Any]", documents)
    return _of_commit(where, folder)


def _of_commit(ref: str, folder: str) -> tuple[str, dict[str, Any]]:
    if ref.startswith("-"):
        raise UsageError(f"{ref!r} is neither a folder, a file nor a commit.")
    commit = _git("rev-parse", "--verify", "--quiet", "--short", f"{ref}^{{commit}}").decode().strip()
    if not commit:
        raise UsageError(f"{ref!r} is neither a folder, nor a file, nor a commit of the git repository here. Name one.")
    listed = _git("ls-tree", "-r", "-z", "--name-only", commit, "--", f"{folder}/").decode()
    names = [name for name in listed.split("\0") if name.endswith(".json")]
    _check_count(len(names), ref)
    if not names:
        raise UsageError(
            f"The commit {ref} ({commit}) has no export in {folder}/. Write one with `eventjet schema export --out "
            f"{folder}` and commit it, or name the folder with --dir."
        )
    texts = {str(PurePosixPath(name).relative_to(folder)): _git("show", f"{commit}:./{name}") for name in names}
    return f"{folder}/ in the commit {ref} ({commit})", _parsed(texts, ref)


def _git(*arguments: str) -> bytes:
    """What git says; nothing where it fails, which its callers tell."""
    git = shutil.which("git")
    if git is None:
        raise UsageError("There is no git on the PATH. Compare with a folder or a file instead.")
    try:
        done = subprocess.run([git, *arguments], capture_output=True, timeout=_GIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(f"git {arguments[0]} did not end within {_GIT_S:g} s. Try it by hand.") from None
    return done.stdout if done.returncode == 0 else b""


def _check_count(count: int, where: str) -> None:
    if count > _FILES_MAX:
        raise UsageError(f"{where} has more than {_FILES_MAX:,} files of JSON. Name the folder of an export.")


def _parsed(texts: Mapping[str, bytes], where: str) -> dict[str, Any]:
    from eventjet.codec.json import read_json

    found: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            found[name] = read_json(text)
        except ValueError as error:
            raise UsageError(f"{name} of {where} is not JSON: {error}. Write the export again.") from None
    return found
