"""Checks the dashboards and rules of helm/thalweg/files; prints what is wrong, and then exits 1.

Grafana takes almost anything and shows an empty panel, so: ids are unique, every panel has a
title, a description and a unit, comes from the data source that the user has chosen, and asks only
for metrics of docs/metrics.md, variables that exist, and what rules.yaml records. Every alert has
a runbook.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "helm" / "thalweg" / "files"
RULES = FILES / "rules.yaml"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
PROMETHEUS_OWN = {"up", "ALERTS"}
GRAFANA_OWN = {"__rate_interval", "__range", "datasource"}

Panel = dict[str, Any]


def load() -> dict[str, dict[str, Any]]:
    """Returns all dashboards, by the file's name."""
    paths = sorted((FILES / "dashboards").glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def panels(dashboard: dict[str, Any]) -> list[Panel]:
    """Yields panels that show something: rows only have a title."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Yields every query of every dashboard, with its place."""
    for name, dashboard in load().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}: {target['refId']}", target["expr"]


def known_metrics() -> set[str]:
    """Returns names in docs/metrics.md; for histograms the series that they consist of."""
    names = set(PROMETHEUS_OWN)
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE):
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + suffix for suffix in suffixes}
    return names


def metrics_in(expression: str) -> set[str]:
    """Returns names of metrics and records that a PromQL expression uses."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    names = set(re.findall(r"(?<![\w:])((?:thalweg|process)_\w+|[a-z_]+:[\w:]+)", bare))
    return names | {name for name in PROMETHEUS_OWN if re.search(rf"\b{name}\b", bare)}


def lint() -> list[str]:
    """Returns the problems, a line each."""
    dashboards = load()
    records = set(re.findall(r"record: (\S+)", RULES.read_text(encoding="utf-8")))
    known = known_metrics() | records
    problems = [f"no dashboards in {FILES / 'dashboards'}"] if not dashboards else []
    uids: dict[str, str] = {}
    for name, dashboard in dashboards.items():
        uid = dashboard["uid"]
        if uid in uids:
            problems.append(f"{name}: uid {uid} is also that of {uids[uid]}")
        uids[uid] = name
        problems += [f"{name}: {problem}" for problem in lint_dashboard(dashboard, known)]
    rules = RULES.read_text(encoding="utf-8")
    problems += [f"rules.yaml: {problem}" for problem in lint_rules(rules, known)]
    return problems


def alerts(rules: str) -> dict[str, str]:
    """Returns the text of each alert in a file of rules, by name."""
    texts = re.split(r"^ +- alert: ", rules, flags=re.M)[1:]
    return {text.split("\n", 1)[0]: text for text in texts}


def lint_rules(text: str, known: set[str]) -> Iterator[str]:
    code = re.sub(r"^\s*(#.*|(summary|description|runbook|record): .*)$", "", text, flags=re.M)
    for name in sorted(metrics_in(code) - known):
        yield f"there is no metric or record {name}"
    for name, alert in alerts(text).items():
        runbook = re.search(r"^ +runbook: (\S+)$", alert, re.M)
        path = ROOT / (runbook[1] if runbook else "")
        if not path.is_file() or not path.read_text(encoding="utf-8").startswith(f"# {name}\n"):
            yield f"alert {name} has no runbook with its name as the title"


def lint_dashboard(dashboard: dict[str, Any], known: set[str]) -> Iterator[str]:
    if dashboard.get("id") is not None:
        yield f"id is {dashboard['id']}, expected none: Grafana gives one"
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    if variables.get("datasource", {}).get("query") != "prometheus":
        yield "there is no variable datasource of type prometheus"
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(ids) != len(set(ids)):
        yield f"panels do not have ids of their own: {ids}"
    queries = [v["definition"] for v in variables.values() if v["type"] == "query"]
    for query in queries:
        yield from lint_expression(query.split("(", 1)[1], known, set(variables))
    for panel in panels(dashboard):
        for problem in lint_panel(panel, known, set(variables)):
            yield f"panel '{panel['title']}': {problem}"
    yield from overlaps(dashboard["panels"])


def lint_panel(panel: Panel, known: set[str], variables: set[str]) -> Iterator[str]:
    if not panel["title"] or not panel.get("description"):
        yield "it has no title or no description"
    if not panel["fieldConfig"]["defaults"].get("unit"):
        yield "it has no unit"
    for source in [panel, *panel["targets"]]:
        if source.get("datasource") != DATASOURCE:
            yield f"the data source is {source.get('datasource')}, expected {DATASOURCE}"
    refs = [target["refId"] for target in panel["targets"]]
    if not refs or len(refs) != len(set(refs)):
        yield f"it has no targets, or they are not unique: {refs}"
    for target in panel["targets"]:
        yield from lint_expression(target["expr"], known, variables)


def lint_expression(expression: str, known: set[str], variables: set[str]) -> Iterator[str]:
    names = metrics_in(expression)
    if not names:
        yield f"there is no metric in: {expression}"
    for name in sorted(names - known):
        yield f"docs/metrics.md has no {name}"
    for name in re.findall(r"\$\{?(\w+)", expression):
        if name not in variables | GRAFANA_OWN:
            yield f"there is no variable ${name}"


def overlaps(all_panels: list[Panel]) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in all_panels:
        grid = panel["gridPos"]
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                other = taken.setdefault((x, y), panel["title"])
                if x > 23 or other != panel["title"]:
                    yield f"panel '{panel['title']}' lies outside, or on '{other}'"
                    return


if __name__ == "__main__":
    found = lint()
    print("\n".join(found) or f"{len(load())} dashboards and the rules: clean")
    sys.exit(bool(found))
