"""Declare events, immutable facts with a wire name, and aggregates, frozen states that are folded from events."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any, Protocol, TypeVar, cast, dataclass_transform

from eventjet.domain.subscription import raw_annotations
from eventjet.domain.unique import Unique, uniques_of
from eventjet.errors import DefinitionError
from eventjet.text import listed, suggestion

T = TypeVar("T")
S = TypeVar("S")
E = TypeVar("E")

_MARK = "__eventjet__"


@dataclass(frozen=True, slots=True)
class EventInfo:
    """The arguments of `@event`."""

    name: str
    """The wire name, `account.deposited`."""
    schema: int
    """The version of the event's fields; raise it, and add an upcaster, when the fields change."""
    formerly: tuple[str, ...] = ()
    """Earlier wire names of this event; they are read, never written."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def event(name: str, /, *, schema: int = 1, formerly: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Make the class a frozen, slotted, keyword-only pydantic dataclass known on the wire as `name`.

    `schema` is the version of the fields; raise it, and add an `upcaster`, when the fields change. `formerly` are
    earlier wire names, which are read and never written.

    Fields are strict: an `int` is not accepted for a `str`, nor a `float` for a `Decimal`. A keyword that is not a
    field raises `TypeError`; a field of a stored body that the class does not have is ignored. Nothing is registered;
    an `App` or a `scenario` finds the event through the annotation of the `evolve` that folds it. Raises
    `DefinitionError` for a class that is generic or a dataclass already, and for a field with an alias.

    ```python
    @event("account.closed")
    class Closed:
        reason: str

    assert Closed(reason="moved") == Closed(reason="moved")
    ```
    """

    check_name(name, "event", "account.opened")

    def declare(cls: type[T]) -> type[T]:
        from pydantic.dataclasses import dataclass as pydantic_dataclass
        from pydantic.dataclasses import rebuild_dataclass

        _check_not_generic(cls, "event")
        _check_not_a_dataclass(cls, "event")
        event_class: Any = pydantic_dataclass(
            frozen=True,
            kw_only=True,
            slots=True,
            config={"strict": True, "extra": "forbid", "hide_input_in_errors": True},
        )(cls)
        if not event_class.__pydantic_complete__:
            # Resolve names in the scope that declares the class; `complete` resolves those that are declared later.
            rebuild_dataclass(event_class, raise_errors=False, _parent_namespace_depth=3)
        for field, field_info in event_class.__pydantic_fields__.items():
            _check_not_generic(field_info.annotation, "event", f"{cls.__qualname__}.{field}")
            if field_info.alias or field_info.validation_alias or field_info.serialization_alias:
                reason = "an event is made, stored and read by the names of its fields: leave the alias out"
                raise DefinitionError([f"{cls.__qualname__}.{field} has an alias, and {reason}"])
        # `tuple` would split a str into its characters.
        names = (formerly,) if isinstance(formerly, str) else tuple(formerly)  # pyright: ignore[reportUnnecessaryIsInstance]
        setattr(event_class, _MARK, EventInfo(name, schema, names))
        event_class.__setattr__ = _refuse_assignment
        event_class.__init__ = _constructor(event_class)
        return cast("type[T]", event_class)

    return declare


def check_name(name: object, decorator: str, example: str) -> None:
    """Raise `DefinitionError` if a decorator was written without a name: it would replace the class or the function."""
    if not isinstance(name, str):
        target = getattr(name, "__qualname__", type(name).__name__)
        raise DefinitionError([f'@{decorator} of {target} lacks its name; write @{decorator}("{example}")'])


