"""Judge the changes between two releases: for stored events, for readers of older releases, and for callers.

An old event is judged by decoding sample bodies of the old shape with the upcasters and the codec of today, and, if its
schema number is still the same, by comparing the shapes as well. A new event is judged by comparing its shape with the
shape that older releases read, and a served command with the shape in which callers send its arguments. A change that
cannot be judged counts as breaking. Each finding ends with its fix: code,
or a step of the deploy. `sarif_of` writes the findings as SARIF 2.1.0, which code reviews show beside the lines at
fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from eventjet.codec.catalog import Catalog, EventType, Resolved
from eventjet.codec.json import dump_json
from eventjet.codec.leaves import DECIMAL_TEXT
from eventjet.codec.reasons import faults_of
from eventjet.codec.shape import Json
from eventjet.contracts.compare import Comparison, Misfit, Weight
from eventjet.contracts.contract import Contract, EventShape
from eventjet.contracts.samples import NoSample, sample_bodies
from eventjet.errors import UnexpectedExit

_SHOWN_MAX = 200
_FAILURES_MAX = 3
"""Limit of refused bodies that are shown for one shape."""
_STOP_FIRST = "Stop the older release, and tell whoever else reads the log, before this one records: no rolling deploy."
_READ_FIRST = (
    "Deploy a release first that declares and folds it without recording it, "
    "or stop the older one before this one records."
)
_NAMES_STAY = (
    "If only the lines were moved, nothing is to be done. Else give both fields their names back, or new names."
)
_ASK_READERS = "Publish it under another name beside the old one, until nobody takes that any more."
_ASK_CALLERS = "Serve it under another name beside the old one, until nobody calls that any more."
_UPCAST_ALL = (
    "Let the upcaster take every body that its schema lets be, or show with --against-log that none is stored."
)
_TRY_THE_LOG = "Try what is stored: eventjet schema check --against-log 100"
_FIELD = re.compile(r"[A-Za-z_]\w*")


class Compatibility(Enum):
    """The compatibility of a change of one event or command, from the best to the worst."""

    SAFE = "safe"
    UNSURE = "may mean otherwise"
    OLD_READERS = "breaks old readers"
    OLD_CALLERS = "breaks old callers"
    UPCASTER = "needs an upcaster"
    OLD_EVENTS = "breaks old events"

    @property
    def rank(self) -> int:
        """The severity: 0 for safe, higher for worse."""
        return list(Compatibility).index(self)


@dataclass(frozen=True, slots=True)
class Remark:
    """One finding about an event or a command."""

    compatibility: Compatibility
    what: str
    fix: str = ""
    """Code, or a step of the deploy, that fixes the finding; empty if nothing has to be done."""


@dataclass(frozen=True, slots=True)
class EventChange:
    """The findings about one event, or one served command."""

    event: str
    """The event's name, or `aggregate.command`."""
    schema: int | None
    """The schema number of today; None for an event that is not declared."""
    remarks: tuple[Remark, ...]
    tried: int = 0
    """The number of sample bodies of the old shapes that were tried."""
    kind: type | None = None
    """The class of the event today."""
    is_command: bool = False

    @property
    def compatibility(self) -> Compatibility:
        """The worst compatibility among the remarks."""
        return max(
            (remark.compatibility for remark in self.remarks), key=lambda level: level.rank, default=Compatibility.SAFE
        )


def changes_between(old: Contract, new: Contract, catalog: Catalog) -> list[EventChange]:
    """Return the findings about every event and command of either release; `catalog` is that of the new release."""
    comparing = _Comparing(old, new, catalog)
    old_names = {name for event in old.events for name in (event.name, *event.formerly)} | set(old.retired)
    recorded = set(old.names())
    changes = [
        comparing.old_event(name) if name in recorded else comparing.old_name(name) for name in sorted(old_names)
    ]
    changes += [comparing.new_event(event) for event in new.events if not {event.name, *event.formerly} & old_names]
    changes += comparing.public()
    return [*sorted(filter(None, changes), key=lambda change: change.event), *comparing.commands()]


