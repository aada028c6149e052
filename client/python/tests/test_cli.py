import subprocess
import sys
from pathlib import Path

import pytest

import thalweg
from thalweg.cli import _run, main
from thalweg.cli._run import Plan

PLAN = Plan(nodes=2, nproc=3, shards=1, codec="fp16", timeout=2.5, port=0, command=["train.py"])


def test_version_is_that_of_cmake(capsys):
    text = (Path(__file__).parents[3] / "CMakeLists.txt").read_text()
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"thalweg {thalweg.__version__}\n"
    assert f"project(thalweg VERSION {thalweg.__version__} " in text


@pytest.mark.parametrize("command", [[], ["run"], ["doctor"], ["version"]])
def test_help_is_there(command, capsys):
    with pytest.raises(SystemExit) as ending:
        main([*command, "--help"])
    assert ending.value.code == 0
    assert "usage: thalweg" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["run"],
        ["run", "--nodes", "0", "x.py"],
        ["run", "--nproc", "many", "x.py"],
        ["run", "--codec", "zip", "x.py"],
        ["run", "--codec", "fp16;a=auto", "x.py"],
        ["run", "--timeout", "0", "x.py"],
        ["run", "--port", "65536", "x.py"],
    ],
)
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_wrong_address_is_named(capsys):
    assert main(["doctor", "--aggregators", "nowhere"]) == 2
    assert "'nowhere', expected host:port" in capsys.readouterr().err


def test_workers_learn_their_place(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = _run._worker_environment(PLAN, rank=4, sidecar="/s", port=99)
    expected = {
        "RANK": "4",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "99",
        "THALWEG_SIDECAR": "/s",
        "THALWEG_CODEC": "fp16",
        "THALWEG_ENABLE": "1",
        "THALWEG_TIMEOUT": "2.5",
        "OMP_NUM_THREADS": "1",
    }
    assert {name: env.get(name) for name in expected} == expected


def test_threads_chosen_by_the_user_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    env = _run._worker_environment(PLAN, rank=0, sidecar="/s", port=99)
    assert env["OMP_NUM_THREADS"] == "3"


def test_command_does_not_load_torch():
    code = (
        "import sys; from thalweg.cli import main; main(['version']); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
    )
    assert result.stdout.splitlines()[-1] == "False"


def test_doctor_reports_an_aggregator_that_is_not_there(capsys):
    assert main(["doctor", "--aggregators", "127.0.0.1:1"]) == 1
    assert "FAIL  aggregator 0: 127.0.0.1:1 cannot be reached" in capsys.readouterr().out


def test_doctor_reports_a_sidecar_that_is_not_there(capsys, tmp_path):
    assert main(["doctor", "--sidecar", str(tmp_path / "none.sock")]) == 1
    assert "none.sock cannot be reached" in capsys.readouterr().out


def test_doctor_is_content_with_this_machine(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "expect no speed-up" in out
    assert "FAIL" not in out
