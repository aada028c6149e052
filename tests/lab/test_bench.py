"""Tests `thalweg bench` from end to end, on small links."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from thalweg_bench import suite
from thalweg_bench.results import Results

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
BENCH = [sys.executable, "-m", "thalweg", "bench"]
SMALL = ["--nodes", "2", "--shards", "2", "--repeats", "2"]


def namespaces():
    folder = Path("/run/netns")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.fixture(autouse=True)
def nothing_left():
    before = namespaces()
    yield
    assert namespaces() <= before


def run(*arguments):
    return subprocess.run([*BENCH, *arguments], capture_output=True, text=True, timeout=110)


def read_rows(path):
    rows = json.loads(path.read_text())
    keys = {"case", "system", "bytes", "median_s", "min_s", "max_s", "bound_s"}
    assert all(set(row) == keys for row in rows)
    assert all(0 < row["min_s"] <= row["median_s"] <= row["max_s"] for row in rows)
    return rows


def test_lab_reports_thalweg_beside_its_peers(tmp_path):
    rows_path, resources_path = tmp_path / "rows.json", tmp_path / "resources.json"
    arguments = ["--rate", "100mbit", "--bytes", "400000", "--peers", "gloo,iperf3"]
    result = run(*("lab", *SMALL, *arguments, "--json", rows_path, "--resources", resources_path))
    assert result.returncode == 0, result.stderr
    rows = read_rows(rows_path)
    assert [row["system"] for row in rows] == ["thalweg", "gloo", "iperf3"]
    for row in rows:
        assert row["bytes"] == 400_000
        # With so few bytes, the buckets' savings are worth a third.
        assert 0.2 <= row["bound_s"] / row["median_s"] <= 1.5
    used = json.loads(resources_path.read_text())
    assert [entry["process"] for entry in used[::2]] == [
        "aggregator max",
        "sidecar max",
        "worker max",
        "node, thalweg",
    ]
    assert used[-1]["process"] == "node, gloo"
    assert all(entry["cpu_s_per_gb"] > 0 and entry["rss_mb"] > 1 for entry in used)
    aggregator, sidecar, worker, node = used[::2]
    sidecar_mean, worker_mean = used[3], used[5]
    # A node sends its gradients, a shard half of the result to each of 2 nodes; headers add to
    # both.
    assert 0.4 <= sidecar["sent_mb"] <= 0.48
    assert 0.4 <= aggregator["sent_mb"] <= 0.48
    assert worker["sent_mb"] is None
    # With one worker on each node, the node's CPU time is that of the sidecar and the worker, whose
    # time is stated for bytes in and out.
    both = 2 * (sidecar_mean["cpu_s_per_gb"] + worker_mean["cpu_s_per_gb"])
    assert node["cpu_s_per_gb"] == pytest.approx(both, rel=0.01, abs=0.001)


@pytest.mark.parametrize("weighted", [(), ("--weighted",)])
def test_shares_make_up_for_a_slow_shard(tmp_path, weighted):
    arguments = ["--rate", "100mbit", "--slow-shard", "10", "--bytes", "4000000", "--peers", ""]
    result = run("lab", *SMALL, *arguments, *weighted, "--json", tmp_path / "rows.json")
    assert result.returncode == 0, result.stderr
    (row,) = read_rows(tmp_path / "rows.json")
    assert row["bound_s"] == pytest.approx(4e6 * 8 / 100e6 * 2 * 10 / 11)
    assert 0.5 <= row["bound_s"] / row["median_s"] <= 1.2


def test_step_reports_the_step_and_its_communication(tmp_path):
    arguments = ["--rate", "none", "--codec", "fp16", "--repeats", "1", "--peers", "torch-fp16"]
    result = run("step", *SMALL, *arguments, "--model", "swin-t", "--json", tmp_path / "rows.json")
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "rows.json")
    assert [(row["case"].split()[-1], row["system"]) for row in rows] == [
        ("step", "thalweg"),
        ("step", "torch-fp16"),
        ("communication", "thalweg"),
        ("communication", "torch-fp16"),
    ]


def test_fsdp_reports_steps_of_sharded_models_beside_gloo(tmp_path):
    small = ["--nodes", "2", "--width", "64", "--blocks", "2", "--repeats", "1"]
    result = run("fsdp", *small, "--rate", "100mbit", "--json", tmp_path / "rows.json")
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "rows.json")
    assert [row["system"] for row in rows] == [
        *("gloo fsdp2", "gloo fsdp1", "thalweg fsdp2", "thalweg fsdp1"),
        *("thalweg fsdp2 fp16", "thalweg fsdp2 int8"),
        *("gloo fsdp2", "thalweg fsdp2", "thalweg fsdp2 powersgd:rank=4,start=2"),
    ]
    assert len({row["case"] for row in rows}) == 2
    lines = [line.split("|") for line in result.stdout.splitlines() if " | thalweg" in line]
    of_gloo = {line[2].strip(): float(line[9]) for line in lines}
    # 3 units where Gloo sends 4, half of them in fp16, and a quarter in int8, besides headers.
    assert 0.74 < of_gloo["thalweg fsdp1"] < 0.85
    assert 0.37 < of_gloo["thalweg fsdp2 fp16"] < 0.45
    assert 0.19 < of_gloo["thalweg fsdp2 int8"] < 0.27
    assert of_gloo["thalweg fsdp2 powersgd:rank=4,start=2"] < 0.25
    assert "is gone" not in result.stderr


def test_ps_reports_steps_on_workers_and_on_shards(tmp_path):
    arguments = ["--rate", "none", "--repeats", "1", "--model", "swin-t", "--clip", "1"]
    arguments += ["--steps", "2"]
    result = run("ps", *SMALL, *arguments, "--peers", "", "--json", tmp_path / "rows.json")
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "rows.json")
    assert [row["system"] for row in rows] == ["workers", "servers"]
    assert all("clipped to 1" in row["case"] for row in rows)


def test_local_reports_intervals_beside_what_advice_predicts(tmp_path):
    arguments = ["--nodes", "2", "--rate", "1gbit", "--repeats", "1", "--model", "swin-t"]
    arguments += ["--every", "2", "--forward", "0.01"]
    result = run("local", *arguments, "--json", tmp_path / "rows.json")
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "rows.json")
    assert [row["system"] for row in rows] == ["alone", "local"]
    assert rows[0]["min_s"] > rows[0]["bound_s"]
    assert re.search(r"local: [+-][\d.]+% from the [\d.]+ s that advice predicts", result.stdout)


@pytest.mark.long
def test_step_is_compressed_when_it_is_measured(tmp_path):
    arguments = ["--rate", "500mbit", "--codec", "powersgd:4", "--repeats", "3"]
    arguments += ["--peers", "torch-powersgd", "--model", "swin-t"]
    result = run("step", *SMALL, *arguments, "--json", tmp_path / "rows.json")
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "rows.json")[:2]
    assert [row["system"] for row in rows] == ["thalweg", "torch-powersgd"]
    for row in rows:
        assert row["case"].endswith("powersgd:rank=4,start=2 step")
        # An uncompressed gradient would take this long on an otherwise idle machine.
        assert row["bound_s"] < row["min_s"] < row["bytes"] * 8 / 500e6


def test_latency_reports_percentiles(tmp_path):
    result = run("latency", *SMALL, "--count", "20", "--json", tmp_path / "rows.json")
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "rows.json")
    assert [row["case"].split()[-1] for row in rows] == ["p50", "p50", "p99", "p99"]


def test_suite_runs_its_cases_for_the_report(tmp_path, monkeypatch):
    monkeypatch.setitem(suite.CASES, "soak", "soak --nodes 2 --shards 1 --count 20")
    one = suite.SuiteCase(out=tmp_path, only=("soak",))
    one.check()
    one.run()
    rows = read_rows(tmp_path / "soak.json")
    assert [row["case"].split(", ")[-1] for row in rows] == ["steps 1 to 2", "steps 3 to 20"]
    found = Results.read(tmp_path, ("soak",))
    assert found.used("soak", "sidecar max", "rss_mb", "steps 3 to 20") > 1
    assert "steps 3 to 20" in (tmp_path / "performance.md").read_text()


def test_embedded_node_needs_no_aggregator(tmp_path):
    arguments = ["--nodes", "1", "--workers", "2", "--shards", "0", "--rate", "none"]
    arguments += ["--bytes", "400000", "--repeats", "1", "--peers", "gloo,memcpy"]
    result = run("lab", *arguments, "--json", tmp_path / "rows.json")
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / "rows.json")
    assert [(row["system"], row["bound_s"]) for row in rows] == [
        ("thalweg", None),
        ("gloo", None),
        ("memcpy", None),
    ]


def heed_interrupts():
    """Restores SIGINT as a terminal has it: a shell makes background programs ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(signum, code):
    command = [*BENCH, "lab", *SMALL, "--rate", "1mbit", "--bytes", "40000000"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    ) as bench:
        assert any("40000000 bytes" in line for line in bench.stderr)
        bench.send_signal(signum)
        assert bench.wait(30) == code
