"""Tests that processes of preloaded.py are what processes that load torch themselves would be."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import preloaded
import pytest
from harness import DEADLINE, Job, servers
from leftovers import await_clean, processes_below, shared_memory

SCRIPT = """\
import atexit, json, os, signal, sys, tempfile, threading
if "torch" not in sys.modules:
    import torch
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
name, out = sys.argv[1:]
atexit.register(print, "at the end of the interpreter", flush=True)
print("to stderr", file=sys.stderr)
def annotated(number: int): pass
said = {
    "argv": sys.argv,
    "variables": dict(os.environ),
    "folder": tempfile.gettempdir(),
    "path": sys.path[0],
    "annotations": repr(annotated.__annotations__),
    "threads": threading.active_count(),
    "modules": sorted(module for module in sys.modules if module.startswith("thalweg")),
}
with open(out, "w") as file:
    json.dump(said, file)
if name == "status":
    sys.exit(3)
if name == "error":
    raise ValueError("of the script")
if name == "stays":
    while True:
        signal.pause()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(name, script, cluster, *, afresh=False, env=None):
    """Returns the ended worker of a job of one."""
    job = Job(name, cluster, script.parent, sidecar_of=[""], jobs=script, afresh=afresh, env=env)
    assert isinstance(job.workers[0].process, subprocess.Popen) == afresh
    return job.wait()[0]


@pytest.mark.parametrize(("name", "code"), [("nothing", 0), ("status", 3), ("error", 1)])
def test_script_ends_and_says_the_same_in_both_kinds_of_process(name, code, script):
    with servers() as nothing:
        loaded, forked = (run(name, script, nothing, afresh=afresh) for afresh in (True, False))
        outputs = [loaded.output, forked.output]
    assert (loaded.code, forked.code) == (code, code)
    for output in outputs:
        assert "to stderr\n" in output
        assert output.count("at the end of the interpreter\n") == 1
        assert ("ValueError: of the script" in output) == (name == "error")


@pytest.mark.parametrize(
    "env", [{}, {"THALWEG_CODEC": "fp16"}, {"THALWEG_FUSED_OPTIMIZER": "1"}, {"LATE": "1"}]
)
def test_script_finds_the_same_process_and_what_its_variables_activate(env, script):
    def found(afresh):
        result = run("nothing", script, nothing, afresh=afresh, env=env).result
        for name in ("MASTER_PORT", "LC_CTYPE"):  # Python may set the locale when it starts
            result["variables"].pop(name, None)
        return result

    with servers() as nothing:
        loaded, forked = found(True), found(False)
        assert loaded["folder"] == str(nothing.folder)
    assert forked == loaded
    activated = any(name.startswith("THALWEG_") for name in env)
    assert ("thalweg._activation._zero_code" in forked["modules"]) == activated


def test_process_is_found_by_its_folder_and_can_be_killed(script):
    with servers() as nothing:
        shm = shared_memory()
        job = Job("stays", nothing, script.parent, sidecar_of=[""], jobs=script)
        process = job.workers[0].process
        job.until("its process", lambda: process.pid in processes_below(nothing.folder))
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        process.kill()
        assert process.wait(DEADLINE) == -signal.SIGKILL
        await_clean(nothing.folder, shm)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "ATEN_CPU_CAPABILITY", "THALWEG_COMPAT"])
def test_variable_that_is_read_early_demands_a_process_of_its_own(name):
    assert preloaded.must_load(["THALWEG_CODEC", name])


def test_server_ends_with_the_process_that_has_started_it(script):
    folder = script.parent
    user = (
        f"import preloaded, os, pathlib; "
        f"env = dict(os.environ, TMPDIR={str(folder)!r}, OMP_NUM_THREADS='1')\n"
        f"argv = [{str(script)!r}, 'nothing', {str(folder / 'out.json')!r}]\n"
        f"exit(preloaded.start(argv, env, pathlib.Path({str(folder / 'log')!r}), env).wait())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", user],
        cwd=preloaded.__file__.rpartition("/")[0],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads((folder / "out.json").read_text())["argv"][1] == "nothing"
    assert processes_below(folder) == {}  # the server had it as its TMPDIR
