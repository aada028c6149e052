"""Tests the commands with standard streams that are closed, full, or have lost their readers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_traces import MS, Writer, hosts

from thalweg.cli import _doctor, _profile_worker, main
from thalweg.cli._supervisor import Supervisor
from thalweg.timeline import files, merge

WORKER = "import sys; print('out'); print('err', file=sys.stderr)"


def shell(redirected, *arguments):
    """Runs the command with its streams as the shell's text says; returns how it has ended."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, "-m", "thalweg", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("full", ["standard output", "standard error"])
def test_full_disk_behind_one_output_is_said_once_on_the_other_and_ends_no_worker(full, tmp_path):
    with (tmp_path / "other").open("w+") as other, Path("/dev/full").open("w") as lost:
        outputs = (lost, other) if full == "standard output" else (other, lost)
        with Supervisor(*outputs) as supervisor:
            for name in ("one", "two"):
                supervisor.start_worker(
                    name, [sys.executable, "-c", WORKER], env=os.environ, to_terminal=False
                )
            assert supervisor.wait() == 0
            supervisor.stop()
        other.seek(0)
        lines = other.read().splitlines()
    said = (
        f"[thalweg] {full} cannot be written: No space left on device; what follows of it is lost"
    )
    kept = "err" if full == "standard output" else "out"
    assert sorted(lines) == sorted([said, f"[one] {kept}", f"[two] {kept}"])


@pytest.mark.parametrize("redirected", [">/dev/full 2>&1", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_job_runs_to_its_end_whatever_becomes_of_its_output(redirected, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"{WORKER}\nopen({str(tmp_path / 'done')!r}, 'w')", encoding="utf-8")
    done = shell(redirected, "run", str(script))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists()


def test_full_disk_is_said_without_a_traceback():
    done = shell(">/dev/full", "version")
    assert done.returncode == 1
    assert done.stderr == "thalweg: [Errno 28] No space left on device\n"


def test_reader_that_goes_away_ends_a_command_without_a_word(tmp_path):
    writer = Writer(hosts()[0], "sidecar", 2, {"node": 0, "num_nodes": 1})
    writer.span("sidecar", "return", 0, MS, round=1)
    merge.merge([files.read(writer.write(tmp_path))]).write(tmp_path / "merged.json")
    reader, output = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "thalweg", "trace", "check", str(tmp_path / "merged.json")],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(output)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Error" not in done.stderr


def test_interrupted_command_says_nothing(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_doctor, "doctor", interrupted)
    assert main(["doctor"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no data"), KeyboardInterrupt()])
def test_what_a_profiled_script_raises_keeps_its_traceback(error, tmp_path, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(_profile_worker, "run", fail)
    with pytest.raises(type(error)):
        main(["profile", "--here", "--out", str(tmp_path), __file__])


@pytest.mark.parametrize("command", ["run", "profile", "status"])
def test_help_is_readable_where_the_output_has_not_all_its_characters(command):
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "thalweg", command, "--help"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "\\u" in done.stdout or "\\x" in done.stdout
