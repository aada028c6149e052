"""Tests what the live page and its API show of a job whose weights are on the shards."""

from __future__ import annotations

import re
from pathlib import Path

from harness import Job, metric, servers
from playwright.sync_api import expect
from watched import api, browser

JOBS = Path(__file__).parent / "server_optimizer_jobs.py"


def test_page_and_api_show_the_time_of_updates_and_the_memory_of_weights(tmp_path):
    with servers(shards=1) as cluster, browser() as view:
        sidecars = [cluster.add_sidecar().address for _ in range(2)]
        job = Job("trained_on_and_on", cluster, tmp_path, sidecar_of=sidecars, jobs=JOBS)
        job.await_rounds(50)
        (aggregator,) = cluster.aggregators
        view.page.goto(f"http://{aggregator.http}/")
        card = view.page.get_by_role("article")
        updates = card.locator('[data-field="phases"] .key-update')
        expect(updates).to_be_visible()
        expect(updates).to_contain_text("updating weights")
        expect(card.locator('[data-field="weights"]')).to_have_text(
            re.compile(r"^[1-9].* here, with the optimizer's state$")
        )
        (found,) = api(aggregator.http, "jobs")["jobs"]
        counted = metric(aggregator, "thalweg_shard_phase_seconds_sum", 'phase="update"')
        assert 0 < found["update_seconds"] < counted + 1e-6  # which may have grown since
        weights = 64 * 100 + 100 * 100 + 100 + 100 * 10 + 10  # the first bias is frozen
        assert found["residual_bytes"] == 3 * 4 * weights
        for worker in job.workers:
            worker.process.kill()
        job.wait()
