"""What changes between two releases mean: for events that are stored, and for readers that are older.

An old event is judged by comparing shapes where its body is read as it is, and in any case by trying bodies of the old
shape through the upcasters and the codec of today. A new event is judged by comparing its shape with the one that older
releases read. What cannot be told is said to break.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from eventjet.codec.catalog import Catalog, EventType, Resolved
from eventjet.codec.faults import faults_of
from eventjet.codec.json import dump_json
from eventjet.contracts import recipes
from eventjet.contracts.compare import Comparison, Misfit, Weight
from eventjet.contracts.contract import Contract, EventShape
from eventjet.contracts.samples import Unmade, bodies
from eventjet.errors import UnexpectedExit

_SHOWN_MAX = 200
_FAILURES_MAX = 3
"""Bodies that are shown of those that were refused."""


class Effect(Enum):
    """What a change of one event means; the later, the worse."""

    SAFE = "safe"
    OLD_READERS = "breaks old readers"
    UPCASTER = "needs an upcaster"
    OLD_EVENTS = "breaks old events"

    @property
    def rank(self) -> int:
        """0 for safe, more for worse."""
        return list(Effect).index(self)


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing that was found out about an event."""

    verdict: Effect
    what: str
    fix: str = ""
    """Code, or a step of the deploy, that makes it right; empty where nothing has to be done."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One event and what its change means."""

    event: str
    schema: int | None
    """Today's; None for one that is not declared."""
    remarks: tuple[Remark, ...]
    tried: int = 0
    """Bodies of the old shapes that were decoded."""
    kind: type | None = None
    """Its class today."""

    @property
    def verdict(self) -> Effect:
        """The worst of its remarks."""
        return max((one.verdict for one in self.remarks), key=lambda one: one.rank, default=Effect.SAFE)


def judge(old: Contract, new: Contract, catalog: Catalog) -> list[Judged]:
    """Every event of either release, by name; `catalog` is the new one's, with its upcasters."""
    judging = _Judging(old, new, catalog)
    named = {name for one in old.events for name in (one.name, *one.formerly)} | set(old.retired)
    known = set(old.names())
    found = [judging.old_event(name) if name in known else judging.old_name(name) for name in sorted(named)]
    found += [judging.new_event(one) for one in new.events if not {one.name, *one.formerly} & named]
    found += judging.public()
    return sorted(filter(None, found), key=lambda one: one.event)


