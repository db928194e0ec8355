"""`eventjet dev` starts everything that one app needs on one machine, and leaves nothing of it running."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import nats
import pytest

from eventjet.app import load_app
from eventjet.errors import Refused
from tests.acceptance.conftest import BANK, Program
from tests.acceptance.traces import traces

_END_S = 60.0
Keep = Callable[[subprocess.Popen[str]], None]


@pytest.fixture
def app(empty: Program, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.setattr(sys, "path", sys.path.copy())  # `load_app` adds to it
    modules = set(sys.modules)
    (empty.folder / "bank.py").write_text(BANK.read_text(encoding="utf-8"), encoding="utf-8")
    yield Program(empty.folder, {**empty.environ, "EVENTJET_APP": "bank:bank"})
    for name in {"bank", "renamed", "shop"} & (set(sys.modules) - modules):
        del sys.modules[name]


def _exports(process: subprocess.Popen[str], folder: Path, until: str = "ready") -> dict[str, str]:
    """Return what a shell reads from the file that `dev` names, once it is ready. Nothing printed has a password."""
    exports: dict[str, str] = {}
    assert process.stdout is not None
    for line in iter(process.stdout.readline, ""):
        assert "@" not in line
        if line.startswith(". "):
            for export in (folder / line[2:].strip()).read_text(encoding="utf-8").splitlines():
                name, _, value = export.removeprefix("export ").partition("=")
                exports[name] = value.strip("'")
        if line.startswith(until):
            return exports
    raise AssertionError(process.communicate(timeout=_END_S))


def _stopped(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 0, errors
    return errors


def test_another_shell_reaches_it_and_it_keeps_data_and_ports(app: Program, ended_processes: Keep) -> None:
    process = app.start("dev")
    ended_processes(process)
    first = _exports(process, app.folder)
    assert app("status", **first).status == 0
    assert (app.folder / ".eventjet" / "env").stat().st_mode & 0o077 == 0
    _stopped(process)
    assert not (app.folder / ".eventjet" / "env").exists()

    process = app.start("dev")
    ended_processes(process)
    again = _exports(process, app.folder)
    assert again == first
    assert "created" not in app("init", **again).out
    _stopped(process)


def test_a_second_dev_in_the_same_folder_is_refused(app: Program, ended_processes: Keep) -> None:
    process = app.start("dev")
    ended_processes(process)
    _exports(process, app.folder)
    folder = app.folder / ".eventjet"
    folder.chmod(0o711)  # as for a PostgreSQL that root starts, which would lose its files
    second = app("dev")
    assert (second.status, second.is_one_paragraph()) == (2, True)
    assert "--temporary" in second.message()
    assert folder.stat().st_mode & 0o777 == 0o711
    _stopped(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_temporary_dev_with_postgres_leaves_nothing(
    app: Program, number: signal.Signals, ended_processes: Keep
) -> None:
    with traces() as leftovers:
        process = app.start("dev", "--temporary", "--postgres", TMPDIR=str(leftovers.folder))
        ended_processes(process)
        exports = _exports(process, app.folder)
        assert exports["EVENTJET_DATABASE"].startswith("postgresql://")
        assert app("status", **exports).status == 0
        process.send_signal(number)
        process.communicate(timeout=_END_S)
        assert process.returncode == 0
        assert (leftovers.processes(), leftovers.files()) == ([], [])
    assert not (app.folder / ".eventjet").exists()


@pytest.mark.slow
def test_impatience_does_not_cut_the_clean_up_short(app: Program, ended_processes: Keep) -> None:
    with traces() as leftovers:
        process = app.start("dev", "--temporary", "--postgres", TMPDIR=str(leftovers.folder))
        ended_processes(process)
        _exports(process, app.folder)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        for line in iter(process.stderr.readline, ""):
            if "stopped" in line:
                break
        for _ in range(5):
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=_END_S)
        assert process.returncode == 0
        assert (leftovers.processes(), leftovers.files()) == ([], [])


@pytest.mark.slow
def test_its_servers_end_when_it_is_killed(app: Program, ended_processes: Keep) -> None:
    with traces() as leftovers:
        process = app.start("dev", "--temporary", TMPDIR=str(leftovers.folder))
        ended_processes(process)
        _exports(process, app.folder)
        process.kill()
        process.communicate(timeout=_END_S)
        leftovers.await_nothing(_END_S)


SHOP = """
from dataclasses import replace

