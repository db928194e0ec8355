"""Every option of every command: that a test uses it, and what those do that no other test is about."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eventjet.cli.main import PROGRAM
from tests.acceptance.conftest import Ended, Program
from tests.acceptance.test_commands import Bank

TESTS = Path(__file__).parents[1]
SHARED = ("--app", "--app-dir", "--servers", "--database", "--json", "--log-format")
"""Declared in one place for all commands (`cli/target.py`, `cli/terminal.py`), so one use of each is enough."""

HELPERS = {"serving": "ui", "serving_process": "ui", "on_spark": "--master"}
"""A word that a helper of the tests adds to a command."""


def options() -> Iterator[tuple[tuple[str, ...], str]]:
    """The words of each command, with each of its options that is not hidden."""

    def below(command: object, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        for name, member in getattr(command, "commands", {}).items():
            yield from below(member, (*words, name))
        for parameter in () if hasattr(command, "commands") else getattr(command, "params", ()):
            if not getattr(parameter, "hidden", False):
                names = (*parameter.opts, *parameter.secondary_opts)
                yield from ((words, name) for name in names if name.startswith("--") and name != "--help")

    return below(PROGRAM, ())


@cache
def words_of_tests() -> list[set[str]]:
    """The words that each statement of the tests gives to something, where an option is among them."""
    files = (file.read_text(encoding="utf-8") for file in TESTS.rglob("*.py"))
    statements = (given for text in files if "--" in text for given in words_given(text))
    return [given for given in statements if any(word.startswith("--") for word in given)]


def words_given(source: str) -> Iterator[set[str]]:
    """Of each statement in a function, with the command that a helper runs; a loop is one statement.

    What a docstring says, or a text that is compared with, gives nothing to anybody.
    """
    dashed = {number for number, line in enumerate(source.splitlines(), 1) if "--" in line}

    def below(parent: ast.AST, kinds: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
        for node in (node for node in ast.walk(parent) if isinstance(node, kinds)):
            at: Any = node.context_expr if isinstance(node, ast.withitem) else node
            if not dashed.isdisjoint(range(at.lineno, at.end_lineno + 1)):
                yield node

    functions = below(ast.parse(source), (ast.FunctionDef, ast.AsyncFunctionDef))
    for statement in (node for function in functions for node in below(function, STATEMENTS)):
        given: set[str] = set()
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id in HELPERS:
                given.add(HELPERS[node.id])
            elif not isinstance(node, ast.Compare | ast.Expr):
                texts = (part.value for part in ast.iter_child_nodes(node) if isinstance(part, ast.Constant))
                given.update(word for text in texts if isinstance(text, str) for word in text.split())
        yield given


STATEMENTS = (ast.For, ast.Assign, ast.Assert, ast.Return, ast.Expr, ast.withitem)


def is_used(words: tuple[str, ...], option: str, given: list[set[str]]) -> bool:
    return any(option in each and (option in SHARED or each.issuperset(words)) for each in given)


def test_every_option_of_every_command_is_used_by_a_test() -> None:
    assert (("rebuild",), "--engine") in options()
    unused = [" ".join([*words, name]) for words, name in options() if not is_used(words, name, words_of_tests())]
    assert unused == []


@pytest.mark.parametrize(
    ("body", "is_use"),
    [
        ('bank("pause", "balances", "--revision", "9")', True),
        ('for options in [("--revision", "9")]: bank("pause", *options)', True),
        ('"""Uses `pause --revision 9`."""', False),
        ('assert "eventjet pause --revision 9" in bank("status").err', False),
        ('bank("pause", "balances"); bank("resume", "balances", "--revision", "9")', False),
    ],
)
def test_an_option_is_used_where_it_is_given_to_its_command(body: str, is_use: bool) -> None:
    assert is_used(("pause",), "--revision", list(words_given(f"def test() -> None:\n    {body}"))) == is_use


def amounts(program: Program) -> Bank:
    assert program("init").status == 0
    bank = Bank(program)
    bank.deposit("a-1", 1, 2)
    bank.deposit("a-2", 3)
    return bank


def keep_snapshots(program: Program, *, every: int) -> None:
    source = program.folder / "bank.py"
    text = source.read_text(encoding="utf-8")
    source.write_text(text.replace('@aggregate("account")', f'@aggregate("account", snapshot_every={every})'), "utf-8")


def on_spark(program: Program, *words: str, **environ: str) -> Ended:
    """Run a command in an interpreter of its own: the JVM's launcher wants no process that was forked."""
    with program.start(*words, "--master", "local[1]", **environ) as process:
        out, err = process.communicate(timeout=600)
    return Ended(process.returncode, out, err)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_archive_up_to_a_position_is_what_read_models_are_made_and_verified_from(bank: Program) -> None:
    log = amounts(bank)
    url = (bank.folder / "archive").as_uri()
    made = on_spark(bank, "archive", url, "--to", "4", "--json")
    assert made.status == 0, made.err
    assert json.loads(made.out)["last"] == 4
    log.deposit("a-1", 4)
    for command in ("rebuild", "verify"):
        words = (command, "balances", "--from-archive", url, "--no-ship")
        ended = on_spark(bank, *words, PYTHONPATH=str(bank.folder))
        assert ended.status == 0, ended.err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_log_is_audited_and_snapshots_are_built_on_the_spark_that_is_named(bank: Program) -> None:
    keep_snapshots(bank, every=2)
    amounts(bank)
    for words in (("audit",), ("snapshots", "build", "account", "--engine", "spark")):
        ended = on_spark(bank, *words)
        assert ended.status == 0, ended.err


def test_schemas_are_exported_with_asyncapi_and_compared_in_the_folder_of_a_commit(bank: Program) -> None:
    amounts(bank)
    assert "new asyncapi.json" in bank("schema", "export", "--out", "contract", "--asyncapi", "--release", "4.2.0").out
    document = json.loads((bank.folder / "contract" / "asyncapi.json").read_text(encoding="utf-8"))
    assert (document["asyncapi"], document["info"]["version"]) == ("3.0.0", "4.2.0")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "--quiet"], ["add", "contract"], ["commit", "--quiet", "-m", "Export the contract"]):
        subprocess.run([*git, *words], cwd=bank.folder, check=True)
    assert bank("schema", "check", "--against", "HEAD", "--dir", "contract").status == 0
    elsewhere = bank("schema", "check", "--against", "HEAD", "--dir", "schemas")
    assert (elsewhere.status, elsewhere.is_one_paragraph()) == (2, True)


def test_the_doctor_waits_as_long_as_it_is_told_to(bank: Program) -> None:
    assert bank("init").status == 0
    away = {"EVENTJET_DATABASE": "postgresql://ada@127.0.0.1:1/read"}
    ended = bank("doctor", "--timeout", "1", "--json", **away)
    assert ended.status == 3
    assert bank("doctor", "--timeout", "0").status == 2


def test_what_runs_left_behind_is_dropped_when_asked(bank: Program) -> None:
    amounts(bank)
    assert bank("db", "unused", "--drop-runs").status == 0


def test_snapshots_are_built_of_aggregates_with_so_many_events(bank: Program) -> None:
    keep_snapshots(bank, every=100)
    amounts(bank)
    for least, written in (("4", 0), ("3", 1), ("2", 1)):  # the last time, of the one that has none
        ended = bank("snapshots", "build", "account", "--engine", "local", "--min-events", least, "--json")
        assert ended.status == 0, ended.err
        assert json.loads(ended.out)["written"] == written
