"""Tests what a shard reports that has been told to end while a job still needs it."""

from __future__ import annotations

import signal
import time
import urllib.error
import urllib.request

from watched import api, watched_job


def answer(http: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{http}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_shard_that_drains_is_alive_but_not_ready_and_ends_with_its_job(tmp_path):
    with watched_job(tmp_path) as watched:
        watched.step(1)
        shard = watched.cluster.aggregators[0]
        assert answer(watched.http, "/readyz") == (200, "ready\n")
        shard.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while answer(watched.http, "/readyz")[0] == 200 and time.monotonic() < deadline:
            pass
        status, text = answer(watched.http, "/readyz")
        assert status == 503
        assert "takes no new jobs" in text
        assert answer(watched.http, "/healthz")[0] == 200
        assert api(watched.http, "shard")["draining"]
        watched.step(2)  # the job has reached its goal
    assert shard.process.wait(20) == 0
