"""Tests which files nodes write of what they hold back, with stand-ins for job and store."""

import gc
import logging
import os
import stat
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thalweg._attach._notes import Notes
from thalweg._attach._residual_files import ResidualFiles
from thalweg._attach._residuals import ResidualKeeper


def state(step, value=1.0):
    name = b"weight"
    sizes = struct.pack("<4Q", step, 0, 1, 0)
    return struct.pack("<4sII", b"TWS3", 1, len(name)) + name + sizes + struct.pack("<f", value)


class Store:
    """Is a store of one process."""

    def __init__(self):
        self.keys = set()
        self.broken = False

    def set(self, key, _):
        self.keys.add(key)

    def check(self, keys):
        if self.broken:
            raise RuntimeError("Connection reset by peer")
        return self.keys.issuperset(keys)


class Node:
    """Is a node of a job, after `step` steps."""

    def __init__(self, folder, store, number, nodes=2, job="job-1"):
        self.step = 0
        self.asked = 0
        self.keeper = ResidualKeeper(
            ResidualFiles(str(folder), number),
            Notes(store, job, timeout=30.0, lost=list, status=lambda: None),
            job=job,
            node=number,
            nodes=nodes,
            whole=self.whole,
        )

    def whole(self):
        self.asked += 1
        return state(self.step)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_user_can_read_the_files_and_a_folder_that_is_made_for_them(tmp_path):
    files = ResidualFiles(str(tmp_path / "new"), 0)
    old_mask = os.umask(0)
    try:
        files.write("job", 1, b"state")
        left = files.folder / "job-2-node0.residuals.unfinished"  # by a process that was killed
        left.touch(mode=0o644)
        files.write("job", 2, b"state")
    finally:
        os.umask(old_mask)
    assert mode(files.folder) == 0o700
    assert [mode(path) for path in files.folder.iterdir()] == [0o600] * 2


def test_folder_that_exists_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    ResidualFiles(str(tmp_path), 0).write("job", 1, b"state")
    assert mode(tmp_path) == 0o755


def test_two_modules_of_a_process_keep_three_files_each(tmp_path):
    modules = {name: ResidualFiles(str(tmp_path), 0) for name in ("G", "D")}
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(files.write, name, step, b"state")
            for step in range(50)
            for name, files in modules.items()
        ]
    for job in jobs:
        job.result()
    assert len(names(tmp_path)) == 6
    for name, files in modules.items():
        assert files.read(name, 49) == b"state"
    del modules["D"], files
    modules["G"].write("G", 50, b"state")
    assert len(names(tmp_path)) == 3


def test_node_writes_its_file_after_rank_0_has_saved_and_only_then(tmp_path):
    store = Store()
    first, second = Node(tmp_path, store, 0), Node(tmp_path, store, 1)
    for second.step in (1, 2):
        second.keeper.look()
    assert second.asked == 0
    mark = first.keeper.keep(state(2))
    assert mark == {"job": "job-1", "step": 2, "nodes": 2}
    second.step = 3  # it was one step further when it looked
    second.keeper.look()
    second.keeper.look()
    assert second.asked == 1
    first.keeper.close()
    second.keeper.close()
    assert names(tmp_path) == ["job-1-2-node0.residuals", "job-1-3-node1.residuals"]
    assert first.keeper.find(mark) == state(2)
    assert second.keeper.find(mark) == state(3)


def test_two_optimizers_of_a_module_make_one_file(tmp_path):
    first = Node(tmp_path, Store(), 0)
    assert first.keeper.keep(state(2)) == first.keeper.keep(state(2, 5.0))
    first.keeper.close()
    assert names(tmp_path) == ["job-1-2-node0.residuals"]
    assert first.keeper.find({"job": "job-1", "step": 2, "nodes": 2}) == state(2)


def test_three_files_of_each_node_stay_and_none_that_is_unfinished(tmp_path):
    (tmp_path / "job-0-9-node1.residuals.unfinished").touch()
    for number in (0, 1):
        files = ResidualFiles(str(tmp_path), number)
        for step in range(1, 6):
            files.write("job/1", step, state(step))
    expected = [f"job_1-{step}-node{node}.residuals" for step in (3, 4, 5) for node in (0, 1)]
    assert names(tmp_path) == expected


def test_files_of_an_earlier_process_go_first_even_if_its_clock_was_ahead(tmp_path):
    ahead = time.time() + 86400
    for step in (10, 20, 30):
        path = tmp_path / f"old-{step}-node0.residuals"
        path.touch()
        os.utime(path, (ahead, ahead + step))
    files = ResidualFiles(str(tmp_path), 0)
    for step in (100, 200):
        files.write("new", step, state(step))
    assert names(tmp_path) == [f"new-{step}-node0.residuals" for step in (100, 200)] + [
        "old-30-node0.residuals"
    ]
    files.write("new", 300, state(300))
    assert names(tmp_path) == [f"new-{step}-node0.residuals" for step in (100, 200, 300)]


def test_file_that_is_damaged_or_missing_or_of_other_nodes_is_refused_by_name(tmp_path):
    first = Node(tmp_path, Store(), 0)
    mark = first.keeper.keep(state(2))
    first.keeper.close()
    for wrong, said in (
        (None, "written without THALWEG_RESIDUALS"),
        ({"step": "2"}, "written without THALWEG_RESIDUALS"),
        (mark | {"nodes": 3}, "written by 3 nodes, this job has 2"),
        (mark | {"step": 4}, "node 0: no file .*job-1-4-node0.residuals"),
    ):
        with pytest.raises(OSError, match=said):
            first.keeper.find(wrong)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(OSError, match="damaged"):
        first.keeper.find(mark)


def test_full_disk_is_said_once_and_leaves_no_file(tmp_path, monkeypatch, caplog):
    first = Node(tmp_path, Store(), 0)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with caplog.at_level(logging.WARNING, "thalweg"):
        for step in (2, 3):
            first.keeper.keep(state(step))
        first.keeper.close()
    assert caplog.text.count("node 0 does not keep what it holds back") == 1
    assert "No space left on device" in caplog.text
    assert names(tmp_path) == []


def test_store_that_has_gone_is_said_once_and_files_are_written_at_the_end(tmp_path, caplog):
    store = Store()
    second = Node(tmp_path, store, 1)
    store.broken = True
    for second.step in (1, 2):
        second.keeper.look()
    second.keeper.close()
    assert caplog.text.count("Connection reset by peer") == 1
    assert names(tmp_path) == ["job-1-2-node1.residuals"]


def test_file_that_a_job_goes_on_from_stays_until_there_is_a_later_checkpoint(tmp_path):
    first = Node(tmp_path, Store(), 1, job="first")
    first.step = 8
    first.keeper.close()
    del first
    for attempt in range(5):
        again = Node(tmp_path, Store(), 1, job=f"again{attempt}")
        again.keeper.find({"job": "first", "step": 8, "nodes": 2})
        again.step = 12
        again.keeper.close()  # without a checkpoint
        del again
        gc.collect()  # each attempt is a process of its own
        assert "first-8-node1.residuals" in names(tmp_path)
    assert len(names(tmp_path)) == 4
    store = Store()
    boss, last = Node(tmp_path, store, 0, job="last"), Node(tmp_path, store, 1, job="last")
    last.keeper.find({"job": "first", "step": 8, "nodes": 2})
    for node in (boss, last):
        node.step = 20
    boss.keeper.keep(boss.whole())
    last.keeper.look()
    last.keeper.close()
    assert "first-8-node1.residuals" not in names(tmp_path)
