"""Logs that are no longer what they were: rolled back, made again, with holes, and with bits that flipped.

What was lost cannot be had again; what must not be is silence. After each change somebody has to say so: the worker's
status within seconds, or whoever reads the whole log. And a client that has states of before in its cache must not
answer from them.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

from eventjet.codec.records import Decoder
from eventjet.dev.nats import NatsServer
from eventjet.errors import ComponentFailed, EventjetError
from eventjet.jetstream.api import stream_info, update_stream
from eventjet.jetstream.connection import NatsConnection, ask_once
from eventjet.log.integrity import RELY_S
from eventjet.nats.endpoint import Endpoint
from eventjet.rebuild.auditing import audit
from eventjet.rebuild.log_audit import NOTES
from tests.faults.processes import await_it
from tests.faults.tally import Tally, Truth, judge, snapshot, tally_app
from tests.faults.trials.commands import Commands, nothing
from tests.faults.trials.trial import Run, Trial, init, scenario
from tests.faults.trials.verdict import log_of

ENTITIES = 10
NOTICES_S = 20.0
STARTS_S = 90.0
GROWS_S = 300.0
EVENTS = 120


class Past:
    """A log with a worker that has caught up, a client with a warm cache, and a way to change the log behind them."""

    def __init__(self, trial: Trial, server: NatsServer, run: Run) -> None:
        self.trial, self.server, self.run = trial, server, run
        self.name = run.ledger.name
        self.endpoint = Endpoint.of(run.settings)
        self.copy = trial.folder / f"{self.name}-older"

    def api(self, subject: str, body: object = None) -> dict[str, Any]:
        with NatsConnection.open(self.endpoint) as link:
            return link.api(subject, body)

    def configure(self, **changes: object) -> None:
        with NatsConnection.open(self.endpoint) as link:
            stream = link.ask(stream_info(self.name))
            link.ask(update_stream({**stream.config, **changes}))

    def state(self) -> Any:
        return ask_once(self.endpoint, stream_info(self.name))

    def restart_with(self, change: Callable[[Path], None]) -> None:
        """Change the server's data while it does not run."""
        self.server.stop()
        change(self.server.directory / "data")
        self.server.start(STARTS_S)

    def grow(self, last: int) -> None:
        """Have others write until the log has this last position."""
        with Commands(self.run.settings, self.name, self.trial.chance.randrange(1 << 30), writers=4) as commands:
            await_it(lambda: self.state().last >= last, lambda: f"a log of {last} positions", GROWS_S)
            commands.finish()

    def make_again(self, **metadata: str) -> None:
        config = self.state().config
        self.api(f"STREAM.DELETE.{self.name}")
        if metadata:
            self.api(f"STREAM.CREATE.{self.name}", {**config, "metadata": metadata})
        else:
            asyncio.run(init(self.run.ledger))


def older_copy(past: Past) -> None:
    past.restart_with(lambda data: (shutil.rmtree(data), shutil.copytree(past.copy, data)))


def older_copy_grown(past: Past) -> None:
    last = past.state().last
    older_copy(past)
    past.grow(last + 20)


def emptied(past: Past) -> None:
    past.restart_with(shutil.rmtree)


def made_again(past: Past) -> None:
    past.make_again()


def made_again_grown(past: Past) -> None:
    last = past.state().last
    past.make_again()
    past.grow(last)


def same_identity_grown(past: Past) -> None:
    state = past.state()
    past.make_again(**state.metadata)
    past.grow(state.last + 20)


