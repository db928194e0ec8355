"""The commands for newcomers, and the files for the forge and pre-commit, fit the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import blocks_of

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
NEWCOMER_PAGES = ("README.md", "CONTRIBUTING.md", "tests/README.md")
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def loaded(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", NEWCOMER_PAGES)
def test_every_make_target_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    commands = re.findall(r"(?:`|^)make ([a-z -]+)", text, re.MULTILINE)
    named = {word for command in commands for word in command.split() if not word.startswith("-")}
    assert named
    assert named <= TARGETS


def test_the_readme_begins_with_the_demo_and_the_tests() -> None:
    first = next(block for block in blocks_of(ROOT / "README.md") if block.language == "sh")
    assert first.text.splitlines() == ["make demo", "make test"]


def test_commands_and_links_of_the_contributing_page_exist() -> None:
    page = ROOT / "CONTRIBUTING.md"
    text = page.read_text(encoding="utf-8")
    tests = re.findall(r'-m pytest "?([\w./-]+)(?:::(\w+)\[([\w./-]+)\])?', text)
    assert len(tests) == 3
    for path, name, page_run in tests:
        assert (ROOT / path).exists(), path
        assert name in (ROOT / path).read_text(encoding="utf-8") if name else True
        assert (ROOT / page_run).exists() if page_run else True
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_the_hooks_run_the_tools_of_make_and_download_nothing() -> None:
    repositories = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    recipes = [
        re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE) for target in ("lint", "types", "contract")
    ]
    wanted = {
        tool
        for recipe in recipes
        if recipe
        for tool in re.findall(r"\t\$\(bin\)/([\w-]+(?: format| check)?)", recipe[1])
    }
    entries = [str(hook["entry"]).removeprefix(".venv/bin/") for hook in hooks]
    assert [tool for tool in wanted if not any(entry.startswith(tool) for entry in entries)] == []
    assert len(wanted) == len(hooks) == 5


@pytest.mark.parametrize("file", TEMPLATES, ids=[file.name for file in TEMPLATES])
def test_an_issue_template_is_a_form(file: Path) -> None:
    form = loaded(file)
    if file.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    if file.stem == "bug":
        required = {field["attributes"]["label"] for field in fields if field.get("validations", {}).get("required")}
        assert "Output of `eventjet doctor`" in required