@dataclass(frozen=True, slots=True)
class _Comparing:
    old: Contract
    new: Contract
    catalog: Catalog

    def old_event(self, name: str) -> EventChange:
        """Judge an event that the old release recorded, at all schemas in its export."""
        shapes = self.old.at(name)
        kind = self.catalog.named(name)
        if kind is None:
            return EventChange(name, None, (self._undeclared(name, list(shapes.values())[-1]),))
        remarks: list[Remark] = []
        tried = 0
        for shape in shapes.values():
            new_remarks, count = self._judge_stored(shape, kind)
            remarks += new_remarks
            tried += count
        remarks += self._judge_older_readers(list(shapes.values())[-1], kind)
        return EventChange(name, kind.info.schema, tuple(dict.fromkeys(remarks)), tried, kind.event_type)

    def old_name(self, name: str) -> EventChange | None:
        """Judge a former name or a retired event, whose shape is not in the export."""
        if self.catalog.named(name) is not None or name in self.catalog.retired:
            return None
        what = "is neither declared nor retired any more, and events of this name may be in the log"
        owner = next((event.name for event in self.old.events if name in event.formerly), None)
        fix = f'@event("{owner}", formerly=("{name}",))' if owner else _retired_fix(name)
        return EventChange(name, None, (Remark(Compatibility.OLD_EVENTS, what, fix),))

    def new_event(self, shape: EventShape) -> EventChange:
        """Judge an event that no older release knows."""
        what = "is new: an older release that meets it cannot load its aggregate, and its projections stop there"
        remark, kind = Remark(Compatibility.OLD_READERS, what, _READ_FIRST), self.catalog.named(shape.name)
        return EventChange(shape.name, shape.schema, (remark,), kind=kind.event_type if kind else None)

    def public(self) -> Iterator[EventChange]:
        """Judge the public events of publications, which only other apps read."""
        before = {event.name: event for event in self.old.public}
        after = {event.name: event for event in self.new.public}
        for name in sorted(before.keys() | after.keys()):
            title = f"{name} (published)"
            if name not in after:
                what = "is no longer published; whoever takes it gets nothing any more"
                yield EventChange(title, None, (Remark(Compatibility.OLD_READERS, what, _ASK_READERS),))
            elif name in before:
                misfits = Comparison(after[name].body, before[name].body, always=True).misfits()
                remarks = [_for_readers(misfit, _ASK_READERS) for misfit in misfits if misfit.weight > Weight.UNSURE]
                remarks += [_unsure(misfit) for misfit in misfits if misfit.weight is Weight.UNSURE]
                yield EventChange(title, after[name].schema, tuple(remarks))
            else:
                yield EventChange(title, after[name].schema, ())

    def commands(self) -> Iterator[EventChange]:
        """Judge the served commands, whose arguments callers send as an older release took them."""
        before, after = (contract.commands or {} for contract in (self.old, self.new))
        for name in sorted(before.keys() | after.keys()):
            remarks: list[Remark] = []
            if name not in after:
                what = "is no longer served; whoever calls it gets no answer any more"
                remarks.append(Remark(Compatibility.OLD_CALLERS, what, _ASK_CALLERS))
            elif name in before:
                for misfit in Comparison(before[name], after[name], always=False).misfits():
                    if misfit.weight > Weight.UNSURE:
                        what = f"for older callers `{misfit.path}` {misfit.reason}"
                        remarks.append(Remark(Compatibility.OLD_CALLERS, what, _ASK_CALLERS))
                    elif misfit.weight is Weight.UNSURE:
                        remarks.append(_unsure(misfit))
            yield EventChange(name, None, tuple(remarks), is_command=True)

    def _undeclared(self, name: str, shape: EventShape) -> Remark:
        if name in self.catalog.retired:
            if name in self.old.retired:
                return Remark(Compatibility.SAFE, "is retired, as it was")
            what = "is retired: stored events are skipped, and their data is in no state and no row any more"
            return Remark(Compatibility.SAFE, what)
        what = "is not declared any more, so aggregates that have one cannot be loaded, and projections stop there"
        recorded = set(self.old.names())
        candidates = [
            event for event in self.new.events if event.name not in recorded and event.aggregate == shape.aggregate
        ]
        for event in candidates:
            misfits = Comparison(shape.body, event.body, always=False).misfits()
            if all(misfit.weight <= Weight.UNSURE for misfit in misfits):
                return Remark(Compatibility.OLD_EVENTS, what, _renamed_fix(name, event.name, event.schema))
        return Remark(Compatibility.OLD_EVENTS, what, _undeclared_fix(name))

    def _judge_stored(self, shape: EventShape, kind: EventType) -> tuple[list[Remark], int]:
        """Judge how stored events of one shape are read today; return the remarks and the number of bodies tried."""
        name, schema = shape.name, shape.schema
        if kind.aggregate is not None and shape.aggregate != kind.aggregate:
            what = f"was an event of {shape.aggregate!r} and is one of {kind.aggregate!r}, on whose subjects none is"
            return [Remark(Compatibility.OLD_EVENTS, what, _moved_fix(name, shape.aggregate))], 0
        if schema > kind.info.schema:
            what = f"was at schema {schema} and is at {kind.info.schema}: events of a higher schema are unknown"
            return [Remark(Compatibility.OLD_EVENTS, what, f'@event("{kind.info.name}", schema={schema + 1})')], 0
        resolved = self.catalog.resolve(name, schema)
        if resolved is None:
            what = f"is at schema {kind.info.schema}, and nothing leads on from schema {schema}"
            misfits = self._misfits(shape, kind)
            return [
                Remark(Compatibility.UPCASTER, what, _upcaster_code(kind.info.name, schema, misfits, shape.body))
            ], 0
        misfits = [] if schema < kind.info.schema else self._misfits(shape, kind)
        remarks = [self._for_old_events(misfit, misfits, shape, kind) for misfit in misfits]
        tried, count = self._try_samples(shape, kind, resolved)
        if all(remark.compatibility is not Compatibility.OLD_EVENTS for remark in remarks):
            remarks += tried
        return remarks, count

    def _try_samples(self, shape: EventShape, kind: EventType, resolved: Resolved) -> tuple[list[Remark], int]:
        """Decode sample bodies of a shape; return the remarks on refused bodies, and the number of bodies."""
        is_upcast = shape.schema < kind.info.schema
        try:
            samples = sample_bodies(shape.body)
        except NoSample as reason:
            what = f"could not be tried at schema {shape.schema}: {reason}"
            compatibility = Compatibility.OLD_EVENTS if is_upcast else Compatibility.SAFE
            return [Remark(compatibility, what, _TRY_THE_LOG)], 0
        refused: dict[str, str] = {}
        for body in samples:
            try:
                resolved.decode(dump_json(body))
            except BaseException as raised:  # noqa: BLE001 - an upcaster's own
                error = UnexpectedExit.instead_of(raised)
                reason = faults_of(error) or type(error).__name__
                refused.setdefault(reason, dump_json(body).decode()[:_SHOWN_MAX])
        fix = _UPCAST_ALL if is_upcast else _raised_fix(kind.info.name, shape.schema, [], shape.body)
        whats = [
            f"refuses the body {body}, which schema {shape.schema} lets be: {reason}"
            for reason, body in list(refused.items())[:_FAILURES_MAX]
        ]
        return [Remark(Compatibility.OLD_EVENTS, what, fix) for what in whats], len(samples)

    def _misfits(self, shape: EventShape, kind: EventType) -> list[Misfit]:
        (today,) = [event.body for event in self.new.events if event.name == kind.info.name]
        return Comparison(shape.body, today, always=False).misfits()

    def _for_old_events(self, misfit: Misfit, misfits: Sequence[Misfit], shape: EventShape, kind: EventType) -> Remark:
        what = f"`{misfit.path}` {misfit.reason}"
        if misfit.weight is Weight.IGNORED:
            return Remark(Compatibility.SAFE, what)
        if misfit.weight is Weight.UNSURE:
            return _unsure(misfit)
        compatibility = Compatibility.OLD_EVENTS if misfit.weight is Weight.REFUSED else Compatibility.UPCASTER
        return Remark(compatibility, what, _raised_fix(kind.info.name, shape.schema, misfits, shape.body))

    def _judge_older_readers(self, shape: EventShape, kind: EventType) -> list[Remark]:
        """Judge how an older release reads the events of today; `shape` is the newest shape that it knows."""
        info = kind.info
        if info.name != shape.name:
            what = f"is recorded as {info.name!r} from now on, which older releases do not know"
            return [Remark(Compatibility.OLD_READERS, what, _STOP_FIRST)]
        if info.schema > shape.schema:
            what = f"is recorded at schema {info.schema}, and older releases read up to schema {shape.schema}"
            return [Remark(Compatibility.OLD_READERS, what, _STOP_FIRST)]
        (today,) = [event.body for event in self.new.events if event.name == info.name]
        misfits = Comparison(today, shape.body, always=True).misfits() if info.schema == shape.schema else []
        return [_for_readers(misfit, _STOP_FIRST) for misfit in misfits if misfit.weight > Weight.UNSURE]


