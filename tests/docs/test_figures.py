"""The figures in bold on the pages of explanation are those of the performance page."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_every_figure_is_measured() -> None:
    measured = set(re.findall(r"[\d.,]*\d", (DOCS / "reference/performance.md").read_text(encoding="utf-8")))
    figures = {
        (page.name, figure)
        for page in (DOCS / "explanation").glob("*.md")
        for figure in re.findall(r"\*\*([\d.,]+)\*\*", page.read_text(encoding="utf-8"))
    }
    assert len(figures) > 8
    assert [page_figure for page_figure in sorted(figures) if page_figure[1] not in measured] == []
