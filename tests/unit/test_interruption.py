"""How signals end the work of commands."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from eventjet.cli import running
from eventjet.cli.running import finished, interruptible, run_until_stopped

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.usefixtures("hang_ups")
@pytest.mark.parametrize("number", ENDING)
def test_a_signal_cancels_the_work_between_its_steps(number: signal.Signals) -> None:
    steps: list[str] = []

    async def beside() -> None:
        signal.raise_signal(number)
        steps.append("the step that the signal came in")

    async def work() -> None:
        other = asyncio.create_task(beside())
        try:
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(number)
            await asyncio.sleep(0)
            await other
            steps.append("the clean-up")

    with interruptible(60) as interruption, pytest.raises(KeyboardInterrupt):
        interruption.run(work())
    assert steps == ["the step that the signal came in", "the clean-up"]


def test_a_signal_interrupts_before_the_work_and_is_ignored_during_the_clean_up() -> None:
    with interruptible(60) as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    with interruptible(60) as interruption:
        interruption.ignore_signals()
        signal.raise_signal(signal.SIGINT)


def test_a_signal_before_the_workers_take_it_ends_them_and_is_no_fault_of_the_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "tune_gc", lambda: None)  # it is for a process of its own
    nowhere: Any = None  # no app is needed where nothing is to be run

    async def work() -> None:
        signal.raise_signal(signal.SIGINT)
        await run_until_stopped(nowhere, [], lambda _: None)

    with interruptible(60) as interruption, pytest.raises(KeyboardInterrupt):
        interruption.run(work())


def test_work_that_does_not_end_is_terminated() -> None:
    hangs = """
import signal, time
from eventjet.cli.running import interruptible
with interruptible(0.1):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        time.sleep(600)
"""
    process = subprocess.run([sys.executable, "-c", hangs], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert process.returncode == 130
    assert process.stderr == "not over within 0.1 s: ended\n"


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback() -> None:
    starts = """
import signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from eventjet.cli.__main__ import run
run()
"""
    process = subprocess.run([sys.executable, "-c", starts], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (process.returncode, process.stderr) == (130, "")


def test_work_that_ended_in_time_is_not_terminated() -> None:
    others = set(threading.enumerate())  # the timer of pytest-timeout among them
    with interruptible(0.05), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    for thread in set(threading.enumerate()) - others:
        thread.join(30)


def test_an_ignored_hang_up_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible(60):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_ups")
@pytest.mark.parametrize("number", ENDING)
def test_interrupted_bulk_work_says_what_was_changed(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work(*, progress: object) -> None:
        del progress
        signal.raise_signal(number)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        finished("Nothing was changed.", work)
    assert capsys.readouterr().err == "Stopping; what was begun is cleared away.\nInterrupted. Nothing was changed.\n"
