"""What the dashboards are made of: panels, variables, and how Grafana's SDK builds them.

In queries NODE stands for the labels of the chosen nodes, SHARD for those of the chosen shards,
SIDECARS and SHARDS for all of the chosen jobs of Prometheus, and [R] for the range that suits the
picture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

_LABELS = {
    "NODE": 'job=~"$sidecars",instance=~"$node"',
    "SHARD": 'job=~"$aggregators",instance=~"$shard"',
    "SIDECARS": 'job=~"$sidecars"',
    "SHARDS": 'job=~"$aggregators"',
    "[R]": "[$__rate_interval]",
}
_SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
# One of the SDK's builders: those of panels have the same methods, but no class in common.
Builder: TypeAlias = Any
Query: TypeAlias = str | tuple[str, str]  # an expression, or what the legend says and an expression


@dataclass(frozen=True)
class Panel:
    """Shows queries; `change` gives the builder what only this panel has."""

    kind: str  # stat, lines or table
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    change: Callable[[Builder], object]
    width: int | None

    def build(self, number: int, stat_width: int) -> Builder:
        builder = _KINDS[self.kind]().id(number).title(self.title).description(self.description)
        builder.datasource(_SOURCE).unit(self.unit).min(0)
        builder.span(self.width or (stat_width if self.kind == "stat" else 12))
        for letter, query in zip("ABCDEF", self.queries, strict=False):
            legend, expression = query if isinstance(query, tuple) else ("", query)
            target = prometheus.Dataquery().ref_id(letter).datasource(_SOURCE)
            target.expr(expand(expression)).legend_format(legend)
            if self.kind == "table":
                target.instant().format(PromQueryFormat.TABLE)
            else:
                target.range()
            builder.with_target(target)
        self.change(builder)
        return builder


@dataclass(frozen=True)
class Row:
    """Begins a section."""

    title: str


def panel(
    kind: str,
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    change: Callable[[Builder], object] = lambda _: None,
    width: int | None = None,
) -> Panel:
    return Panel(kind, title, description, unit, queries, change, width)


def expand(expression: str) -> str:
    """Returns a query as Prometheus and Grafana understand it."""
    return re.sub(r"\b(NODE|SHARD|SIDECARS|SHARDS)\b|\[R\]", lambda m: _LABELS[m[0]], expression)


def bounded(builder: Builder) -> None:
    """Ends the axis at 1: for shares."""
    builder.max(1)


def whole(builder: Builder) -> None:
    """Shows no decimals: for counts of few things."""
    builder.decimals(0)


def signed(builder: Builder) -> None:
    """Lets the axis begin anywhere: for what may be below 0, and for scales without 0."""
    builder._internal.field_config.defaults.min_val = None


def stacked(builder: Builder) -> None:
    """Puts lines upon each other: for parts of one whole."""
    stacking = common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A")
    builder.fill_opacity(40).stacking(stacking)


def logarithmic(builder: Builder) -> None:
    signed(builder)
    scale = common.ScaleDistributionConfig().type(kinds.ScaleDistribution.LOG).log(2)
    builder.scale_distribution(scale)


def decimals(count: int, *steps: tuple[str, float]) -> Callable[[Builder], None]:
    """Shows so many decimals, and other colours from some values on."""
    return lambda builder: builder.decimals(count).thresholds(thresholds("text", *steps))


def alarming(builder: Builder) -> None:
    """Shows red from 1 on: for what should be 0."""
    builder.thresholds(thresholds("green", ("red", 1)))


def thresholds(first: str, *steps: tuple[str, float]) -> build.ThresholdsConfig:
    colours = [model.Threshold(color=first, value=None)]
    colours += [model.Threshold(color=colour, value=value) for colour, value in steps]
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(colours)


def variable(name: str, label: str, description: str, metric: str, value: str) -> Builder:
    """Lets the user choose from the values that a label of a metric has."""
    chosen = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    query = f"label_values({metric}, {value})"
    builder = build.QueryVariable(name).label(label).description(description)
    builder.datasource(_SOURCE).query({"query": query, "refId": "variable"})
    builder.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True)
    return builder.sort(model.VariableSort.ALPHABETICAL_ASC).current(chosen)


def _stat() -> stat.Panel:
    last = common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)
    panel = stat.Panel().height(4).reduce_options(last).thresholds(thresholds("text"))
    return panel.color_mode(kinds.BigValueColorMode.VALUE).graph_mode(kinds.BigValueGraphMode.AREA)


def _lines() -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(kinds.LegendDisplayMode.LIST)
    legend.placement(kinds.LegendPlacement.BOTTOM).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI)
    panel = timeseries.Panel().height(8).legend(legend)
    panel.tooltip(tooltip.sort(kinds.SortOrder.DESCENDING))
    panel.fill_opacity(8).line_width(1).span_nulls(True)
    return panel.show_points(kinds.VisibilityMode.NEVER)


def _table() -> table.Panel:
    hidden = {"excludeByName": {"Time": True, "Value": True, "__name__": True}}
    organized = model.DataTransformerConfig(id_val="organize", options=hidden)
    return table.Panel().height(6).with_transformation(organized)


_KINDS: dict[str, Callable[[], Builder]] = {"stat": _stat, "lines": _lines, "table": _table}
