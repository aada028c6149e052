"""Tests that reports of Google Benchmark programs are read right, and failing programs named."""

import json

import pytest

from thalweg.cli import main
from thalweg_bench import micro
from thalweg_bench.rows import BenchError


def run_of(name, cpu, real=99.0, **changes):
    """Returns a run in the form of `--benchmark_format=json`."""
    fields = {"name": name, "run_name": name, "run_type": "iteration", "time_unit": "us"}
    return fields | {"real_time": real, "cpu_time": cpu} | changes


def report(*runs):
    return json.dumps({"context": {"num_cpus": 2}, "benchmarks": runs})


def test_repetitions_become_one_row_beside_that_of_copies():
    runs = [run_of("BM_Fold/4", cpu, bytes_per_second=4096 / 2e-6) for cpu in (2.0, 4.0, 3.0)]
    aggregate = run_of("BM_Fold/4_mean", 3.0, run_name="BM_Fold/4", run_type="aggregate")
    copy = run_of("BM_Memcpy/32768", 1.0)
    row, memcpy = micro.parse("x_bench", report(*runs, aggregate, copy))
    assert (row.case, row.system, row.bytes) == ("x_bench/BM_Fold/4", "thalweg", 4096)
    assert [row.median_s, row.min_s, row.max_s] == pytest.approx([3e-6, 2e-6, 4e-6])
    assert (memcpy.system, memcpy.bytes, memcpy.bound_s) == ("memcpy", 0, None)


def test_benchmarks_that_go_by_the_wall_clock_are_read_so():
    run = run_of("BM_Wait/real_time", 1.0, real=5.0, time_unit="ms", bytes_per_second=1000.0)
    (row,) = micro.parse("x_bench", report(run))
    assert row.median_s == pytest.approx(5e-3)
    assert row.bytes == 5


def test_failure_inside_a_benchmark_is_reported():
    run = run_of("BM_Fold/4", 0.0, error_occurred=True, error_message="the fold failed")
    with pytest.raises(BenchError, match="x_bench: BM_Fold/4 failed: the fold failed"):
        micro.parse("x_bench", report(run))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"benchmarks": [{"run_type": "iteration"}]}'])
def test_other_output_is_refused(text):
    with pytest.raises(BenchError, match="x_bench did not report"):
        micro.parse("x_bench", text)


def make_program(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_programs_are_run_and_shown_until_one_fails(tmp_path, capsys):
    argv = ["bench", "micro", "--dir", str(tmp_path)]
    assert main(argv) == 2
    assert f"there is no program *_bench in {tmp_path}" in capsys.readouterr().err
    output = report(run_of("BM_Fold", 2.0))
    make_program(tmp_path, "b_bench", f"echo '{output}'")
    make_program(tmp_path, "a_bench", f"echo '{output}'")
    for other in ("a_test", "gpu_a_bench"):
        make_program(tmp_path, other, "exit 1")
    assert main(argv) == 0
    shown = capsys.readouterr()
    names = [line.split()[1] for line in shown.out.splitlines()[2:]]
    assert names == ["a_bench/BM_Fold", "b_bench/BM_Fold"]
    assert "a_bench (1/2)" in shown.err
    make_program(tmp_path, "c_bench", "echo no memory >&2; exit 3")
    assert main(argv) == 1
    assert "c_bench ended with 3: no memory" in capsys.readouterr().err
