"""Tests the live page, its API and `thalweg status` with a real job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.parse

import pytest
from axe_playwright_python.sync_playwright import Axe
from harness import environment
from playwright.sync_api import expect
from ports import free_port
from watched import JOB, NODES, api, browser, watched_job

from thalweg import _binaries
from thalweg._job._processes import Server


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    with watched_job(tmp_path_factory.mktemp("watched")) as result:
        result.step(10)
        yield result


@pytest.fixture(scope="module")
def view(watched):
    with browser() as result:
        result.page.goto(f"http://{watched.http}/")
        yield result


def name_of_job(watched):
    """Returns the name that attach() has given it: the requested name and a suffix."""
    name = api(watched.http, "jobs")["jobs"][0]["name"]
    assert name.startswith(JOB)
    return name


def only_job(watched):
    return api(watched.http, "jobs/" + urllib.parse.quote(name_of_job(watched), safe=""))["job"]


def test_api_has_the_values_of_the_metrics(watched):
    shard, job = api(watched.http, "shard"), only_job(watched)
    for key, name in [
        ("rounds", "thalweg_shard_rounds_total"),
        ("contributions", "thalweg_shard_contributions_total"),
        ("nonfinite_elements", "thalweg_shard_nonfinite_elements_total"),
        ("held_bytes", "thalweg_shard_held_bytes"),
        ("memory_reserved_bytes", "thalweg_shard_memory_reserved_bytes"),
    ]:
        assert shard[key] == job[key] == watched.shard_metric(name), key
    assert job["fold_seconds"] == pytest.approx(
        watched.shard_metric("thalweg_shard_phase_seconds_sum", 'phase="fold"'),
        rel=1e-9,
        abs=2e-9,  # the API counts whole nanoseconds
    )
    assert shard["jobs"] == watched.shard_metric("thalweg_shard_jobs") == 1
    assert job["contributions"] == NODES * job["rounds"] > 0
    for way in ("received", "sent"):
        wire = watched.shard_metric(f"thalweg_shard_{way}_bytes_total")
        assert shard[way]["wire_bytes"] == job[way]["wire_bytes"] == wire > 0
        raw = watched.shard_metric(f"thalweg_shard_{way}_raw_bytes_total")
        assert shard[way]["raw_bytes"] == job[way]["raw_bytes"] == raw


def test_bytes_are_those_that_the_nodes_have_counted(watched):
    # The sidecars count whole gradients; the shard sums shares of them.
    received = only_job(watched)["received"]
    assert received["wire_bytes"] == watched.sent("wire")
    assert received["raw_bytes"] == pytest.approx(watched.sent("raw"), rel=1e-9)
    assert received["raw_bytes"] > 2 * received["wire_bytes"]


def test_api_names_nodes_and_what_they_send(watched):
    job = only_job(watched)
    assert [job["name"], job["state"], job["workers"]] == [name_of_job(watched), "running", NODES]
    assert [node["state"] for node in job["nodes"]] == ["active"] * NODES
    assert sum(node["last_rounds"] for node in job["nodes"]) == job["rounds"]
    assert sum(node["waited_seconds"] for node in job["nodes"]) == pytest.approx(
        job["wait_seconds"]  # with two nodes, a node that waits waits for the other
    )
    assert job["codec"].startswith("powersgd:rank=2")
    formats = {(item["format"], item["factors"]): item["received"] for item in job["formats"]}
    assert set(formats) == {("fp32", False), ("fp32", True), ("fp16", False)}
    for kind in ("raw_bytes", "wire_bytes"):
        assert sum(item[kind] for item in formats.values()) == job["received"][kind]


def test_api_and_page_say_what_the_shares_cost(watched, view):
    placement = only_job(watched)["placement"]
    assert placement["shares"] == [1.0]
    assert placement["seconds_per_byte"] > 0
    # With two nodes a ring carries the gradient once over each link.
    ratio = placement["seconds_per_byte"] / placement["ring_seconds_per_byte"]
    assert 1 - 1e-9 < ratio < 2 + 1e-9
    assert placement["text"].startswith("one shard sums everything; 100 MB take ")
    card = view.page.get_by_role("article", name=name_of_job(watched))
    expect(card.locator('[data-field="placement"]')).to_have_text(placement["text"])


def test_unknown_job_is_not_found(watched):
    with pytest.raises(urllib.error.HTTPError) as refusal:
        api(watched.http, "jobs/none")
    assert refusal.value.code == 404
    assert json.load(refusal.value) == {"error": "no job 'none' has members on this shard"}


def test_page_shows_the_values_of_the_metrics(watched, view):
    card = view.page.get_by_role("article", name=name_of_job(watched))
    rounds = watched.shard_metric("thalweg_shard_rounds_total")
    expect(card.locator('[data-chart="rounds"] .value')).to_contain_text(f"{rounds:,.0f} in all")
    ratio = watched.sent("raw") / watched.sent("wire")
    expect(card.locator('[data-chart="ratio"] .value')).to_contain_text(f"{ratio:.2f}\u00d7")
    expect(view.page.locator('[data-sum="jobs"]')).to_have_text("1")
    names = [node["name"] for node in only_job(watched)["nodes"]]
    for i, row in enumerate(card.locator("tbody tr").all()):
        expect(row.get_by_role("rowheader")).to_have_text(f"{i}{names[i]}")
    expect(card.get_by_role("row")).to_have_count(1 + NODES)


@pytest.mark.parametrize(
    ("seconds", "number"), [(0.0014, -1), (0.00199, -1), (0.002, 1), (0.03, 1)]
)
def test_page_calls_a_node_the_slowest_from_a_mean_delay_of_2_ms_on(view, seconds, number):
    nodes = [
        {"share": 0.1, "waited": seconds / 10},
        {"share": 0.9, "waited": seconds},
        {"share": 0.0, "waited": None},  # it never came last
    ]
    find = "async (nodes) => (await import('./rates.js')).slowest(nodes)"
    assert view.page.evaluate(find, nodes) == number


def test_page_says_what_a_nodes_delay_is(watched, view):
    card = view.page.get_by_role("article", name=name_of_job(watched))
    expect(card.get_by_role("columnheader", name="Mean delay when last")).to_be_visible()


def test_page_shows_no_time_of_updates_where_workers_keep_the_weights(watched, view):
    card = view.page.get_by_role("article", name=name_of_job(watched))
    phases = card.locator('[data-field="phases"]')
    expect(phases).to_contain_text("summing")
    expect(phases.locator(".key-update")).to_be_hidden()


def test_page_follows_the_job(watched, view):
    before = watched.shard_metric("thalweg_shard_rounds_total")
    watched.step(30)
    rounds = watched.shard_metric("thalweg_shard_rounds_total")
    assert rounds > before
    card = view.page.get_by_role("article", name=name_of_job(watched))
    expect(card.locator('[data-chart="rounds"] .value')).to_contain_text(f"{rounds:,.0f} in all")
    label = re.compile("^Rounds over the last minutes: from 0/s to [1-9]")
    chart = card.locator('[data-chart="rounds"] svg')
    expect(chart).to_have_attribute("aria-label", label)  # 0/s before or after


def test_page_can_be_paused_and_read_by_everybody(watched, view):
    view.page.keyboard.press("Tab")
    expect(view.page.get_by_role("link", name="Skip to jobs")).to_be_focused()
    view.page.keyboard.press("Tab")
    expect(view.page.get_by_role("button", name="Pause")).to_be_focused()
    view.page.keyboard.press("Enter")
    expect(view.page.get_by_role("status")).to_contain_text("Paused at")
    for scheme in ("light", "dark"):
        view.page.emulate_media(color_scheme=scheme)
        violations = Axe().run(view.page).response["violations"]
        assert not violations, [(item["id"], item["help"]) for item in violations]
    view.page.get_by_role("button", name="Go on").click()
    expect(view.page.get_by_role("status")).to_have_text("Live")
    assert view.complaints == []


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thalweg", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_status_shows_the_job_and_names_shards_that_are_gone(watched):
    gone = f"127.0.0.1:{free_port()}"
    result = status("--shards", f"{watched.http},{gone}", "--interval", "0.2")
    assert result.returncode == 1
    job = only_job(watched)
    assert f"job {name_of_job(watched)} · running · powersgd:rank=2" in result.stdout
    assert re.search(rf"^ +1 +{re.escape(job['nodes'][1]['name'])} +active", result.stdout, re.M)
    assert f"{gone}  not reachable: Connection refused" in result.stdout


def test_status_passes_the_api_on_as_json(watched):
    result = status("--shards", watched.http, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    (shard,) = json.loads(result.stdout)["shards"]
    assert shard["error"] == ""
    assert shard["shard"]["rounds"] == watched.shard_metric("thalweg_shard_rounds_total")
    assert shard["jobs"][0]["received"] == only_job(watched)["received"]


# This test comes last: the page leaves the watched job.
def test_page_survives_a_restart_of_the_shard(view, tmp_path):
    ports = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    program = str(_binaries.find(_binaries.AGGREGATOR))
    argv = [program, "--listen", ports[0], "--http", ports[1]]
    place = view.page.get_by_role("status")
    for run in range(2):
        server = Server("shard", argv, env=environment(tmp_path))
        server.wait_ready(20)
        try:
            if run == 0:
                view.page.goto(f"http://{server.http}/")
            expect(place).to_have_text("Live")
            expect(view.page.get_by_text("No job has nodes on this shard.")).to_be_visible()
        finally:
            server.stop(grace=20)
        expect(place).to_contain_text("Not reachable since")
    assert [text for text in view.complaints if "net::ERR_" not in text] == []
