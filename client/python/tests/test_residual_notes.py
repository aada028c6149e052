"""Tests that no step waits long for a store that is silent, with stand-ins for store and job."""

import threading

import pytest

from thalweg._attach import _codec_states
from thalweg._attach._notes import Notes
from thalweg._attach._residual_files import ResidualFiles
from thalweg._attach._residuals import ResidualKeeper

LONG = 1000.0  # seconds, longer than a test may take


class SilentStore:
    """Is the store of a machine that has fallen silent, until the end of the test."""

    def __init__(self):
        self.asked = 0
        self.end = threading.Event()

    def check(self, keys):
        self.asked += 1
        assert self.end.wait(60), "the step still waits"
        return False

    def set(self, key, value):
        pass


@pytest.fixture
def silent():
    store = SilentStore()
    yield store
    store.end.set()


def notes_in(store, *, timeout=LONG, lost=list, status=lambda: None):
    return Notes(store, "job-1", timeout=timeout, lost=lost, status=status)


def counts(rounds):
    sizes = _codec_states._Sizes(rounds, 0, 0, 0)
    return _codec_states._join([_codec_states._Parameter(b"weight", sizes, b"", b"")])


def keeper_of(folder, notes, node=1):
    files = ResidualFiles(str(folder), node)
    return ResidualKeeper(files, notes, job="job-1", node=node, nodes=3, whole=lambda: b"")


@pytest.mark.parametrize("node", [0, 1])
def test_store_that_does_not_answer_holds_up_one_step_for_the_timeout(
    node, silent, tmp_path, caplog
):
    keeper = keeper_of(tmp_path, notes_in(silent, timeout=0.2), node)
    for step in (7, 8, 9):
        keeper.keep(counts(step)) if node == 0 else keeper.look()
    assert silent.asked == 1
    warning = f"node {node} does not keep what it holds back of gradients"
    assert caplog.text.count(warning) == 1
    assert "store has not answered within 0.2 s (THALWEG_TIMEOUT)" in caplog.text
    keeper._join()


def test_store_is_not_waited_for_once_a_node_is_lost(silent, tmp_path, caplog):
    lost = []

    def lose():
        if silent.asked:
            lost.append("node 0 (gpu-a)")
        return lost

    keeper = keeper_of(tmp_path, notes_in(silent, lost=lose))
    for _ in range(3):
        keeper.look()
    assert silent.asked == 1
    assert caplog.text.count("the job goes on without node 0 (gpu-a)") == 1


def test_store_is_not_asked_after_a_loss(silent, tmp_path, caplog):
    keeper = keeper_of(tmp_path, notes_in(silent, lost=lambda: ["node 2 (gpu-c)"]))
    for _ in range(3):
        keeper.look()
    assert silent.asked == 0
    assert caplog.text.count("the job goes on without node 2 (gpu-c)") == 1


def test_store_is_not_waited_for_once_the_job_has_failed(silent, tmp_path, caplog):
    keeper = keeper_of(tmp_path, notes_in(silent, status=lambda: "node 0 is lost"))
    keeper.look()
    keeper.look()
    assert silent.asked == 1
    assert "node 0 is lost" in caplog.text
