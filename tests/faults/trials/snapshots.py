"""Snapshots whose bits flip: no decision sees a state that differs from the log."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from eventjet import App, aggregate, event
from eventjet.dev.nats import NatsServer
from eventjet.errors import EventjetError
from tests.faults.trials.pasts import flipped
from tests.faults.trials.trial import Trial, scenario
from tests.logs import fresh_name

COUNTERS = 20
LENGTH = 17


@event("counter.counted")
class Counted:
    by: int


@aggregate("counter", snapshot_every=5)
class Counter:
    events: int = 0
    total: int = 0
    note: str = "as long as a state usually is, so that most of what flips is in it"

    def count(self, by: int) -> Counted:
        return Counted(by=by)

    def evolve(self, event: Counted) -> Counter:
        return replace(self, events=self.events + 1, total=self.total + event.by)


@scenario("bit-flips-snapshots")
def bit_flips_snapshots(trial: Trial) -> None:
    """Bits flip in the block files of the snapshots, while the server does not run."""
    app = App(fresh_name("counted"), aggregates=[Counter])
    server = trial.stack.enter_context(NatsServer())
    truth = asyncio.run(_filled(app, server.url, trial))
    data = server.directory / "data"
    for _ in range(trial.options.rounds * 3):
        bits = trial.chance.choice((1, 8, 200))
        server.stop()
        files = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
        flipped(trial.chance, data, f"KV_{app.name}", bits)
        server.start()
        loaded = asyncio.run(_loaded(app, server.url))
        wrong = [counter for counter, state in loaded.items() if state is not None and state != truth[counter]]
        trial.figures.wrong += len(wrong)
        for counter in wrong:
            trial.figures.add_problem(f"{counter} is loaded as {loaded[counter]}, and the log gives {truth[counter]}")
        raised = sum(state is None for state in loaded.values())
        trial.note(
            f"{bits} bits: {len(loaded) - raised - len(wrong)} of {COUNTERS} states right, {raised} loads raised"
        )
        server.stop()
        for path, content in files.items():
            path.write_bytes(content)
        server.start()


async def _filled(app: App, url: str, trial: Trial) -> dict[str, Counter]:
    truth: dict[str, Counter] = {}
    async with app.connect(servers=url) as jet:
        await jet.init()
        counters = jet.repository(Counter)
        for _ in range(LENGTH):
            for number in range(COUNTERS):
                done = await counters.execute(f"c-{number}", Counter.count, trial.chance.randrange(100))
                truth[f"c-{number}"] = done.state
                trial.figures.acked += 1
    trial.figures.commands = trial.figures.acked
    return truth


async def _loaded(app: App, url: str) -> dict[str, Counter | None]:
    """Return every state as a new process loads it; None when that raises."""
    states: dict[str, Counter | None] = {}
    async with app.connect(servers=url) as jet:
        counters = jet.repository(Counter)
        for number in range(COUNTERS):
            try:
                states[f"c-{number}"] = await counters.load(f"c-{number}")
            except EventjetError:
                states[f"c-{number}"] = None
    return states
