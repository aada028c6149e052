"""Tests the targets, tables and plots of measurements, and how a suite handles failing cases."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from thalweg.cli import main
from thalweg_bench import report, results, suite
from thalweg_bench.cli import case_of, make_parser
from thalweg_bench.programs import run_watched
from thalweg_bench.results import NODES, Results
from thalweg_bench.rows import BenchError, Row
from thalweg_bench.suite import CASES, SuiteCase

STEPS = {"step-resnet50": "torch-fp16", "step-swin-t": "torch-fp16", "step-bert-base": "torch-fp16"}


def row(case, system, median, bound=None, size=102_228_128):
    return Row(case, system, size, median, median * 0.9, median * 1.1, bound)


def used(process, cpu=1.0, rss=50.0, sent=100.0, case="c"):
    fields = {"case": case, "process": process, "cpu_s_per_gb": cpu, "rss_mb": rss}
    return fields | {"sent_mb": sent}


def everything():
    """Returns made-up results in which every target is reached."""
    rows = {
        name: [
            *(row("c", "thalweg", 3.3, 3.2), row("c", "gloo", 1.75 * 3.3, 1.75 * 3.2)),
            row("c", "iperf3", 3.2, 3.1),
        ]
        for name in CASES
        if name.startswith("allreduce")
    }
    for name in ("local-2workers", "local-4workers"):
        rows[name] = [row("c", "thalweg", 0.03), row("c", "gloo", 0.06)]
    for name, peer in (STEPS | {"step-4x2workers-fp32": "ddp"}).items():
        rows[name] = [
            row(f"c {part}", system, median, 1.6)
            for part in ("step", "communication")
            for system, median in (("thalweg", 1.7), (peer, 3.0), ("iperf3", 2.0))
        ]
    rows["sweep-1gbit"] = [
        row("c", system, size / 1e8, size / 1.25e8, size)
        for size in (4096, 65536, 1 << 20)
        for system in ("thalweg", "gloo")
    ]
    rows |= {f"scale-{n}": [row(f"{n} nodes", "thalweg", 1.0 + n / 1000, 0.98)] for n in NODES}
    rows["latency"] = [
        row(f"c {p}", system, 5e-4) for p in ("p50", "p99") for system in ("thalweg", "gloo")
    ]
    rows["micro"] = [
        row("codec_bench/BM_FoldPayloads/fp16/4/8192", "thalweg", 2e-4, size=5 << 20),
        row("codec_bench/BM_Memcpy", "memcpy", 1e-4, size=2 << 20),
        row("reduce_bench/BM_FoldMean/fp16/4/8388608", "thalweg", 3.4e-3, size=80 << 20),
        row("reduce_bench/BM_Memcpy/33554432", "memcpy", 3.7e-3, size=64 << 20),
    ]
    servers = [used("aggregator max"), used("sidecar max"), used("worker max", sent=None)]
    names = ("allreduce-4x250mbit", "allreduce-4x2workers-250mbit", "fp16-4x1gbit", "memory")
    resources = dict.fromkeys(names, servers)
    resources["soak"] = [
        used(process, case=f"c, steps {steps}")
        for steps in ("1 to 1000", "1001 to 10000")
        for process in ("aggregator max", "sidecar max")
    ]
    return Results(rows, resources)


def test_every_target_can_be_measured_and_met():
    lines = {line[:2]: line[2:] for line in report.reached(everything())}
    assert len(lines) == 24
    assert lines.pop(("the same, p99", "reported")) == ("0.50 ms (Gloo 0.50 ms)", "-")
    assert {met for _, met in lines.values()} == {"yes"}


def test_nothing_is_met_by_what_was_not_measured():
    assert {line[2:] for line in report.reached(Results())} == {("not measured", "-")}


@pytest.mark.parametrize(
    ("median", "text", "met"), [(1.0, "0.950", True), (1.001, "0.949", False), (0.5, "1.900", True)]
)
def test_share_of_the_bound(median, text, met):
    found = Results({"a": [row("c", "thalweg", median, 0.95)]})
    assert results.of_bound("a", 0.95, found) == (text, met)


def test_how_many_times_a_peer_takes_is_of_the_named_part():
    rows = [row("c step", "thalweg", 5.0), row("c communication", "thalweg", 2.0)]
    rows += [row("c step", "ddp", 6.0), row("c communication", "ddp", 3.0)]
    found = Results({"a": rows})
    assert results.versus("a", "ddp", 1.6, found, ending=" communication") == ("1.50x", False)


@pytest.mark.parametrize(("two", "met"), [(100.5, True), (97.0, False), (175.0, False)])
def test_bytes_leaving_must_not_depend_on_the_workers(two, met):
    found = everything()
    found.resources["allreduce-4x2workers-250mbit"] = [used("sidecar max", sent=two)]
    assert results.bytes_leaving(found)[1] is met


def test_fold_is_compared_with_the_copy_by_bytes_per_second():
    rows = [row("a/BM_Fold", "thalweg", 4.0, size=600), row("b/BM_Memcpy", "memcpy", 9.0, size=1)]
    rows += [row("a/BM_Memcpy", "memcpy", 1.0, size=200)]
    found = Results({"micro": rows})
    assert results.fold("a", "BM_Fold", "BM_Memcpy", found) == ("0.75", True)


def test_scaling_is_the_ratio_of_the_slowest_to_the_fastest():
    medians = zip(NODES, (1.0, 1.05, 1.12, 1.1), strict=True)
    text, met = results.flat(Results({f"scale-{n}": [row("", "thalweg", m)] for n, m in medians}))
    assert text.startswith("1.120x")
    assert not met


def test_memory_may_be_what_the_window_needs_and_must_not_grow():
    found = everything()
    bounds = [target for case, target, _ in results.targets() if "peak" in case]
    # 4 nodes x 16 chunks of 256 KiB, and 102 MB twice.
    assert ["80.8 MB" in bounds[0], "268.5 MB" in bounds[1]] == [True, True]
    found.resources["soak"] = [
        used("sidecar max", rss=rss, case=f"c, steps {steps}")
        for rss, steps in ((100.0, "1 to 1000"), (106.0, "1001 to 10000"))
    ]
    assert results.growth("sidecar max", found) == ("1.060x (100.0 → 106.0 MB)", False)


def measure(out, *names):
    """Returns what the suite complains about."""
    try:
        SuiteCase(out=out, only=names).run()
    except BenchError as error:
        return str(error)
    return ""


def succeed(self, name, out):
    (out / f"{name}.json").write_text(json.dumps([asdict(row("c", "thalweg", 1.0))]))
    (out / f"{name}.resources.json").write_text(json.dumps([used("x")]))
    (out / f"{name}.md").write_text(f"## {name}\n\ntable\n")


def fail(self, name, out):
    raise BenchError("it exited with code 1; its message is above")


def test_page_has_the_plots_and_tables_of_all_that_was_measured(tmp_path):
    succeed(None, "latency", tmp_path)
    report.write(tmp_path, everything(), {"cores": 2, "commit": None}, ["soak", "latency"])
    page = (tmp_path / "performance.md").read_text()
    assert page.startswith("# Performance: measurements\n\n- cores: 2\n\n## Targets\n")
    assert page.endswith("(performance/scale.png)\n\n## latency\n\ntable\n")
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "performance").iterdir()}
    assert sorted(drawn) == ["allreduce.png", "scale.png", "step.png", "sweep.png"]
    report.write(tmp_path, everything(), {}, [])
    assert all((tmp_path / "performance" / name).read_bytes() == drawn[name] for name in drawn)


def test_failing_case_is_named_and_leaves_nothing_of_an_earlier_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SuiteCase, "start", succeed)
    assert measure(tmp_path, "soak", "latency", "slow-shard-weighted") == ""
    monkeypatch.setattr(SuiteCase, "start", fail)
    assert measure(tmp_path, "soak", "slow-shard") == (
        "failed: soak, slow-shard; all others were measured"
    )
    found = {path.name for path in tmp_path.iterdir()}
    names = ("latency", "slow-shard-weighted")
    kept = {f"{name}.{kind}" for name in names for kind in ("md", "json", "resources.json")}
    assert found == kept | {"performance.md"}
    assert "## latency\n\ntable" in (tmp_path / "performance.md").read_text()
    assert "no sweep.png: not measured" in capsys.readouterr().err


def test_case_leaves_what_it_prints_and_its_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(suite.CASES, "memory", "THALWEG_LOG=warn optim --numel 10 --repeats 1")
    SuiteCase().start("memory", tmp_path)
    heading, _, how, _, table, *_ = (tmp_path / "memory.md").read_text().splitlines()
    assert heading == "## memory"
    assert how.startswith("`THALWEG_LOG=warn thalweg bench optim --numel 10 --repeats 1`, 20")
    assert re.match(r"\| case +\| system", table)
    assert len(Results.read(tmp_path, ["memory"]).rows["memory"]) == 3


def test_machine_is_described():
    assert list(suite.describe_machine()) == (
        ["date", "cpu", "cores", "memory", "kernel", "python", "torch", "thalweg", "commit"]
    )


@pytest.mark.parametrize("name", ["scale-2.json", "scale-2.resources.json"])
def test_broken_measurements_are_named(tmp_path, name):
    (tmp_path / name).write_text("[")
    with pytest.raises(BenchError, match="scale-2 is not what a suite left"):
        Results.read(tmp_path, tuple(CASES))


@pytest.mark.parametrize("name", CASES)
def test_commands_are_accepted(name):
    words = [word for word in CASES[name].split() if not word.startswith("THALWEG_")]
    case_of(make_parser().parse_args(words))


def test_list_shows_the_commands_of_the_chosen_cases(capsys):
    assert main(["bench", "suite", "--list", "--only", "scale-16,latency"]) == 0
    shown = capsys.readouterr().out
    assert "thalweg bench lab --nodes 16 --shards 16 --rate 50mbit" in shown
    assert "allreduce" not in shown


def test_commit_is_that_of_the_folder(tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    tracked = tmp_path / "tracked"
    tracked.write_text("1")
    assert suite.commit(tmp_path) is None
    for argv in (["init", "-q"], ["add", "tracked"], ["commit", "-q", "-m", "c"]):
        subprocess.run([*git, *argv], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    clean = suite.commit(tmp_path)
    assert head.startswith(clean)
    tracked.write_text("2")
    assert suite.commit(tmp_path) == f"{clean}-dirty"


def test_command_that_hangs_is_ended():
    begin = time.monotonic()
    with pytest.raises(BenchError, match="it did not end within 0 s"):
        run_watched([sys.executable, "-c", "import time; time.sleep(100)"], 0.2)
    assert time.monotonic() - begin < 30


def test_sigterm_ends_the_command_too():
    inner = "import time; print(1, flush=True); time.sleep(100)"
    script = "import sys; from thalweg_bench.programs import run_watched; "
    script += f"run_watched([sys.executable, '-c', {inner!r}], 90)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert process.stdout.read() == b""  # nobody has it open any more


def test_sigterm_while_the_command_starts_ends_it(monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(SystemExit, match="143"):
        run_watched([sys.executable, "-c", "import time; time.sleep(100)"], 90)
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_exit_code_of_a_command_is_told_and_an_interrupt_passed_on():
    run_watched([sys.executable, "-c", ""], 60)
    with pytest.raises(BenchError, match="it exited with code 3"):
        run_watched([sys.executable, "-c", "raise SystemExit(3)"], 60)
    with pytest.raises(KeyboardInterrupt):
        run_watched([sys.executable, "-c", f"raise SystemExit({128 + signal.SIGINT})"], 60)
