"""The examples in `--help`, and the answers to a wrong command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventjet.cli.main import EXAMPLES, PROGRAM, app, commands_of, main
from eventjet.text import NAMED_MAX, listed, suggestion


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty current folder and an environment without settings."""
    for name in ("EVENTJET_APP", "EVENTJET_SERVERS", "EVENTJET_DATABASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def error_text(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that reads the paragraph on standard error, without its line breaks."""
    return lambda: " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_every_example_is_a_valid_command_line(line: str) -> None:
    program, *words = shlex.split(line.partition(" > ")[0])
    assert program == "eventjet"
    command: Any = PROGRAM
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context("eventjet", words)  # raises what typer would say


def test_no_paragraph_of_a_help_has_line_breaks_of_its_source() -> None:
    for name, command in commands_of(app):
        assert command.help, name
        assert not [paragraph for paragraph in command.help.split("\n\n") if "\n" in paragraph], name


def test_every_command_has_examples_of_its_own() -> None:
    assert {name for name, _ in commands_of(app)} == set(EXAMPLES)
    for name, lines in EXAMPLES.items():
        assert all(line.startswith(f"eventjet {name}") for line in lines)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("statsu", "No such command 'statsu'. Did you mean 'status'? See `eventjet --help`."),
        ("quarantine lits", "No such command 'lits'. Did you mean 'list'? See `eventjet quarantine --help`."),
        ("status --jsno", "There is no option --jsno here. Did you mean '--json'? See `eventjet status --help`."),
        ("--app x status", "There is no option --app here. It follows the command, as in `eventjet dev --app`."),
        ("verify x --position 9", "There is no option --position here. See `eventjet verify --help`."),
        ("status --zzz", "There is no option --zzz here. See `eventjet status --help`."),
        ("rebuild", "Missing argument 'PROJECTION'. See `eventjet rebuild --help`."),
        ("history account", "Missing argument 'ID'. See `eventjet history --help`."),
        ("tail --from x", "--from is given as 'x'. Give a position of the log, which is a whole number: 1, 2, 3"),
        ("status --interval x", "--interval is given as 'x'. Give a number."),
        ("ui --port 99999", "--port is given as '99999'. Give 65535 or less."),
        ("status more", "unexpected extra argument"),
    ],
)
def test_a_wrong_command_line_is_refused_with_a_suggestion(
    line: str, answer: str, error_text: Callable[[], str]
) -> None:
    assert main(line.split()) == 2
    assert answer in error_text()


def test_a_missing_app_is_refused_with_the_ways_to_name_it_and_a_near_project(
    project: Path, monkeypatch: pytest.MonkeyPatch, error_text: Callable[[], str]
) -> None:
    assert main(["status"]) == 2
    answer = error_text()
    assert all(way in answer for way in ("--app module:name", "EVENTJET_APP", "[tool.eventjet]"))
    assert "names one" not in answer
    (project / "pyproject.toml").write_text('[tool.eventjet]\napp = "shop.app:shop"\n')
    (project / "shop").mkdir()
    monkeypatch.chdir(project / "shop")
    assert main(["status"]) == 2
    assert f"{project}/pyproject.toml names one: run it in that folder." in error_text()


def test_only_a_close_name_is_suggested() -> None:
    assert suggestion("balnces", ["postings", "balances"]) == "Did you mean 'balances'? "
    assert suggestion("Balances", ["balances"]) == "Did you mean 'balances'? "
    assert suggestion("orders", ["postings", "balances"]) == ""


def test_a_list_of_names_has_a_limit() -> None:
    assert listed([]) == "none"
    assert listed(["a", "b", "a"]) == "a, b"
    assert listed(map(str, range(1_000 + NAMED_MAX))).endswith(f"{NAMED_MAX - 1} and 1,000 more")
