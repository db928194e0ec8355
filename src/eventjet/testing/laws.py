"""Laws: what must hold for every aggregate, projection and event, tested with histories that Hypothesis makes up.

A test class names its subject and inherits the tests:

    class TestAccount(AggregateLaws):
        aggregate = Account

Histories contain the declared events in any order with any values of their annotations, since a fold may never
refuse an event. Hypothesis shrinks a failure to the shortest history that shows it.
"""

from __future__ import annotations

import inspect
import typing
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, note, reject, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy
from sqlalchemy.exc import DBAPIError

from eventjet.codec.catalog import Catalog
from eventjet.commands.execute import recorded_events
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.history import FoldedState
from eventjet.domain.process import Outcome
from eventjet.domain.recorded import Recorded
from eventjet.domain.subscription import folded_events, union_members
from eventjet.errors import HandlerFailed, RowRefused, UsageError
from eventjet.log.snapshots import SnapshotCodec
from eventjet.projections.app_ref import Application, Declared
from eventjet.testing.golden import Golden
from eventjet.testing.read_model import ReadModelCase, TableRows, read_model_case, resolved_alone
from eventjet.testing.scenarios import as_stored, folded, left_as_they_are
from eventjet.testing.strategies import Values, instances_of, values_of

_LAW = settings(
    deadline=None,
    max_examples=50,
    phases=[phase for phase in Phase if phase is not Phase.explain],
    # Every class of laws runs the same inherited test.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
_EVENTS_MAX = 12
_AGGREGATES = ("a-1", "a-2", "a-3")
_START = datetime(2026, 1, 1, tzinfo=UTC)


class Laws:
    """The base of the classes of laws: strategies for values, and golden files."""

    strategies: ClassVar[Mapping[Any, SearchStrategy[Any]]] = {}
    """Strategies by type, for types without a built-in strategy and for types whose values need care."""

    def _values(self) -> Values:
        return Values(self.strategies)

    def golden(self, name: str, pytestconfig: pytest.Config) -> Golden:
        """Return the golden file of this name, in the folder `golden` beside the file of the test class."""
        folder = Path(inspect.getfile(type(self))).parent / "golden"
        return Golden(folder / f"{name}.json", write=bool(pytestconfig.getoption("--write-golden")))


class AggregateLaws(Laws):
    """Laws of an aggregate: it folds every history, snapshots change nothing, and decisions change no argument.

    ```python
    class TestAccount(AggregateLaws):
        aggregate = Account
    ```
    """

    aggregate: ClassVar[Any]
    """The class decorated with `@aggregate`."""
    app: ClassVar[Application | None] = None
    """The app whose upcasters read earlier schemas in the golden file; not needed before there is an earlier schema."""

    @given(data=st.data())
    @_LAW
    def test_evolve_takes_every_history(self, data: DataObject) -> None:
        """`evolve` raises nothing, returns the aggregate's own type, and changes neither state nor event."""
        self._fold(self._history(data))

    @given(data=st.data())
    @_LAW
    def test_a_snapshot_and_the_events_after_it_are_the_whole_history(self, data: DataObject) -> None:
        """The state survives JSON after any event, and later events fold as they do without a snapshot."""
        if aggregate_info(self.aggregate).snapshot_every is None:
            pytest.skip(f"{self.aggregate.__qualname__} keeps no snapshots")
        history, codec = self._history(data), SnapshotCodec[Any](self.aggregate)
        full_state, before = self._fold(history), self._fold([])
        for cut in range(len(history) + 1):
            value = codec.encode(FoldedState(before, cut, cut, "id"))
            assert value is not None, (
                f"the state {before!r} would not come back equal from a snapshot; give its fields types that JSON "
                "keeps, or leave out snapshot_every"
            )
            decoded = codec.decode(value)
            assert decoded is not None
            after = self._fold(history[cut:], decoded.state)
            message = f"the snapshot after {cut} events leads to {after!r}, and the whole history to {full_state!r}"
            assert after == full_state, message
            before = self._fold(history[cut : cut + 1], before)

    @given(data=st.data())
    @_LAW
    def test_decisions_leave_alone_what_they_are_given(self, data: DataObject) -> None:
        """No decision changes its arguments, on any state and with any arguments; a domain error is an answer too.

        What a process decides on another aggregate's event, outcome or error is left to `story`. Raises `UsageError`
        for a parameter without annotation and default.
        """
        decisions = self._decisions()
        if not decisions:
            pytest.skip(f"{self.aggregate.__qualname__} has no method that is annotated to return its events")
        state = self._fold(self._history(data))
        name, decide, hints = data.draw(st.sampled_from(decisions), label="decision")
        arguments = {
            argument: data.draw(values_of(hint, f"{name}({argument})", self._values()), label=argument)
            for argument, hint in hints.items()
        }
        signature = inspect.signature(decide)
        bound = inspect.BoundArguments(signature, OrderedDict({next(iter(signature.parameters)): state, **arguments}))
        with left_as_they_are(name, state, *arguments.values()):
            try:
                events = recorded_events(decide(*bound.args, **bound.kwargs))
            except UsageError:
                raise
            except Exception:  # noqa: BLE001 - a refusal, in the application's own words
                events = ()
        folded(state, events, self._catalog())

    def test_what_was_folded_once_folds_to_the_same(self, pytestconfig: pytest.Config) -> None:
        """A history folds to the same state as before, unless `revision` was raised, which invalidates old snapshots.

        Histories and their states are in `golden/<aggregate>.json`, written by `pytest --write-golden`.
        """
        info = aggregate_info(self.aggregate)
        golden = self.golden(info.name, pytestconfig)
        catalog = self._catalog() if self.app is None else self.app.catalog
        golden.check_folds(info.revision, catalog, folded_events(self.aggregate), self._histories, self._fold)

    def _catalog(self) -> Catalog:
        return Catalog(folded_events(self.aggregate))

    def _history(self, data: DataObject) -> list[Any]:
        return data.draw(st.lists(self._event(), max_size=_EVENTS_MAX), label="history")

    def _event(self) -> SearchStrategy[Any]:
        return st.one_of([instances_of(event_type, self._values()) for event_type in folded_events(self.aggregate)])

    def _histories(self) -> list[list[Any]]:
        """Return histories with every event, the same in every run with one version of Hypothesis."""
        histories: list[list[Any]] = []

        @given(st.lists(self._event(), min_size=1, max_size=_EVENTS_MAX))
        @settings(derandomize=True, database=None, max_examples=20, deadline=None)
        def collect(history: list[Any]) -> None:
            histories.append(history)

        collect()
        missing = {*folded_events(self.aggregate)} - {type(event) for history in histories for event in history}
        rest = [
            [_first(instances_of(kind, self._values()))] for kind in folded_events(self.aggregate) if kind in missing
        ]
        return histories + rest

    def _fold(self, history: Sequence[Any], state: Any = None) -> Any:
        return folded(self.aggregate() if state is None else state, history, self._catalog())

    def _decisions(self) -> list[tuple[str, Callable[..., Any], dict[str, Any]]]:
        """Return (name, function, argument annotations) of the decisions whose arguments can be generated."""
        events = set(folded_events(self.aggregate))
        decisions: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []
        for name, function in inspect.getmembers(self.aggregate, inspect.isfunction):
            is_static = isinstance(inspect.getattr_static(self.aggregate, name), staticmethod)
            if name.startswith("_") or name == "evolve" or is_static:
                continue
            hints = typing.get_type_hints(function, include_extras=True)
            decides = events & set(_classes(hints.pop("return", None)))
            if decides and not any(map(_is_made_by_eventjet, hints.values())):
                title = f"{self.aggregate.__qualname__}.{name}"
                decisions.append((title, function, _argument_hints(title, function, hints)))
        return decisions


class ProjectionLaws(Laws):
    """Laws of a projection: its rows are the same however the log is cut into batches, live as in a rebuild.

    ```python
    class TestBalances(ProjectionLaws):
        projection = balances
    ```
    """

    projection: ClassVar[Declared]
    histories: ClassVar[SearchStrategy[Sequence[Any]] | None] = None
    """A strategy for one aggregate's events, where not every order works, as with foreign keys of a SQL projection."""

    def test_every_way_to_read_the_log_gives_the_same_rows(self) -> None:
        """Rows are the same event by event, in batches as a worker writes them to SQLite, and in one pass of a rebuild.

        A history with a value that a column cannot store is skipped, since a worker stops there with an error. None is
        not such a value.
        """
        with read_model_case(resolved_alone(type(self).projection)) as case:

            @given(st.data())
            @settings(_LAW, max_examples=25)
            def law(data: DataObject) -> None:
                self._check(case, data)

            law()

    def _check(self, case: ReadModelCase, data: DataObject) -> None:
        log = self._log(data, case)
        ends = data.draw(st.lists(st.integers(1, max(len(log), 1)), max_size=4), label="batches end at")
        ends = sorted({end for end in ends if end <= len(log)})
        one_by_one = self._one_by_one(case, log)
        _compare(one_by_one, case.written(log, ends), f"in batches that end at {ends}")
        _compare(one_by_one, case.in_one_pass(log), "in the one pass of a rebuild")

    def _one_by_one(self, case: ReadModelCase, log: Sequence[Recorded[Any]]) -> TableRows:
        try:
            return case.written(log, range(1, len(log) + 1))
        except HandlerFailed as error:
            failed, cause = error, error.__cause__
        # Raised outside of `except`, so that the traceback shows the application's code and not its callers.
        if isinstance(cause, RowRefused) and cause.value is not None:
            reject()
        message = f"{failed.projection} cannot take {log[failed.position - 1].data!r}: {failed.reason}"
        raise AssertionError(message) from (None if isinstance(cause, RowRefused | DBAPIError) else cause)

    def _log(self, data: DataObject, case: ReadModelCase) -> list[Recorded[Any]]:
        histories = self.histories
        if histories is None:
            values = Values.within(self.strategies, case.resolved.tables, _EVENTS_MAX)
            event = st.one_of([instances_of(event_type, values) for event_type in case.events])
            histories = st.lists(event, max_size=_EVENTS_MAX // len(_AGGREGATES))
        drawn = data.draw(st.fixed_dictionaries(dict.fromkeys(_AGGREGATES, histories)), label="histories")
        taken = {name: [event for event in history if type(event) in case.events] for name, history in drawn.items()}
        turns = [aggregate_id for aggregate_id, history in taken.items() for _ in history]
        remaining = {aggregate_id: iter(history) for aggregate_id, history in taken.items()}
        versions = Counter[str]()
        log: list[Recorded[Any]] = []
        for position, aggregate_id in enumerate(data.draw(st.permutations(turns), label="order"), 1):
            versions[aggregate_id] += 1
            number, at = versions[aggregate_id], _START + timedelta(minutes=position)
            log.append(
                Recorded(
                    as_stored([next(remaining[aggregate_id])])[0],
                    aggregate_id,
                    number,
                    position,
                    at,
                    f"{aggregate_id}-{number}",
                )
            )
        note(
            "log:\n" + "\n".join(f"  {recorded.position} {recorded.aggregate_id} {recorded.data!r}" for recorded in log)
        )
        return log


def _compare(expected: TableRows, actual: TableRows, how: str) -> None:
    """Raise `AssertionError` with the rows that differ, if there are any."""
    for table, rows in expected.items():
        missing = [row for row in rows if row not in actual[table]]
        extra = [row for row in actual[table] if row not in rows]
        if missing or extra:
            raise AssertionError(
                f"the rows of {table} depend on how the log is read:\n  one event at a time {missing}\n  {how} {extra}"
            )


class CodecLaws(Laws):
    """Laws of events: each comes back equal from its stored form, and every schema that was ever stored can be read.

    ```python
    class TestEvents(CodecLaws):
        app = bank
    ```
    """

    app: ClassVar[Application]

    def test_what_is_stored_comes_back_equal(self) -> None:
        """Every event comes back equal from its stored body."""
        for kind in self._kinds():

            @given(instances_of(kind, self._values()))
            @settings(_LAW, max_examples=25)
            def law(value: Any) -> None:
                encoded = self.app.catalog.encode(value)  # raises if it does not come back equal
                resolved = self.app.catalog.resolve(encoded.type_name, encoded.schema)
                assert resolved is not None
                assert resolved.decode(encoded.body) == encoded.event

            law()

    def test_every_schema_that_was_stored_is_read(self, pytestconfig: pytest.Config) -> None:
        """Every stored body can still be read.

        One body of each schema is in `golden/<app>.events.json`; `pytest --write-golden` adds bodies of new schemas.
        """
        golden = self.golden(f"{self.app.name}.events", pytestconfig)
        golden.check_schemas(self.app.catalog, self._kinds(), lambda kind: _first(instances_of(kind, self._values())))

    def _kinds(self) -> list[type]:
        """Return the events of the application's own aggregates."""
        return list(dict.fromkeys(event_type for cls in self.app.aggregates for event_type in folded_events(cls)))


def _first(strategy: SearchStrategy[Any]) -> Any:
    """Return one value, the same in every run with one version of Hypothesis."""
    values: list[Any] = []

    @given(strategy)
    @settings(derandomize=True, database=None, max_examples=5, deadline=None)
    def collect(value: Any) -> None:
        values.append(value)

    collect()
    return values[-1]


def _argument_hints(title: str, function: Callable[..., Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the annotations of a decision's arguments after the state; those of `*` and `**` as of tuples and dicts.

    Raises `UsageError` for an argument that has to be given and has no annotation.
    """
    _, *parameters = inspect.signature(function).parameters.values()
    argument_hints: dict[str, Any] = {}
    for parameter in parameters:
        name, is_variadic = parameter.name, parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name in hints:
            hint = hints[name]
            variadic_hint = tuple[hint, ...] if parameter.kind is parameter.VAR_POSITIONAL else dict[str, hint]
            argument_hints[name] = variadic_hint if is_variadic else hint
        elif parameter.default is parameter.empty and not is_variadic:
            raise UsageError(
                f"The parameter `{name}` of {title} has no annotation, so no value of it can be made up. Annotate it."
            )
    return argument_hints


def _classes(hint: Any) -> Iterator[Any]:
    """Yield every class in a decision's return annotation, also within unions, lists, tuples and sequences."""
    for member in union_members(hint):
        yield member
        if typing.get_origin(member) in (list, tuple, Sequence):
            for part in typing.get_args(member):
                yield from _classes(part)


def _is_made_by_eventjet(hint: Any) -> bool:
    """Return whether only eventjet makes such values: the recorded events, outcomes and errors given to a process."""
    return any(
        value_type in (Recorded, Outcome) or (isinstance(value_type, type) and issubclass(value_type, BaseException))
        for value_type in (typing.get_origin(member) or member for member in union_members(hint))
    )
