import os
import select
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from thalweg.cli._supervisor import LinePrefixer, Supervisor

WAIT = 60  # seconds, for what takes none


@pytest.fixture
def patient(monkeypatch):
    """Lets nothing be killed that is told to end."""
    monkeypatch.setattr("thalweg.cli._supervisor.GRACE_SECONDS", WAIT)


def supervise(*codes, server=None):
    """Runs Python snippets as workers; returns (exit code, stdout, stderr, seconds)."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.monotonic()
        with Supervisor(out, err) as supervisor:
            if server is not None:
                with supervisor.pipes("server") as (stdout, stderr):
                    process = subprocess.Popen(
                        [sys.executable, "-c", server],
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,
                    )
                supervisor.watch("server", process, is_worker=False)
            for index, code in enumerate(codes):
                supervisor.start_worker(
                    f"worker{index}",
                    [sys.executable, "-c", code],
                    env=os.environ,
                    to_terminal=False,
                )
            code = supervisor.wait()
            supervisor.stop()
        seconds = time.monotonic() - start
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read(), seconds


def test_lines_are_prefixed_whatever_the_pieces():
    text = b"one\ntwo\n\nthree"
    for cut in range(len(text)):
        prefixer = LinePrefixer("> ")
        result = prefixer.feed(text[:cut]) + prefixer.feed(text[cut:]) + prefixer.finish()
        assert result == b"> one\n> two\n> \n> three\n"


def test_of_a_progress_bar_the_last_state_is_shown():
    text = b"\r 1%\r 2%\r 99%\r100%\ndone\n"
    for cut in range(len(text)):
        prefixer = LinePrefixer("> ")
        result = prefixer.feed(text[:cut]) + prefixer.feed(text[cut:]) + prefixer.finish()
        assert result == b"> 100%\n> done\n"


def test_endless_line_is_cut():
    prefixer = LinePrefixer("> ")
    assert prefixer.feed(b"x" * 100_000) == b"> " + b"x" * 100_000 + b"\n"
    assert prefixer.finish() == b""


def test_success_of_all_workers_is_zero_and_output_is_prefixed():
    code, out, err, _ = supervise(
        "print('hello')", "import sys; print('world'); print('oops', file=sys.stderr)"
    )
    assert code == 0
    assert sorted(out.splitlines()) == ["[worker0] hello", "[worker1] world"]
    assert err.splitlines() == ["[worker1] oops"]


def test_failing_worker_ends_the_others_and_is_named(patient):
    code, _, err, seconds = supervise(
        "import signal; signal.pause()", "import sys; sys.exit(7)", "import signal; signal.pause()"
    )
    assert code == 7
    assert "[thalweg] worker1 exited with code 7" in err
    assert "was killed" not in err
    assert seconds < WAIT


def test_killed_worker_counts_as_128_plus_signal():
    code, _, err, _ = supervise("import os; os.kill(os.getpid(), 9)")
    assert code == 137
    assert "worker0 was killed by SIGKILL" in err


def test_last_words_of_a_failing_worker_are_forwarded():
    code, out, _, _ = supervise("import sys; print('x' * 300_000); print('end'); sys.exit(1)")
    assert code == 1
    assert out.endswith("[worker0] end\n")
    assert out.count("x") == 300_000


def test_server_that_ends_is_a_failure_even_with_code_zero():
    code, _, err, _ = supervise("import signal; signal.pause()", server="pass")
    assert code == 1
    assert "server exited with code 0" in err


def test_servers_are_stopped_when_the_workers_are_done(patient, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    server = (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        f"open({str(fifo)!r}, 'w').close()\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "print('bye')"
    )
    code, out, err, seconds = supervise(f"open({str(fifo)!r}).close()", server=server)
    assert code == 0
    assert out == "[server] bye\n"
    assert "was killed" not in err
    assert seconds < WAIT


def test_worker_that_ignores_sigterm_is_killed_after_the_grace(monkeypatch, tmp_path):
    monkeypatch.setattr("thalweg.cli._supervisor.GRACE_SECONDS", 0.3)
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    stubborn = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({fifo!r}, 'w').close()\n"
        "while True: signal.pause()"
    )
    code, _, err, _ = supervise(stubborn, f"import sys; open({fifo!r}).close(); sys.exit(4)")
    assert code == 4
    assert "worker0 did not end within 0.3 s and was killed" in err


def test_what_a_worker_has_started_ends_with_it():
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    grandchild = "import signal; signal.pause()"
    worker = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}], close_fds=False)\n"
    )
    with tempfile.TemporaryFile("w+") as out, Supervisor(out, out) as supervisor:
        with supervisor.pipes("w") as (stdout, stderr):
            process = subprocess.Popen(
                [sys.executable, "-c", worker],
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                close_fds=False,
            )
        os.close(writer)
        supervisor.watch("w", process, is_worker=True)
        assert supervisor.wait() == 0
        supervisor.stop()
    # The pipe is at its end: no process has the writing end open.
    assert select.select([reader], [], [], WAIT)[0] == [reader]
    assert os.read(reader, 1) == b""
    os.close(reader)


LAUNCHER = """
import os, sys
from thalweg.cli._supervisor import Interrupted, Supervisor
with Supervisor(sys.stdout, sys.stderr) as supervisor:
    for index in range(2):
        supervisor.start_worker(f"worker{index}", [sys.executable, "-c",
            "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"],
            env=os.environ, to_terminal=False)
    try:
        code = supervisor.wait()
    except Interrupted as interrupted:
        code = 128 + interrupted.signum
    finally:
        supervisor.stop()
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_workers_die_with_the_launcher(signum, code):
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup ignores it
    ) as launcher:
        pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        workers = [os.pidfd_open(pid) for pid in pids]
        launcher.send_signal(signum)
        assert launcher.wait(WAIT) == code
        for worker in workers:
            assert select.select([worker], [], [], WAIT)[0] == [worker]
            os.close(worker)


def test_reader_that_goes_away_ends_everything():
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            LAUNCHER.replace("signal.pause()", "[print(i) for i in range(10**9)]"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(WAIT) == 128 + signal.SIGPIPE
