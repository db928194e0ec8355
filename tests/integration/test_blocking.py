"""`App.connect_blocking` does what `Jet` does, for threads, forks and code without `await`."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from eventjet import (
    App,
    BlockingCommand,
    BlockingJet,
    BlockingRepository,
    Command,
    Imported,
    Jet,
    Metadata,
    NotCaughtUp,
    OutcomeUnknown,
    Repository,
    Unreachable,
    with_metadata,
)
from eventjet.dev.nats import NatsServer
from eventjet.errors import CommandReused, EventjetError, UsageError
from eventjet.examples.bank.account import Account, Deposited, InsufficientFunds, Opened
from eventjet.examples.bank.app import bank, withdrawn_has_a_reason
from tests.logs import fresh_name

ROOT = Path(__file__).parents[2]
BOUND_S = 120.0
ASYNC_ONLY = {"service", "close", "run", "forget", "decode", "masked", "reader"}
"""Methods without a blocking version: serving, which is a whole program, `close`, and internal methods."""


@pytest.fixture
def app() -> App:
    return App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])


@pytest.fixture(params=["server", "memory"])
def jet(request: pytest.FixtureRequest, app: App, eventjet_nats: NatsServer) -> Iterator[BlockingJet]:
    in_memory = request.param == "memory"
    with app.in_memory_blocking() if in_memory else app.connect_blocking(servers=eventjet_nats.url) as jet:
        if not in_memory:
            jet.init()
        yield jet


def program(text: str, server: NatsServer, **options: Any) -> subprocess.Popen[str]:
    """Start a user's program beside a server, with every warning as an error."""
    code = textwrap.dedent(text)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "EVENTJET_SERVERS": server.url, "PATH": ""},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("blocking", "awaited"), [(BlockingJet, Jet), (BlockingRepository, Repository), (BlockingCommand, Command)]
)
def test_every_async_method_has_a_blocking_one_with_its_parameters_and_docstring(blocking: Any, awaited: Any) -> None:
    def public(owner: Any) -> set[str]:
        return {name for name, method in vars(owner).items() if name[0] != "_" and inspect.isfunction(method)}

    assert public(blocking) - {"close"} == public(awaited) - ASYNC_ONLY
    for name in public(awaited) - ASYNC_ONLY:
        blocking_method, async_method = getattr(blocking, name), getattr(awaited, name)
        signature = inspect.signature(blocking_method)
        assert not inspect.iscoroutinefunction(blocking_method)
        assert signature.parameters == inspect.signature(async_method).parameters, name
        if not str(signature.return_annotation).startswith("Blocking"):  # these objects are made without a request
            assert (signature, blocking_method.__doc__) == (inspect.signature(async_method), async_method.__doc__), name


@pytest.mark.parametrize("name", ["connect", "in_memory"])
def test_blocking_connections_take_the_arguments_of_async_ones(name: str) -> None:
    blocking_parameters = inspect.signature(getattr(App, f"{name}_blocking")).parameters
    async_parameters = dict(inspect.signature(getattr(App, name)).parameters)
    async_parameters.pop("client", None)  # an open client of nats-py belongs to another loop
    assert blocking_parameters == async_parameters


def test_a_blocking_connection_does_what_an_async_one_does(jet: BlockingJet) -> None:
    accounts = jet.repository(Account)
    accounts.execute("a", Account.open, "ada")
    once = accounts.command("c-1", metadata=Metadata(actor="ada"))
    done = once.execute("a", Account.deposit, Decimal(10))
    assert once.execute("a", Account.deposit, Decimal(10)) == done
    with pytest.raises(CommandReused):
        once.execute("a", Account.deposit, Decimal(11))
    with pytest.raises(InsufficientFunds):
        accounts.execute("a", Account.withdraw, Decimal(11))
    paid, received = jet.transact(
        accounts.command("c-2").decide("a", Account.withdraw, Decimal(4)),
        accounts.command("c-2").decide("b", Account.deposit, Decimal(4)),
    )
    assert (paid.state.balance, received.state.balance) == (Decimal(6), Decimal(4))
    assert (accounts.load("a").balance, accounts.load("a", version=2).balance) == (Decimal(6), Decimal(10))
    with with_metadata(Metadata(actor="cyd")):  # in this thread's context
        accounts.execute("a", Account.deposit, Decimal(1))
    assert [event.metadata.actor for event in accounts.history("a", after=1)] == ["ada", None, "cyd"]
    report = jet.append_many([Imported(Account, "c", Opened(owner="cyd"))], source="old")
    assert report.stored == 1
    assert [event.position for event in jet.tail()] == [1, 2, 3, 4, 5, 6] == list(range(1, jet.log().last + 1))
    with pytest.raises(UsageError, match="limit"):
        next(jet.tail(limit=-1))


