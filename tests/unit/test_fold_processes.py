"""Fold processes by themselves: who gets which record, in which order answers come, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from eventjet.codec.headers import RawRecord, void_subject
from eventjet.errors import FoldProcessLost
from eventjet.parallel.process import FoldFailed
from tests.fold_processes import all_ended, fold_processes, fork_servers
from tests.forked import ROOT
from tests.unit.echoing import Echo, Loaded
from tests.unit.folding import BOUND_S, answered, started

SHORT_S = 3.0


def record(position: int, subject: str, body: bytes = b"{}") -> RawRecord:
    return position, position, subject.encode(), b"NATS/1.0\r\n\r\n", body


def test_each_aggregate_is_one_processes_own_in_the_order_of_the_log_and_voids_are_everybodys(mark: str) -> None:
    records = [record(n, f"app.{kind}.id-{n % 7}") for n, kind in enumerate(["one", "other"] * 200, 1)]
    records.insert(100, record(1_000, void_subject("app", 3)))
    with started(4) as processes:
        processes.begin(Echo())
        assert len(set(processes.pids)) == 4
        assert fold_processes(mark) == sorted(processes.pids)
        assert len(fork_servers(mark)) == 1
        for first in range(0, len(records), 50):
            processes.send(records[first : first + 50])
        processes.cut("one")
        shares = answered(processes)
    owners: dict[bytes, set[int]] = {}
    for share, (told, mark_, taken) in enumerate(shares):
        assert (told, mark_) == (share, "one")
        own = [(position, subject) for position, subject in taken if b"._void." not in subject]
        assert own == sorted(own)
        assert [position for position, _ in taken].count(1_000) == 1
        for _, subject in own:
            owners.setdefault(subject.rpartition(b".")[2], set()).add(share)
    assert {len(found) for found in owners.values()} == {1}
    assert len({share for found in owners.values() for share in found}) > 1
    everything = [one for _, _, taken in shares for one in taken if one[0] != 1_000]
    assert sorted(everything) == [(one[0], one[2]) for one in records if one[0] != 1_000]
    assert len(owners) == 7


def test_answers_come_batch_by_batch_and_of_some_processes_where_only_those_are_asked(mark: str) -> None:
    with started(2) as processes:
        processes.begin(Echo())
        for number in range(5):
            processes.cut(number)
        assert [[told[1] for told in answered(processes)] for _ in range(5)] == [[n, n] for n in range(5)]
        assert processes.answers(0.0) is None
        processes.cut("of one", shares=[1])
        found = processes.answers(BOUND_S, shares=[1])
        assert found is not None
        assert [told[:2] for told in found] == [(1, "of one")]


def test_a_batch_may_be_far_larger_than_what_a_socket_holds(mark: str) -> None:
    with started(2) as processes:
        processes.begin(Echo())
        sender = threading.Thread(
            target=lambda: (
                processes.send([record(n, f"a.b.{n}", bytes(100_000)) for n in range(400)]),
                processes.cut(1),
            )
        )
        sender.start()
        assert sum(len(taken) for _, _, taken in answered(processes)) == 400
        sender.join(BOUND_S)


@pytest.mark.parametrize("when", ["load", "begin", "take", "cut"])
def test_a_fault_is_told_with_its_reason_at_every_moment(mark: str, when: str) -> None:
    def work() -> None:
        processes.begin(Echo(fails=when))
        processes.send([record(1, "a.b.c")])
        processes.cut(1)
        answered(processes)

    with pytest.raises(FoldFailed) as failed, started(2, Loaded(fails=when == "load")) as processes:
        work()
    # Where the work has begun it says itself what may be shown.
    assert str(failed.value) == {"load": "no app", "begin": "no begin"}.get(when, f"told: no {when}")


@pytest.mark.parametrize("asked", ["answers", "check"])
def test_a_fault_is_told_though_more_is_sent_after_it(mark: str, asked: str) -> None:
    with started(1) as processes:
        processes.begin(Echo(fails="take"))
        processes.send([record(1, "a.b.c")])
        assert processes._links[0].is_ready(BOUND_S)  # it has told by now
        for position in range(2, 200):
            processes.send([record(position, "a.b.c", b"x" * 10_000)])
        processes.cut(1)
        with pytest.raises(FoldFailed, match="no take"):
            processes.check() if asked == "check" else processes.answers(BOUND_S)


def test_a_reason_has_a_bound(mark: str) -> None:
    with started(1) as processes:
        processes.begin(Echo(fails="cut", reason="x" * 100_000))
        processes.cut(1)
        with pytest.raises(FoldFailed) as failed:
            processes.answers(BOUND_S)
    assert len(str(failed.value)) < 1_000


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("moment", ["made", "begun", "within a batch", "before an answer"])
def test_one_that_is_killed_is_found_lost_at_every_moment(mark: str, which: int, moment: str) -> None:
    def begin() -> None:
        processes.begin(Echo())

    def feed() -> None:
        for number in range(1_000_000):
            processes.send([record(number, f"a.b.{n}", bytes(1_000)) for n in range(100)])

    def ask() -> None:
        processes.cut(1)
        answered(processes)

    with started(2) as processes:
        act: Callable[[], None] = begin
        if moment != "made":
            begin()
            act = feed if moment == "within a batch" else ask
        if moment == "before an answer":
            processes.cut(0)
            answered(processes)
        os.kill(processes.pids[which], signal.SIGKILL)
        with pytest.raises(FoldProcessLost) as lost:
            act()
        assert f"(pid {processes.pids[which]}) was ended by SIGKILL" in str(lost.value)


@pytest.mark.parametrize("moment", ["before it begins", "while records are sent"])
def test_one_that_is_stopped_is_lost_within_the_bound(mark: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventjet.parallel.processes._BEGIN", 1)

    def feed() -> None:
        for number in range(1_000_000):
            processes.send([record(number, f"a.b.{n}", bytes(10_000)) for n in range(100)])

    with started(2, bound_s=SHORT_S) as processes:
        act, told = (lambda: processes.begin(Echo())), "did not begin within 3 s"
        if moment == "while records are sent":
            processes.begin(Echo())
            act, told = feed, "took nothing for 3 s"
        os.kill(processes.pids[1], signal.SIGSTOP)
        with pytest.raises(FoldProcessLost, match=told):
            act()


def test_close_wakes_whoever_waits_or_sends(mark: str) -> None:
    ended: list[str] = []

    def waits() -> None:
        try:
            processes.answers(10 * BOUND_S)
        except FoldProcessLost as lost:
            ended.append(str(lost))

    def sends() -> None:
        try:
            while True:
                processes.send([record(n, f"a.b.{n}", bytes(10_000)) for n in range(100)])
        except FoldProcessLost as lost:
            ended.append(str(lost))

    with started(2) as processes:
        processes.begin(Echo(hangs=True))
        threads = [threading.Thread(target=one) for one in (waits, sends)]
        for one in threads:
            one.start()
        time.sleep(0.2)  # so that they are likely to be blocked; it holds as well when they are not yet
        processes.close()
        for one in threads:
            one.join(BOUND_S)
    assert len(ended) == 2
    assert all("was ended by this process" in one for one in ended)


def test_an_application_that_starts_threads_has_programs_started_instead(mark: str) -> None:
    with started(3, Loaded(threads=True)) as processes:
        processes.begin(Echo())
        processes.cut("all")
        assert [told[0] for told in answered(processes)] == [0, 1, 2]
        assert fold_processes(mark) == sorted(processes.pids)


PARENT = """
import sys, time
from eventjet.parallel.fork_server import ForkServer
from eventjet.parallel.processes import FoldProcesses
from tests.unit.echoing import Echo, Loaded
server = getattr(ForkServer, sys.argv.pop(1))(Loaded())
assert server.is_ready(60.0)
processes = FoldProcesses(server, 3, bound_s=60.0)
processes.begin(Echo(hangs=len(sys.argv) > 1))
if len(sys.argv) > 1:
    processes.cut(1)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("waiting", "forked"),
        ("waiting", "started"),
        ("at work", "forked"),
        ("stopped", "forked"),
        ("stopped", "started"),
    ],
)
def test_they_end_when_the_process_that_made_them_is_killed(mark: str, how: str, kind: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kind, *(["hangs"] if how == "at work" else [])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            assert len(fold_processes(mark)) == 3
            pids = fold_processes(mark) + fork_servers(mark)
            if how == "stopped":
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
        finally:
            parent.kill()
    if how == "stopped":
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
    assert all_ended(mark)