@dataclass(frozen=True, slots=True)
class _Judging:
    old: Contract
    new: Contract
    catalog: Catalog

    def old_event(self, name: str) -> Judged:
        """An event that the old release recorded, at all schemas that its export has."""
        shapes = self.old.at(name)
        kind = self.catalog.named(name)
        if kind is None:
            return Judged(name, None, (self._undeclared(name, list(shapes.values())[-1]),))
        remarks: list[Remark] = []
        tried = 0
        for shape in shapes.values():
            made, count = self._read_again(shape, kind)
            remarks += made
            tried += count
        remarks += self._read_before(list(shapes.values())[-1], kind)
        return Judged(name, kind.info.schema, tuple(dict.fromkeys(remarks)), tried, kind.event_type)

    def old_name(self, name: str) -> Judged | None:
        """A name of before, or of a retired event, whose shape is not in the export."""
        if self.catalog.named(name) is not None or self.catalog.is_retired(name):
            return None
        what = "is neither declared nor retired any more, and events of this name may be in the log"
        owner = next((one.name for one in self.old.events if name in one.formerly), None)
        fix = f'@event("{owner}", formerly=("{name}",))' if owner else recipes.retired(name)
        return Judged(name, None, (Remark(Effect.OLD_EVENTS, what, fix),))

    def new_event(self, shape: EventShape) -> Judged:
        """One that no older release knows."""
        what = "is new: an older release that meets it cannot load its aggregate, and its projections stop there"
        return Judged(
            shape.name,
            shape.schema,
            (Remark(Effect.OLD_READERS, what, recipes.READ_FIRST),),
            kind=self._class_of(shape.name),
        )

    def public(self) -> Iterator[Judged]:
        """What others read of publications; nothing of it is read again here."""
        before = {one.name: one for one in self.old.public}
        after = {one.name: one for one in self.new.public}
        for name in sorted(before.keys() | after.keys()):
            told = f"{name} (published)"
            if name not in after:
                what = "is no longer published; whoever takes it gets nothing any more"
                yield Judged(told, None, (Remark(Effect.OLD_READERS, what, recipes.ASK_READERS),))
            elif name in before:
                misfits = Comparison(after[name].body, before[name].body, always=True).misfits()
                remarks = [_for_readers(one, recipes.ASK_READERS) for one in misfits if one.weight > Weight.TOLD]
                yield Judged(told, after[name].schema, tuple(remarks))
            else:
                yield Judged(told, after[name].schema, ())

    def _undeclared(self, name: str, shape: EventShape) -> Remark:
        if self.catalog.is_retired(name):
            if name in self.old.retired:
                return Remark(Effect.SAFE, "is retired, as it was")
            what = "is retired: stored ones are passed over, and what they told is in no state and no row any more"
            return Remark(Effect.SAFE, what)
        what = "is not declared any more, so aggregates that have one cannot be loaded, and projections stop there"
        known = set(self.old.names())
        strangers = [one for one in self.new.events if one.name not in known and one.aggregate == shape.aggregate]
        for one in strangers:
            misfits = Comparison(shape.body, one.body, always=False).misfits()
            if all(each.weight is Weight.TOLD for each in misfits):
                return Remark(Effect.OLD_EVENTS, what, recipes.renamed(name, one.name, one.schema))
        return Remark(Effect.OLD_EVENTS, what, recipes.gone(name))

    def _read_again(self, shape: EventShape, kind: EventType) -> tuple[list[Remark], int]:
        """What happens to stored events of one shape, and how many bodies were tried."""
        name, schema = shape.name, shape.schema
        if kind.aggregate is not None and shape.aggregate != kind.aggregate:
            what = f"was an event of {shape.aggregate!r} and is one of {kind.aggregate!r}, on whose subjects none is"
            return [Remark(Effect.OLD_EVENTS, what, recipes.moved(name, shape.aggregate))], 0
        if schema > kind.info.schema:
            what = f"was at schema {schema} and is at {kind.info.schema}: events of a higher schema are unknown"
            return [Remark(Effect.OLD_EVENTS, what, f'@event("{kind.info.name}", schema={schema + 1})')], 0
        resolved = self.catalog.resolve(name, schema)
        if resolved is None:
            what = f"is at schema {kind.info.schema}, and nothing leads on from schema {schema}"
            misfits = self._misfits(shape, kind)
            return [Remark(Effect.UPCASTER, what, recipes.upcaster(kind.info.name, schema, misfits, shape.body))], 0
        misfits = [] if schema < kind.info.schema else self._misfits(shape, kind)
        remarks = [self._for_old_events(one, misfits, shape, kind) for one in misfits]
        tried, count = self._tried(shape, kind, resolved)
        if all(one.verdict is not Effect.OLD_EVENTS for one in remarks):
            remarks += tried
        return remarks, count

    def _tried(self, shape: EventShape, kind: EventType, resolved: Resolved) -> tuple[list[Remark], int]:
        """What bodies of a shape come to when they are read, and how many there were."""
        is_upcast = shape.schema < kind.info.schema
        try:
            made = bodies(shape.body)
        except Unmade as reason:
            what = f"could not be tried at schema {shape.schema}: {reason}"
            verdict = Effect.OLD_EVENTS if is_upcast else Effect.SAFE
            return [Remark(verdict, what, recipes.TRY_THE_LOG)], 0
        refused: dict[str, str] = {}
        for body in made:
            try:
                resolved.decode(dump_json(body))
            except BaseException as raised:  # noqa: BLE001 - an upcaster's own
                error = UnexpectedExit.instead_of(raised)
                reason = faults_of(error) or type(error).__name__
                refused.setdefault(reason, dump_json(body).decode()[:_SHOWN_MAX])
        fix = recipes.UPCAST_ALL if is_upcast else recipes.raised(kind.info.name, shape.schema, [], shape.body)
        whats = [
            f"refuses the body {body}, which schema {shape.schema} lets be: {reason}"
            for reason, body in list(refused.items())[:_FAILURES_MAX]
        ]
        return [Remark(Effect.OLD_EVENTS, what, fix) for what in whats], len(made)

    def _misfits(self, shape: EventShape, kind: EventType) -> list[Misfit]:
        (today,) = [one.body for one in self.new.events if one.name == kind.info.name]
        return Comparison(shape.body, today, always=False).misfits()

    def _for_old_events(self, one: Misfit, all_of: Sequence[Misfit], shape: EventShape, kind: EventType) -> Remark:
        what = f"`{one.path}` {one.reason}"
        if one.weight is Weight.TOLD:
            return Remark(Effect.SAFE, what)
        verdict = Effect.OLD_EVENTS if one.weight is Weight.REFUSED else Effect.UPCASTER
        return Remark(verdict, what, recipes.raised(kind.info.name, shape.schema, all_of, shape.body))

    def _read_before(self, shape: EventShape, kind: EventType) -> list[Remark]:
        """What happens to an older release that reads the events of today; `shape` is the newest that it knows."""
        info = kind.info
        if info.name != shape.name:
            what = f"is recorded as {info.name!r} from now on, which older releases do not know"
            return [Remark(Effect.OLD_READERS, what, recipes.STOP_FIRST)]
        if info.schema > shape.schema:
            what = f"is recorded at schema {info.schema}, and older releases read up to schema {shape.schema}"
            return [Remark(Effect.OLD_READERS, what, recipes.STOP_FIRST)]
        (today,) = [one.body for one in self.new.events if one.name == info.name]
        misfits = Comparison(today, shape.body, always=True).misfits() if info.schema == shape.schema else []
        return [_for_readers(one, recipes.STOP_FIRST) for one in misfits if one.weight > Weight.TOLD]

    def _class_of(self, name: str) -> type | None:
        kind = self.catalog.named(name)
        return kind.event_type if kind else None


def _for_readers(one: Misfit, fix: str) -> Remark:
    """A misfit from the side of those who read in the old shape."""
    return Remark(Effect.OLD_READERS, f"for older readers `{one.path}` {one.reason}", fix)