from eventjet import App, Incoming, Reaction, Recorded, aggregate, event, inbox, publication, served


@event("order.paid")
class Paid:
    cents: int


@aggregate("order")
class Order:
    cents: int = 0

    def pay(self, cents: int) -> Paid:
        return Paid(cents=cents)

    def evolve(self, event: Paid) -> "Order":
        return replace(self, cents=self.cents + event.cents)


@event("told.paid")
class Told:
    cents: int


@inbox("payments", stream="PAY", subject="pay.captured.>")
async def payments(message: Incoming[Told], to: Reaction) -> None:
    await to.repository(Order).execute(message.id, Order.pay, message.data.cents)


@publication("news", stream="told", source="https://shop.example/news")
def news(event: Recorded[Paid]) -> Told:
    return Told(cents=event.data.cents)


@inbox("echo", stream="told", subject="told.>")
async def echo(message: Incoming[Told], to: Reaction) -> None:
    assert message.data.cents


shop = App(
    "shop", aggregates=[Order], reactors=[payments, echo], publications=[news], served=[served(Order, Order.pay)]
)
"""


def test_it_creates_the_streams_of_inboxes_and_publications_and_serves_commands(
    app: Program, ended_processes: Keep
) -> None:
    (app.folder / "shop.py").write_text(SHOP, encoding="utf-8")
    process = app.start("dev", EVENTJET_APP="shop:shop")
    ended_processes(process)
    exports = _exports(process, app.folder)

    async def try_it() -> int:
        client = await nats.connect(exports["EVENTJET_SERVERS"])
        jetstream = client.jetstream()
        assert (await jetstream.stream_info("told")).config.subjects == ["told.>"]  # one for both: they may not overlap
        published = await jetstream.pull_subscribe("told.news.>", stream="told")
        await jetstream.publish("pay.captured.1", b'{"cents": 5}')
        (message,) = await published.fetch(1, timeout=_END_S)
        assert json.loads(message.data)["data"] == {"cents": 5}
        await client.close()
        shop: Any = load_app("shop:shop", app.folder)
        (order,) = shop.aggregates
        async with shop.client(servers=exports["EVENTJET_SERVERS"]) as remote:
            return (await remote.repository(order).execute("o-1", order.pay, 3)).version

    assert asyncio.run(try_it()) == 1
    errors = " ".join(_stopped(process).split())
    assert "Created the stream PAY for the inbox payments; elsewhere it is not eventjet's to create." in errors
    assert "publish to pay.captured.> to try it" in errors
    assert "Created the stream told for the inbox echo, the publication news" in errors


def test_a_port_in_use_is_replaced_and_reported_and_used_again_later(app: Program, ended_processes: Keep) -> None:
    ports = app.folder / ".eventjet" / "ports.json"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken_port = other.getsockname()[1]
        ports.parent.mkdir()
        ports.write_text(json.dumps({"nats": taken_port}), encoding="utf-8")
        process = app.start("dev")
        ended_processes(process)
        instead = _exports(process, app.folder)["EVENTJET_SERVERS"]
        assert instead != f"nats://127.0.0.1:{taken_port}"
        message = " ".join(_stopped(process).split())
        port = instead.rpartition(":")[2]
        assert f"Another program has port {taken_port} of NATS, which is on port {port} this time." in message
    assert json.loads(ports.read_text(encoding="utf-8"))["nats"] == taken_port


def test_a_renamed_aggregate_is_reported_before_anything_is_recorded(app: Program, ended_processes: Keep) -> None:
    """By `init`, `doctor`, `worker` and `dev`; a decision under the new name records nothing."""
    source = (app.folder / "bank.py").read_text(encoding="utf-8")
    (app.folder / "renamed.py").write_text(source.replace('@aggregate("account")', '@aggregate("acct")'))
    process = app.start("dev")
    ended_processes(process)
    exports = _exports(process, app.folder)

    async def open_account(name: str) -> int:
        bank: Any = load_app(name, app.folder)
        (account,) = bank.aggregates
        async with bank.connect(servers=exports["EVENTJET_SERVERS"]) as jet:
            return (await jet.repository(account).execute("a-1", account.open, "ada")).version

    assert asyncio.run(open_account("bank:bank")) == 1
    with pytest.raises(Refused, match="does not declare: account"):
        asyncio.run(open_account("renamed:bank"))
    renamed = {**exports, "EVENTJET_APP": "renamed:bank"}
    wanted = "give it its name back, whatever its class is called: @aggregate('account')"
    init = app("init", **renamed)
    assert (init.status, wanted in " ".join(init.out.split())) == (1, True)
    assert "eventjet init" not in init.out + init.err  # it has just run
    doctor = app("doctor", **renamed)
    assert (doctor.status, "has events of 1 'account'" in " ".join(doctor.out.split())) == (1, True)
    worker = app.start("worker", **renamed)
    ended_processes(worker)
    assert worker.stderr is not None
    assert "has events of 1 'account'" in worker.stderr.readline()
    worker.terminate()
    worker.communicate(timeout=_END_S)
    _stopped(process)

    refused = app("dev", EVENTJET_APP="renamed:bank")
    message = " ".join(refused.err.split())
    assert (refused.status, wanted in message) == (1, True)
    assert "remove the folder .eventjet and begin anew" in message
    with sqlite3.connect(app.folder / ".eventjet" / "eventjet.db") as database:
        assert database.execute("select count(*) from balances").fetchone() == (1,)
    database.close()


def test_a_server_alone_prints_its_url_and_keeps_its_data_in_its_store(app: Program, ended_processes: Keep) -> None:
    urls: list[str] = []
    for created in (True, False):
        process = app.start("server", "--port", urls[0].rpartition(":")[2] if urls else "0", "--store", "kept")
        ended_processes(process)
        assert process.stdout is not None
        urls.append(process.stdout.readline().strip())
        exports = {"EVENTJET_SERVERS": urls[-1], "EVENTJET_DATABASE": f"sqlite:///{app.folder / 'read.db'}"}
        assert ("created  stream bank" in app("init", **exports).out) is created
        for options, part in (
            (("--port", urls[-1].rpartition(":")[2]), "taken"),
            (("--store", "kept"), "runs on kept"),
        ):
            second = app("server", "--port", "0", *options)
            assert (second.status, second.is_one_paragraph(), part in second.message()) == (2, True, True)
        assert 'sync_interval: "always"' in (app.folder / "kept" / "nats.conf").read_text(encoding="utf-8")
        errors = _stopped(process)
        assert "For development and tests only" in errors
        assert errors.endswith("stopped\n")
    assert urls[0] == urls[1]


def test_a_fault_in_the_app_is_reported_before_anything_starts(app: Program) -> None:
    (app.folder / "bank.py").write_text("bank = 1\n")
    result = app("dev")
    assert (result.status, result.is_one_paragraph()) == (2, True)
    assert not Path(app.folder / ".eventjet").exists()


@pytest.mark.slow
def test_a_changed_source_starts_the_worker_again_and_an_error_waits_for_the_next_change(
    app: Program, ended_processes: Keep
) -> None:
    source = app.folder / "bank.py"
    text = source.read_text(encoding="utf-8")
    with traces() as leftovers:
        process = app.start("dev", "--reload", "--temporary", TMPDIR=str(leftovers.folder))
        ended_processes(process)
        assert process.stderr is not None
        error_lines = iter(process.stderr.readline, "")

        def await_line(part: str) -> None:
            assert any(part in line for line in error_lines), process.poll()

        await_line("ready: balances")
        source.write_text(text + "\nbroken = (\n", encoding="utf-8")
        await_line("changed: bank.py")
        await_line("SyntaxError")
        await_line("starts again when a source changes")
        source.write_text(text + "\nwhole = 1\n", encoding="utf-8")
        await_line("changed: bank.py")
        await_line("ready: balances")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=_END_S)
        assert process.returncode == 0
        assert (leftovers.processes(), leftovers.files()) == ([], [])


def _watched(url: str) -> HTTPResponse:
    """Open a live page and leave it open."""
    stream = urlopen(f"{url}live/overview", timeout=_END_S)
    assert stream.readline().startswith(b"retry:")
    return stream


@pytest.mark.parametrize("options", [(), ("--reload",)])
def test_what_another_shell_is_told_to_use_is_there_at_once(
    app: Program, ended_processes: Keep, options: tuple[str, ...]
) -> None:
    process = app.start("dev", *options)
    ended_processes(process)
    exports = _exports(process, app.folder, until=". ")

    async def version() -> int:
        bank: Any = load_app("bank:bank", app.folder)
        (account,) = bank.aggregates
        async with bank.connect(servers=exports["EVENTJET_SERVERS"]) as jet:
            return (await jet.repository(account).execute("a-1", account.open, "ada")).version

    assert asyncio.run(version()) == 1
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=_END_S)
    assert process.returncode in {0, 130}, errors
    assert "CancelledError" not in errors


@pytest.mark.parametrize("options", [(), ("--reload",)])
def test_it_ends_with_the_reason_when_its_server_ends(
    app: Program, ended_processes: Keep, options: tuple[str, ...]
) -> None:
    process = app.start("dev", *options)
    ended_processes(process)
    assert process.stdout is not None
    begun = "ready" if not options else ". "  # with --reload, the worker says on standard error that it is ready
    assert any(line.startswith(begun) for line in iter(process.stdout.readline, ""))
    (ports_file,) = (app.folder / ".eventjet" / "nats" / "ports").iterdir()
    os.kill(int(ports_file.stem.rpartition("_")[2]), signal.SIGKILL)
    _, errors = process.communicate(timeout=_END_S)
    assert process.returncode == 3, errors
    assert "The embedded nats-server: it has ended;" in " ".join(errors.split())


def _console_of(process: subprocess.Popen[str]) -> str:
    """Return the console's URL, once it answers."""
    assert process.stdout is not None
    return next(line for line in iter(process.stdout.readline, "") if line.startswith("console:")).split()[1]


