"""The page of metrics says what the code declares."""

from __future__ import annotations

from pathlib import Path

from eventjet.observability.metrics import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_the_page_lists_every_metric_as_it_is_declared() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    declared = [
        f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels) or '–'} | {one.help} |"
        for one in METRICS
    ]
    assert rows == declared