def test_a_command_ignores_an_argument(jet: BlockingJet) -> None:
    once = jet.repository(Account).command("c-1", ignoring=("amount",))
    assert once.execute("a", Account.deposit, Decimal(1)) == once.execute("a", Account.deposit, Decimal(2))


def test_caught_up_waits_for_a_read_model() -> None:
    with bank.in_memory_blocking() as jet:
        done = jet.repository(Account).execute("a", Account.open, "ada")
        jet.caught_up("balances", position=done.position)
        jet.caught_up("balances", token=done.token)
        with pytest.raises(NotCaughtUp):
            jet.caught_up("balances", position=done.position + 1)


def test_threads_share_a_connection(jet: BlockingJet) -> None:
    accounts = jet.repository(Account)  # not connected yet: the threads do that, too

    def deposit(number: int) -> None:
        for _ in range(5):
            accounts.execute("shared", Account.deposit, Decimal(1))
            accounts.execute(f"own-{number}", Account.deposit, Decimal(1))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(deposit, range(16)))
    assert accounts.load("shared").balance == 80
    assert [accounts.load(f"own-{number}").balance for number in range(16)] == [5] * 16


def test_a_tail_follows_in_a_thread_and_ends_with_its_loop(jet: BlockingJet) -> None:
    accounts = jet.repository(Account)
    aggregate_ids: list[str] = []

    def follow() -> None:
        for recorded in jet.tail(follow=True):
            aggregate_ids.append(recorded.aggregate_id)
            if len(aggregate_ids) == 3:
                break

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    for name in "abc":
        accounts.execute(name, Account.open, name)
    thread.join(BOUND_S)
    assert aggregate_ids == ["a", "b", "c"]
    assert accounts.load("a").owner == "a"


async def test_a_thread_with_a_running_loop_is_refused_with_the_alternatives(app: App) -> None:
    jet = app.in_memory_blocking()
    uses = [jet.__enter__, jet.log, jet.close, lambda: next(jet.tail()), lambda: jet.repository(Account).load("a")]
    for use in uses:
        with pytest.raises(UsageError, match=r"event loop runs in this thread.*Use `connect`.*to_thread"):
            use()
    assert (await asyncio.to_thread(jet.log)).last == 0
    await asyncio.to_thread(jet.close)


def test_a_decision_that_calls_the_connection_is_refused_without_a_deadlock(jet: BlockingJet) -> None:
    accounts = jet.repository(Account)

    def greedy(account: Account) -> Deposited:
        return Deposited(amount=accounts.load("b").balance)

    with pytest.raises(UsageError, match=r"A decision.*calls the connection.*give the decision what it returned"):
        accounts.execute("a", greedy)
    assert accounts.execute("a", Account.deposit, Decimal(1)).version == 1


def test_calls_of_a_closed_connection_fail_also_in_other_threads(jet: BlockingJet) -> None:
    accounts = jet.repository(Account)
    accounts.execute("a", Account.open, "ada")
    begun = threading.Event()

    def follow() -> str:
        events = jet.tail(follow=True)
        next(events)
        begun.set()
        with pytest.raises(UsageError) as refused:
            next(events)
        return str(refused.value)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(follow)
        assert begun.wait(BOUND_S)
        jet.close()
        assert "closed" in waiting.result(BOUND_S)
    jet.close()  # a second call does nothing
    for use in (jet.log, jet.__enter__, lambda: accounts.load("a"), lambda: list(jet.tail())):
        with pytest.raises(UsageError, match=r"is closed.*connect_blocking"):
            use()


class Connecting:
    """A connection attempt that fails once all other callers wait for it."""

    def __init__(self, callers: int) -> None:
        self.tries = 0
        self._callers = callers

    async def __aenter__(self) -> Jet:
        self.tries += 1
        while self._callers > len([frame for frame in sys._current_frames().values() if _is_waiting(frame)]) + 1:
            await asyncio.sleep(0.01)
        raise Unreachable("NATS", "nobody answers", "Start it.")

    async def __aexit__(self, *_: object) -> None: ...


def _is_waiting(frame: FrameType) -> bool:
    return (Path(frame.f_code.co_filename).name, frame.f_code.co_name) == ("blocking.py", "start")


def test_a_tail_that_cannot_connect_tries_once() -> None:
    connecting: Any = Connecting(0)
    jet = BlockingJet(lambda: connecting)
    with pytest.raises(Unreachable):
        list(jet.tail())
    assert connecting.tries == 1


def test_callers_that_wait_for_a_connection_share_its_failed_attempt() -> None:
    connecting: Any = Connecting(8)
    jet = BlockingJet(lambda: connecting)
    with ThreadPoolExecutor(8, thread_name_prefix="caller") as threads:
        errors = [threads.submit(jet.log) for _ in range(8)]
        assert {type(error.exception(BOUND_S)) for error in errors} == {Unreachable}
    assert connecting.tries < 8


