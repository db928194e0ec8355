"""A higher revision of a process advances each waiting process once."""

from __future__ import annotations

import logging
import sys
import types
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from eventjet import App, Deadline, Imported, Jet, NotSettled, Step, after, aggregate, do, event, process
from eventjet.dev.nats import NatsServer
from eventjet.settings import Settings
from eventjet.subscriptions.cursor import Cursor
from eventjet.subscriptions.cursor_store import Cursors
from eventjet.subscriptions.status import status
from tests.integration.reacting import eventually, until, working
from tests.logs import fresh_name


@event("parcel.sent")
class Sent:
    pass


@event("parcel.noted")
class Noted:
    pass


@event("parcel.lapsed")
class Lapsed:
    pass


@event("mail.asked")
class Asked:
    pass


@aggregate("mail")
class Mail:
    count: int = 0

    def ask(self) -> Asked:
        return Asked()

    def evolve(self, event: Asked) -> Mail:
        return replace(self, count=self.count + 1)


@dataclass
class Code:
    """The behaviour of a release, and how often its step was called."""

    lapses_s: float | None = None
    mails: bool = False
    breaks: bool = False
    breaks_at: int = 0
    """The step fails for processes with this number of events."""
    cannot_lapse_at: int = 0
    """The deadline fails for processes with this number of events."""
    asked: Counter[int] = field(default_factory=Counter[int])
    """Calls of the step, by the number of events of the process."""


SOURCE = """
from __future__ import annotations

@process("parcel", revision={revision})
class Parcel:
    events: int = 0
    lapsed: bool = False

    def send(self) -> Sent:
        return Sent()

    def note(self) -> Noted:
        return Noted()

    def lapse(self) -> Lapsed:
        if code.cannot_lapse_at == self.events:
            raise ConnectionRefusedError("what it needs is away")
        return Lapsed()

    def step(self) -> Step[Parcel, Lapsed] | None:
        code.asked[self.events] += 1
        if code.breaks_at == self.events:
            raise ConnectionRefusedError("what it asks is away")
        if code.breaks:
            raise RuntimeError("the new release is broken")
        return do(Mail, "m", Mail.ask).then(Parcel.lapse) if code.mails and not self.lapsed else None

    def deadline(self) -> Deadline[Parcel, Lapsed] | None:
        if code.lapses_s is None or self.lapsed:
            return None
        return after(timedelta(seconds=code.lapses_s), Parcel.lapse)

    def evolve(self, event: Sent | Noted | Lapsed) -> Parcel:
        return replace(self, events=self.events + 1, lapsed=isinstance(event, Lapsed))
"""


def app_of(name: str, revision: int, code: Code) -> tuple[App, Any]:
    """Return a release as an app and its process, in a module of its own."""
    module = types.ModuleType(f"{name}_{revision}_{id(code)}")
    sys.modules[module.__name__] = module
    names = [Asked, Deadline, Lapsed, Mail, Noted, Sent, Step, after, do, process, replace, timedelta]
    module.__dict__.update({item.__name__: item for item in names}, code=code)
    exec(SOURCE.format(revision=revision), module.__dict__)
    parcel = module.__dict__["Parcel"]
    return App(name, aggregates=[Mail], processes=[parcel]), parcel


@pytest.fixture
def settings(eventjet_nats: NatsServer) -> Settings:
    return Settings(servers=(eventjet_nats.url,), database="postgresql://nobody@127.0.0.1:1/nothing")


@pytest.fixture
async def name(settings: Settings) -> str:
    """Create three parcels, the first with two events, the others with one; return the name of the app."""
    app, parcel = app_of(fresh_name(), 1, Code())
    async with app.connect(settings) as jet:
        await jet.init()
        parcels = jet.repository(parcel)
        async with working(app, settings):
            for parcel_id in ("a", "b", "c"):
                await parcels.execute(parcel_id, parcel.send)
            await parcels.execute("a", parcel.note)
            await eventually(lambda: stands_at(jet, 4))
    return app.name