def _unsure(misfit: Misfit) -> Remark:
    """Return the remark on a misfit that only the application's code can judge."""
    return Remark(Compatibility.UNSURE, f"`{misfit.path}` {misfit.reason}", _NAMES_STAY)


def _for_readers(misfit: Misfit, fix: str) -> Remark:
    """Return the remark on a misfit for readers that use the old shape."""
    return Remark(Compatibility.OLD_READERS, f"for older readers `{misfit.path}` {misfit.reason}", fix)


def _retired_fix(name: str) -> str:
    """Return the fix for an event that nobody needs any more."""
    return f'App(…, retired_events=["{name}"])'


def _undeclared_fix(name: str) -> str:
    """Return the fix for an event that is no longer declared, if no new event looks like it."""
    return (
        f'If it was renamed: @event("NEW_NAME", formerly=("{name}",)). If nobody needs its data: '
        f"{_retired_fix(name)}, which passes over it."
    )


def _renamed_fix(name: str, new_name: str, schema: int) -> str:
    """Return the fix for an event that has a new name."""
    number = f", schema={schema}" if schema != 1 else ""
    return f'@event("{new_name}"{number}, formerly=("{name}",))'


def _moved_fix(name: str, aggregate: str | None) -> str:
    """Return the fix for an event that moved to another aggregate."""
    return f"Leave {name!r} to the aggregate {aggregate!r}, and give the other one an event of its own with a new name."


