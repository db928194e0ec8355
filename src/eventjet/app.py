"""`App`: one composition root. Explicit lists, checked as a whole when it is built; nothing is registered elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Protocol, Unpack

from eventjet.codec.catalog import Catalog
from eventjet.codec.subjects import is_name
from eventjet.codec.upcasting import Upcaster
from eventjet.domain.aggregate import AggregateInfo, aggregate_info
from eventjet.domain.event import event_info
from eventjet.domain.subscription import folded_events
from eventjet.errors import DefinitionError, UsageError
from eventjet.jet import Jet, open_jet
from eventjet.projections.app_ref import AppRef
from eventjet.projections.application import Declared
from eventjet.projections.resolve import resolve
from eventjet.projections.sql_projection import AnyResolved, ResolvedSql, SqlProjection, resolve_sql
from eventjet.settings import Settings, SettingsOverrides
from eventjet.snapshots.snapshot import SnapshotCodec
from eventjet.sql.sqlite_types import make_readable

NAME_RULE = "[a-z][a-z0-9_]*"


class Folded(Protocol):
    """Anything with an `evolve`: the class object of an aggregate."""

    def evolve(self, instance: Any, event: Any, /) -> object: ...


class App:
    """Everything an application declares. Raises `DefinitionError` with all faults at once."""

    def __init__(
        self,
        name: str,
        *,
        aggregates: Sequence[Folded],
        projections: Sequence[Declared] = (),
        upcasters: Sequence[Upcaster] = (),
        retired_events: Sequence[str] = (),
    ) -> None:
        faults: list[str] = [] if is_name(name) else [f"the app's name {name!r} is not {NAME_RULE}"]
        self.name = name
        """Also the name of its stream and the first token of its subjects."""
        self.aggregates: Mapping[Any, AggregateInfo] = _aggregates(aggregates, faults)
        self.catalog = _catalog(self.aggregates, upcasters, retired_events, faults)
        if not faults:
            _check_snapshots(self.aggregates, faults)
        self.projections: Mapping[str, AnyResolved] = _projections(projections, self.catalog, faults)
        if not faults:
            faults += _quarantine_faults(self.aggregates, self.projections.values())
        if faults:
            raise DefinitionError(faults)

    @asynccontextmanager
    async def connect(
        self, settings: Settings | None = None, /, **overrides: Unpack[SettingsOverrides]
    ) -> AsyncGenerator[Jet]:
        """A connection, by keywords over `settings` or over `EVENTJET_*`; raises `Unreachable` and `UsageError`."""
        settings = Settings.load(overrides) if settings is None else settings.with_overrides(overrides)
        async with open_jet(self, settings) as jet:
            yield jet


def load_app(reference: str, folder: Path | None = None) -> App:
    """The app at `module:name`, with `folder` (default: the current one) on the path; raises `UsageError`."""
    app = AppRef.parse(reference, folder).load()
    if not isinstance(app, App):
        raise UsageError(f"{reference!r} is not an App. Name one made by `eventjet.App(…)`.")
    return app


def _aggregates(declared: Sequence[Any], faults: list[str]) -> dict[Any, AggregateInfo]:
    found: dict[Any, AggregateInfo] = {}
    names: dict[str, Any] = {}
    for cls in declared:
        try:
            info = aggregate_info(cls)
        except DefinitionError as error:
            faults.extend(error.faults)
            continue
        if not is_name(info.name):
            faults.append(f"the aggregate's name {info.name!r} is not {NAME_RULE}")
        if names.setdefault(info.name, cls) is not cls:
            faults.append(f"two aggregates are called {info.name!r}")
        faults.extend(_state_faults(cls))
        found[cls] = info
    return found


def _state_faults(cls: Any) -> list[str]:
    bare = [one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING]
    found = [f"{cls.__qualname__}.{name} has no default, so there is no initial state" for name in bare]
    if not callable(getattr(cls, "evolve", None)):
        found.append(f"{cls.__qualname__} has no `evolve(self, event)`")
    return found


def _catalog(
    aggregates: Mapping[Any, AggregateInfo],
    upcasters: Sequence[Upcaster],
    retired: Sequence[str],
    faults: list[str],
) -> Catalog:
    owner: dict[type, Any] = {}
    for cls in aggregates:
        if not callable(getattr(cls, "evolve", None)):
            continue
        try:
            events = folded_events(cls)
            for one in events:
                event_info(one)
                if owner.setdefault(one, cls) is not cls:
                    faults.append(
                        f"{one.__qualname__} is folded by {owner[one].__qualname__} and by {cls.__qualname__}; "
                        "an event belongs to one aggregate"
                    )
        except DefinitionError as error:
            faults.extend(error.faults)
    catalog = Catalog([one for one in owner if _is_event(one)], upcasters, retired)
    faults.extend(catalog.faults())
    return catalog


def _check_snapshots(aggregates: Mapping[Any, AggregateInfo], faults: list[str]) -> None:
    for cls, info in aggregates.items():
        if info.snapshot_every is None:
            continue
        if info.snapshot_every < 1:
            faults.append(f"snapshot_every of {info.name!r} is {info.snapshot_every}; give 1 or more, or leave it out")
        try:
            SnapshotCodec[Any](cls)
        except DefinitionError as error:
            faults.extend(error.faults)


def _is_event(cls: Any) -> bool:
    try:
        event_info(cls)
    except DefinitionError:
        return False
    return True


def _projections(declared: Sequence[Declared], catalog: Catalog, faults: list[str]) -> dict[str, AnyResolved]:
    found: dict[str, AnyResolved] = {}
    names: set[str] = set()
    for one in declared:
        if one.name in names:
            faults.append(f"two projections are called {one.name!r}")
        names.add(one.name)
        try:
            resolved = resolve_sql(one, catalog) if isinstance(one, SqlProjection) else resolve(one, catalog)
            for table in resolved.tables:
                make_readable(table)
            found[one.name] = resolved
        except DefinitionError as error:
            faults.extend(error.faults)
    faults.extend(_shared_tables(found))
    return found


def _quarantine_faults(aggregates: Mapping[Any, AggregateInfo], resolved: Iterable[AnyResolved]) -> list[str]:
    """A row of several aggregates would come out otherwise when one of them was held back for a while."""
    found: list[str] = []
    for one in resolved:
        of = sorted({info.name for cls, info in aggregates.items() if set(folded_events(cls)) & set(one.events)})
        if one.quarantines and len(of) > 1:
            found.append(
                f'projection {one.name!r}: on_error="quarantine" takes events of one aggregate, and it takes those of '
                f"{', '.join(of)}: the order after a parked event can only be kept by aggregate"
            )
    return found


def _shared_tables(found: Mapping[str, AnyResolved]) -> list[str]:
    """Tables that a projection by hand shares with another one: a rebuild of one would undo the other."""
    return [
        f"the table {table.name!r} belongs to the projections {one.name!r} and {other.name!r}; give each its own"
        for one in found.values()
        if isinstance(one, ResolvedSql)
        for other in found.values()
        if other is not one and not (isinstance(other, ResolvedSql) and other.name < one.name)
        for table in one.tables
        if table.name in {its.name for its in other.tables}
    ]
