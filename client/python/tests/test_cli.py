import dataclasses
import signal
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest

import thalweg
from thalweg import _binaries
from thalweg._job._processes import Server
from thalweg._settings import _variables
from thalweg._settings._config import ConfigError, server_environment
from thalweg.cli import _passed_on, _run, _types, main
from thalweg.cli._run import Plan

PLAN = Plan(
    nodes=2,
    nproc=3,
    shards=1,
    local_shards="1",
    codec="fp16",
    timeout=2.5,
    port=0,
    command=["train.py"],
)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["x.py", "--", "a", "--", "-b"], ["x.py", "--", "a", "--", "-b"]),
        (["x.py", "--nodes", "3"], ["x.py", "--nodes", "3"]),
        (["--", "x.py", "--", "a"], ["x.py", "--", "a"]),
        (["-m", "x", "--", "a"], ["-m", "x", "--", "a"]),
    ],
)
def test_what_follows_the_script_is_the_scripts(words, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    plans = []
    monkeypatch.setattr(_run, "run", lambda plan: plans.append(plan) or 0)
    for verb in ("run", "profile"):
        assert main([verb, *words]) == 0
        found = plans.pop().command
        assert found[-len(command) :] == command
        assert verb == "profile" or found == command


def test_version_is_that_of_cmake(capsys):
    text = (Path(__file__).parents[3] / "CMakeLists.txt").read_text()
    assert main(["version"]) == 0
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"thalweg {thalweg.__version__}\n" * 2
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
    ],
)
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    assert "usage:" in capsys.readouterr().err


COUNT = "a whole number, from 1 to 1024"
CODEC = "codec is 'zip', expected one of fp32, fp16"
TIMEOUT = "seconds, more than 0 and at most 86400"
RATE = "a rate such as 940mbit or 10gbit"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--nodes", "0"], f"--nodes: expected {COUNT}, got '0'"),
        (["run", "--nodes", "abc"], f"--nodes: expected {COUNT}, got 'abc'"),
        (["run", "--nproc", "1025"], f"--nproc: expected {COUNT}, got '1025'"),
        (["run", "--shards", "-1"], "--shards: expected a whole number, from 0 to 1024, got '-1'"),
        (["run", "--local-shards", "yes"], "--local-shards: invalid choice: 'yes'"),
        (["run", "--codec", "zip"], f"--codec: {CODEC}"),
        (["run", "--codec", "fp16;a=auto"], "--codec: codec: rule 1 'a=auto': Rule: auto chooses"),
        (["run", "--timeout", "0"], f"--timeout: expected {TIMEOUT}, got '0'"),
        (["run", "--timeout", "nan"], f"--timeout: expected {TIMEOUT}, got 'nan'"),
        (["run", "--timeout", "abc"], f"--timeout: expected {TIMEOUT}, got 'abc'"),
        (["run", "--port", "x"], "--port: expected a whole number, from 0 to 65535, got 'x'"),
        (["profile", "--nodes", "1025"], f"--nodes: expected {COUNT}, got '1025'"),
        (["profile", "--steps", "x"], "--steps: expected a whole number, 1 or more, got 'x'"),
        (["profile", "--out", ""], "--out: expected a folder, got ''"),
        (["profile", "--skip", "-1"], "--skip: expected a whole number, 0 or more, got '-1'"),
        (["profile", "--codec", "zip"], f"--codec: {CODEC}"),
        (["profile", "--rate", "0kbit"], f"--rate: expected {RATE}, got '0kbit'"),
        (["profile", "--rate", f"{'9' * 400}gbit"], f"--rate: expected {RATE}, got '999"),
        (["doctor", "--rate", "fast"], f"--rate: expected {RATE}, got 'fast'"),
        (["status", "--interval", "x"], "--interval: expected seconds, from 0.1 to 3600, got 'x'"),
        (["status", "--interval", "0"], "--interval: expected seconds, from 0.1 to 3600, got '0'"),
    ],
)
def test_wrong_value_is_named_with_its_option_and_what_is_expected(arguments, message, capsys):
    script = ["x.py"] if arguments[0] in ("run", "profile", "doctor") else []
    with pytest.raises(SystemExit) as ending:
        main([*arguments, *script])
    assert ending.value.code == 2
    assert f"error: argument {message}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0.001kbit", "12.5kbit", "940mbit", "10gbit"])
def test_rate_is_passed_on_to_the_bit(text):
    rate = _types.rate(text)
    assert _types.rate(_types.rate_as_text(rate)) == rate


def test_wrong_address_is_named(capsys):
    assert main(["doctor", "--aggregators", "nowhere"]) == 2
    assert "'nowhere', expected host:port" in capsys.readouterr().err


