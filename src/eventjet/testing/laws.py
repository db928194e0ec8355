"""Laws: what must be so of every aggregate, projection and event, tried with histories that Hypothesis writes.

A test class names what it is about; its tests are inherited:

    class TestAccount(AggregateLaws):
        aggregate = Account

Histories hold the declared events in any order with any values of their annotations: a fold never refuses, whatever
happened. What is found is shrunk to the shortest history that shows it.
"""

from __future__ import annotations

import inspect
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy

from eventjet.codec.catalog import Catalog
from eventjet.domain.aggregate import aggregate_info
from eventjet.domain.history import FoldedState
from eventjet.domain.recorded import Recorded
from eventjet.domain.subscription import folded_events, union_members
from eventjet.errors import HandlerFailed, RowRefused, UsageError
from eventjet.projections.app_ref import Application, Declared
from eventjet.repository.decisions import recorded_events
from eventjet.snapshots.snapshot import SnapshotCodec
from eventjet.testing.golden import Golden
from eventjet.testing.read_model import ReadModelCase, read_model_case, resolved_alone
from eventjet.testing.scenarios import folded, left_as_they_are
from eventjet.testing.strategies import instances_of, values_of

_LAW = settings(
    deadline=None,
    max_examples=50,
    # One inherited test is run for every class of laws.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
_EVENTS_MAX = 12
_AGGREGATES = ("a-1", "a-2", "a-3")
_START = datetime(2026, 1, 1, tzinfo=UTC)


class Laws:
    """What the classes of laws share."""

    strategies: ClassVar[Mapping[Any, SearchStrategy[Any]]] = {}
    """Type → strategy, for types that nothing is known of, or whose values need care."""

    def golden(self, name: str, pytestconfig: pytest.Config) -> Golden:
        """What an earlier run wrote down, in a folder `golden` beside the file of the test class."""
        folder = Path(inspect.getfile(type(self))).parent / "golden"
        return Golden(folder / f"{name}.json", write=bool(pytestconfig.getoption("--write-golden")))


class AggregateLaws(Laws):
    """An aggregate folds every history, snapshots change nothing, and decisions leave alone what they are given.

    ```python
    class TestAccount(AggregateLaws):
        aggregate = Account
    ```
    """

    aggregate: ClassVar[Any]
    """The class decorated with `@aggregate`."""

    @given(data=st.data())
    @_LAW
    def test_evolve_takes_every_history(self, data: DataObject) -> None:
        """It raises nothing, returns its own type, and changes neither state nor event."""
        self._fold(self._history(data))

    @given(data=st.data())
    @_LAW
    def test_a_snapshot_and_the_events_after_it_are_the_whole_history(self, data: DataObject) -> None:
        """The state survives JSON at every cut, and goes on from there as if there had been none."""
        if aggregate_info(self.aggregate).snapshot_every is None:
            pytest.skip(f"{self.aggregate.__qualname__} keeps no snapshots")
        history, codec = self._history(data), SnapshotCodec[Any](self.aggregate)
        whole = self._fold(history)
        cut = data.draw(st.integers(0, len(history)))
        before = self._fold(history[:cut])
        value = codec.encode(FoldedState(before, cut, cut, "id"))
        assert value is not None, f"the state {before!r} would not come back equal from a snapshot"
        kept = codec.decode(value)
        assert kept is not None
        assert self._fold(history[cut:], kept.state) == whole, f"the snapshot after {cut} events changes the state"

    @given(data=st.data())
    @_LAW
    def test_decisions_leave_alone_what_they_are_given(self, data: DataObject) -> None:
        """On every state, with any arguments; an error of the domain is an answer too."""
        decisions = self._decisions()
        if not decisions:
            pytest.skip(f"{self.aggregate.__qualname__} has no method that is annotated to return its events")
        state = self._fold(self._history(data))
        name, decide, hints = data.draw(st.sampled_from(decisions), label="decision")
        arguments = {
            each: data.draw(values_of(hint, f"{name}({each})", self.strategies), label=each)
            for each, hint in hints.items()
        }
        with left_as_they_are(name, state, *arguments.values()):
            try:
                events = recorded_events(decide(state, **arguments))
            except UsageError:
                raise
            except Exception:  # noqa: BLE001 - a refusal, in the application's own words
                events = ()
        folded(state, events, self._catalog())

    def test_what_was_folded_once_folds_to_the_same(self, pytestconfig: pytest.Config) -> None:
        """A fold that changes its mind raises `revision`, which makes snapshots of the old one worthless.

        Histories and their states are in `golden/<aggregate>.json`, written by `pytest --write-golden`.
        """
        info, catalog = aggregate_info(self.aggregate), self._catalog()
        golden = self.golden(info.name, pytestconfig)
        golden.check_folds(info.revision, catalog, self._histories(), lambda events: repr(self._fold(events)))

    def _catalog(self) -> Catalog:
        return Catalog(folded_events(self.aggregate))

    def _history(self, data: DataObject) -> list[Any]:
        history = data.draw(st.lists(self._event(), max_size=_EVENTS_MAX), label="history")
        note(f"history: {history!r}")
        return history

    def _event(self) -> SearchStrategy[Any]:
        return st.one_of([instances_of(each, self.strategies) for each in folded_events(self.aggregate)])

    def _histories(self) -> list[list[Any]]:
        """The same for every run of this version of Hypothesis; what is compared is in the golden file."""
        found: list[list[Any]] = []

        @given(st.lists(self._event(), min_size=1, max_size=_EVENTS_MAX))
        @settings(derandomize=True, database=None, max_examples=20, deadline=None)
        def collect(history: list[Any]) -> None:
            found.append(history)

        collect()
        return found

    def _fold(self, history: Sequence[Any], state: Any = None) -> Any:
        return folded(self.aggregate() if state is None else state, history, self._catalog())

    def _decisions(self) -> list[tuple[str, Callable[..., Any], dict[str, Any]]]:
        """(name, function, arguments' annotations) of the methods that are annotated to return events."""
        events = set(folded_events(self.aggregate))
        found: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []
        members = cast("Mapping[str, Any]", vars(self.aggregate))
        for name, function in members.items():
            if name.startswith("_") or name == "evolve" or not inspect.isfunction(function):
                continue
            hints = typing.get_type_hints(function, include_extras=True)
            if events & set(_classes(hints.pop("return", None))):
                found.append((f"{self.aggregate.__qualname__}.{name}", function, hints))
        return found


class ProjectionLaws(Laws):
    """A read model is the same however the log is cut into batches, live as in a rebuild.

    ```python
    class TestBalances(ProjectionLaws):
        projection = balances
    ```
    """

    projection: ClassVar[Declared]

    def test_every_way_to_read_the_log_gives_the_same_rows(self) -> None:
        """One by one, in batches as a worker writes them into SQLite, and in one pass as a rebuild does.

        Values that a column cannot hold are passed over: a worker stops there, and says so.
        """
        with read_model_case(resolved_alone(type(self).projection)) as case:

            @given(st.data())
            @settings(_LAW, max_examples=25)
            def law(data: DataObject) -> None:
                self._hold(case, data)

            law()

    def _hold(self, case: ReadModelCase, data: DataObject) -> None:
        log = self._log(data, case)
        ends = data.draw(st.lists(st.integers(1, max(len(log), 1)), max_size=4), label="batches end at")
        try:
            one_by_one = case.written(log, range(1, len(log) + 1))
        except HandlerFailed as error:
            if isinstance(error.__cause__, RowRefused):
                reject()
            raise
        in_batches = case.written(log, [end for end in ends if end <= len(log)])
        assert in_batches == one_by_one, "the rows depend on how the log is cut into batches"
        assert case.in_one_pass(log) == one_by_one, "a rebuild gives other rows than a worker"

    def _log(self, data: DataObject, case: ReadModelCase) -> list[Recorded[Any]]:
        event = st.one_of([instances_of(each, self.strategies) for each in case.events])
        drawn = data.draw(st.lists(st.tuples(st.sampled_from(_AGGREGATES), event), max_size=_EVENTS_MAX), label="log")
        note(f"log: {drawn!r}")
        versions = Counter[str]()
        log: list[Recorded[Any]] = []
        for position, (aggregate_id, each) in enumerate(drawn, 1):
            versions[aggregate_id] += 1
            number, at = versions[aggregate_id], _START + timedelta(minutes=position)
            log.append(Recorded(each, aggregate_id, number, position, at, f"{aggregate_id}-{number}"))
        return log


class CodecLaws(Laws):
    """Every event comes back equal from the wire, in every schema that was ever stored.

    ```python
    class TestEvents(CodecLaws):
        app = bank
    ```
    """

    app: ClassVar[Application]

    @given(data=st.data())
    @_LAW
    def test_what_is_stored_comes_back_equal(self, data: DataObject) -> None:
        catalog = self.app.catalog
        kind = data.draw(st.sampled_from(self._kinds()), label="event")
        value = data.draw(instances_of(kind, self.strategies), label="value")
        encoded = catalog.encode(value)
        resolved = catalog.resolve(encoded.type_name, encoded.schema)
        assert resolved is not None
        assert resolved.decode(encoded.body) == encoded.event

    def test_every_schema_that_was_stored_is_read(self, pytestconfig: pytest.Config) -> None:
        """One body of each schema is in `golden/<app>.events.json`; `pytest --write-golden` adds those of new ones."""
        golden = self.golden(f"{self.app.name}.events", pytestconfig)
        golden.check_schemas(self.app.catalog, self._kinds(), lambda kind: _first(instances_of(kind, self.strategies)))

    def _kinds(self) -> list[type]:
        """The application's own events."""
        return list(dict.fromkeys(each for cls in self.app.aggregates for each in folded_events(cls)))


def _first(strategy: SearchStrategy[Any]) -> Any:
    """One value, the same for every run of this version of Hypothesis."""
    found: list[Any] = []

    @given(strategy)
    @settings(derandomize=True, database=None, max_examples=5, deadline=None)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found[-1]


def _classes(hint: Any) -> Iterator[Any]:
    """Every class in the annotation of what a decision returns: of unions, lists and tuples."""
    for member in union_members(hint):
        yield member
        for part in typing.get_args(member):
            yield from _classes(part)
