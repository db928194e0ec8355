"""`Golden`: what an earlier release wrote down in a file beside the tests, which this one is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from eventjet.codec.catalog import Catalog
from eventjet.domain.aggregate import event_info

_WRITE = "run `pytest --write-golden` once, look at what changed in it, and commit it"


class Golden:
    """One file; `write` has it written instead of compared."""

    def __init__(self, file: Path, *, write: bool) -> None:
        self._file = file
        self._shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        self._write = write

    def check_folds(
        self, revision: int, catalog: Catalog, histories: Sequence[Sequence[Any]], fold: Callable[[Sequence[Any]], str]
    ) -> None:
        """Raise `AssertionError` when a history that was written down folds to another state at the same revision."""
        if self._write:
            told = [{"events": [_told(catalog, one) for one in each], "state": fold(each)} for each in histories]
            self._save({"revision": revision, "histories": told})
            return
        held: dict[str, Any] = self._load()
        if held["revision"] != revision:
            raise AssertionError(f"{self._shown} is of revision {held['revision']}, declared is {revision}: {_WRITE}.")
        for each in held["histories"]:
            events = [_read(catalog, one, self._shown) for one in each["events"]]
            state = fold(events)
            if state != each["state"]:
                raise AssertionError(
                    f"these events folded to {each['state']} and fold to {state} now: {events!r}. Snapshots of the old "
                    f"fold would be believed: raise `revision`, then {_WRITE}."
                )

    def check_schemas(self, catalog: Catalog, kinds: Sequence[type], example: Callable[[type], Any]) -> None:
        """Raise `AssertionError` for a body that is not read any more, and for a schema that has none yet."""
        held: list[dict[str, Any]] = self._load() if self._file.exists() or not self._write else []
        known = {(one["event"], one["schema"]) for one in held}
        missing = {kind: info for kind in kinds if (info := _name(kind)) not in known}
        if missing and self._write:
            held += [_told(catalog, example(kind)) for kind in missing]
            self._save(sorted(held, key=lambda one: (one["event"], one["schema"])))
        elif missing:
            names = ", ".join(f"{name} schema {schema}" for name, schema in missing.values())
            raise AssertionError(f"{self._shown} has no example of {names}: {_WRITE}.")
        for one in held:
            if not catalog.is_retired(one["event"]):
                _read(catalog, one, self._shown)

    def _load(self) -> Any:
        if not self._file.exists():
            raise AssertionError(f"{self._shown} is not there yet: {_WRITE}.")
        return orjson.loads(self._file.read_bytes())

    def _save(self, value: Any) -> None:
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _name(kind: type) -> tuple[str, int]:
    info = event_info(kind)
    return info.name, info.schema


def _told(catalog: Catalog, event: Any) -> dict[str, Any]:
    encoded = catalog.encode(event)
    return {"event": encoded.type_name, "schema": encoded.schema, "body": orjson.loads(encoded.body)}


def _read(catalog: Catalog, told: dict[str, Any], file: Path) -> Any:
    name, schema = told["event"], told["schema"]
    resolved = catalog.resolve(name, schema)
    if resolved is None:
        raise AssertionError(
            f"{name!r} schema {schema} was stored once ({file}) and cannot be read any more. Keep its upcasters, its "
            "name among `formerly=`, or list it in `retired_events`."
        )
    try:
        return resolved.decode(orjson.dumps(told["body"]))
    except Exception as error:
        raise AssertionError(f"{name!r} schema {schema} as {file} has it cannot be read any more: {error}") from error