def test_workers_learn_their_place(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = _run._worker_environment(PLAN, rank=4, sidecar="/s", port=99, aggregators=["h:1", "h:2"])
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
        "THALWEG_AGGREGATORS": "h:1,h:2",
        "THALWEG_CODEC": "fp16",
        "THALWEG_LOCAL_SHARDS": "1",
        "THALWEG_TIMEOUT": "2.5",
        "OMP_NUM_THREADS": "1",
    }
    assert {name: env.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "listen"),
    [
        ({}, True),
        ({"local_shards": "auto"}, True),
        ({"local_shards": "0"}, False),
        ({"local_shards": None}, False),
        ({"local_shards": None, "shards": 0}, True),
        ({"local_shards": "0", "shards": 0}, False),
        ({"nodes": 1, "shards": 0}, False),
    ],
)
def test_sidecars_listen_where_they_are_to_host_shards_for_other_nodes(
    changes, listen, monkeypatch
):
    monkeypatch.delenv("THALWEG_LOCAL_SHARDS", raising=False)
    assert dataclasses.replace(PLAN, **changes).sidecars_listen == listen


@pytest.mark.parametrize(
    ("variable", "changes", "listen"),
    [
        ("1", {"local_shards": None}, True),
        ("auto", {"local_shards": None}, True),
        ("0", {"local_shards": None, "shards": 0}, False),
        ("", {"local_shards": None}, False),
        ("1", {"local_shards": "0"}, False),
        ("0", {"local_shards": "1"}, True),
    ],
)
def test_sidecars_listen_as_the_variable_says_unless_it_is_chosen(
    variable, changes, listen, monkeypatch
):
    monkeypatch.setenv("THALWEG_LOCAL_SHARDS", variable)
    assert dataclasses.replace(PLAN, **changes).sidecars_listen == listen


def test_local_shards_are_left_to_the_environment_unless_they_are_chosen(monkeypatch):
    monkeypatch.setenv("THALWEG_LOCAL_SHARDS", "0")
    plan = dataclasses.replace(PLAN, local_shards=None)
    env = _run._worker_environment(plan, rank=0, sidecar="/s", port=99, aggregators=())
    assert env["THALWEG_LOCAL_SHARDS"] == "0"


def test_workers_do_not_get_aggregators_that_were_not_started(monkeypatch):
    monkeypatch.setenv("THALWEG_AGGREGATORS", "elsewhere:7070")
    env = _run._worker_environment(PLAN, rank=0, sidecar="/s", port=99, aggregators=())
    assert env["THALWEG_AGGREGATORS"] == ""


