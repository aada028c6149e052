"""Tests that the servers refuse wrong arguments and variables with the exit code 2."""

import subprocess

import pytest

from thalweg import _binaries

ZERO = "expected auto or more than 0, got"


def refused(program, *arguments, **variables):
    """Returns what the server says when it has ended with 2."""
    done = subprocess.run(
        [_binaries.find(program), *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2, done
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "--nonsense"),
        (["--threads", "many"], "--threads"),
        (["--threads", "65"], "--threads"),
        (["--weight", "0"], f"--weight: {ZERO} '0'"),
        (["--memory-limit", "0"], f"--memory-limit: {ZERO} '0'"),
        (["--memory-limit", "0G"], f"--memory-limit: {ZERO} '0G'"),
        (["--memory-limit", "4"], "expected a unit, as in 4G"),
        (["--cpus", "x"], "expected a list such as 0-3,8"),
        (["--listen", "nowhere"], "nowhere"),
    ],
)
def test_wrong_arguments_of_the_aggregator(arguments, said):
    assert said in refused(_binaries.AGGREGATOR, *arguments)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("THALWEG_WEIGHT", "0", f"--weight: {ZERO} '0'"),
        ("THALWEG_WEIGHT", "1001", "--weight"),
        ("THALWEG_MEMORY_LIMIT", "0", f"--memory-limit: {ZERO} '0'"),
        ("THALWEG_LISTEN", "nowhere", "nowhere"),
    ],
)
def test_wrong_variables_of_the_aggregator(variable, value, said):
    assert said in refused(_binaries.AGGREGATOR, **{variable: value})


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ([], {}, "no socket: give --socket PATH"),
        (["--nonsense"], {}, "--nonsense"),
        (["--channels", "0"], {}, f"--channels: {ZERO} '0'"),
        (["--aggregators", "nowhere"], {}, "nowhere"),
        ([], {"THALWEG_TIMEOUT": "x"}, "THALWEG_TIMEOUT: expected seconds"),
    ],
)
def test_wrong_arguments_of_the_sidecar(arguments, variables, said, tmp_path):
    socket = ["--socket", str(tmp_path / "sidecar.sock")] if arguments else []
    assert said in refused(_binaries.SIDECAR, *socket, *arguments, **variables)


@pytest.mark.parametrize("program", [_binaries.AGGREGATOR, _binaries.SIDECAR])
@pytest.mark.parametrize("option", ["--help", "--version", "--list-env"])
def test_what_only_prints_ends_with_0(program, option):
    done = subprocess.run([_binaries.find(program), option], stdout=subprocess.PIPE, timeout=30)
    assert done.returncode == 0
    assert done.stdout


def test_auto_is_still_taken():
    """The address is wrong, which is found out after the options were read."""
    options = ["--weight", "auto", "--threads", "auto", "--memory-limit", "auto"]
    assert "nowhere" in refused(_binaries.AGGREGATOR, *options, "--listen", "nowhere")
