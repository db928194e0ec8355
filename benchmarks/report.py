"""All figures as Markdown tables and plots: `python -m benchmarks.report`, from `benchmarks/out/results.jsonl`.

`--into` puts the tables between the marks `<!-- tables: begin -->` and `<!-- tables: end -->` of a page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS

WIDTH_IN = 9.0
_OURS = "eventjet"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def tables(results: Iterable[dict[str, Any]]) -> str:
    """A table a job: medians, spread, and how many times better eventjet is."""
    parts: list[str] = []
    for job, figures in _by_job(results).items():
        ratios = [one for one in figures if "versus" in one]
        rows = [one for one in figures if "versus" not in one]
        mine = {one["subject"] for one in ratios}
        head = f"{next(iter(mine))} is" if len(mine) == 1 else "beside it"
        parts += [f"### {_title(job)}", ""]
        if "when_it_began" in rows[0]:  # figures kept from before it was written down lack it
            parts += [f"When it began: {rows[0]['when_it_began']}.", ""]
        parts.append(f"| | {rows[0]['unit']} | lowest to highest | runs |" + (f" {head} |" if ratios else ""))
        parts.append("|---|---:|---:|---:|" + ("---:|" if ratios else ""))
        for one in rows:
            versus = [ratio for ratio in ratios if ratio["versus"] == one["subject"]]
            told = "; ".join(_ratio(each) if len(mine) == 1 else f"{each['subject']} {_ratio(each)}" for each in versus)
            spread = f"{_number(one['min'])} to {_number(one['max'])}"
            row = f"| {one['subject']} | {_number(one['median'])} | {spread} | {one['runs']} |"
            parts.append(row + (f" {told} |" if ratios else ""))
        parts.append("")
    return "\n".join(parts)


def placed(page: str, made: str) -> str:
    """The page with these tables in the place of what is between its marks; raises `ValueError` without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{before}{begin}\n\n{made.strip()}\n\n{end}{after}"


def plot(results: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """A bar chart a job with several subjects; nothing where matplotlib is not installed."""
    try:
        pyplot: Any = import_module("matplotlib.pyplot")
    except ModuleNotFoundError:
        print("matplotlib is not installed, so there are no plots (`make bench` installs it)")
        return []
    made: list[Path] = []
    for job, figures in _by_job(results).items():
        rows = [one for one in figures if "versus" not in one]
        if len(rows) < 2:
            continue
        figure, axes = pyplot.subplots(figsize=(WIDTH_IN, 0.8 + 0.4 * len(rows)), layout="constrained")
        medians = [one["median"] for one in rows]
        errors = [[one["median"] - one["min"] for one in rows], [one["max"] - one["median"] for one in rows]]
        colours = ["#2a6fbb" if one["subject"].startswith(_OURS) else "#b5bcc6" for one in rows]
        bars = axes.barh([one["subject"] for one in rows], medians, xerr=errors, color=colours, ecolor="#555555")
        axes.bar_label(bars, labels=[_number(one) for one in medians], padding=6, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{_title(job)} ({rows[0]['unit']})", loc="left", fontsize=10)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        path = folder / f"{_slug(job)}.png"
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        made.append(path)
    return made


def _by_job(results: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        found.setdefault(one["job"], []).append(one)
    return found


def _ratio(found: dict[str, Any]) -> str:
    told = f"{_number(found['ratio'])} × ({_number(found['ratio_min'])} to {_number(found['ratio_max'])})"
    target = found.get("target")
    if target is None:
        return told
    return f"{told}, aimed at {target:g}{'' if found['ratio'] >= target else ' and missed'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _title(job: str) -> str:
    return job[:1].upper() + job[1:]


def _slug(job: str) -> str:
    return "-".join("".join(one if one.isalnum() else " " for one in job.lower()).split())


def main(into: Path | None) -> None:
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    report = RESULTS.parent / "report.md"
    made = tables(results)
    report.write_text(f"# Benchmarks\n\n{made}")
    if into is not None:
        into.write_text(placed(into.read_text(), made))
    plots = plot(results, RESULTS.parent)
    print(f"{report.name} and {len(plots)} plots are in {RESULTS.parent.name}/ of benchmarks")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="a page that has the marks")
    main(parser.parse_args().into)
