"""The site of `make docs` is whole, without a warning, and works without a network; every public name is in it."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import eventjet
import eventjet.dev
import eventjet.lake
import eventjet.rebuild
import eventjet.spark
import eventjet.testing
from eventjet import errors

ROOT = Path(__file__).parents[2]
NOTE = re.compile(r"^<!-- api: ([\w.]+)", re.MULTILINE)
VALUES = {
    "eventjet.Key",
    "eventjet.Personal",
    "eventjet.rebuild.ENGINES",
    "eventjet.rebuild.EngineName",
    "eventjet.rebuild.Kind",
}
"""Names that are neither classes nor functions; pages name what they contain."""
ELSEWHERE = {"eventjet.rebuild.AppRef", "eventjet.spark.AppRef"}
"""Other names of `eventjet.AppRef`."""


def described() -> list[str]:
    pages = sorted((ROOT / "docs/reference/api").glob("*.md"))
    return [name for page in pages for name in NOTE.findall(page.read_text(encoding="utf-8"))]


def public() -> set[str]:
    packages = (eventjet, eventjet.testing, eventjet.rebuild, eventjet.lake, eventjet.dev, eventjet.spark)
    names = {f"{package.__name__}.{name}" for package in packages for name in package.__all__}
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and name[0] != "_"}
    in_front = {f"eventjet.{name}" for name in raised}
    return (names - in_front - VALUES - ELSEWHERE) | {f"eventjet.errors.{name}" for name in raised}


def test_the_reference_describes_every_public_name_once() -> None:
    names = described()
    assert sorted(set(names)) == sorted(names)
    in_modules = {"eventjet.alembic.include_object", "eventjet.console.console", "eventjet.spark.pipelines.declare"}
    assert set(names) - public() == in_modules
    assert public() - set(names) == set()


class Links(HTMLParser):
    """The files that a page loads, and its links."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe") and attributes.get("src"):
            self.loaded.append(str(attributes["src"]))
        if tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(str(attributes["href"]))


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_the_site_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--doctree-dir", str(tmp_path / "doctrees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "--conf-dir", "docs/site", ".", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1_500,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pages = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if not (site / page.with_suffix(".html")).is_file()] == []
    for page in site.rglob("*.html"):
        links = Links()
        links.feed(page.read_text(encoding="utf-8"))
        assert [link for link in links.loaded if "//" in link] == []
        assert [link for link in links.loaded if not (page.parent / link.partition("?")[0]).is_file()] == []
    assert (site / "searchindex.js").stat().st_size > 100_000
    page_text = (site / "docs/reference/api/declare.html").read_text(encoding="utf-8")
    assert 'id="eventjet.App.connect"' in page_text
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", listed)
    assert len(targets) > 50
    assert [target for target in targets if not (site / target).is_file()] == []
    whole = (site / "llms-full.txt").read_text(encoding="utf-8")
    assert "# Tutorial: a bank" in whole
    assert "### eventjet.App(" in whole
    assert "<!-- api:" not in whole
