"""Tests that a sidecar which hosts a shard serves that shard's page, API and metrics."""

from __future__ import annotations

import json

import pytest
from harness import metric
from playwright.sync_api import expect
from watched import JOB, NODES, api, browser, watched_job

from thalweg.cli import main


@pytest.fixture(scope="module")
def hosting(tmp_path_factory):
    with watched_job(tmp_path_factory.mktemp("hosting"), hosted=True) as result:
        result.step(5)
        yield result


def test_shards_of_all_sidecars_have_summed_what_the_nodes_have_sent(hosting):
    jobs = [api(server.http, "jobs")["jobs"] for server in hosting.cluster.sidecars]
    assert [len(of_shard) for of_shard in jobs] == [1] * NODES
    for (job,) in jobs:
        assert job["name"].startswith(JOB)
        assert [node["state"] for node in job["nodes"]] == ["active"] * NODES
        assert job["received"]["wire_bytes"] > 0
    received = sum(job["received"]["wire_bytes"] for (job,) in jobs)
    assert received == hosting.sent("wire") > 0


def test_metrics_of_a_sidecar_include_those_of_its_shard(hosting):
    for server in hosting.cluster.sidecars:
        rounds = api(server.http, "shard")["rounds"]
        assert rounds == metric(server, "thalweg_shard_rounds_total") > 0
        assert metric(server, "thalweg_sidecar_workers") == 1


def test_page_of_a_sidecar_shows_the_rounds_of_its_shard(hosting):
    server = hosting.cluster.sidecars[1]
    with browser() as view:
        view.page.goto(f"http://{server.http}/")
        rounds = view.page.get_by_role("article").locator('[data-chart="rounds"] .value')
        expected = metric(server, "thalweg_shard_rounds_total")
        expect(rounds).to_contain_text(f"{expected:,.0f} in all")
        assert view.complaints == []


def test_status_adds_up_the_shards_of_sidecars(hosting, capsys):
    addresses = ",".join(server.http for server in hosting.cluster.sidecars)
    assert main(["status", "--json", "--shards", addresses]) == 0
    shards = json.loads(capsys.readouterr().out)["shards"]
    assert [shard["error"] for shard in shards] == [""] * NODES
    assert [len(shard["jobs"]) for shard in shards] == [1] * NODES