def head_dropped(past: Past) -> None:
    past.configure(discard="old", max_msgs=past.state().last // 2)


def subjects_trimmed(past: Past) -> None:
    past.configure(discard="old", max_msgs_per_subject=1)


def expired(past: Past) -> None:
    past.configure(max_age=1_000_000_000, duplicate_window=1_000_000_000)
    await_it(lambda: past.state().messages == 0, lambda: "an empty stream", GROWS_S)
    past.configure(max_age=0)


def tail_cut(past: Past) -> None:
    def change(data: Path) -> None:
        block = max(path for path in data.rglob("*.blk") if past.name in str(path))
        os.truncate(block, block.stat().st_size * 2 // 3)

    past.restart_with(change)


WAYS = (
    older_copy, older_copy_grown, emptied, made_again, made_again_grown, same_identity_grown, head_dropped,
    subjects_trimmed, expired, tail_cut,
)  # fmt: skip


@scenario("rolled-back")
def rolled_back(trial: Trial) -> None:
    """The log goes back behind a read model and a cache, in ten ways: older copies, streams made
    again, and limits that drop events."""
    for way in WAYS:
        trial.note(f"{way.__name__.replace('_', ' ')}: {changed(trial, way)}")


def flipped(chance: random.Random, data: Path, pattern: str, bits: int) -> None:
    """Flip bits in one block file of the stream whose folder matches; its server does not run."""
    blocks = sorted(path for path in data.rglob("*.blk") if pattern in str(path) and path.stat().st_size)
    path = chance.choice(blocks)
    content = bytearray(path.read_bytes())
    for _ in range(bits):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    if chance.random() < 0.5:
        # Else the server believes its index, and reads a block only when it is asked for it.
        (path.parent / "index.db").unlink(missing_ok=True)


@scenario("bit-flips")
def bit_flips(trial: Trial) -> None:
    """Bits flip in the block files of the log, while the server does not run."""
    for _ in range(trial.options.rounds * 3):
        bits = trial.chance.choice((1, 1, 8, 200))

        def way(past: Past, bits: int = bits) -> None:
            past.restart_with(lambda data: flipped(trial.chance, data, past.name, bits))

        trial.note(f"{bits} bits: {changed(trial, way)}")


def changed(trial: Trial, way: Callable[[Past], None]) -> str:
    """Change a log behind a worker and a cache; return who noticed it, and count wrong answers."""
    with ExitStack() as stack:
        server = stack.enter_context(NatsServer(trial.folder / f"server-{time.monotonic_ns()}"))
        run = Run(trial, (server.url,), None, stack, {"entities": ENTITIES})
        past = Past(trial, server, run)
        run.commands.await_acks(EVENTS // 4)
        server.pause()
        shutil.copytree(server.directory / "data", past.copy)
        server.resume()
        run.commands.await_acks(EVENTS)
        trial.figures.acked += run.commands.acked
        trial.figures.commands += len(run.commands.finish())
        assert run.settled(past.state().last) == ""
        try:
            answers = asyncio.run(_looks(past, way))
        except ComponentFailed as failure:
            return f"the server does not start: {failure.reason}"
        noticed = _noticed(past)
        records = log_of_or_none(past)
        decode = Decoder(run.ledger.catalog)
        if noticed is None:
            events = [
                (event.aggregate_id, event.data) for record in records or [] if (event := decode(record)) is not None
            ]
            verdict = judge(Truth(events), snapshot(run.settings.database))
            noticed = "nobody had to notice" if verdict.right else f"SILENT: {verdict}"
            trial.figures.models += not verdict.right
        trial.figures.wrong += _wrong_answers(past, answers, records)
        if records is None:
            noticed += "; it cannot be read as a whole"
        return f"{noticed}; {sum(isinstance(answer, str) for answer in answers.values())} of {ENTITIES} looks raised"


def log_of_or_none(past: Past) -> list[Any] | None:
    try:
        return log_of(past.endpoint, past.name)
    except EventjetError:
        return None


async def _looks(past: Past, way: Callable[[Past], None]) -> dict[str, int | str]:
    """Return what a client with a warm cache says of each entity after the change: its version, or the error's name."""
    answers: dict[str, int | str] = {}
    async with tally_app(past.name).connect(past.run.settings) as jet:
        tallies = jet.repository(Tally)
        for number in range(ENTITIES):
            await tallies.execute(f"e-{number}", Tally.add, Decimal(number + 1_000_000))
        await asyncio.to_thread(past.run.settled, past.state().last)
        await asyncio.to_thread(way, past)
        # For so long after a load the cache counts; the server's notices of a change may come later.
        await asyncio.sleep(RELY_S)
        for number in range(ENTITIES):
            try:
                answers[f"e-{number}"] = (await tallies.execute(f"e-{number}", nothing)).version
            except EventjetError as error:
                answers[f"e-{number}"] = type(error).__name__
    return answers


def _wrong_answers(past: Past, answers: dict[str, int | str], records: list[Any] | None) -> int:
    """Count answers from a log that is gone. When the log cannot be read as a whole, the server's count is used."""
    if records is None:
        counts = past.api(f"STREAM.INFO.{past.name}", {"subjects_filter": ">"})["state"].get("subjects", {})
    else:
        counts = Counter(record[2].decode() for record in records)
    wrong = 0
    for entity, answer in answers.items():
        stored = counts.get(f"{past.name}.ledger.{entity}", 0)
        if isinstance(answer, int) and answer != stored:
            past.trial.figures.add_problem(f"{entity} is at version {answer} by its cache, and the log has {stored}")
            wrong += 1
    return wrong


def _noticed(past: Past) -> str | None:
    """Return who says that something is wrong, and how soon; None when nobody does."""
    began = time.monotonic()
    while time.monotonic() - began < NOTICES_S:
        try:
            statuses = past.run.statuses()
        except EventjetError as error:
            return f"status raises {type(error).__name__}"
        reasons = [status.reason for status in statuses if status.state == "failed" or status.reason]
        if reasons:
            return f"the worker's status after {time.monotonic() - began:.1f} s: {str(reasons[0])[:160]}"
        time.sleep(0.2)
    try:
        report = asyncio.run(audit(tally_app(past.name), past.run.settings, engine="local"))
    except EventjetError as error:
        return f"`eventjet audit`: {error}"[:240]
    kinds = [f"{finding.kind} ({finding.positions})" for finding in report.findings if finding.kind not in NOTES]
    return f"`eventjet audit`: {', '.join(kinds)}" if kinds else None
