"""All figures as Markdown tables and plots: `python -m benchmarks.report`, from `benchmarks/out/results.jsonl`.

`--into` puts the tables between the marks `<!-- tables: begin -->` and `<!-- tables: end -->` of a page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS
from benchmarks.options import parser_of

WIDTH_IN = 9.0
_OURS = "eventjet"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def tables(results: Iterable[dict[str, Any]]) -> str:
    """A table a job: medians, spread, and how many times better eventjet is."""
    parts: list[str] = []
    for job, figures in _by_job(results).items():
        ratios = [result for result in figures if "versus" in result]
        rows = _rows(figures)
        compared = {result["subject"] for result in ratios}
        head = f"{next(iter(compared))} is" if len(compared) == 1 else "beside it"
        parts += [f"### {_title(job)}", ""]
        if "when_it_began" in rows[0]:  # figures kept from before it was written down lack it
            parts += [f"When it began: {rows[0]['when_it_began']}.", ""]
        parts.append(f"| | {rows[0]['unit']} | lowest to highest | runs |" + (f" {head} |" if ratios else ""))
        parts.append("|---|---:|---:|---:|" + ("---:|" if ratios else ""))
        for row in rows:
            versus = [ratio for ratio in ratios if ratio["versus"] == row["subject"]]
            cell = "; ".join(
                _ratio(each) if len(compared) == 1 else f"{each['subject']} {_ratio(each)}" for each in versus
            )
            spread = f"{_number(row['min'])} to {_number(row['max'])}"
            line = f"| {row['subject']} | {_number(row['median'])} | {spread} | {row['runs']} |"
            parts.append(line + (f" {cell} |" if ratios else ""))
        parts.append("")
    return "\n".join(parts)


def placed(page: str, report: str) -> str:
    """Return the page with the report between its marks; raises `ValueError` without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{before}{begin}\n\n{report.strip()}\n\n{end}{after}"


def plot(results: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """A bar chart a job with several subjects; nothing where matplotlib is not installed."""
    try:
        pyplot: Any = import_module("matplotlib.pyplot")
    except ModuleNotFoundError:
        print("matplotlib is not installed, so there are no plots (`make bench` installs it)")
        return []
    paths: list[Path] = []
    for job, figures in _by_job(results).items():
        rows = _rows(figures)
        if len(rows) < 2:
            continue
        figure, axes = pyplot.subplots(figsize=(WIDTH_IN, 0.8 + 0.4 * len(rows)), layout="constrained")
        medians = [row["median"] for row in rows]
        errors = [[row["median"] - row["min"] for row in rows], [row["max"] - row["median"] for row in rows]]
        colours = ["#2a6fbb" if row["subject"].startswith(_OURS) else "#b5bcc6" for row in rows]
        bars = axes.barh([row["subject"] for row in rows], medians, xerr=errors, color=colours, ecolor="#555555")
        axes.bar_label(bars, labels=[_number(median) for median in medians], padding=6, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{_title(job)} ({rows[0]['unit']})", loc="left", fontsize=10)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        path = folder / f"{_slug(job)}.png"
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        paths.append(path)
    return paths


def _by_job(results: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    jobs: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        jobs.setdefault(result["job"], []).append(result)
    return jobs


def _rows(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those that are no ratios."""
    return [result for result in results if "versus" not in result]


def _ratio(result: dict[str, Any]) -> str:
    text = f"{_number(result['ratio'])} × ({_number(result['ratio_min'])} to {_number(result['ratio_max'])})"
    target = result.get("target")
    if target is None:
        return text
    return f"{text}, aimed at {target:g}{'' if result['ratio'] >= target else ' and missed'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _title(job: str) -> str:
    return job[:1].upper() + job[1:]


def _slug(job: str) -> str:
    return "-".join("".join(char if char.isalnum() else " " for char in job.lower()).split())


def main(into: Path | None) -> None:
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    file = RESULTS.parent / "report.md"
    report = tables(results)
    file.write_text(f"# Benchmarks\n\n{report}")
    if into is not None:
        into.write_text(placed(into.read_text(), report))
    plots = plot(results, RESULTS.parent)
    print(f"{file.name} and {len(plots)} plots are in {RESULTS.parent.name}/ of benchmarks")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--into", type=Path, help="a page that has the marks")
    main(parser.parse_args().into)