def _may_act(url: str) -> bool:
    """Return whether its pages say that the visitor may act."""
    return b"may act" in urlopen(f"{url}actions", timeout=_END_S).read()


@pytest.mark.slow
def test_its_console_allows_actions_only_with_the_option(app: Program, ended_processes: Keep) -> None:
    for options, may_act in (((), False), (("--no-allow-actions",), False), (("--allow-actions",), True)):
        process = app.start("dev", "--temporary", "--ui", *options)
        ended_processes(process)
        assert _may_act(_console_of(process)) == may_act, options
        _stopped(process)
    alone = app("dev", "--allow-actions")
    assert (alone.status, alone.is_one_paragraph()) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "may_act"), [("y", True), ("n", False), ("", False)])
def test_it_asks_in_a_terminal_before_it_allows_actions(
    app: Program, ended_processes: Keep, answer: str, may_act: bool
) -> None:
    terminal, program_side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "eventjet.cli", "dev", "--temporary", "--ui"],
        cwd=app.folder,
        env=dict(app.environ),
        stdin=program_side,
        stdout=subprocess.PIPE,
        stderr=program_side,
        text=True,
        start_new_session=True,
    )
    ended_processes(process)
    os.close(program_side)
    output = b""
    while b"[y/N]" not in output:
        output += os.read(terminal, 1024)
    os.write(terminal, f"{answer}\n".encode())
    assert _may_act(_console_of(process)) == may_act
    process.send_signal(signal.SIGINT)
    assert process.wait(_END_S) == 0
    os.close(terminal)