async def stands_at(jet: Jet, position: int) -> bool:
    assert jet.client is not None
    cursor = (await Cursors(jet.client, jet.name).read("parcel")).cursor
    return cursor.position >= position and cursor.waking is None


async def has_revision(jet: Jet, revision: int) -> bool:
    assert jet.client is not None
    return (await Cursors(jet.client, jet.name).read("parcel")).cursor.revision == revision


async def is_lapsed(jet: Jet, parcel: Any, parcel_id: str) -> bool:
    return (await jet.repository(parcel).load(parcel_id)).lapsed


async def are_lapsed(jet: Jet, parcel: Any, parcel_ids: Sequence[str]) -> bool:
    return all([await is_lapsed(jet, parcel, parcel_id) for parcel_id in parcel_ids])


async def all_lapsed(jet: Jet, parcel: Any) -> bool:
    return await are_lapsed(jet, parcel, ("a", "b", "c"))


@pytest.mark.parametrize("code", [Code(lapses_s=0.5), Code(mails=True)], ids=["a deadline", "a step"])
async def test_steps_and_deadlines_of_a_new_revision_apply_to_waiting_processes(
    name: str, settings: Settings, code: Code
) -> None:
    app, parcel = app_of(name, 2, code)
    async with app.connect(settings) as jet, working(app, settings):
        await eventually(lambda: all_lapsed(jet, parcel))
        assert (await jet.repository(Mail).load("m")).count == (3 if code.mails else 0)


async def test_a_nearer_deadline_of_a_new_revision_replaces_the_farther_one(name: str, settings: Settings) -> None:
    for revision, lapses_s in ((2, 3_600.0), (3, 0.5)):
        app, parcel = app_of(name, revision, Code(lapses_s=lapses_s))
        async with app.connect(settings) as jet, working(app, settings):
            if revision == 2:
                await eventually(lambda jet=jet: stands_at(jet, 4))
                assert not await all_lapsed(jet, parcel)
            else:
                await eventually(lambda jet=jet, parcel=parcel: all_lapsed(jet, parcel))


async def test_a_process_is_advanced_once_for_each_new_revision(name: str, settings: Settings) -> None:
    unchanged, new = Code(), Code()
    for revision, code in ((1, unchanged), (2, new), (2, new)):
        app, _ = app_of(name, revision, code)
        async with app.connect(settings) as jet, working(app, settings):
            await eventually(lambda jet=jet: stands_at(jet, 4))
    assert unchanged.asked == {}
    assert new.asked == {2: 1, 1: 2}


async def test_older_code_stands_by_once_a_newer_revision_runs(name: str, settings: Settings) -> None:
    old, new = Code(), Code(lapses_s=0.5)
    old_app, _ = app_of(name, 1, old)
    app, parcel = app_of(name, 2, new)
    async with app.connect(settings) as jet:
        async with working(app, settings), working(old_app, settings):
            await eventually(lambda: all_lapsed(jet, parcel))
        assert old.asked == {}


