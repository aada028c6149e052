"""Tests `thalweg run` with its real servers. The scripts do not load torch, which takes seconds."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

from harness import environment, servers

RUN = [sys.executable, "-m", "thalweg", "run"]


def run(
    folder: Path, arguments: list[str], script: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "x.py").write_text(script)
    command = [*RUN, *arguments, str(folder / "x.py"), "--option", "value"]
    result = subprocess.run(
        command,
        env=environment(folder) | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    (folder / "x.py").unlink()
    return result


def test_workers_get_sockets_that_exist_and_the_arguments():
    script = (
        "import json, os, stat, sys\n"
        "is_socket = stat.S_ISSOCK(os.stat(os.environ['THALWEG_SIDECAR']).st_mode)\n"
        "print(json.dumps([os.environ['RANK'], os.environ['THALWEG_CODEC'], is_socket,"
        " os.environ['THALWEG_SIDECAR'], sys.argv[1:]]))\n"
    )
    with servers() as nothing:
        arguments = ["--nodes", "2", "--nproc", "2", "--shards", "2", "--codec", "bf16"]
        result = run(nothing.folder, arguments, script)
    assert result.returncode == 0, result.stderr
    lines = sorted(line for line in result.stdout.splitlines() if ".worker" in line)
    prefixes = [line.split("] ")[0] + "]" for line in lines]
    assert prefixes == [f"[node{rank // 2}.worker{rank}]" for rank in range(4)]
    said = [json.loads(line.split("] ", 1)[1]) for line in lines]
    assert [entry[:3] for entry in said] == [[str(rank), "bf16", True] for rank in range(4)]
    assert said[0][3] == said[1][3] != said[2][3] == said[3][3]
    assert said[0][4] == ["--option", "value"]


def test_exported_addresses_of_servers_are_set_aside_and_named():
    script = "import os; print(os.environ['THALWEG_AGGREGATORS'])"
    elsewhere = {
        "THALWEG_AGGREGATORS": "elsewhere:7070",
        "THALWEG_HTTP": "elsewhere:80",
        "THALWEG_INTERFACE": "nowhere0",
        "THALWEG_LISTEN": "elsewhere:7070",
        "THALWEG_SHARD_PORTS": "9000-9001",
        "THALWEG_SIDECAR": "/nowhere",
    }
    with servers() as nothing:
        result = run(nothing.folder, ["--shards", "1"], script, **elsewhere)
    assert result.returncode == 0, result.stderr
    (started,) = re.findall(r"aggregator0 serves at ([^,]+),", result.stderr)
    assert f"[node0.worker0] {started}" in result.stdout.splitlines()
    for name, value in elsewhere.items():
        assert result.stderr.count(f"{name}={value} is set aside") == 1


def test_code_of_the_failing_worker_is_returned():
    script = "import os, signal, sys\nsys.exit(9) if os.environ['RANK'] == '1' else signal.pause()"
    with servers() as nothing:
        result = run(nothing.folder, ["--nproc", "2"], script)
    assert result.returncode == 9
    assert "node0.worker1 exited with code 9" in result.stderr


def test_server_that_dies_is_a_failure():
    script = (
        "import os, signal, subprocess\n"
        "launcher = os.getppid()\n"
        "names = subprocess.run(['ps', '-o', 'pid=,comm=', '--ppid', str(launcher)],"
        " capture_output=True, text=True).stdout\n"
        "[os.kill(int(line.split()[0]), 9) for line in names.splitlines() if 'aggre' in line]\n"
        "signal.pause()\n"
    )
    with servers() as nothing:
        result = run(nothing.folder, ["--shards", "1"], script)
    assert result.returncode == 1
    assert "aggregator0 was killed by SIGKILL" in result.stderr


def test_nothing_survives_the_launcher():
    with servers() as nothing:
        script = nothing.folder / "x.py"
        script.write_text("import signal; print('here', flush=True); signal.pause()")
        for signum, code in [(signal.SIGINT, 130), (signal.SIGKILL, -9)]:
            with subprocess.Popen(
                [*RUN, "--nodes", "2", str(script)],
                env=environment(nothing.folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ) as launcher:
                for line in launcher.stdout:
                    if "here" in line:
                        break
                launcher.send_signal(signum)
                assert launcher.wait(20) == code
        script.unlink()
