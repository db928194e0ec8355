"""The page of metrics says what the code declares, and dashboard and alert rules query nothing else."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from eventjet.observability import logs, spans
from eventjet.observability.metrics import METRICS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
ALERTS = ROOT / "deploy" / "alerts.yaml"
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""


def rows_of_page() -> list[str]:
    return [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]


def named(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def test_the_page_lists_every_metric_and_span_as_it_is_declared() -> None:
    declared = [f"| `{metric.name}` | {metric.kind} | {named(metric.labels)} | {metric.help} |" for metric in METRICS]
    declared += [
        f"| `{span.name}` | {span.kind} | {named(span.labels)} | {named(span.attributes)} | {span.help} |"
        for span in spans.SPANS
    ]
    rows = rows_of_page()
    assert rows[: len(declared)] == declared
    events = [
        f"| `{event.name}` | {logging.getLevelName(event.level).lower()} | {named(fields_of(event))} |"
        for event in logs.LOG_EVENTS
    ]
    assert [row.rsplit("|", 2)[0] + "|" for row in rows[len(declared) :]] == events


def fields_of(event: logs.LogEvent) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"%\((\w+)\)", event.text)))


def known_labels() -> dict[str, set[str]]:
    """Return every name that a query may have, with its labels."""
    known: dict[str, set[str]] = {}
    declared = [(metric.name, metric.labels, metric.kind == "histogram") for metric in METRICS]
    declared += [
        (span.prometheus, tuple(label.replace(".", "_") for label in span.labels), True) for span in spans.SPANS
    ]
    declared.append((spans.CONFLICTS_PROMETHEUS, ("eventjet_aggregate",), False))
    for name, labels, is_histogram in declared:
        names = [f"{name}_{part}" for part in ("bucket", "sum", "count")] if is_histogram else [name]
        known |= {series: {*labels, *SCRAPED, *({"le"} if series.endswith("_bucket") else ())} for series in names}
    return known


def queried(node: Any) -> list[tuple[str, set[str]]]:
    """Return the metrics of an expression, each with the labels that it queries."""
    match node:
        case promql_parser.VectorSelector():
            return [(node.name, {matcher.name for matcher in node.matchers.matchers})]
        case promql_parser.MatrixSelector():
            return queried(node.vector_selector)
        case promql_parser.AggregateExpr():
            by = set(node.modifier.labels) if node.modifier is not None else set[str]()
            return [(name, labels | by) for name, labels in queried(node.expr)]
        case promql_parser.BinaryExpr():
            return queried(node.lhs) + queried(node.rhs)
        case promql_parser.Call():
            return [query for argument in node.args for query in queried(argument)]
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            return queried(node.expr)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return []
    raise AssertionError(type(node))


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    on_page = PAGE.read_text(encoding="utf-8").partition("```promql\n")[2].partition("```")[0].splitlines()
    return [*queries, *rules, *on_page]


@pytest.mark.parametrize("expression", expressions())
def test_queries_use_declared_metrics_and_labels(expression: str) -> None:
    queries = queried(promql_parser.parse(expression))
    assert queries
    known = known_labels()
    assert [
        (name, labels - known.get(name, set())) for name, labels in queries if labels - known.get(name, set())
    ] == []
    assert {name for name, _ in queries} <= known.keys()


def test_a_query_for_an_undeclared_metric_is_detected() -> None:
    ((name, labels),) = queried(promql_parser.parse('sum by (who) (rate(eventjet_nothing_total{a="b"}[5m]))'))
    assert (name, labels) == ("eventjet_nothing_total", {"who", "a"})
    assert name not in known_labels()


def test_grafana_reads_and_writes_the_dashboard_unchanged() -> None:
    register_default_plugins()
    stored = DASHBOARD.read_text(encoding="utf-8")
    read = Dashboard.from_json(json.loads(stored))
    assert json.loads(JSONEncoder().encode(read)) == json.loads(stored)
    panels = json.loads(stored)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})


def test_every_alert_is_a_rule_with_a_description() -> None:
    """Read the rules as Prometheus does, which refuses unknown keys."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [group.keys() - {"name", "rules", "interval"} for group in groups] == [set()] * len(groups)
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations", "keep_firing_for"}, rule
        assert {"summary", "description"} == rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("page", "ticket")
        if "for" in rule:
            assert promql_parser.parse_duration(rule["for"]).total_seconds() > 0
    assert len({rule["alert"] for rule in rules}) == len(rules)
