"""Helpers for the tests of building snapshots: an app in its own module, its log and its bucket."""

from __future__ import annotations

import string
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from eventjet import Imported, Jet, Settings
from eventjet.codec.subjects import snapshot_bucket
from eventjet.commands.loading import Histories
from eventjet.domain.history import FoldedState
from eventjet.log.snapshots import KeyValueSnapshots, SnapshotCodec
from eventjet.nats.endpoint import Endpoint
from eventjet.rebuild import AppRef
from tests.logs import append, block, fresh_name

APP = string.Template("""
from dataclasses import replace

from eventjet import App, aggregate, event


@event("tally.added")
class Added:
    n: int
    note: str = ""


@event("tally.spoiled")
class Spoiled:
    pass


@event("plain.noted")
class Noted:
    pass


@aggregate("tally", snapshot_every=3, revision=$revision)
class Tally:
    total: int = 0
    ratio: float = 0.0
    notes: tuple[str, ...] = ()

    def add(self, n: int) -> Added:
        return Added(n=n)

    def evolve(self, event: Added | Spoiled) -> "Tally":
        if isinstance(event, Spoiled):
            return replace(self, ratio=float("inf"))
        if event.n == 13:
            raise RuntimeError("no 13")
        return replace(self, total=2 * self.total + event.n, notes=(*self.notes[-9:], event.note))


@aggregate("plain")
class Plain:
    def evolve(self, event: Noted) -> "Plain":
        return self


app = App("$name", aggregates=[Tally, Plain])
""")


@dataclass
class Scene:
    """An app with an existing log and bucket."""

    settings: Settings
    folder: Path
    name: str
    ref: AppRef
    app: Any
    module: Any

    @classmethod
    def of(cls, settings: Settings, folder: Path, name: str | None = None, revision: int = 1) -> Scene:
        """Return a new app, or another revision of an app."""
        module = fresh_name()
        name = name or module
        (folder / f"{module}.py").write_text(APP.substitute(name=name, revision=revision))
        ref = AppRef.parse(f"{module}:app", folder)
        return cls(settings, folder, name, ref, ref.load(), sys.modules[module])

    def connect(self) -> Any:
        return self.app.connect(servers=self.settings.servers)

    async def fill(self, jet: Jet, lengths: Iterable[tuple[str, int]], seed: int = 1) -> None:
        """Import histories of these lengths, with their events mixed."""
        random = Random(seed)
        added = self.module.Added
        ids = [aggregate_id for aggregate_id, length in lengths for _ in range(length)]
        random.shuffle(ids)
        imported = [
            Imported(self.module.Tally, aggregate_id, added(n=random.choice((1, 2, 3)), note=aggregate_id[:5]))
            for aggregate_id in ids
        ]
        await jet.append_many(imported, source=f"fill-{seed}")

    def put(self, token: str, type_name: str, version: int, body: bytes, aggregate: str = "tally") -> None:
        """Append a record as any program could write it."""
        record = (f"{aggregate}.{token}", block(type_name, version=version), body)
        append(Endpoint.of(self.settings), self.name, [record])

    def histories(self, jet: Jet) -> Histories[Any]:
        """Return loads that do not use snapshots."""
        tally = self.module.Tally
        return Histories(jet.store, self.app.catalog, tally)

    def bucket(self, jet: Jet) -> KeyValueSnapshots:
        assert jet.client is not None
        return KeyValueSnapshots(snapshot_bucket(self.name), jet.client)

    @property
    def codec(self) -> SnapshotCodec[Any]:
        return SnapshotCodec(self.module.Tally)

    async def snapshot(self, jet: Jet, aggregate_id: str) -> FoldedState[Any] | None:
        """Return the decoded snapshot of the bucket, or nothing when a load would ignore it."""
        value = await self.bucket(jet).get("tally", aggregate_id)
        return None if value is None else self.codec.decode(value)


def known(folded: FoldedState[Any] | None) -> Any:
    """Return all fields of a folded state, also its command ids."""
    if folded is None:
        return None
    commands = folded.commands.as_mapping(folded.version)
    return (folded.state, folded.version, folded.position, folded.event_id, commands, folded.commands.complete)
