import os
import select
import signal
import subprocess
import sys

import pytest

from thalweg._job._processes import Server, ServerError, describe_exit, die_with_parent

ANNOUNCE = """
import os, signal, sys
fd = int(sys.argv[sys.argv.index("--ready-fd") + 1])
os.write(fd, LINE)
os.close(fd)
signal.pause()
"""


def server(code, **options):
    return Server("fake", [sys.executable, "-c", code], env=os.environ, **options)


def announcing(line):
    return server(ANNOUNCE.replace("LINE", repr(line)))


def test_ready_line_gives_the_addresses():
    fake = announcing(b'{"address": "127.0.0.1:7", "http": "127.0.0.1:8"}\n')
    try:
        fake.wait_ready(60)
        assert (fake.address, fake.http) == ("127.0.0.1:7", "127.0.0.1:8")
        assert fake.process.poll() is None
    finally:
        assert fake.stop(grace=60) == -signal.SIGTERM


def test_server_that_ends_before_it_is_ready_is_named_with_its_exit_code():
    with pytest.raises(ServerError, match="fake exited with code 3 before it was ready"):
        server("import sys; sys.exit(3)").wait_ready(60)


def test_server_that_is_not_ready_in_time_is_killed():
    silent = server("import signal; signal.pause()")
    with pytest.raises(ServerError, match=r"not ready within 0\.2 s"):
        silent.wait_ready(0.2)
    assert silent.process.returncode is not None


def test_error_that_a_server_announces_is_raised_and_the_server_stopped():
    fake = announcing(b'{"error": "port 7 is taken"}\n')
    with pytest.raises(ServerError, match=r"^fake: port 7 is taken$"):
        fake.wait_ready(60)
    assert fake.process.returncode is not None


@pytest.mark.parametrize("line", [b"serving\n", b"[]\n", b'{"address": "x"}\n'])
def test_malformed_ready_line_is_refused_and_the_server_stopped(line):
    fake = announcing(line)
    with pytest.raises(ServerError, match="announced itself with"):
        fake.wait_ready(60)
    assert fake.process.returncode is not None


def test_program_that_does_not_exist_is_named():
    with pytest.raises(ServerError, match="ghost cannot be started"):
        Server("ghost", ["/nonexistent/ghost"], env={})


def test_child_dies_with_its_parent():
    parent_code = (
        "import signal, subprocess, sys\n"
        "from thalweg._job._processes import die_with_parent\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'],"
        " preexec_fn=die_with_parent(signal.SIGKILL))\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            parent.wait(60)
            assert select.select([child], [], [], 60)[0] == [child]
        finally:
            os.close(child)


def test_child_whose_parent_is_gone_already_does_not_start():
    prepare = die_with_parent(signal.SIGKILL)
    child = os.fork()
    if child == 0:  # its parent is not the grandchild's, as if the launcher had died before prctl
        grandchild = os.fork()
        if grandchild == 0:
            prepare()
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_exits_are_described_in_words():
    assert describe_exit(0) == "exited with code 0"
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe_exit(-64) in {"was killed by SIGRTMAX", "was killed by signal 64"}
