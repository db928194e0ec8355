"""Parts of the command line that need no server: messages, exit statuses, settings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eventjet.cli.log import line
from eventjet.cli.main import exit_status, main, report
from eventjet.cli.output import wrapped
from eventjet.cli.running import Lines, finished
from eventjet.cli.target import safe_settings, target
from eventjet.domain.personal import MASK
from eventjet.errors import (
    DefinitionError,
    Forbidden,
    HistoryBroken,
    RebuildRefused,
    Refused,
    StoreUnavailable,
    Unreachable,
    UsageError,
    VerificationFailed,
)
from eventjet.operations.events import event_view
from eventjet.operations.reports import difference_text, key_text
from eventjet.rebuild import Difference
from eventjet.text import counted


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("EVENTJET_APP", "EVENTJET_SERVERS", "EVENTJET_DATABASE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("x"), 2),
        (DefinitionError(["x"]), 2),
        (RebuildRefused("p", "x", "y"), 2),
        (Refused("p", "x", "y"), 2),
        (Unreachable("c", "x", "y"), 3),
        (StoreUnavailable("c", "x"), 3),
        (Forbidden("s", "x"), 3),
        (VerificationFailed("p", "x"), 1),
        (HistoryBroken("s", 1, "x"), 1),
        (ValueError("x"), 70),
    ],
)
def test_every_error_has_its_exit_status(error: Exception, status: int) -> None:
    assert exit_status(error) == status


def test_prose_is_wrapped_at_80_columns_and_faults_keep_their_lines() -> None:
    text = wrapped(str(DefinitionError(["one " * 30, "two"])))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert [line for line in text.splitlines() if line.startswith("  - ")] == [
        text.splitlines()[1],
        "  - two",
    ]


def test_control_characters_for_terminals_are_escaped() -> None:
    assert wrapped("red \x1b[31m and \x9b") == "red \\x1b[31m and \\x9b"


def test_a_message_of_several_lines_becomes_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(UsageError("first\nsecond"), debug=False) == 2
    assert capsys.readouterr().err == "eventjet: first second\n"


def test_an_error_within_a_group_is_reported_without_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    group = ExceptionGroup("unhandled", [ValueError("x"), ExceptionGroup("inner", [UsageError("Do it otherwise.")])])
    assert report(group, debug=False) == 2
    assert capsys.readouterr().err == "eventjet: Do it otherwise.\n"


def test_an_unexpected_error_asks_for_a_run_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(KeyError("x"), debug=False) == 70
    message = capsys.readouterr().err
    assert "--debug" in message
    assert "Traceback" not in message


def test_the_option_debug_can_stand_before_or_after_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--debug", "status"], ["status", "--debug"]):
        assert main([*arguments, "--app", "nowhere:app"]) == 2
        assert "Traceback" in capsys.readouterr().err


def test_the_app_comes_from_the_option_then_from_pyproject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.eventjet]\napp = "shop:shop"\n')
    assert target(None, None, None, None).reference == "shop:shop"
    assert target("bank:bank", None, None, None).reference == "bank:bank"


def test_a_user_without_a_password_is_allowed_in_the_database_url() -> None:
    assert safe_settings(database="postgresql://ada@db/bank").database == "postgresql://ada@db/bank"
    with pytest.raises(UsageError, match="secret"):
        safe_settings(servers="nats://ada@host:4222")


def test_progress_is_printed_each_second_and_at_the_end_of_long_work(
    capsys: pytest.CaptureFixture[str], clock: Iterator[float]
) -> None:
    lines = Lines()
    for done in range(0, 101, 10):
        lines("catch up", done, 100)
    assert capsys.readouterr().err.splitlines() == [
        f"phase=catch-up done={done} total=100" for done in (30, 60, 90, 100)
    ]


def test_short_work_prints_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    for done in range(101):
        lines("load", done, 100, "copy")
    assert capsys.readouterr().err == ""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """A clock that advances by 0.4 s at each reading."""
    times = iter([0.4 * number for number in range(1_000)])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    return times


def test_an_event_is_printed_in_80_columns_and_complete_in_json() -> None:
    headers = (
        b"NATS/1.0\r\nNats-Msg-Id: id\r\nEj-Type: account.withdrawn\r\nEj-Schema: 2\r\nEj-Version: 3\r\n"
        b"Ej-Command: c-1\r\nEj-Meta-actor: ada\r\n\r\n"
    )
    body = {"amount": "1", "reason": "r" * 90}
    moment = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    record = (
        12,
        int(moment.timestamp()) * 10**9 + 678_000_000,
        b"bank.account.a-1",
        headers,
        json.dumps(body).encode(),
    )
    event = event_view(
        cast("Any", SimpleNamespace(decode=lambda _: None, masked=lambda *arguments: arguments[-1])), record
    )
    lines = line(event, with_aggregate=True).splitlines()
    assert lines[0] == "     12  2026-01-02 03:04:05Z  account a-1  v3  account.withdrawn (schema 2)"
    assert all(len(line) <= 80 for line in lines)
    assert event == json.loads(json.dumps(event))
    assert event["recorded_at"] == "2026-01-02T03:04:05.678000Z"
    assert (event["command_id"], event["metadata"], event["data"]) == ("c-1", {"actor": "ada"}, body)
    assert "fault" not in event


def test_counts_and_keys_are_formatted_for_readers() -> None:
    assert [counted(1, "row"), counted(2_000, "row")] == ["1 row", "2,000 rows"]
    assert key_text(("a", 3)) == "a, 3"


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN], ids=["heard", "ignored"])
def test_sigterm_ends_bulk_work_even_if_ctrl_c_is_ignored(ctrl_c: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cancelled: list[str] = []

    async def work(progress: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("in good order")
            raise

    before = signal.signal(signal.SIGINT, ctrl_c)
    try:
        with pytest.raises(KeyboardInterrupt):
            finished("Nothing was changed.", work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert cancelled == ["in good order"]
    assert "Interrupted. Nothing was changed." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("live", "expected", "text"),
    [
        (Decimal("5.0"), Decimal("5.00"), "v is 5.0 and should be 5.00"),
        (1, "1", "v is 1 (int) and should be 1 (str)"),
        (1, Decimal(1), "v is 1 (int) and should be 1 (Decimal)"),
        ({"a": 1}, {"a": 1}, "v is {'a': 1} (dict) and should be another one, which prints alike"),
        ("x" * 500 + "a" * 9, "x" * 500 + "b" * 9, f"v is {'x' * 500}… (509 characters) and should be another one"),
    ],
)
def test_two_values_that_print_alike_are_shown_as_different(live: object, expected: object, text: str) -> None:
    difference = Difference(("t", 1), {"id": 1, "v": live}, {"id": 1, "v": expected}, ("v",), "never equal")
    assert difference_text(difference, private=False) == text


def test_a_difference_in_a_personal_column_is_named_and_not_shown() -> None:
    difference = Difference(("t", 1), {"v": "ada"}, {"v": "eve"}, ("v",), "never equal")
    assert difference_text(difference, private=True) == f"v is {MASK} and should be another one"