def test_all_write_where_the_launcher_was_started_or_into_the_home(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("THALWEG_TRACE", "~/traces")
    monkeypatch.setenv("THALWEG_RESIDUALS", "residuals")
    worker = _run._worker_environment(PLAN, rank=0, sidecar="/s", port=99, aggregators=())
    for env in (worker, server_environment(log="info")):
        found = (env["THALWEG_TRACE"], env["THALWEG_RESIDUALS"])
        assert found == ("/home/me/traces", f"{tmp_path}/residuals")


def test_home_that_is_not_there_is_a_folder_of_that_name():
    found = _variables.absolute_folders({"THALWEG_TRACE": "~nobody-of-that-name/traces"})
    assert found == {"THALWEG_TRACE": f"{Path.cwd()}/~nobody-of-that-name/traces"}


def test_server_that_is_started_by_hand_writes_into_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("THALWEG_TRACE", "~/traces")
    given = []
    monkeypatch.setattr("os.execve", lambda *call: given.append(call))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    _binaries.aggregator(["--help"])
    ((_, words, env),) = given
    assert (words, env["THALWEG_TRACE"]) == ([_binaries.AGGREGATOR, "--help"], "/home/me/traces")


def test_threads_chosen_by_the_user_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    env = _run._worker_environment(PLAN, rank=0, sidecar="/s", port=99, aggregators=())
    assert env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nothere.py"], "there is no script {folder}/nothere.py"),
        ([""], "the name of the script is empty"),
        (["empty"], "{folder}/empty is a folder without a __main__.py, expected a script"),
        (["-m", "nowhere.at.all"], "there is no module 'nowhere' in {folder} or in Python's path"),
    ],
)
def test_without_a_script_nothing_is_started(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for verb in ("run", "profile"):
        assert main([verb, *command]) == 2
        assert [path.name for path in tmp_path.iterdir()] == ["empty"]
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ("", f"thalweg: {message.format(folder=tmp_path)}\n")


def test_doctor_of_a_module_without_a_name_is_refused(capsys):
    assert main(["doctor", "-m"]) == 2
    assert capsys.readouterr().err == "thalweg: -m needs the name of a module\n"


def test_folder_with_a_main_module_is_a_script(tmp_path):
    (tmp_path / "__main__.py").touch()
    _run.check_is_there([str(tmp_path)])


def test_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_alone.py").touch()
    path = list(sys.path)
    _run.check_is_there(["-m", "mine_alone"])
    assert sys.path == path


def test_module_of_this_program_itself_is_not_there():
    with pytest.raises(ConfigError, match="there is no module '__main__'"):
        _run.check_is_there(["-m", "__main__"])


def test_nodes_without_anything_that_sums_are_refused(capsys):
    assert main(["run", "--nodes", "2", "--local-shards", "0", __file__]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("thalweg: --local-shards is 0, and without --shards there is no")
    assert "Leave --local-shards out, or give --shards 1" in shown


def test_module_that_has_been_loaded_by_hand_is_left_to_python(monkeypatch):
    module = types.ModuleType("loaded_by_hand")
    assert module.__spec__ is None
    monkeypatch.setitem(sys.modules, "loaded_by_hand", module)
    _run.check_is_there(["-m", "loaded_by_hand.inner"])


def test_loopback_that_cannot_be_used_is_named_before_anything_is_started(monkeypatch, capsys):
    monkeypatch.setattr(_run._addresses, "LOOPBACK", "192.0.2.1")  # is kept for documentation
    assert main(["run", __file__]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[thalweg] 192.0.2.1 cannot be used")
    assert "Is the loopback interface up? `ip link set lo up`" in line


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("verb", ["run", "profile", "doctor"])
def test_interrupted_command_ends_by_the_signals_number_and_judges_nothing(
    verb, signum, monkeypatch, tmp_path, capsys
):
    def start_and_interrupt(*args):
        start(*args)
        signal.raise_signal(signum)

    start = _run._start_workers
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_run, "_start_workers", start_and_interrupt)
    (tmp_path / "endless.py").write_text("import signal\nsignal.pause()\n")
    assert main([verb, "endless.py"]) == 128 + signum
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"[thalweg] {signum.name}: ending all processes" in shown.err


@pytest.mark.parametrize(("codec", "switch"), [("fp16", "1"), (None, "0")])
def test_codec_of_an_argument_wins_over_a_variable_that_switches_all_off(
    codec, switch, monkeypatch
):
    monkeypatch.setenv("THALWEG_ENABLE", "0")
    plan = dataclasses.replace(PLAN, codec=codec, variables={})
    env = _run._worker_environment(plan, rank=0, sidecar="/s", port=99, aggregators=())
    assert env["THALWEG_ENABLE"] == switch


SERVERS = [("aggregator", _binaries.AGGREGATOR), ("sidecar", _binaries.SIDECAR)]


@pytest.mark.parametrize(("command", "program"), SERVERS)
@pytest.mark.parametrize("arguments", [["--help"], ["--nonsense"], []])
def test_servers_get_all_arguments_and_their_exit_code_is_kept(command, program, arguments):
    def run(*argv, executable=None):
        done = subprocess.run(
            [*argv, *arguments],
            executable=executable,
            env={"THALWEG_LISTEN": "nowhere"},  # without a --socket the sidecar ends by itself
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.returncode, done.stdout

    direct = run(program, executable=_binaries.find(program))
    assert run(sys.executable, "-m", "thalweg", command) == direct
    assert run(Path(sysconfig.get_path("scripts")) / program) == direct
    assert (direct[0] == 0) == (arguments == ["--help"])


def test_signals_reach_the_server():
    argv = [sys.executable, "-m", "thalweg", "aggregator", "--listen", "127.0.0.1:0"]
    server = Server("aggregator", argv, env={})
    try:
        server.wait_ready(20)
        program = Path("/proc", str(server.process.pid), "exe").resolve()
        assert program == _binaries.find(_binaries.AGGREGATOR).resolve()
        server.process.terminate()
        assert server.process.wait(20) == 0
    finally:
        server.stop(grace=1)


def test_bench_says_where_it_is_when_it_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(_passed_on, "entry_points", lambda **_: ())
    assert main(["bench", "lab", "--help"]) == 2
    assert "clone Thalweg's repository, run `make setup build` there" in capsys.readouterr().err


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
    assert "no aggregators are configured: the sidecars of a job's nodes host its shards" in out
    assert "expect no speed-up" in out
    assert "FAIL" not in out


def test_doctor_tells_the_address_for_other_hosts_and_its_rule(capsys, monkeypatch):
    monkeypatch.setenv("THALWEG_INTERFACE", "lo")
    monkeypatch.setenv("THALWEG_SHARD_PORTS", "7000-7010")
    main(["doctor"])
    line = "ok    address for other hosts: 127.0.0.1, port 7000-7010 (THALWEG_INTERFACE=lo;"
    assert line in capsys.readouterr().out


def test_doctor_reports_an_interface_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setenv("THALWEG_INTERFACE", "nowhere0")
    assert main(["doctor"]) == 1
    text = "FAIL  address for other hosts: THALWEG_INTERFACE=nowhere0 names no interface"
    assert text in capsys.readouterr().out


def test_doctor_says_what_is_malformed(capsys, monkeypatch):
    monkeypatch.setenv("THALWEG_SHARD_PORTS", "many")
    assert main(["doctor"]) == 2
    assert "THALWEG_SHARD_PORTS is 'many'" in capsys.readouterr().err
