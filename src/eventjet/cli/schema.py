"""The commands `eventjet schema export` and `check`: write the schemas of an app, and check changes of them."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from eventjet.cli.output import Answer, Block, Lines, show
from eventjet.cli.target import AppTarget, on_app, option, switch
from eventjet.errors import UsageError
from eventjet.runtime import run_async
from eventjet.text import counted

if TYPE_CHECKING:
    from eventjet.commands.log_check import LogCheck
    from eventjet.contracts.compatibility import Compatibility, EventChange
    from eventjet.projections.app_ref import AppRef

schema = typer.Typer(name="schema", help="The shapes of events on the wire: export and check.", no_args_is_help=True)

_FOLDER = "schemas"
_ASYNCAPI = "asyncapi.json"
_FILES_MAX = 20_000
_GIT_S = 60.0
_COMMANDS_FOLDER = "commands"
"""The folder from which files of commands that are gone are removed.

Files of events stay, since the log may have events of every schema.
"""


@schema.command()
@on_app(servers=False, database=False)
def export(
    at: AppTarget,
    out: Annotated[Path | None, option("--out", "DIR", "Write a file for each event and schema there.")] = None,
    asyncapi: Annotated[bool, switch("--asyncapi", "An AsyncAPI 3.0 document, too.")] = False,
    release: Annotated[
        str | None, option("--release", "TEXT", "The version that the AsyncAPI document names; default: 0.0.0.")
    ] = None,
) -> None:
    """Write JSON Schemas of the app's events, published events and served commands, to keep beside the code.

    Without --out one document is printed: with --asyncapi that one, else all schemas. Files of events that are not
    declared any more are left: the log may have such events.
    """
    from eventjet.contracts.asyncapi import asyncapi_of
    from eventjet.contracts.contract import contract_of, text_of

    if release is not None and not asyncapi:
        raise UsageError("--release is the version that the AsyncAPI document names. Give --asyncapi too.")
    app = at.app()
    contract = contract_of(app)
    documents: dict[str, Any] = contract.documents()
    asyncapi_document = asyncapi_of(app, contract, release or "0.0.0") if asyncapi else None
    if out is None:
        print(text_of(asyncapi_document or documents), end="")
        return
    if asyncapi_document is not None:
        documents[_ASYNCAPI] = asyncapi_document
    changed = _write({name: text_of(document) for name, document in documents.items()}, out)
    listing = "".join(f"  - {line}\n" for line in changed) or "  - nothing has changed\n"
    show(f"{out}: {counted(len(documents), 'file')} of {app.name}\n{listing}".rstrip())


@schema.command()
@on_app(database=False)
def check(
    at: AppTarget,
    against: Annotated[
        str | None,
        option("--against", "REF|DIR|FILE", "An export: in a commit of git, or on disk."),
    ] = None,
    against_log: Annotated[
        int | None,
        option("--against-log", "N", "Read the log, and fold N histories of each event.", min=1),
    ] = None,
    folder: Annotated[
        str | None,
        option("--dir", "DIR", f"Where a commit has the export, from the current folder; default: {_FOLDER}."),
    ] = None,
    sarif: Annotated[Path | None, option("--sarif", "FILE", "Write the verdicts as SARIF 2.1.0, too.")] = None,
    readers_stopped: Annotated[
        bool,
        switch("--readers-stopped", "Older readers are stopped first: what breaks only them is no fault."),
    ] = False,
    callers_changed: Annotated[
        bool,
        switch("--callers-changed", "Callers of served commands are changed first: what breaks only them is no fault."),
    ] = False,
) -> Answer:
    """Say whether stored events, older readers and callers survive what this app makes of each event and command.

    With --against the app is compared with an export of before. With --against-log the stored events are read with
    this app: some of each event and schema, and the histories that they belong to. Status 1 where something breaks.
    """
    if against is None and against_log is None:
        raise UsageError("Say what to check the app against: --against main, or --against-log 100, or both.")
    given_flags = {
        "--sarif": sarif is not None,
        "--dir": folder is not None,
        "--readers-stopped": readers_stopped,
        "--callers-changed": callers_changed,
    }
    if against is None and any(given_flags.values()):
        named = ", ".join(option for option, is_given in given_flags.items() if is_given)
        raise UsageError(f"{named} says more about --against, which is missing. Give that too.")
    compared: tuple[str, list[EventChange]] | None = None
    if against is not None:
        compared = _compared(at, against, folder, sarif)
    log = None if against_log is None else run_async(_read_log(at, against_log))
    accepted = _accepted(readers_stopped=readers_stopped, callers_changed=callers_changed)
    breaks = [] if compared is None else [change for change in compared[1] if change.compatibility not in accepted]
    is_fine = (log is None or log.readable) and not breaks

    blocks: list[Block] = []
    if compared is not None:
        blocks += _change_blocks(*compared, accepted)
    if log is not None:
        blocks += _log_lines(log)
    value: dict[str, Any] = {"passes": is_fine}
    if compared is not None:
        where, changes = compared
        commands = [{"command": change.event, **_as_json(change)} for change in changes if change.is_command]
        events = [
            {"event": change.event, "schema": change.schema, **_as_json(change), "tried": change.tried}
            for change in changes
            if not change.is_command
        ]
        value |= {"against": where, "events": events, "commands": commands}
    if log is not None:
        value["log"] = {**asdict(log), "readable": log.readable}
    return Answer(value, blocks, ok=is_fine)


def _compared(at: AppTarget, against: str, folder: str | None, sarif: Path | None) -> tuple[str, list[EventChange]]:
    from importlib.metadata import version

    from eventjet.contracts.compatibility import changes_between, sarif_of
    from eventjet.contracts.contract import contract_in, contract_of, text_of

    app = at.app()
    where, documents = _read(against, folder)
    old = contract_in(documents, where)
    if old.app != app.name:
        raise UsageError(f"The export in {where} is of the app {old.app!r}, and this one is {app.name!r}.")
    changes = changes_between(old, contract_of(app), app.catalog)
    if sarif is not None:
        text = text_of(sarif_of(changes, partial(_place_of, at.ref), version("eventjet")))
        try:
            sarif.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{sarif} cannot be written: {error}. Name another file with --sarif.") from None
    return where, changes


async def _read_log(at: AppTarget, histories: int) -> LogCheck:
    from eventjet.commands.log_check import check_log

    async with at.jet() as jet:
        return await check_log(at.app(), jet.store, histories)


def _accepted(*, readers_stopped: bool, callers_changed: bool) -> list[Compatibility]:
    """Return the verdicts that are no fault."""
    from eventjet.contracts.compatibility import Compatibility

    by_flag = {Compatibility.OLD_READERS: readers_stopped, Compatibility.OLD_CALLERS: callers_changed}
    return [Compatibility.SAFE, Compatibility.UNSURE, *(kind for kind, is_given in by_flag.items() if is_given)]


def _place_of(app: AppRef, change: EventChange) -> tuple[str, int]:
    """Return file and line of an event's class, below the current folder; those of the app's module for no class."""
    try:
        source: Any = change.kind or sys.modules[app.module]
        file = Path(inspect.getsourcefile(source) or "").resolve()
        return file.relative_to(Path.cwd()).as_posix(), inspect.getsourcelines(source)[1] if change.kind else 1
    except (TypeError, OSError, ValueError, KeyError):
        return "pyproject.toml", 1  # outside this folder; SARIF needs some file and line


def _as_json(change: EventChange) -> dict[str, Any]:
    remarks = [
        {"verdict": remark.compatibility.value, "what": remark.what, "fix": remark.fix} for remark in change.remarks
    ]
    return {"verdict": change.compatibility.value, "remarks": remarks}


def _change_blocks(where: str, changes: list[EventChange], accepted: Sequence[Compatibility]) -> Iterator[Block]:
    from eventjet.contracts.compatibility import Compatibility

    yield f"Compared with {where}:"
    for event in sorted(changes, key=lambda change: change.compatibility.rank):
        yield Lines([f"{event.compatibility.value:<20} {event.event}{' (served)' if event.is_command else ''}"])
        yield from (f"  - {remark.what}" for remark in event.remarks)
        for fix in dict.fromkeys(remark.fix for remark in event.remarks if remark.fix):
            is_code = fix.startswith(("@", "App("))
            lines = fix.splitlines() if is_code else textwrap.wrap(fix, 72)
            yield Lines([f"      {line}".rstrip() for line in lines])
    counts = Counter(event.compatibility for event in changes)
    totals = ", ".join(f"{effect.value}: {counts[effect]}" for effect in Compatibility if counts[effect])
    said = {Compatibility.OLD_READERS: "Older readers are stopped.", Compatibility.OLD_CALLERS: "Callers are changed."}
    notes = "".join(f" {note}" for kind, note in said.items() if counts[kind] and kind in accepted)
    commands = sum(change.is_command for change in changes)
    number = counted(len(changes) - commands, "event") + (f", {counted(commands, 'command')}" if commands else "")
    yield f"\n{number}; {totals or 'none'}.{notes}"


def _log_lines(log: LogCheck) -> Iterator[str]:
    judgement = "can be read" if log.readable else "can NOT be read"
    extent = "all of its events" if log.is_whole else "its beginning, its end and places evenly between"
    counts = f"{log.events:,} events up to position {log.last:,} ({extent}), and {log.histories:,} histories"
    yield f"{log.stream} {judgement} by this app, as far as was looked: {counts}"
    for kind in log.event_types:
        events_text = f"{counted(kind.events, 'event')} seen, from position {kind.first:,} to {kind.last:,}"
        folded = f"; {kind.folded:,} {'history' if kind.folded == 1 else 'histories'} folded" if kind.folded else ""
        yield f"  - {kind.type} schema {kind.schema}: {events_text}{folded}"
    for fault in log.faults:
        repeats = f" (and {fault.count - 1:,} more like it)" if fault.count > 1 else ""
        yield f"\n{fault.type} schema {fault.schema} at position {fault.position:,}: {fault.reason}{repeats}"
    if not log.is_whole:
        yield "\nWhat was not looked at may hold others; `eventjet audit` reads the whole log."


def _write(documents: Mapping[str, str], folder: Path) -> list[str]:
    """Write the documents that differ; return a line for each new, changed or removed file, such as `new app.json`."""
    changed: list[str] = []
    try:
        for name, text in documents.items():
            path = folder / name
            before = path.read_text(encoding="utf-8") if path.is_file() else None
            if before != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8", newline="\n")
                changed.append(f"{'new' if before is None else 'changed'} {name}")
        for path in sorted((folder / _COMMANDS_FOLDER).glob("*.json")):
            if f"{_COMMANDS_FOLDER}/{path.name}" not in documents:
                path.unlink()
                changed.append(f"removed {_COMMANDS_FOLDER}/{path.name}")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error}. Name a folder with --out.") from None
    return changed


def _read(where: str, folder: str | None) -> tuple[str, dict[str, Any]]:
    """Read an export from a folder, a file, or `folder` in a commit; return its source in words, and its documents."""
    path = Path(where)
    if path.exists() and folder is not None:
        raise UsageError(f"--dir says where a commit has its export, and {where} is on disk. Leave --dir out.")
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*.json")) if file.is_file()]
        _check_count(len(files), where)
        texts = {file.relative_to(path).as_posix(): file.read_bytes() for file in files}
        return f"the folder {where}", _parsed(texts, where)
    if path.is_file():
        documents = _parsed({path.name: path.read_bytes()}, where)[path.name]
        if not isinstance(documents, dict):
            raise UsageError(f"{where} is no export. Write one with `eventjet schema export > FILE`.")
        return f"the file {where}", cast("dict[str, Any]", documents)
    return _of_commit(where, (folder or _FOLDER).rstrip("/"))


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
    """Run git and return its output; empty where it fails, which callers report."""
    git = shutil.which("git")
    if git is None:
        raise UsageError("There is no git on the PATH. Compare with a folder or a file instead.")
    try:
        completed = subprocess.run([git, *arguments], capture_output=True, timeout=_GIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(f"git {arguments[0]} did not end within {_GIT_S:g} s. Run it yourself.") from None
    return completed.stdout if completed.returncode == 0 else b""


def _check_count(count: int, where: str) -> None:
    if count > _FILES_MAX:
        raise UsageError(f"{where} has more than {_FILES_MAX:,} files of JSON. Name the folder of an export.")


def _parsed(texts: Mapping[str, bytes], where: str) -> dict[str, Any]:
    from eventjet.codec.json import read_json

    documents: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            documents[name] = read_json(text)
        except ValueError as error:
            raise UsageError(f"{name} of {where} is not JSON: {error}. Write the export again.") from None
    return documents