@pytest.mark.parametrize("before", [None, 0o777])
def test_its_files_are_readable_by_their_owner_only(app: Program, ended_processes: Keep, before: int | None) -> None:
    folder = app.folder / ".eventjet"
    if before is not None:
        (folder / "nats").mkdir(parents=True)
        for entry in (folder, folder / "nats"):
            entry.chmod(before)
        (folder / "ports.json").write_text("{}", encoding="utf-8")
    process = app.start("dev")
    ended_processes(process)
    _exports(process, app.folder)
    modes = {entry.name: (entry.is_dir(), entry.stat().st_mode & 0o777) for entry in (folder, *folder.iterdir())}
    _stopped(process)
    assert {".eventjet", "nats", "env", "ports.json", "lock", "eventjet.db"} <= modes.keys()
    assert {name: mode for name, (is_dir, mode) in modes.items() if mode != (0o700 if is_dir else 0o600)} == {}


@pytest.mark.slow
def test_with_a_console_it_ends_at_once_despite_an_open_page(app: Program, ended_processes: Keep) -> None:
    process = app.start("dev", "--temporary", "--ui")
    ended_processes(process)
    with _watched(_console_of(process)):
        errors = _stopped(process)
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_console_ends_at_once_despite_an_open_page(
    app: Program, number: signal.Signals, ended_processes: Keep
) -> None:
    process = app.start("dev")
    ended_processes(process)
    there = _exports(process, app.folder)
    console = app.start("ui", "--port", "0", **there)
    ended_processes(console)
    assert console.stdout is not None
    with _watched(console.stdout.readline().strip()):
        console.send_signal(number)
        _, errors = console.communicate(timeout=_END_S)
    assert (console.returncode, errors) == (0, "")
    _stopped(process)