def _raised_fix(name: str, schema: int, misfits: Sequence[Misfit], old_shape: Json) -> str:
    """Return the fix for a shape that changed while its schema number did not."""
    return f'@event("{name}", schema={schema + 1})\n\n{_upcaster_code(name, schema, misfits, old_shape)}'


def _upcaster_code(name: str, schema: int, misfits: Sequence[Misfit], old_shape: Json) -> str:
    """Return the code of the upcaster to the next schema, with `...` for what cannot be known."""
    function = re.sub(r"\W+", "_", name.rpartition(".")[2]).strip("_") or "event"
    fields: dict[str, str] = {}
    for misfit in misfits:
        top = _FIELD.match(misfit.path)
        if top is not None and misfit.weight > Weight.UNSURE:
            fields.setdefault(*_upcaster_field(top[0], misfit, old_shape))
    entries = "".join(f', "{key}": {value}' for key, value in fields.items())
    return (
        f'@upcaster("{name}", schema={schema})\n'
        f"def {function}_{schema}(body: dict[str, Any]) -> dict[str, Any]:\n"
        f"    return {{**body{entries or ', ...'}}}\n\n"
        f"App(…, upcasters=[{function}_{schema}])"
    )


def _upcaster_field(name: str, misfit: Misfit, old_shape: Json) -> tuple[str, str]:
    """Return a field of the new body, and the expression that makes it from the old body."""
    before = old_shape.get("properties", {}).get(name)
    if before is None:
        return name, "..."
    new_name = re.search(r"its new name is '(\w+)'", misfit.reason)
    if new_name is not None:
        is_sure = name in (old_shape.get("required") or ())
        return new_name[1], f'body["{name}"]' if is_sure else f'body.get("{name}", {before.get("default")!r})'
    if "where it is not there" in misfit.reason:
        return name, f'body.get("{name}", {before.get("default", "...")!r})'
    if "takes a Decimal" in misfit.reason and before.get("pattern") != DECIMAL_TEXT:
        return name, f'str(body["{name}"])'
    if "is required, and was not" in misfit.reason:
        return name, f'body.get("{name}", {before.get("default", "...")!r})'
    return name, "..."


SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVEL = {
    Compatibility.SAFE: "note",
    Compatibility.UNSURE: "warning",
    Compatibility.OLD_READERS: "warning",
    Compatibility.OLD_CALLERS: "warning",
    Compatibility.UPCASTER: "error",
    Compatibility.OLD_EVENTS: "error",
}
Locate = Callable[[EventChange], tuple[str, int]]
"""Returns the file of an event or a command, relative to the repository, and the line."""


def sarif_of(changes: Sequence[EventChange], locate: Locate, version: str) -> Json:
    """Return the findings as a SARIF log, without those that are safe."""
    rules = [
        {
            "id": _rule(compatibility),
            "shortDescription": {"text": f"This change {compatibility.value}."},
            "defaultConfiguration": {"level": _LEVEL[compatibility]},
        }
        for compatibility in Compatibility
        if compatibility is not Compatibility.SAFE
    ]
    results = [
        _result(change, remark, *locate(change))
        for change in changes
        for remark in change.remarks
        if remark.compatibility is not Compatibility.SAFE
    ]
    driver = {"name": "eventjet schema check", "version": version, "rules": rules}
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _result(change: EventChange, remark: Remark, file: str, line: int) -> Json:
    text = f"{change.event} {remark.what}" + (f"\n\n{remark.fix}" if remark.fix else "")
    place = {"artifactLocation": {"uri": file}, "region": {"startLine": line}}
    return {
        "ruleId": _rule(remark.compatibility),
        "level": _LEVEL[remark.compatibility],
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
        "partialFingerprints": {"eventjet/v1": f"{change.event}: {remark.what}"},
    }


def _rule(compatibility: Compatibility) -> str:
    return compatibility.value.replace(" ", "-")
