"""Imports point one way, as `pyproject.toml` lays down, and every module has a docstring."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions

from tests.architecture.sources import ROOT, Source, sources

OF_EXTRAS = re.compile(r"src/eventjet/(dev|examples|observability/otel|spark|starter|testing|console)\b")
"""Where an extra may be imported at the top of a module; elsewhere only within a function that needs it."""
WITH_CORE = {"pydantic_core": "pydantic"}
"""Packages that come with one that the core requires."""


def test_there_are_no_import_cycles() -> None:
    """An import within a function counts, too: it hides a circle and does not break it."""
    modules = {module_of(source): source for source in sources("src")}
    imported = {name: imports_of(source) & modules.keys() - {name} for name, source in modules.items()}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_every_module_has_a_docstring() -> None:
    assert [source.name for source in sources("src") if source.text and not ast.get_docstring(source.tree)] == []


def test_the_core_requires_what_its_modules_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}  # type: ignore[index]
    known = packages_distributions()
    missing = {
        f"{source.name} imports {package}"
        for source in sources("src")
        if not OF_EXTRAS.match(source.name)
        for package in imported_packages(source)
        if core.isdisjoint(
            name.replace("_", "-").lower() for name in [WITH_CORE.get(package, ""), *known.get(package, ())]
        )
    }
    assert missing == set()


def module_of(source: Source) -> str:
    return source.name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(source: Source) -> set[str]:
    """Return the modules that a file imports; for `from package import module`, that module and not the package."""
    modules = {module_of(each) for each in sources("src")}
    names: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= submodules & modules
            names |= {node.module} if submodules - modules else set()
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def imported_packages(source: Source) -> set[str]:
    """Return the packages of others that a module imports when it is imported itself."""
    names = {
        name.partition(".")[0]
        for node in source.tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [imported.name for imported in node.names]
        )
    }
    return names - sys.stdlib_module_names - {"__future__", "eventjet"}
