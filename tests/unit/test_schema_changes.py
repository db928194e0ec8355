"""The judgement of a change agrees with what happens: the new app reads old bodies, the old app reads new bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID, uuid4

import orjson
import pytest
from pydantic import AfterValidator, Field

from eventjet import App, aggregate, event, served, upcaster
from eventjet.codec.catalog import Upcaster
from eventjet.codec.commands import Arguments
from eventjet.codec.json import dump_json
from eventjet.contracts.compatibility import Compatibility, EventChange, changes_between
from eventjet.contracts.contract import Contract, contract_in, contract_of, text_of
from eventjet.contracts.samples import sample_bodies

NAME = "order.placed"
SAFE, UNSURE, READERS, UPCASTER, EVENTS = (
    Compatibility.SAFE,
    Compatibility.UNSURE,
    Compatibility.OLD_READERS,
    Compatibility.UPCASTER,
    Compatibility.OLD_EVENTS,
)


class Size(Enum):
    S = "s"
    M = "m"


class MoreSizes(Enum):
    S = "s"
    M = "m"
    L = "l"


class SwappedSizes(Enum):
    S = "m"
    M = "s"


class RenamedSizes(Enum):
    SMALL = "s"
    M = "m"


class MovedSizes(Enum):
    M = "s"
    L = "m"


@dataclass(frozen=True)
class Move:
    source: str
    target: str


@dataclass(frozen=True)
class MoveBack:
    target: str
    source: str


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal


@dataclass(frozen=True)
class LineInCents:
    sku: str
    price: int


@dataclass(frozen=True)
class LineWithNote:
    sku: str
    price: Decimal
    note: str = ""


@dataclass(frozen=True)
class Shape:
    """An event as a release declares it: annotations, and defaults as `(annotation, default)`."""

    fields: Mapping[str, Any]
    schema: int = 1
    name: str = NAME
    formerly: tuple[str, ...] = ()
    upcasters: Sequence[Upcaster] = ()
    retired: tuple[str, ...] = ()
    aggregate: str = "order"


def shape(schema: int = 1, name: str = NAME, **fields: Any) -> Shape:
    return Shape(fields, schema, name)


def app_of(declared: Shape | None, retired: tuple[str, ...] = ()) -> App:
    """Return an app whose aggregates fold this event and another event that never changes."""

    @event("order.noted")
    class Noted:
        text: str

    folded: Any = Noted
    if declared is not None:
        namespace: dict[str, Any] = {"__annotations__": {}, "__module__": __name__}
        for name, kind in declared.fields.items():
            annotation, *default = kind if isinstance(kind, tuple) else (kind,)
            namespace["__annotations__"][name] = annotation
            if default:
                namespace[name] = default[0]
        declare = event(declared.name, schema=declared.schema, formerly=declared.formerly)
        folded = declare(type("Placed", (), namespace))

    def folding(name: str, events: Any) -> Any:
        class State:
            count: int = 0

            def evolve(self, event: Any) -> Any:
                return replace(self, count=self.count + 1)  # type: ignore[type-var]

        State.evolve.__annotations__["event"] = events
        return aggregate(name)(State)

    moved = declared is not None and declared.aggregate != "order"
    aggregates = [folding("order", Noted if moved else Noted | folded)]
    if declared is not None and moved:
        aggregates.append(folding(declared.aggregate, folded))
    upcasters = declared.upcasters if declared else ()
    return App(
        "shop", aggregates=aggregates, upcasters=upcasters, retired_events=(declared or Shape({})).retired or retired
    )


def written(app: App, contract: Contract, declared: Shape) -> list[bytes]:
    """Return sample bodies as the codec of an app writes them."""
    (body,) = [exported.body for exported in contract.events if exported.name == declared.name]
    resolved = app.catalog.resolve(declared.name, declared.schema)
    assert resolved is not None
    samples = [resolved.decode(orjson.dumps(sample)) for sample in sample_bodies(body)]
    return [app.catalog.encode(sample).body for sample in samples]


def refused(app: App, name: str, schema: int, written: Sequence[bytes]) -> bool:
    """Return whether the app cannot read some of these bodies; it passes over retired events."""
    if name in app.catalog.retired:
        return False
    resolved = app.catalog.resolve(name, schema)
    if resolved is None:
        return True
    for body in written:
        try:
            resolved.decode(body)
        except Exception:  # noqa: BLE001 - whatever an upcaster raises
            return True
    return False


def up(schema: int, step: Callable[[dict[str, Any]], dict[str, Any]], name: str = NAME) -> Upcaster:
    return upcaster(name, schema=schema)(step)


def small(value: int) -> int:
    if value > 10:
        raise ValueError("it is too large")
    return value


@dataclass(frozen=True)
class Change:
    """An event before and after a change, how the change is judged, and what old events and old readers meet."""

    before: Shape
    after: Shape | None
    verdict: Compatibility
    says: str
    """Part of a remark, or of its fix."""
    old_events_refused: bool = False
    old_readers_refuse: bool = False
    retired: tuple[str, ...] = field(default=())


ONE = shape(amount=Decimal, by=str)
CHANGES = {
    "nothing": Change(ONE, ONE, SAFE, ""),
    "event renamed": Change(
        ONE, replace(ONE, name="order.made"), EVENTS, '@event("order.made", formerly=("order.placed",))', True, True
    ),
    "event renamed, with its former name": Change(
        ONE, replace(ONE, name="order.made", formerly=(NAME,)), READERS, "recorded as 'order.made'", False, True
    ),
    "event removed": Change(ONE, None, EVENTS, 'retired_events=["order.placed"]', True),
    "event retired": Change(ONE, None, SAFE, "stored events are skipped", retired=(NAME,)),
    "event given to another aggregate": Change(ONE, replace(ONE, aggregate="cart"), EVENTS, "Leave"),
    "field renamed": Change(ONE, shape(amount=Decimal, who=str), EVENTS, "`who` is required", True, True),
    "field renamed, with a default": Change(
        shape(amount=Decimal, by=(str, "")),
        shape(amount=Decimal, who=(str, "")),
        UPCASTER,
        '"who": body.get("by", \'\')',
    ),
    "field retyped": Change(ONE, shape(amount=Decimal, by=int), EVENTS, "takes an integer, and was text", True, True),
    "required field added": Change(ONE, shape(amount=Decimal, by=str, why=str), EVENTS, "def placed_1(body", True),
    "optional field added": Change(ONE, shape(amount=Decimal, by=str, why=(str, "")), SAFE, ""),
    "required field dropped": Change(ONE, shape(amount=Decimal), READERS, "`by` is no longer read", False, True),
    "optional field dropped": Change(
        shape(amount=Decimal, by=(str, "-")), shape(amount=Decimal), READERS, "is read as '-'"
    ),
    "field split": Change(shape(whole=str), shape(first=str, last=str), EVENTS, '"first": ...', True, True),
    "int widened to Decimal": Change(shape(cents=int), shape(cents=Decimal), EVENTS, 'str(body["cents"])', True, True),
    "int widened to float": Change(shape(n=int), shape(n=float), EVENTS, "beyond 2^53", True, True),
    "a small int widened to float": Change(
        shape(n=Annotated[int, Field(ge=0, le=9)]), shape(n=float), READERS, "a number", False, True
    ),
    "Decimal narrowed to int": Change(shape(n=Decimal), shape(n=int), EVENTS, "an integer", True, True),
    "text narrowed to UUID": Change(shape(n=str), shape(n=UUID), EVENTS, "a uuid", True),
    "UUID widened to text": Change(shape(n=UUID), shape(n=str), READERS, "a uuid", False, True),
    "datetime narrowed to date": Change(shape(n=datetime), shape(n=date), EVENTS, "a date", True, True),
    "bytes read as text": Change(shape(n=bytes), shape(n=str), UPCASTER, "base64", False, True),
    "enum member added": Change(shape(size=Size), shape(size=MoreSizes), READERS, "'l'", False, True),
    "enum member removed": Change(shape(size=MoreSizes), shape(size=Size), EVENTS, "'l'", True),
    "enum members that swap their values": Change(
        shape(size=Size), shape(size=SwappedSizes), UPCASTER, "`size` is M where it is 's', which was S"
    ),
    "an enum's member takes the value of another": Change(
        shape(size=Size), shape(size=MovedSizes), UPCASTER, "`size` is L where it is 'm', which was M"
    ),
    "enum members that swap their values, as keys": Change(
        shape(prices=dict[Size, int]), shape(prices=dict[SwappedSizes, int]), UPCASTER, "is M where it is 's'"
    ),
    "enum member renamed": Change(shape(size=Size), shape(size=RenamedSizes), SAFE, ""),
    "two fields of one type changed places": Change(
        shape(source=str, target=str, n=int), shape(target=str, source=str, n=int), UNSURE, "`source` and `target`"
    ),
    "two fields with defaults changed places": Change(
        shape(a=(str, ""), b=(str, "")), shape(b=(str, ""), a=(str, "")), UNSURE, "give both fields their names back"
    ),
    "two fields of a nested model changed places": Change(
        shape(move=Move), shape(move=MoveBack), UNSURE, "`move.source` and `target`"
    ),
    "two fields of different types changed places": Change(
        shape(source=str, n=int), shape(n=int, source=str), SAFE, ""
    ),
    "enum made of text": Change(shape(size=str), shape(size=Literal["s"]), EVENTS, "takes only 's'", True),
    "optional made required": Change(shape(by=(str, "ada")), shape(by=str), EVENTS, "body.get(\"by\", 'ada')", True),
    "required made optional": Change(shape(by=str), shape(by=(str, "ada")), SAFE, ""),
    "null allowed": Change(shape(by=str), shape(by=str | None), READERS, "null", False, True),
    "null no longer allowed": Change(shape(by=str | None), shape(by=str), EVENTS, "null", True),
    "default changed": Change(shape(by=(str, "ada")), shape(by=(str, "bob")), UPCASTER, "body.get(\"by\", 'ada')"),
    "nested model changed": Change(
        shape(lines=tuple[Line, ...]),
        shape(lines=tuple[LineInCents, ...]),
        EVENTS,
        "`lines[].price` takes an integer",
        True,
        True,
    ),
    "nested model with one optional field more": Change(
        shape(lines=tuple[Line, ...]), shape(lines=tuple[LineWithNote, ...]), SAFE, ""
    ),
    "union widened": Change(shape(n=int), shape(n=int | bool), READERS, "true or false", False, True),
    "union narrowed": Change(shape(n=bool | str), shape(n=bool), EVENTS, "text", True),
    "constraint tightened": Change(shape(n=int), shape(n=Annotated[int, Field(ge=0)]), EVENTS, "minimum 0", True),
    "constraint loosened": Change(
        shape(n=Annotated[int, Field(le=9)]), shape(n=Annotated[int, Field(le=99)]), READERS, "maximum 9", False, True
    ),
    "a Decimal's constraint tightened": Change(
        shape(n=Decimal), shape(n=Annotated[Decimal, Field(decimal_places=2)]), EVENTS, "decimal_places 2", True
    ),
    "a validator of one's own added": Change(
        shape(n=int), shape(n=Annotated[int, AfterValidator(small)]), EVENTS, "checked by small", True
    ),
    "list made a set": Change(shape(n=tuple[str, ...]), shape(n=frozenset[str]), UPCASTER, "several equal", False),
    "schema raised, with an upcaster": Change(
        shape(cents=int),
        Shape({"amount": Decimal}, 2, upcasters=[up(1, lambda body: {"amount": str(body["cents"])})]),
        READERS,
        "is recorded at schema 2",
        False,
        True,
    ),
    "schema raised, with an upcaster that does nothing": Change(
        shape(cents=int), Shape({"amount": Decimal}, 2, upcasters=[up(1, dict)]), EVENTS, "Field required", True, True
    ),
    "schema raised, with an upcaster that fails for some": Change(
        shape(whole=str),
        Shape(
            {"first": str, "last": str},
            2,
            upcasters=[up(1, lambda body: dict(zip(("first", "last"), body["whole"].split(" ", 1), strict=True)))],
        ),
        EVENTS,
        "refuses the body",
        True,
        True,
    ),
    "schema lowered": Change(Shape(ONE.fields, 2, upcasters=[up(1, dict)]), ONE, EVENTS, "schema=3", True),
}


def judgement_of(judged: Sequence[EventChange], name: str = NAME) -> tuple[Compatibility, str]:
    (change,) = [candidate for candidate in judged if candidate.event == name]
    return change.compatibility, "\n".join(f"{remark.what}\n{remark.fix}" for remark in change.remarks)


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_the_judgement_of_a_change_agrees_with_what_old_events_and_readers_meet(change: Change) -> None:
    before, after = app_of(change.before), app_of(change.after, change.retired)
    old, new = contract_of(before), contract_of(after)
    verdict, remarks = judgement_of(changes_between(old, new, after.catalog))
    assert (verdict, change.says in remarks) == (change.verdict, True), remarks
    stored = written(before, old, change.before)
    stored += [orjson.dumps(sample) for sample in sample_bodies(old.at(NAME)[change.before.schema].body)]
    misplaced = change.after is not None and change.after.aggregate != "order"
    assert refused(after, NAME, change.before.schema, stored) is change.old_events_refused
    assert change.old_events_refused <= (verdict is EVENTS) <= (change.old_events_refused or misplaced)
    if change.after is not None and not misplaced and "checked by" not in remarks:
        new_bodies = written(after, new, change.after)
        assert refused(before, change.after.name, change.after.schema, new_bodies) is change.old_readers_refuse
        assert not change.old_readers_refuse or verdict in (READERS, UPCASTER, EVENTS)
        assert not change.old_readers_refuse or "der re" in remarks or "may be" in remarks or verdict is EVENTS


CALLERS = Compatibility.OLD_CALLERS


def pay(self: Any, amount: Decimal, note: str = "") -> None: ...
def pay_with_method(self: Any, amount: Decimal, method: str, note: str = "") -> None: ...
def pay_with_method_of_ours(self: Any, amount: Decimal, note: str = "", method: str = "card") -> None: ...
def pay_without_note(self: Any, amount: Decimal) -> None: ...
def pay_total(self: Any, total: Decimal, note: str = "") -> None: ...
def pay_cents(self: Any, amount: int, note: str = "") -> None: ...
def pay_at_most(self: Any, amount: Annotated[Decimal, Field(le=100)], note: str = "") -> None: ...
def pay_noted(self: Any, amount: Decimal, note: str) -> None: ...
def pay_paid(self: Any, amount: Decimal, note: str = "paid") -> None: ...
def pay_maybe(self: Any, amount: Decimal | None, note: str = "") -> None: ...


@event("bill.noted")
class BillNoted:
    text: str


@aggregate("order")
class Bill:
    def evolve(self, event: BillNoted) -> Bill:
        return self


def serving(decide: Any) -> App:
    """Return an app that serves this command, or none."""
    return App("shop", aggregates=[Bill], served=[] if decide is None else [served(Bill, decide, name="pay")])


@pytest.mark.parametrize(
    ("decide", "says"),
    [
        (pay, None),
        (pay_with_method_of_ours, None),
        (pay_maybe, None),
        (pay_with_method, "`method` is required, and is not there"),
        (pay_without_note, "`note` is a field that is refused"),
        (pay_total, "`amount` is a field that is refused"),
        (pay_cents, "`amount` takes an integer, and was a Decimal"),
        (pay_at_most, "`amount` has the limit le 100, and had nothing"),
        (pay_noted, "`note` is required, and was not"),
        (pay_paid, "`note` is read as 'paid' where it is not there"),
        (None, "is no longer served"),
    ],
)
def test_the_judgement_of_a_changed_command_agrees_with_what_callers_meet(decide: Any, says: str | None) -> None:
    old, after = contract_of(serving(pay)), serving(decide)
    *_, judged = changes_between(old, contract_of(after), after.catalog)
    remarks = "\n".join(remark.what for remark in judged.remarks)
    assert (judged.event, judged.is_command) == ("order.pay", True)
    assert judged.compatibility is (Compatibility.SAFE if says is None else CALLERS), remarks
    assert says is None or says in remarks
    if decide is None:
        return
    arguments, refused_bodies, read = Arguments(decide), 0, set[Any]()
    for body in [{"amount": "1000.50"}, *sample_bodies((old.commands or {})["order.pay"])]:
        try:
            read.add(arguments.decode(dump_json(body)).get("note", "") == body.get("note", ""))
        except ValueError:
            refused_bodies += 1
    assert bool(refused_bodies or False in read) is (says is not None)


def test_a_newly_served_command_is_a_safe_change() -> None:
    after = serving(pay)
    *_, judged = changes_between(contract_of(serving(None)), contract_of(after), after.catalog)
    assert (judged.event, judged.compatibility, judged.remarks) == ("order.pay", Compatibility.SAFE, ())


def test_a_schema_raised_without_an_upcaster_asks_for_one() -> None:
    before = app_of(shape(cents=int))
    raised = app_of(Shape({"amount": Decimal}, 2, upcasters=[up(1, dict)]))
    gap = type(raised.catalog)({kind.event_type: "order" for kind in raised.catalog.kinds()})
    verdict, remarks = judgement_of(changes_between(contract_of(before), contract_of(raised), gap))
    assert verdict is UPCASTER
    assert '@upcaster("order.placed", schema=1)' in remarks
    assert '"amount": ...' in remarks


def test_bodies_of_every_exported_schema_are_tried_with_the_current_upcasters() -> None:
    first = contract_of(app_of(shape(a=str)))
    second = contract_of(app_of(Shape({"b": str}, 2, upcasters=[up(1, lambda body: {"b": body["a"]})])))
    stored = contract_in({**first.documents(), **second.documents()}, "here")
    broken = app_of(Shape({"b": str}, 2, upcasters=[up(1, lambda body: {"b": len(body["a"])})]))
    (change,) = [
        candidate
        for candidate in changes_between(stored, contract_of(broken), broken.catalog)
        if candidate.event == NAME
    ]
    assert change.compatibility is EVENTS
    assert change.tried > 2
    assert "schema 1 lets be: b: Input should be a valid string" in change.remarks[0].what


def test_dropping_a_former_name_or_a_retired_event_breaks_old_events() -> None:
    before = app_of(replace(ONE, formerly=("order.given",), retired=("order.lost",)))
    after = app_of(ONE)
    judged = changes_between(contract_of(before), contract_of(after), after.catalog)
    assert judgement_of(judged, "order.given")[0] is judgement_of(judged, "order.lost")[0] is EVENTS
    assert '@event("order.placed", formerly=("order.given",))' in judgement_of(judged, "order.given")[1]


def test_a_new_event_breaks_readers_that_do_not_know_it() -> None:
    after = app_of(ONE)
    verdict, remarks = judgement_of(changes_between(contract_of(app_of(None)), contract_of(after), after.catalog))
    assert verdict is READERS
    assert "Deploy a release first" in remarks


def test_a_change_that_cannot_be_tried_is_judged_as_broken() -> None:
    checked = shape(code=Annotated[str, AfterValidator(str.strip)])
    after = app_of(Shape({"code": str}, 2, upcasters=[up(1, dict)]))
    verdict, remarks = judgement_of(changes_between(contract_of(app_of(checked)), contract_of(after), after.catalog))
    assert verdict is EVENTS
    assert "could not be tried at schema 1" in remarks
    assert "--against-log" in remarks


def test_an_export_is_read_back_and_written_the_same_again() -> None:
    contract = contract_of(app_of(shape(at=(datetime, datetime.fromisoformat("2026-01-01T00:00:00Z")), n=UUID)))
    texts = {name: text_of(document) for name, document in contract.documents().items()}
    imported = contract_in({name: orjson.loads(text) for name, text in texts.items()}, "here")
    assert imported == contract
    assert {name: text_of(document) for name, document in imported.documents().items()} == texts
    assert list(texts) == sorted(texts)


def test_a_generated_default_is_not_exported() -> None:
    declared = shape(n=(UUID, Field(default_factory=uuid4)))
    assert contract_of(app_of(declared)) == contract_of(app_of(declared))