def is_count(number: object) -> bool:
    """Return whether a value is a whole number from 1 on."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


@dataclass(frozen=True, slots=True)
class AggregateInfo:
    """The arguments of `@aggregate`, and the unique constraints of the class."""

    name: str
    snapshot_every: int | None
    """Versions between two snapshots; None for no snapshots."""
    revision: int
    unique: tuple[Unique[Any], ...] = ()
    """Constraints on values that no two aggregates of this type may have at once."""


class AggregateType(Protocol[S, E]):  # type: ignore[misc]  # pyright: ignore[reportInvalidTypeVarUse]  variance is of the class object
    """The class object of an aggregate, whose `evolve` ties a state to its events.

    A type checker matches the class itself, so `Repository[Account, Opened | Deposited]` is inferred from `Account`.
    """

    def evolve(self, instance: S, event: E, /) -> object: ...


@dataclass_transform(frozen_default=True, kw_only_default=True)
def aggregate(name: str, /, *, snapshot_every: int | None = None, revision: int = 1) -> Callable[[type[T]], type[T]]:
    """Make the class a frozen, slotted, keyword-only dataclass whose events live at `<app>.<name>.<id>`.

    `snapshot_every` is the number of versions between two snapshots, None for no snapshots. Raise `revision` when the
    same events should fold to a different state. Methods decorated with `unique` return the values that no two
    aggregates of this type may have at once. Slots re-create the class, so `super()` without arguments does not work
    inside it. Raises `DefinitionError` for a class that is generic or a dataclass already.

    ```python
    @aggregate("counter")
    class Counter:
        count: int = 0

        def deposit(self, amount: Decimal) -> Deposited:
            return Deposited(amount=amount)

        def evolve(self, event: Deposited) -> Counter:
            return replace(self, count=self.count + 1)

    assert Counter().count == 0
    ```
    """

    check_name(name, "aggregate", "account")

    def declare(cls: type[T]) -> type[T]:
        _check_not_generic(cls, "aggregate")
        _check_not_a_dataclass(cls, "aggregate")
        aggregate_class: Any = dataclass(frozen=True, kw_only=True, slots=True)(cls)
        aggregate_class.__setattr__ = _refuse_assignment
        setattr(aggregate_class, _MARK, AggregateInfo(name, snapshot_every, revision, uniques_of(aggregate_class)))
        return cast("type[T]", aggregate_class)

    return declare


def _refuse_assignment(instance: object, name: str, value: object) -> None:  # noqa: ARG001
    """Raise `FrozenInstanceError`. A slotted dataclass raises an unclear `TypeError` for a name that is no field."""
    cls = type(instance)
    is_field = name in cast("Any", cls).__dataclass_fields__
    fault = f"cannot assign to field {name!r} of" if is_field else f"there is no field {name!r} to assign to in"
    raise FrozenInstanceError(f"{fault} {cls.__qualname__}, which never changes: use `replace`")


def _check_not_generic(hint: Any, decorator: str, field: str = "") -> None:
    """Raise `DefinitionError` for a generic class or field: stored data names the class, never its type arguments."""
    if field and isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return  # the field's type is a plain class
    variables = (hint,) if isinstance(hint, TypeVar) else getattr(hint, "__parameters__", ())
    if variables:
        names = ", ".join(str(variable.__name__) for variable in variables)
        if field:
            fault = f"{field} is of the type variable {names}"
        else:
            fault = f"{getattr(hint, '__qualname__', hint)} is generic in {names}"
        raise DefinitionError(
            [f"{fault}, and a generic {decorator} is not supported: declare one class for each type, with that type"]
        )


def _check_not_a_dataclass(cls: type, decorator: str) -> None:
    """Raise `DefinitionError` for a class that is a dataclass: one that is frozen or slotted cannot be made again."""
    if "__dataclass_fields__" in vars(cls):
        problem = f"{cls.__qualname__} is a dataclass already, and @{decorator} makes it one"
        raise DefinitionError([f"{problem}: remove @dataclass from it"])


def field_faults(cls: type) -> list[str]:
    """Return, as sentences, the fields that a class lacks because the base declaring them is not a dataclass."""
    return [
        f"{cls.__qualname__} lacks {listed(missing)} of its base {base.__qualname__}, which is no dataclass; decorate "
        f"{base.__qualname__} with @dataclass(frozen=True, kw_only=True), or declare its fields in {cls.__qualname__}"
        for base in cls.__mro__[1:]
        if (missing := [name for name in _annotated(base) if name not in cast("Any", cls).__dataclass_fields__])
    ]


def _annotated(base: type) -> list[str]:
    """Return the names that `@dataclass` would make fields of; none for a class that is a dataclass already."""
    if base is object or "__dataclass_fields__" in vars(base):
        return []
    namespace = {"__annotations__": raw_annotations(base), "__module__": base.__module__}
    stand_in: Any = dataclass(type(base.__name__, (), namespace))
    return [field.name for field in fields(stand_in) if not field.name.startswith("__")]


def _constructor(cls: Any) -> Callable[..., None]:
    """Return pydantic's constructor, changed to raise `TypeError` for an unknown keyword as any dataclass does."""
    from pydantic_core import ArgsKwargs, ValidationError

    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes the class's
        if not cls.__pydantic_complete__:
            complete(cls)
        try:
            self.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=self)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False, include_input=False)
            unknown = [str(detail["loc"][0]) for detail in details if detail["type"] == "unexpected_keyword_argument"]
            if not unknown:
                raise
            names = [field.name for field in fields(cls) if field.init]
            reason = f"{cls.__qualname__} has no field {unknown[0]!r}. {suggestion(unknown[0], names)}"
            faults = "".join(f"{fault}. " for fault in field_faults(cls))
            raise TypeError(f"{reason}{faults}Its fields: {listed(names)}.") from None

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    return __init__


def complete(cls: Any) -> None:
    """Have pydantic resolve the annotations that could not be resolved at declaration; raises what pydantic raises."""
    from pydantic.dataclasses import rebuild_dataclass

    constructor = cls.__init__
    try:
        rebuild_dataclass(cls, _parent_namespace_depth=4)  # where the event is made
    finally:
        cls.__init__ = constructor  # pydantic replaces it


def event_info(cls: Any) -> EventInfo:
    """Return the arguments of `@event`; raises `DefinitionError` for a class that is not an event."""
    return _declared(cls, EventInfo, "an event", "@event(…)")


def is_event(cls: Any) -> bool:
    """Return whether a class is declared by `@event` itself; a subclass of an event is not an event."""
    return isinstance(cls, type) and isinstance(vars(cls).get(_MARK), EventInfo)


def is_aggregate(cls: Any) -> bool:
    """Return whether a class is declared by `@aggregate` itself, or by `@process`."""
    return isinstance(cls, type) and isinstance(vars(cls).get(_MARK), AggregateInfo)


def aggregate_info(cls: Any) -> AggregateInfo:
    """Return the arguments of `@aggregate`; raises `DefinitionError` for a class that is not an aggregate."""
    return _declared(cls, AggregateInfo, "an aggregate", "@aggregate(…)")


def _declared(cls: Any, kind: type[T], title: str, decorator: str) -> T:
    info = vars(cls).get(_MARK) if isinstance(cls, type) else None
    if isinstance(info, kind):
        return info
    label = cls if isinstance(cls, str) else getattr(cls, "__qualname__", None)
    if label is not None:
        raise DefinitionError([f"{label} is not {title}: decorate it with {decorator}"])
    # The repr of a value may be long, and may contain personal data.
    made_of = cast("type[Any]", type(cls))
    is_declared = isinstance(vars(made_of).get(_MARK), kind)
    remedy = "give the class itself" if is_declared else f"give a class decorated with {decorator}"
    raise DefinitionError([f"an object of the class {made_of.__qualname__} is not {title}: {remedy}"])
