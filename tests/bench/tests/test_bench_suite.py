"""Tests the suite of `thalweg bench`: what it measures, and how it handles a failing case."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from thalweg.cli import main
from thalweg_bench import machine, suite
from thalweg_bench.cli._main import make_parser
from thalweg_bench.rows import BenchError
from thalweg_bench.suite import Suite
from thalweg_bench.suite_cases import CASES

ROW = {
    "case": "c",
    "system": "thalweg",
    "bytes": 4,
    "median_s": 1.0,
    "min_s": 1.0,
    "max_s": 1.0,
    "bound_s": None,
}


def write_results(case, folder):
    for number in range(len(case.commands)):
        for kind in ("json", "resources.json"):
            row = ROW | {"case": f"part {number}"}
            (folder / f"{number}.{kind}").write_text(json.dumps([row]))


def test_all_cases_together_take_less_than_half_an_hour():
    assert sum(case.seconds for case in CASES.values()) <= 0.8 * 30 * 60


@pytest.mark.parametrize("name", CASES)
def test_commands_are_accepted(name):
    for command in CASES[name].commands:
        argv = command.split()
        argv += ["--resources", "x"] if CASES[name].resources else []
        make_parser().parse_args([*argv, "--json", "x"])


@pytest.mark.parametrize("name", CASES)
def test_names_can_be_names_of_files(name):
    assert re.fullmatch(r"[a-z0-9-]+", name)


def test_failing_case_is_reported_and_the_others_are_measured(tmp_path, capsys):
    def start(case, folder):
        if case.name == "latency":
            raise BenchError("it exited with code 1; its message is above")
        write_results(case, folder)

    names = ("latency", "scale")
    assert Suite(tmp_path, names, tmp_path).run(start) == ["latency"]
    assert "latency failed: it exited with code 1" in capsys.readouterr().err
    assert not (tmp_path / "latency.json").exists()
    rows = json.loads((tmp_path / "scale.json").read_text())
    assert [row["case"] for row in rows] == ["part 0", "part 1", "part 2", "part 3"]
    assert len(json.loads((tmp_path / "scale.resources.json").read_text())) == 4


def test_failing_case_leaves_nothing_of_an_earlier_run(tmp_path):
    def fail(case, folder):
        raise BenchError("failed")

    one = Suite(tmp_path, ("soak",), tmp_path)
    assert one.run(write_results) == []
    assert (tmp_path / "soak.json").exists()
    assert one.run(fail) == ["soak"]
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]
    assert json.loads((tmp_path / "machine.json").read_text())["cases"] == {}


def test_machine_says_where_when_and_how_each_case_was_measured(tmp_path):
    for name in ("soak", "memory"):
        assert Suite(tmp_path, (name,), tmp_path).run(write_results) == []
    found = json.loads((tmp_path / "machine.json").read_text())
    expected = "date cpu cores memory kernel python torch thalweg commit command cases"
    assert list(found) == expected.split()
    assert found["command"] == f"thalweg bench suite --out {tmp_path} --only memory"
    assert list(found["cases"]) == ["soak", "memory"]
    (command,) = found["cases"]["memory"]["commands"]
    assert command.startswith("THALWEG_CHUNK_BYTES=262144 THALWEG_WINDOW_CHUNKS=16 thalweg bench")


def test_commit_is_that_of_the_file(tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    tracked = tmp_path / "tracked"
    tracked.write_text("1")
    assert machine.commit(tracked) is None
    for argv in (["init", "-q"], ["add", "tracked"], ["commit", "-q", "-m", "c"]):
        subprocess.run([*git, *argv], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    clean = machine.commit(tracked)
    assert head.startswith(clean)
    assert machine.commit(tmp_path / "other") is None
    tracked.write_text("2")
    assert machine.commit(tracked) == f"{clean}-dirty"


def test_case_that_hangs_is_ended():
    argv = [sys.executable, "-c", "import time; time.sleep(100)"]
    begin = time.monotonic()
    with pytest.raises(BenchError, match="it did not end within 0 s"):
        suite.run_watched(argv, {}, 0.2)
    assert time.monotonic() - begin < 30


def test_exit_code_of_a_case_is_told():
    with pytest.raises(BenchError, match="it exited with code 3"):
        suite.run_watched([sys.executable, "-c", "raise SystemExit(3)"], {}, 60)
    assert suite.run_watched([sys.executable, "-c", ""], {}, 60) is None


def test_interrupted_case_ends_the_suite():
    script = f"raise SystemExit({128 + signal.SIGINT})"
    with pytest.raises(KeyboardInterrupt):
        suite.run_watched([sys.executable, "-c", script], {}, 60)


def test_list_shows_the_commands_of_the_chosen_cases(capsys):
    assert main(["bench", "suite", "--list", "--only", "scale,latency"]) == 0
    shown = capsys.readouterr().out
    assert "thalweg bench lab --nodes 16 --shards 16 --rate 50mbit" in shown
    assert "allreduce" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x", "--only", "soak,speed"], "unknown: speed; known are allreduce-4x250mbit"),
        ([], "one of the arguments --out --list is required"),
    ],
)
def test_wrong_arguments_are_named_with_exit_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "suite", *arguments])
    assert message in capsys.readouterr().err


def test_micro_benchmarks_are_left_out_when_there_are_none(tmp_path, capsys):
    assert suite.select((), tmp_path) == tuple(name for name in CASES if name != "micro")
    assert "micro is left out" in capsys.readouterr().err
    program = tmp_path / "room" / "x_bench"
    program.parent.mkdir()
    program.touch(mode=0o755)
    assert suite.select((), tmp_path) == tuple(CASES)
    assert suite.select(("micro", "scale"), tmp_path) == ("scale", "micro")
