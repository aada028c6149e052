"""Tests what a shard reports that has been told to end while a job still needs it."""

from __future__ import annotations

import signal
import subprocess
import urllib.error
import urllib.request

import pytest
from waiting import settled
from watched import api, watched_job

from thalweg import _binaries


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
        status, text = settled(
            lambda: answer(watched.http, "/readyz"), lambda got: got[0] != 200, 20, every=0.05
        )
        assert status == 503
        assert "takes no new jobs" in text
        assert answer(watched.http, "/healthz")[0] == 200
        assert api(watched.http, "shard")["draining"]
        watched.step(2)  # the job has reached its goal
    assert shard.process.wait(20) == 0


@pytest.mark.parametrize("program", [_binaries.AGGREGATOR, _binaries.SIDECAR])
@pytest.mark.parametrize("value", ["nan", "-1", "inf", "soon"])
def test_what_are_no_seconds_is_refused(program, value):
    argv = [str(_binaries.find(program)), f"--drain-seconds={value}"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode != 0
    assert "--drain-seconds" in ended.stderr + ended.stdout
