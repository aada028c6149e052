#!/usr/bin/env python3
"""Writes the Grafana dashboards of the chart from the lists in this folder.

    python helm/dashboards/write.py [FOLDER]    # after a change of a list

What it writes, a line for each panel, is committed: so `helm install` from a clone, and Grafana's
import, need neither Python nor Grafana's SDK. A test compares it with the lists.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import aggregators
import faults
import training
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model
from panels import Panel, variable

FOLDER = Path(__file__).resolve().parents[1] / "thalweg" / "files" / "dashboards"
DASHBOARDS: tuple[ModuleType, ...] = (aggregators, faults, training)
_VARIABLES = {
    # A sidecar that has a shard exports what aggregators export.
    "aggregators": (
        "Shards of",
        "What Prometheus calls the aggregators it scrapes, and sidecars with a shard",
        "thalweg_shard_jobs",
        "job",
    ),
    "sidecars": (
        "Sidecars",
        "What Prometheus calls the sidecars it scrapes",
        'thalweg_build_info{program="sidecar"}',
        "job",
    ),
    "shard": ("Shard", "Shards to look at", 'thalweg_shard_jobs{job=~"$aggregators"}', "instance"),
    "node": (
        "Node",
        "Sidecars of the job to look at",
        'thalweg_build_info{program="sidecar",job=~"$sidecars"}',
        "instance",
    ),
}


def make(dashboard: ModuleType) -> dict[str, Any]:
    """Returns a dashboard as Grafana reads it."""
    link = build.DashboardLink("Thalweg").type(model.DashboardLinkType.DASHBOARDS)
    link.tags(["thalweg"]).as_dropdown(True).keep_time(True)
    source = build.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    builder = build.Dashboard(f"Thalweg / {dashboard.TITLE}").uid(f"thalweg-{dashboard.__name__}")
    builder.description(dashboard.DESCRIPTION).tags(["thalweg"]).link(link).with_variable(source)
    builder.tooltip(model.DashboardCursorSync.CROSSHAIR).timezone("browser")
    builder.time("now-1h", "now").refresh("30s")
    for name in dashboard.VARIABLES:
        builder.with_variable(variable(name, *_VARIABLES[name]))
    stats = [each for each in dashboard.PANELS if isinstance(each, Panel) and each.kind == "stat"]
    for number, each in enumerate(dashboard.PANELS, 1):
        if isinstance(each, Panel):
            builder.with_panel(each.build(number, 24 // len(stats)))
        else:
            builder.with_row(build.Row(each.title).id(number))
    made = json.loads(json.dumps(builder.build(), cls=JSONEncoder))
    made["schemaVersion"] = 38  # Grafana 10.1's: newer ones convert it
    for each in made["templating"]["list"]:
        if each["type"] == "query":
            each["definition"] = each["query"]["query"]  # what Grafana's list of variables shows
        else:
            each["refresh"] = model.VariableRefresh.ON_DASHBOARD_LOAD
    return made


def dump(made: dict[str, Any]) -> str:
    """Returns JSON with a line for each panel."""
    panels = ",\n".join(json.dumps(panel) for panel in made.pop("panels"))
    head = json.dumps(made)
    return f'{head[:-1]}, "panels": [\n{panels}\n]}}\n'


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for each in DASHBOARDS:
        (folder / f"{each.__name__}.json").write_text(dump(make(each)), encoding="utf-8")
