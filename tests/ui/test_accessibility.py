"""Every screen at two widths and in two schemes: axe-core reports nothing serious, and nothing overflows the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.ui.conftest import PATIENCE_MS, in_thread, serving
from tests.ui.screens import SCREENS
from tests.ui.screenshots import poison_of
from tests.ui.stage import planted, staged

AXE = (Path(__file__).parent / "vendor/axe.min.js").read_text()
_RUN = """async () => {
  const found = await axe.run(document, {resultTypes: ["violations"]});
  return found.violations.map(v => [v.impact, v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 300)).join(" | ")]);
}"""
_WIDER = "document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth"


@pytest.fixture(scope="module")
def faulty_console() -> Iterator[tuple[str, int]]:
    """The URL of a console over a branch with faults, and the position of its poison event."""
    with staged(postgres=False) as stage:
        planted(stage)
        with serving(stage.folder, stage.environ, "--allow-actions") as url:
            yield url, in_thread(poison_of(stage))


@pytest.mark.timeout(900)
def test_every_screen_is_accessible(browser: Browser, faulty_console: tuple[str, int]) -> None:
    url, poison = faulty_console
    problems: list[object] = []
    for width, scheme in ((400, "light"), (1600, "dark")):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        for name, path in SCREENS.items():
            answer = page.goto(url + path.replace("{poison}", str(poison)))
            assert answer is not None
            if answer.status != 200:
                problems.append((name, answer.status))
            if name == "overview":  # whose worker is gone
                expect(page.locator("#models-balances-1-said")).to_contain_text("has not been seen for")
            page.evaluate(AXE)
            violations = [violation for violation in page.evaluate(_RUN) if violation[0] in ("serious", "critical")]
            problems += [(name, width, scheme, *violation) for violation in violations]
            if page.evaluate(_WIDER):
                problems.append((name, width, "wider than the window"))
        context.close()
    assert problems == []
