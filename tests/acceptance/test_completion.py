"""What shell completion offers for an unfinished line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.conftest import Program

Complete = Callable[[str], list[str]]


@pytest.fixture
def complete(bank: Program) -> Complete:
    def offers(line: str, program: Program = bank) -> list[str]:
        words = line.split()
        at = len(words) - (not line.endswith(" "))
        ended = program(_EVENTJET_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(at))
        assert (ended.status, ended.err) == (0, "")
        return ended.out.split()

    return offers


def test_commands_and_options_are_offered(complete: Complete) -> None:
    assert complete("eventjet re") == ["resume", "rebuild", "restore"]
    assert complete("eventjet quarantine ") == ["list", "show", "retry", "drop"]
    assert complete("eventjet verify --eng") == ["--engine"]


def test_names_of_the_app_are_offered_once(complete: Complete) -> None:
    assert complete("eventjet rebuild ") == ["balances"]
    assert complete("eventjet rebuild balances ") == []
    assert complete("eventjet worker b") == ["balances"]
    assert complete("eventjet history ") == ["account"]
    assert complete("eventjet process show ") == []


def test_an_app_that_talks_or_fails_as_it_is_imported_spoils_no_line(bank: Program, complete: Complete) -> None:
    file = bank.folder / "bank.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(f"{text}\nprint('hello')\n", encoding="utf-8")
    assert complete("eventjet rebuild ") == ["balances"]
    file.write_text("broken = (\n", encoding="utf-8")
    assert complete("eventjet rebuild ") == []
    assert complete("eventjet rebuild --app nowhere:app ") == []


def test_bash_completes_with_the_script_that_is_printed(bank: Program) -> None:
    line = """
        eval "$(eventjet --show-completion)"
        COMP_WORDS=(eventjet verify bal) COMP_CWORD=2
        _eventjet_completion eventjet
        echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=bank.folder,
        env={**bank.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.stdout, done.stderr) == ("balances\n", "")
