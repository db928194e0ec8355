"""Figures that pages of explanation give in bold are those of the performance page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eventjet.rebuild.choice import LOCAL_S, SPARK_CORE_S, SPARK_START_S

DOCS = Path(__file__).parents[2] / "docs"


def test_every_figure_is_measured() -> None:
    measured = set(re.findall(r"[\d.,]*\d", (DOCS / "reference/performance.md").read_text(encoding="utf-8")))
    given = {
        (page.name, figure)
        for page in (DOCS / "explanation").glob("*.md")
        for figure in re.findall(r"\*\*([\d.,]+)\*\*", page.read_text(encoding="utf-8"))
    }
    assert len(given) > 8
    assert [one for one in sorted(given) if one[1] not in measured] == []


def test_an_engine_is_chosen_by_the_figures_of_the_page() -> None:
    page = (DOCS / "reference/performance.md").read_text(encoding="utf-8")
    title = "### Rebuild of 1,000,000 events into PostgreSQL"

    def medians(heading: str) -> dict[str, float]:
        table = page.partition(f"{heading}\n")[2].partition("\n###")[0]
        return {
            row: float(n.replace(",", "")) for row, n in re.findall(r"^\| ([^|]+) \| ([\d.,]+) \|", table, re.MULTILINE)
        }

    rates, starts = medians(title), medians(f"{title}: from nothing to the first read")
    assert pytest.approx(1 / rates["local engine"], rel=0.01) == LOCAL_S
    assert pytest.approx(2 / rates["Spark from JetStream"], rel=0.01) == SPARK_CORE_S, "of two cores"
    began = (
        starts["eventjet rebuild --engine spark, from nothing"]
        - starts["eventjet rebuild --engine local, from nothing"]
    )
    assert pytest.approx(began, rel=0.01) == SPARK_START_S
