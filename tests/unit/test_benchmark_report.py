"""Tables of benchmarks are put into a page between its marks, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import BEGIN, END, placed

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "performance.md"


def test_tables_take_the_place_of_those_before_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    once = placed(page, "### One\n")
    assert placed(placed(page, "### Another\n\n| a |\n"), "### One\n") == once
    before, _, rest = page.partition(BEGIN)
    assert once.startswith(f"{before}{BEGIN}\n\n### One\n\n{END}")
    assert once.endswith(rest.partition(END)[2])


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="tables: begin"):
        placed("# A page\n", "### One\n")
