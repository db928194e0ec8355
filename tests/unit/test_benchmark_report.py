"""Tables of benchmarks replace the text between the marks of a page, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import BEGIN, END, placed, tables

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "performance.md"


def test_new_tables_replace_the_former_tables_of_a_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    once = placed(page, "### One\n")
    assert placed(placed(page, "### Another\n\n| a |\n"), "### One\n") == once
    before, _, rest = page.partition(BEGIN)
    assert once.startswith(f"{before}{BEGIN}\n\n### One\n\n{END}")
    assert once.endswith(rest.partition(END)[2])


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="tables: begin"):
        placed("# A page\n", "### One\n")


def test_earlier_figures_keep_their_tables_beside_new_figures() -> None:
    figure = {"unit": "ms", "median": 2.0, "min": 1.0, "max": 3.0, "runs": 3}
    old = {"job": "old", "subject": "a", **figure}
    new = {"job": "new", "subject": "b", **figure, "when_it_began": "load average 0.1"}
    ratio = {**new, "subject": "a", "versus": "b", "ratio": 2.5, "ratio_min": 2.0, "ratio_max": 3.0, "target": 4.0}
    text = tables([old, new, ratio])
    assert "### Old\n\n| | ms |" in text
    assert "### New\n\nWhen it began: load average 0.1.\n" in text
    assert "| b | 2 | 1 to 3 | 3 | 2.5 × (2 to 3), aimed at 4 and missed |" in text
