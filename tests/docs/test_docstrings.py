"""The docstring of a public name has an example that runs, and names the errors that are raised."""

from __future__ import annotations
import __future__

import ast
import asyncio
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

import eventjet
import eventjet.alembic
import eventjet.console
import eventjet.rebuild
import eventjet.testing
from eventjet import errors
from eventjet.examples.bank import account, read_models
from eventjet.examples.bank import app as wired
from eventjet.examples.transfer import transfers

RAISED = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
ALIASES = {"Key", "Personal"}
"""Annotations, which have no docstring: pages describe them."""
NAMES = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (eventjet, eventjet.testing)
    for name in package.__all__
    if name not in RAISED | ALIASES
} | {
    "eventjet.alembic.include_object": eventjet.alembic.include_object,
    "eventjet.console.console": eventjet.console.console,
}
MADE_BY = {
    "BlockingCommand": "BlockingRepository",
    "Command": "Repository",
    "Committed": "Repository",
    "Deadline": "after",
    "Entries": "entries",
    "ImportReport": "Imported",
    "Inbox": "inbox",
    "Incoming": "inbox",
    "LogState": "Jet",
    "Outcome": "do",
    "Planned": "Repository",
    "Projection": "projection",
    "Publication": "publication",
    "Reaction": "reactor",
    "Reactor": "reactor",
    "Step": "do",
    "Topology": "Jet",
    "Upcaster": "upcaster",
}
"""Classes that nobody instantiates by hand, and the name whose example shows where they come from."""
_FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(value: object) -> list[str]:
    return _FENCED.findall(inspect.getdoc(value) or "")


def known() -> dict[str, Any]:
    """Return what every example may use: all public names, the bank of the tutorial, and the library's own."""
    packages = (eventjet, eventjet.testing)
    public = {name: getattr(package, name) for package in packages for name in package.__all__}
    library = {"Decimal": Decimal, "UTC": UTC, "datetime": datetime, "timedelta": timedelta}
    others = {"AsyncConnection": AsyncConnection, "include_object": eventjet.alembic.include_object}
    others |= {"postings_table": read_models.postings.table}
    story = {name: getattr(transfers, name) for name in ("Transfer", "Requested", "Debited")}
    return {**vars(account), **vars(read_models), **vars(wired), **story, **public, **library, **others}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    value, maker = NAMES[name], MADE_BY.get(name.rpartition(".")[2])
    if maker is None:
        assert examples(value), f"{name} has no example"
    else:
        assert examples(NAMES[f"eventjet.{maker}"])
        assert re.search(rf"`@?{maker}\b", inspect.getdoc(value) or ""), f"{name} does not name {maker}"


def members() -> dict[str, Any]:
    """Return the public names, and the methods of those that are classes."""
    methods = {
        f"{name}.{member}": function
        for name, value in NAMES.items()
        if inspect.isclass(value)
        for member, function in vars(value).items()
        if member[0] != "_" and inspect.isfunction(function)
    }
    return NAMES | methods


WITH_EXAMPLE = {name: value for name, value in members().items() if examples(value)}


@pytest.mark.parametrize("name", WITH_EXAMPLE)
async def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("shown")
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | __future__.annotations.compiler_flag
    async with wired.bank.in_memory() as jet:
        for example in examples(WITH_EXAMPLE[name]):
            vars(module).update(known(), jet=jet)
            # In a thread, for code that blocks.
            value = await asyncio.to_thread(eval, compile(example, name, "exec", flags), vars(module))
            if inspect.iscoroutine(value):
                await asyncio.wait_for(value, 60)


def described() -> Iterator[tuple[str, Any, str]]:
    """Yield functions and methods of the public names, each with its docstring and that of its class."""
    jobs = {f"eventjet.rebuild.{name}": getattr(eventjet.rebuild, name) for name in eventjet.rebuild.__all__}
    for name, value in (NAMES | jobs).items():
        doc = inspect.getdoc(value) or ""
        if inspect.isfunction(value):
            yield name, value, doc
        elif inspect.isclass(value) and value.__module__.startswith("eventjet"):
            for member, function in vars(value).items():
                function = getattr(function, "__func__", function)
                if inspect.isfunction(function) and not member.startswith("_") and inspect.getdoc(function):
                    yield f"{name}.{member}", function, f"{doc} {inspect.getdoc(function)}"


def raised_in(function: Any) -> set[str]:
    """Return the errors that a function raises itself: the functions it calls are not followed."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    named = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    return {name for name in named if name in RAISED or name.endswith("Error")} - {"AssertionError"}


def test_a_docstring_names_the_errors_that_are_raised() -> None:
    functions = list(described())
    assert len(functions) > 60
    silent = [
        f"{name}: {error}" for name, function, doc in functions for error in raised_in(function) if error not in doc
    ]
    assert silent == []


@pytest.mark.parametrize("name", sorted(RAISED))
def test_an_error_says_what_it_is(name: str) -> None:
    assert vars(getattr(errors, name)).get("__doc__")
