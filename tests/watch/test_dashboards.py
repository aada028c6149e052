"""Tests the dashboards and rules as files; test_watch.py runs them on a real Prometheus."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import dashboards
import pytest
from real_prometheus import TOOL, hurried

needs_promtool = pytest.mark.skipif(
    TOOL is None, reason="there is no promtool; scripts/setup unpacks it"
)


def test_dashboards_and_rules_are_clean():
    assert dashboards.lint() == []
    assert len(list(dashboards.expressions())) > 50


def test_dashboards_are_what_their_lists_say(tmp_path):
    writer = dashboards.ROOT / "helm" / "dashboards" / "write.py"
    subprocess.run([sys.executable, writer, tmp_path], check=True)
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = (dashboards.FILES / "dashboards").iterdir()
    assert written == {path.name: path.read_text(encoding="utf-8") for path in kept}


def test_shards_to_choose_are_also_those_of_sidecars():
    lists = [dashboard["templating"]["list"] for dashboard in dashboards.load().values()]
    asked = {each["name"]: each.get("definition") for variables in lists for each in variables}
    assert asked["aggregators"] == "label_values(thalweg_shard_jobs, job)"
    assert asked["shard"] == 'label_values(thalweg_shard_jobs{job=~"$aggregators"}, instance)'


def evaluate(folder, place, series, at, expected):
    """Lets promtool evaluate the first expression of a panel. Grafana's ranges are 5m and 1h.

    `series` is values by series, `expected` the value by labels.
    """
    (expression,) = [e for where, e in dashboards.expressions() if where == f"{place}: A"]
    for name, value in {"__rate_interval": "5m", "__range": "1h"}.items():
        expression = expression.replace(f"${name}", value)
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [
            {
                "expr": re.sub(r"\$\w+", ".+", expression),
                "eval_time": at,
                "exp_samples": samples,
            }
        ],
    }
    path = folder / "test.yaml"
    path.write_text(json.dumps({"tests": [test]}), encoding="utf-8")  # JSON is YAML
    result = subprocess.run([str(TOOL), "test", "rules", str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_restarts_are_those_of_aggregators(tmp_path):
    started, build = "process_start_time_seconds", "thalweg_build_info"
    of_shard, of_node = 'job="s",instance="1"', 'job="n",instance="2"'
    series = {
        f"{started}{{{of_shard}}}": "1x10 900x10 1500x10",
        f"{started}{{{of_node}}}": "1x10 900x10 1500x10",
        f'{build}{{program="aggregator",{of_shard}}}': "1x15 _x20",  # the last one is down
        f'{build}{{program="sidecar",{of_node}}}': "1x40",
    }
    evaluate(tmp_path, "faults.json: Restarts", series, "30m", {"{}": 2})


@needs_promtool
def test_pod_that_comes_back_at_another_address_is_a_restart(tmp_path):
    started, build = "process_start_time_seconds", "thalweg_build_info"
    labels = 'job="s",namespace="ml",pod="a-{}",instance="{}"'
    series = {}
    # The pod a-0 has two addresses in turn, and a new version at the second, where it crashes once.
    for (pod, instance), starts, built in (
        ((0, 1), "1x10 _x20", {"1": "1x10 _x20"}),
        ((0, 2), "_x12 9x9 20x9", {"1": "_x12 1x9", "2": "_x22 1x9"}),
        ((1, 3), "1x30", {"1": "1x30"}),
    ):
        own = labels.format(pod, instance)
        series[f"{started}{{{own}}}"] = starts
        for version, values in built.items():
            series[f'{build}{{program="aggregator",version="{version}",{own}}}'] = values
    evaluate(tmp_path, "faults.json: Restarts", series, "30m", {"{}": 2})


@needs_promtool
def test_wait_for_a_shard_is_that_of_the_average_node(tmp_path):
    wait = 'thalweg_sidecar_shard_wait_seconds_total{job="n",instance="%s",shard="0"}'
    series = {wait % "a": "0+75x20", wait % "b": "0+45x20", wait % "c": "0+15x20"}
    place = "training.json: Waiting for a shard"
    evaluate(tmp_path, place, series, "15m", {'{shard="0"}': 0.75})


@needs_promtool
def test_node_that_does_collectives_alone_does_not_wait(tmp_path):
    stands = {"buckets": "5x20", "collectives": "5x20", "jobs": "1x20"}
    nodes = {
        "a": stands,
        "b": stands | {"collectives": "0+1x20"},
        "c": stands | {"buckets": "0+1x20"},
        "d": stands | {"jobs": "0x20"},
        "e": {"jobs": "1x20", "buckets": "5x20"},  # of a release without collectives
    }
    names = {"jobs": "jobs", "buckets": "buckets_total", "collectives": "collectives_total"}
    series = {
        f'thalweg_sidecar_{names[what]}{{job="n",instance="{node}"}}': values
        for node, each in nodes.items()
        for what, values in each.items()
    }
    evaluate(tmp_path, "faults.json: Waiting nodes", series, "15m", {"{}": 2})


def duplicate_id(dashboard):
    dashboard["panels"][1]["id"] = dashboard["panels"][0]["id"]


def no_unit(dashboard):
    del dashboard["panels"][0]["fieldConfig"]["defaults"]["unit"]


def no_description(dashboard):
    dashboard["panels"][0]["description"] = ""


def fixed_datasource(dashboard):
    dashboard["panels"][0]["targets"][0]["datasource"] = {"type": "prometheus", "uid": "abc"}


def unknown_metric(dashboard):
    dashboard["panels"][0]["targets"][0]["expr"] = "rate(thalweg_sidecar_stepz_total[1m])"


def histogram_without_series(dashboard):
    dashboard["panels"][0]["targets"][0]["expr"] = "sum(thalweg_sidecar_bucket_seconds)"


def unknown_variable(dashboard):
    dashboard["panels"][0]["targets"][0]["expr"] = 'thalweg_shard_jobs{job=~"$nobody"}'


def unknown_record(dashboard):
    dashboard["panels"][0]["targets"][0]["expr"] = "job:thalweg_shard:nothing"


def overlap(dashboard):
    dashboard["panels"][1]["gridPos"] = dashboard["panels"][0]["gridPos"]


def no_datasource_variable(dashboard):
    del dashboard["templating"]["list"][0]


BREAKS = [
    (duplicate_id, "ids of their own"),
    (no_unit, "no unit"),
    (no_description, "no description"),
    (fixed_datasource, "data source"),
    (unknown_metric, "stepz_total"),
    (histogram_without_series, "no thalweg_sidecar_bucket_seconds"),
    (unknown_variable, "$nobody"),
    (unknown_record, "job:thalweg_shard:nothing"),
    (overlap, "lies outside, or on"),
    (no_datasource_variable, "no variable datasource"),
]


@pytest.mark.parametrize(("break_it", "said"), BREAKS, ids=[b.__name__ for b, _ in BREAKS])
def test_linter_names_what_is_wrong(break_it, said):
    dashboard = copy.deepcopy(dashboards.load()["training.json"])
    known = dashboards.known_metrics()
    assert list(dashboards.lint_dashboard(dashboard, known)) == []
    break_it(dashboard)
    problems = list(dashboards.lint_dashboard(dashboard, known))
    assert any(said in problem for problem in problems), problems


def test_linter_wants_known_metrics_and_runbooks_of_rules():
    rules = "  - alert: A\n    expr: thalweg_nothing > 0\n    runbook: docs/runbooks/straggler.md\n"
    problems = list(dashboards.lint_rules(rules, dashboards.known_metrics()))
    assert problems == [
        "there is no metric or record thalweg_nothing",
        "alert A has no runbook with its name as the title",
    ]


@needs_promtool
def test_rules_fire_at_their_thresholds_and_times():
    tests = Path(__file__).with_name("rules_test.yaml")
    for arguments in (["check", "rules", str(dashboards.RULES)], ["test", "rules", str(tests)]):
        result = subprocess.run([str(TOOL), *arguments], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_test_of_its_time():
    text = dashboards.RULES.read_text(encoding="utf-8")
    tested = Path(__file__).with_name("rules_test.yaml").read_text(encoding="utf-8")
    alerts = dashboards.alerts(text)
    assert len(alerts) > 5
    assert [name for name in alerts if f"alertname: {name}\n" not in tested] == []


def test_hurried_rules_differ_in_minutes_only():
    rules = "expr: rate(a[5m] offset 1m) > max_over_time(b[1d])\nfor: 30m\nsummary: 5m"
    assert hurried(rules) == (
        "expr: rate(a[10000ms] offset 2000ms) > max_over_time(b[1d])\nfor: 60000ms\nsummary: 5m"
    )
