"""Tests that training needs no room on a disk or in /dev/shm."""

import os
import subprocess
import sys

import full_disks
import pytest

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
]


def test_full_disk_and_full_shared_memory_do_not_keep_a_job_from_training(tmp_path):
    mount = f"mount -t tmpfs -o size={full_disks.SIZE} none"
    script = f'{mount} /dev/shm && {mount} "$TMPDIR" && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, full_disks.__file__]
    env = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