async def test_older_code_that_alone_is_left_says_why_it_stands_by_and_how_it_goes_on(
    name: str, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    before, parcel = app_of(name, 1, Code())
    app, _ = app_of(name, 2, Code())
    async with before.connect(settings) as jet:
        async with working(app, settings):
            await eventually(lambda: has_revision(jet, 2))
            (beside,) = await status(before, settings)
            assert beside.reason is None, "while the newer code works, nothing is wrong"
        async with working(before, settings):
            await until(lambda: "declare that with revision=3" in caplog.text)
            await jet.repository(parcel).execute("d", parcel.send)
            with pytest.raises(NotSettled, match="Start workers of the release with revision 2") as raised:
                await jet.settled(parcel, "d", timeout_s=0.1, until=lambda _: False)
            assert "no worker runs" not in str(raised.value)
            (alone,) = await status(before, settings)
        assert alone.condition.word == "waiting"
        assert "revision 2 of its code had it last, and workers of revision 1 stand by" in str(alone.reason)
        assert caplog.text.count("declare that with revision=3") == 1
        back, _ = app_of(name, 3, Code())
        async with working(back, settings):
            await eventually(lambda: stands_at(jet, 5))
        (again,) = await status(back, settings)
        assert again.reason is None


async def test_older_code_says_besides_the_fault_of_the_newer_that_it_stands_by(name: str, settings: Settings) -> None:
    before, _ = app_of(name, 1, Code())
    async with before.connect(settings) as jet:
        assert jet.client is not None
        cursors = Cursors(jet.client, name)
        stored = await cursors.read("parcel")
        await cursors.write(stored, stored.cursor.taken("new", 2).failed("it is broken."))
        (stopped,) = await status(before, settings)
        assert stopped.condition.word == "stopped"
        assert str(stopped.reason).startswith("it is broken. Besides, revision 2 of its code had it last")


async def test_an_error_of_new_code_is_retried_and_blocks_no_other_process(name: str, settings: Settings) -> None:
    code = Code(breaks=True)
    app, parcel = app_of(name, 2, code)
    async with app.connect(settings) as jet:
        assert jet.client is not None
        cursors = Cursors(jet.client, name)
        async with working(app, settings):
            await until(lambda: sum(code.asked.values()) >= 3)
            code.breaks = False
            await eventually(lambda: stands_at(jet, 4))
            await jet.repository(parcel).execute("d", parcel.send)
            await eventually(lambda: stands_at(jet, 5))
        assert await cursors.quarantined("parcel") == []  # the next try succeeded


@pytest.mark.parametrize("stuck", [1, 20])
async def test_processes_that_keep_failing_block_no_other_process(settings: Settings, stuck: int) -> None:
    name, stuck_ids, others = fresh_name(), [f"s-{n}" for n in range(stuck)], [f"p-{n}" for n in range(40)]
    last = 2 * len(stuck_ids) + len(others)
    app, parcel = app_of(name, 1, Code())
    async with app.connect(settings) as jet:
        await jet.init()
        async with working(app, settings):
            for parcel_id in stuck_ids:
                await jet.repository(parcel).execute(parcel_id, parcel.send)
                await jet.repository(parcel).execute(parcel_id, parcel.note)
            for parcel_id in others:
                await jet.repository(parcel).execute(parcel_id, parcel.send)
            await eventually(lambda: stands_at(jet, last))
    code = Code(mails=True, breaks_at=2)
    app, parcel = app_of(name, 2, code)
    async with app.connect(settings) as jet:
        assert jet.client is not None
        cursors = Cursors(jet.client, name)
        async with working(app, settings):
            await eventually(lambda: are_lapsed(jet, parcel, others))
            assert code.asked[2] > 0
            assert not await are_lapsed(jet, parcel, stuck_ids)
            waking = (await cursors.read("parcel")).cursor.waking
            assert waking is not None
            assert waking[0] < 2, "whoever goes on begins with the first one that is left"
            code.breaks_at = 0
            await eventually(lambda: are_lapsed(jet, parcel, stuck_ids))
            await eventually(lambda: stands_at(jet, last))


async def test_failing_deadlines_delay_no_deadline_of_another_process(settings: Settings) -> None:
    code = Code(lapses_s=0.05, cannot_lapse_at=1)
    app, parcel = app_of(fresh_name(), 1, code)
    stuck_ids = [f"p-{n}" for n in range(20)]
    async with app.connect(settings) as jet:
        await jet.init()
        async with working(app, settings):
            for parcel_id in stuck_ids:
                await jet.repository(parcel).execute(parcel_id, parcel.send)
            assert jet.client is not None
            cursors = Cursors(jet.client, app.name)

            async def all_wait() -> bool:
                return "(and 19 more wait)" in str((await cursors.read("parcel")).cursor.reason)

            await eventually(all_wait)
            await jet.repository(parcel).execute("free", parcel.send)
            await jet.repository(parcel).execute("free", parcel.note)
            await eventually(lambda: is_lapsed(jet, parcel, "free"))
            assert not await are_lapsed(jet, parcel, stuck_ids[:1])
            code.cannot_lapse_at = 0
            await eventually(lambda: are_lapsed(jet, parcel, stuck_ids))


def test_an_interrupted_pass_continues_and_a_higher_revision_begins_again() -> None:
    cursor = Cursor("parcel", "process", "log", 70, "id", ((75, 80),), revision=1).taken("one", 2)
    assert cursor.waking == (0, 80)
    resumed = Cursor.decoded(cursor.moved(90, "id", (), (40, 80)).encoded())
    assert resumed.taken("two", 2).waking == (40, 80)
    assert resumed.taken("two", 3).waking == (0, 90)
    assert Cursor("letters", "reactor", "log", 70, revision=1).taken("one", 2).waking is None


def test_the_first_revision_wakes_no_earlier_process() -> None:
    first = Cursor("parcel", "process", "log", 70, began=70).taken("one", 3)
    assert (first.waking, first.revision) == (None, 3)


def test_a_higher_revision_wakes_only_processes_that_a_revision_followed() -> None:
    first = Cursor("parcel", "process", "log", 70, began=70).taken("one", 3)
    later = Cursor.decoded(first.moved(90, "id", ()).encoded())
    assert later.taken("one", 4).waking == (70, 90)
    assert later.set_to("log", 80, "id").taken("one", 4).waking == (70, 80)
    assert later.set_to("log", 50, "id").moved(90, "id", ()).taken("one", 4).waking == (50, 90)
    assert later.taken("one", 4).set_to("restored", 80, "id").waking == (70, 80)


async def test_processes_from_before_the_first_start_are_not_woken_by_a_higher_revision(settings: Settings) -> None:
    name = fresh_name()
    app, parcel = app_of(name, 1, Code())
    async with app.connect(settings) as jet:
        await jet.init()
        assert jet.client is not None
        cursors = Cursors(jet.client, name)
        await cursors.drop(await cursors.read("parcel"), ())
        for parcel_id in ("old", "both"):
            await jet.repository(parcel).execute(parcel_id, parcel.send)
        await jet.init()
        async with working(app, settings):
            for parcel_id in ("both", "new"):
                await jet.repository(parcel).execute(parcel_id, parcel.note)
            await eventually(lambda: stands_at(jet, 4))
    code = Code(mails=True)
    app, parcel = app_of(name, 2, code)
    async with app.connect(settings) as jet, working(app, settings):
        await eventually(lambda: are_lapsed(jet, parcel, ("both", "new")))
        await eventually(lambda: stands_at(jet, 4))
        assert not await is_lapsed(jet, parcel, "old")
        assert (await jet.repository(Mail).load("m")).count == 2


async def test_a_process_that_starts_with_a_higher_revision_ignores_earlier_events(
    settings: Settings,
) -> None:
    code = Code(mails=True)
    app, parcel = app_of(fresh_name(), 3, code)
    async with app.connect(settings) as jet:
        await jet.init()
        assert jet.client is not None
        cursors = Cursors(jet.client, app.name)
        await cursors.drop(await cursors.read("parcel"), ())
        await jet.repository(parcel).execute("old", parcel.send)
        await jet.init()
        async with working(app, settings):
            await jet.repository(parcel).execute("new", parcel.send)
            await eventually(lambda: is_lapsed(jet, parcel, "new"))
        assert not await is_lapsed(jet, parcel, "old")
        assert code.asked[1] == 1


async def test_a_new_revision_ignores_imported_processes(settings: Settings) -> None:
    name = fresh_name()
    app, parcel = app_of(name, 1, Code())
    async with app.connect(settings) as jet:
        await jet.init()
        await jet.append_many([Imported(parcel, f"i-{n}", Sent()) for n in range(3)], source="old-shop")
        await jet.repository(parcel).execute("own", parcel.send)
        async with working(app, settings):
            await eventually(lambda: stands_at(jet, 4))
    app, parcel = app_of(name, 2, Code(mails=True, lapses_s=0.1))
    async with app.connect(settings) as jet, working(app, settings):
        await eventually(lambda: is_lapsed(jet, parcel, "own"))
        await eventually(lambda: stands_at(jet, 4))
        assert not any([await is_lapsed(jet, parcel, f"i-{n}") for n in range(3)])
        assert (await jet.repository(Mail).load("m")).count == 1
