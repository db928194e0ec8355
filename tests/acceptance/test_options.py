"""Every option of every command is used by a test; options that no other test is about are tested here."""

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
"""Options that are declared once for all commands (`cli/target.py`, `cli/terminal.py`): one use of each is enough."""

HELPERS = {"serving": "ui", "serving_process": "ui", "on_spark": "--master"}
"""Words that helpers of the tests add to a command."""


def options() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the words of each command, with each of its options that is not hidden."""

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
    """Return the words that each statement of the tests passes on, where an option is among them."""
    files = (file.read_text(encoding="utf-8") for file in TESTS.rglob("*.py"))
    statements = (words for text in files if "--" in text for words in words_in(text))
    return [words for words in statements if any(word.startswith("--") for word in words)]


def words_in(source: str) -> Iterator[set[str]]:
    """Yield the words of each statement in a function, with the command that a helper runs; a loop is one statement.

    The text of a docstring, or one that is compared with, is not passed to anything.
    """
    dashed = {number for number, line in enumerate(source.splitlines(), 1) if "--" in line}

    def below(parent: ast.AST, kinds: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
        for node in (node for node in ast.walk(parent) if isinstance(node, kinds)):
            place: Any = node.context_expr if isinstance(node, ast.withitem) else node
            if not dashed.isdisjoint(range(place.lineno, place.end_lineno + 1)):
                yield node

    functions = below(ast.parse(source), (ast.FunctionDef, ast.AsyncFunctionDef))
    for statement in (node for function in functions for node in below(function, STATEMENTS)):
        words: set[str] = set()
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id in HELPERS:
                words.add(HELPERS[node.id])
            elif not isinstance(node, ast.Compare | ast.Expr):
                texts = (part.value for part in ast.iter_child_nodes(node) if isinstance(part, ast.Constant))
                words.update(word for text in texts if isinstance(text, str) for word in text.split())
        yield words


STATEMENTS = (ast.For, ast.Assign, ast.Assert, ast.Return, ast.Expr, ast.withitem)


def is_used(words: tuple[str, ...], option: str, uses: list[set[str]]) -> bool:
    return any(option in each and (option in SHARED or each.issuperset(words)) for each in uses)


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
def test_an_option_counts_as_used_only_with_its_command(body: str, is_use: bool) -> None:
    assert is_used(("pause",), "--revision", list(words_in(f"def test() -> None:\n    {body}"))) == is_use


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
def test_read_models_are_built_and_verified_from_an_archive_up_to_a_position(bank: Program) -> None:
    log = amounts(bank)
    url = (bank.folder / "archive").as_uri()
    archived = on_spark(bank, "archive", url, "--to", "4", "--json")
    assert archived.status == 0, archived.err
    assert json.loads(archived.out)["last"] == 4
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


def test_the_doctor_waits_for_its_timeout(bank: Program) -> None:
    assert bank("init").status == 0
    away = {"EVENTJET_DATABASE": "postgresql://ada@127.0.0.1:1/read"}
    ended = bank("doctor", "--timeout", "1", "--json", **away)
    assert ended.status == 3
    assert bank("doctor", "--timeout", "0").status == 2


def test_leftovers_of_rebuilds_are_dropped_when_asked(bank: Program) -> None:
    amounts(bank)
    assert bank("db", "unused", "--drop-runs").status == 0


def test_snapshots_are_built_of_aggregates_with_so_many_events(bank: Program) -> None:
    keep_snapshots(bank, every=100)
    amounts(bank)
    for least, written in (("4", 0), ("3", 1), ("2", 1)):  # the last time, of the aggregate without a snapshot
        ended = bank("snapshots", "build", "account", "--engine", "local", "--min-events", least, "--json")
        assert ended.status == 0, ended.err
        assert json.loads(ended.out)["written"] == written