def test_all_waiting_calls_report_that_the_connection_was_closed(jet: BlockingJet) -> None:
    accounts = jet.repository(Account)
    accounts.execute("a", Account.open, "ada")
    all_begun = threading.Barrier(9)

    def repeat(call: Callable[[], object]) -> BaseException:
        call()
        all_begun.wait(BOUND_S)
        while True:
            try:
                call()
            except (EventjetError, CancelledError) as error:
                return error

    followed = jet.tail(follow=True)
    calls: list[Callable[[], object]] = [lambda: next(followed), jet.log, lambda: accounts.load("a")]
    calls += [lambda name=name: accounts.execute(name, Account.deposit, Decimal(1)) for name in "aabbc"]
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(repeat, call) for call in calls]
        all_begun.wait(BOUND_S)
        jet.close()
        errors = [call.result(BOUND_S) for call in waiting]
    # A save that was sent may have an unknown outcome, which is another error.
    assert {type(error) for error in errors if not isinstance(error, OutcomeUnknown)} == {UsageError}
    assert all("closed" in str(error) for error in errors), errors


def test_a_failed_connection_is_retried_at_the_next_call(app: App, tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        url, port = server.url, server.port
    jet = app.connect_blocking(servers=url)
    accounts = jet.repository(Account)
    with pytest.raises(Unreachable):
        accounts.load("a")
    with NatsServer(tmp_path / "nats", port=port):
        jet.init()
        accounts.execute("a", Account.open, "ada")
        jet.close()


def test_a_connection_may_be_forked_only_before_its_first_use(eventjet_nats: NatsServer) -> None:
    done = program(
        """
        import os, warnings
        from tests.integration.test_blocking import fresh_name, withdrawn_has_a_reason
        from eventjet import App, UsageError
        from eventjet.examples.bank.account import Account
        app = App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])
        jet = app.connect_blocking()
        accounts = jet.repository(Account)

        def forked(work):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside a thread
                pid = os.fork()
            if pid:
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                return
            work()
            os._exit(0)

        def init():
            jet.init()
            accounts.execute("a", Account.open, "ada")
            jet.close()

        def refused():
            for use in (jet.log, lambda: accounts.load("a"), lambda: next(jet.tail()), jet.__enter__):
                try:
                    use()
                except UsageError as error:
                    assert "used in the process that forked this one" in str(error), error
                else:
                    raise AssertionError
            jet.close()

        forked(init)
        assert accounts.load("a").owner == "ada"
        forked(refused)
        assert accounts.load("a").owner == "ada"
        print("done")
        """,
        eventjet_nats,
    )
    out, err = done.communicate(timeout=BOUND_S)
    assert (done.returncode, out, err) == (0, "done\n", "")


def test_a_process_that_closes_no_connection_ends_without_a_warning(eventjet_nats: NatsServer) -> None:
    done = program(
        """
        import os
        from tests.integration.test_blocking import fresh_name, withdrawn_has_a_reason
        from eventjet import App
        from eventjet.examples.bank.account import Account
        from eventjet.examples.bank.app import bank
        app = App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])
        # A thread looks a name up.
        jet = app.connect_blocking(servers=os.environ["EVENTJET_SERVERS"].replace("127.0.0.1", "localhost"))
        jet.init()
        jet.repository(Account).execute("a", Account.open, "ada")
        events = jet.tail(follow=True)
        next(events)
        memory = bank.in_memory_blocking()
        memory.caught_up("balances", position=0)
        """,
        eventjet_nats,
    )
    out, err = done.communicate(timeout=BOUND_S)
    assert (done.returncode, out, err) == (0, "", "")


def test_an_interrupt_is_raised_in_the_waiting_call(eventjet_nats: NatsServer) -> None:
    waiting = program(
        """
        from eventjet import App
        from eventjet.examples.bank.account import Account
        from tests.integration.test_blocking import fresh_name, withdrawn_has_a_reason
        app = App(fresh_name(), aggregates=[Account], upcasters=[withdrawn_has_a_reason])
        with app.connect_blocking() as jet:
            jet.init()
            try:
                print("ready", flush=True)
                for event in jet.tail(follow=True):
                    pass
            except KeyboardInterrupt:
                print("interrupted", jet.log().last, flush=True)
        """,
        eventjet_nats,
    )
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "ready\n"
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=BOUND_S)
    assert (waiting.returncode, out, err) == (0, "interrupted 0\n", "")


def test_an_unknown_outcome_is_resolved_without_await(jet: BlockingJet) -> None:
    with pytest.raises(OutcomeUnknown):
        jet.resolve(OutcomeUnknown((), (), "", ()))
