"""Tests `thalweg doctor --cluster` on real aggregators and a real job."""

import math

import pytest
from harness import servers
from watched import api, watched_job

from thalweg.cli import main


@pytest.fixture(autouse=True)
def on_machines_of_any_speed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # hides kubectl
    monkeypatch.setattr("thalweg.cli._cluster._CONNECT_SECONDS", 20.0)
    monkeypatch.setattr("thalweg.cli._cluster._SILENT_SECONDS", math.inf)
    monkeypatch.setattr("thalweg.cli._http._ANSWER_SECONDS", 60.0)


def doctor(grpc, http, capsys):
    code = main(
        ["doctor", "--cluster", "--aggregators", ",".join(grpc), "--shards", ",".join(http)]
    )
    return code, capsys.readouterr().out


def test_running_job_on_shards_that_answer_is_ok(tmp_path, capsys):
    with watched_job(tmp_path) as watched:
        watched.step(1)
        shard = watched.cluster.aggregators[0]
        code, out = doctor([shard.address], [shard.http], capsys)
        placement = api(shard.http, "jobs")["jobs"][0]["placement"]
    assert code == 0, out
    assert f"ok    gRPC {shard.address}: answers" in out
    assert ": running, 2 nodes, 2 workers" in out
    assert "; 100 MB take " in placement["text"]
    assert f": {placement['text']}\n" in out
    # One shard for two nodes warns, unless its link was measured to be twice as fast as theirs.
    assert out.endswith(("\n3 ok, 1 warn, 0 FAIL\n", "\n4 ok, 0 warn, 0 FAIL\n"))


def test_shard_that_is_gone_and_ports_that_are_mixed_up_fail(capsys):
    with servers(shards=2) as cluster:
        first, second = cluster.aggregators
        assert doctor([first.address], [first.http], capsys)[0] == 0
        code, out = doctor([first.http], [first.address], capsys)
        assert code == 1
        assert f"FAIL  gRPC {first.http}: something else than gRPC answers" in out
        assert f"FAIL  HTTP {first.address}: " in out
        second.stop(grace=20)
        grpc, http = [first.address, second.address], [first.http, second.http]
        code, out = doctor(grpc, http, capsys)
        assert code == 1
        assert f"ok    gRPC {first.address}: answers" in out
        assert f"FAIL  gRPC {second.address}: cannot be reached" in out
        assert f"FAIL  HTTP {second.http}: not reachable" in out
