"""`Golden`: a file beside the tests, written by an earlier release, that the present code is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from eventjet.codec.catalog import Catalog
from eventjet.codec.json import dump_json, read_json
from eventjet.domain.aggregate import event_info

_WRITE = "run `pytest --write-golden` once, look at what changed in it, and commit it"


class Golden:
    """One golden file; `write` adds missing entries and the states of a new revision instead of reporting them."""

    def __init__(self, file: Path, *, write: bool) -> None:
        self._file = file
        self._title = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        self._write = write

    def check_folds(
        self,
        revision: int,
        catalog: Catalog,
        kinds: Sequence[type],
        histories: Callable[[], Sequence[Sequence[Any]]],
        fold: Callable[[Sequence[Any]], Any],
    ) -> None:
        """Raise `AssertionError` when a stored history folds to another state at the same revision.

        Of `histories`, the file takes those with events that none of its own histories has. A field that only one of
        the two states has is not compared, since snapshots with other fields are not used.
        """
        stored: dict[str, Any] = self._load() if self._file.exists() or not self._write else {"histories": []}
        is_same = not stored["histories"] or stored.get("revision") == revision
        if not is_same and not self._write:
            raise AssertionError(
                f"{self._title} is of revision {stored.get('revision')}, declared is {revision}: {_WRITE}."
            )
        stored_histories: list[list[dict[str, Any]]] = [history["events"] for history in stored["histories"]]
        if is_same:
            self._compare(stored["histories"], lambda events: pictured(fold(self._events(catalog, events))))
        missing = {_name(kind) for kind in kinds} - {
            (event["event"], event["schema"]) for history in stored_histories for event in history
        }
        if missing and not self._write:
            raise AssertionError(f"{self._title} has no history with {_listed(missing)}: {_WRITE}.")
        if self._write:
            if missing:
                new = [[_entry_of(catalog, event) for event in history] for history in histories()]
                stored_histories += [
                    history for history in new if any((event["event"], event["schema"]) in missing for event in history)
                ]
            folded = [
                {"state": pictured(fold(self._events(catalog, history))), "events": history}
                for history in stored_histories
            ]
            self._save(folded, f'"revision": {revision}, "histories": ')

    def _compare(self, histories: Sequence[dict[str, Any]], fold: Callable[[Sequence[Any]], Any]) -> None:
        """Raise `AssertionError` for the shortest history that folds to another state."""
        for history in sorted(histories, key=lambda entry: len(entry["events"])):
            was, now = history["state"], fold(history["events"])
            changed = [name for name in was if name in now and was[name] != now[name]]
            if changed:
                fields = "\n".join(f"  {name} was {_line(was[name])} and is {_line(now[name])}" for name in changed)
                events = "\n".join(f"  {event['event']} {_line(event['body'])}" for event in history["events"])
                raise AssertionError(
                    f"these events fold to another state than {self._title} says:\n{events}\n{fields}\nSnapshots of "
                    f"the old fold would be believed. Raise `revision`, then {_WRITE}; or let it fold as it did."
                )

    def _events(self, catalog: Catalog, entries: Sequence[dict[str, Any]]) -> list[Any]:
        """Return the stored events as they are read today, without retired events, as in a history."""
        return [_read(catalog, entry, self._title) for entry in entries if entry["event"] not in catalog.retired]

    def check_schemas(self, catalog: Catalog, kinds: Sequence[type], example: Callable[[type], Any]) -> None:
        """Raise `AssertionError` for a stored body that cannot be read any more, and for a schema without a body."""
        entries: list[dict[str, Any]] = self._load() if self._file.exists() or not self._write else []
        stored = {(entry["event"], entry["schema"]) for entry in entries}
        missing = {kind: info for kind in kinds if (info := _name(kind)) not in stored}
        if missing and self._write:
            entries += [_entry_of(catalog, example(kind)) for kind in missing]
            self._save(sorted(entries, key=lambda entry: (entry["event"], entry["schema"])))
        elif missing:
            raise AssertionError(f"{self._title} has no example of {_listed(missing.values())}: {_WRITE}.")
        for entry in entries:
            if entry["event"] not in catalog.retired:
                _read(catalog, entry, self._title)

    def _load(self) -> Any:
        if not self._file.exists():
            raise AssertionError(f"{self._title} is not there yet: {_WRITE}.")
        try:
            return read_json(self._file.read_bytes())
        except ValueError as error:
            raise AssertionError(f"{self._title} is not JSON: {error}. Restore it as it was committed.") from None

    def _save(self, entries: Sequence[Any], head: str = "") -> None:
        """Write the file as JSON with one entry on each line, so that a diff shows what changed."""
        self._file.parent.mkdir(exist_ok=True)
        lines = ",\n".join(map(_line, entries))
        listed = f"[\n{lines}\n]"
        text = f"{{{head}{listed}}}\n" if head else f"{listed}\n"
        self._file.write_text(text, encoding="utf-8", newline="\n")


def pictured(value: Any) -> Any:
    """Return the contents of a state as JSON values that are equal for equal states, whatever the order of its sets."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: pictured(getattr(value, field.name)) for field in fields(value) if field.compare}
    if isinstance(value, Mapping):
        pairs = [[pictured(key), pictured(item)] for key, item in cast("Mapping[Any, Any]", value).items()]
        return sorted(pairs, key=_line)
    if isinstance(value, AbstractSet):
        return sorted(map(pictured, cast("AbstractSet[Any]", value)), key=_line)
    if isinstance(value, list | tuple):
        return [pictured(item) for item in cast("Sequence[Any]", value)]
    return value if value is None or type(value) in (bool, str) else repr(value)


def _line(value: Any) -> str:
    return dump_json(value).decode()


def _listed(kinds: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} schema {schema}" for name, schema in sorted(kinds))


def _name(kind: type) -> tuple[str, int]:
    info = event_info(kind)
    return info.name, info.schema


def _entry_of(catalog: Catalog, event: Any) -> dict[str, Any]:
    encoded = catalog.encode(event)
    return {"event": encoded.type_name, "schema": encoded.schema, "body": read_json(encoded.body)}


def _read(catalog: Catalog, entry: dict[str, Any], file: Path) -> Any:
    name, schema = entry["event"], entry["schema"]
    resolved = catalog.resolve(name, schema)
    if resolved is None:
        raise AssertionError(
            f"{name!r} schema {schema} was stored once ({file}) and cannot be read any more. Keep its upcasters, its "
            "name among `formerly=`, or list it in `retired_events`."
        )
    try:
        return resolved.decode(dump_json(entry["body"]))
    except Exception as error:
        raise AssertionError(f"{name!r} schema {schema} as {file} has it cannot be read any more: {error}") from error
