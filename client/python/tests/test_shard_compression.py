"""Tests what a sharded model's codec keeps from step to step, without workers."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from thalweg._sharded import _compression
from thalweg._sharded._state import Compression, Size
from thalweg._sharded._units import Unit

OWN, COPIES = "rank0 of 2 workers, here", "copies0 of 2 workers, here"


class Job:
    """A job that sums over copies."""

    def __init__(self) -> None:
        self.loaded: object = None
        self.closed = 0

    def state_dict(self):
        return {"codec": "onebit", "node0": b"held"}

    def load_state_dict(self, state):
        self.loaded = state

    def close(self):
        self.closed += 1


@pytest.fixture
def job():
    return Job()


@pytest.fixture
def of_other_ranks(monkeypatch):
    """Returns what ranks with copies of this one's shards tell it."""
    words = [""]

    def gather(found, mine, group):
        found[:] = [mine, *words]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    return words


@pytest.fixture
def state(monkeypatch, job, of_other_ranks):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    unit = SimpleNamespace(residual=torch.tensor([[1.0, -3.0]]), rounds=5)
    group = SimpleNamespace(size=lambda: 1 + len(of_other_ranks))
    copies = [(job, group)]
    size = Size("2 workers, here", "2 workers")
    return Compression("int8:start=2,feedback=1", "bf16", size, {"blocks.0": unit}, copies)


def held(state: Compression) -> list[float]:
    return state._reduces["blocks.0"].residual.flatten().tolist()


def test_what_is_held_back_follows_the_scale_of_losses_and_is_saved_without(state):
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones(1))
    assert held(state) == [4.0, -12.0]
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    scaler.step(torch.optim.SGD([parameter], 0.1))
    scaler.update()  # doubles it
    assert held(state) == [8.0, -24.0]
    saved = state.state_dict()
    assert saved[OWN]["blocks.0"].tolist() == [[1.0, -3.0]]
    state.load_state_dict(saved)
    assert held(state) == [8.0, -24.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"saved_by": "4 workers"}, "saved by 4 workers, and this job has 2 workers"),
        ({"saved_by": "2 workers"}, "the state has nothing of rank 0"),
        ({OWN: {"head": torch.zeros(1, 2)}}, "the state is of other units"),
        ({OWN: {"blocks.0": torch.zeros(1, 3)}}, "the state is of other units"),
        ({COPIES: {}}, "the state is of other copies"),
    ],
)
def test_state_of_another_job_leaves_nothing_held_back_and_says_so(
    state, job, change, said, caplog
):
    state.load_state_dict(state.state_dict() | change)
    assert held(state) == [0.0, 0.0]
    assert job.loaded is None
    assert said in caplog.text


def test_state_that_an_earlier_version_has_saved_is_loaded(state, job):
    saved = state.state_dict()
    old = {"rank0": {"blocks.0": torch.tensor([[7.0, 8.0]])}, "copies0": saved[COPIES]}
    shared = {"codec": saved["codec"], "saved_by": "2 workers", "rounds": {"blocks.0": 9}}
    state.load_state_dict(shared | old)
    assert held(state) == [7.0, 8.0]
    assert state._reduces["blocks.0"].rounds == 9
    assert job.loaded == job.state_dict()


def of_size(size, elements):
    """Returns what holds back so many elements in a job of that size, without copies."""
    unit = SimpleNamespace(residual=torch.ones(1, elements), rounds=5)
    return Compression("int8:start=2,feedback=1", "bf16", Size(size, ""), {"blocks.0": unit}, [])


def test_checkpoint_of_another_size_is_loaded_without_what_was_held_back(state, tmp_path, caplog):
    saved, others = of_size("4 workers", 8), of_size("2 workers", 16)
    checkpoint.save({"codec": saved.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    found = {"codec": others.state_dict()}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    checkpoint.load(found, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    others.load_state_dict(found["codec"])
    assert held(others) == [0.0] * 16
    assert "the state was saved by 4 workers, and this job has 2 workers" in caplog.text


def test_state_of_sums_over_copies_is_saved_and_loaded_with_that_of_shards(state, job):
    saved = state.state_dict()
    assert saved[COPIES] == {"0": job.state_dict()}
    state.load_state_dict(saved)
    assert job.loaded == job.state_dict()


def test_sums_over_copies_begin_anew_on_all_ranks_if_one_has_no_state(
    state, job, of_other_ranks, caplog
):
    of_other_ranks[:] = ["the state has nothing of rank 2"]
    state.load_state_dict(state.state_dict())
    assert held(state) == [1.0, -3.0]
    assert job.loaded is None
    assert "rank 2: what is held back of sums over copies begins at zero" in caplog.text


def test_closing_ends_the_jobs_that_sum_over_copies(state, job):
    state.close()
    assert job.closed == 1


def test_state_of_another_codec_is_refused(state):
    with pytest.raises(ValueError, match="saved with codec 'fp16'"):
        state.load_state_dict({"codec": "fp16"})


def test_a_scale_of_zero_is_not_followed(state):
    state.note_precision(0.0, 1)
    assert held(state) == [1.0, -3.0]


def test_a_scale_of_infinity_is_not_followed(state):
    state.note_precision(2.0, 0)
    state.note_precision(float("inf"), 0)
    assert held(state) == [2.0, -6.0]


def test_what_was_held_back_without_a_scale_follows_the_first_one_and_the_end_of_all(state):
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.sum().backward()
    scaler = GradScaler("cpu", init_scale=32768.0)
    scaler.scale(parameter.sum()).backward()
    assert held(state) == [32768.0, -3 * 32768.0]
    parameter.sum().backward()
    assert held(state) == [1.0, -3.0]


def test_what_was_loaded_before_the_first_word_of_a_scale_follows_it(state):
    state.load_state_dict(state.state_dict())
    state.note_precision(4.0, 0)
    assert held(state) == [4.0, -12.0]


def test_what_would_become_infinite_with_another_scale_is_forgotten(state):
    state._reduces["blocks.0"].residual[0, 1] = -3e38
    state.note_precision(65536.0, 0)
    assert held(state) == [65536.0, 0.0]


@pytest.mark.parametrize("inside", [False, True])
def test_model_that_is_not_on_the_cpu_is_refused_before_its_first_step(inside, monkeypatch):
    group = SimpleNamespace(group_name="shards")
    mesh = SimpleNamespace(shard_process_group=group)
    unit = Unit("blocks.0", None, SimpleNamespace(device=torch.device("meta"), mesh_info=mesh), {})
    monkeypatch.setattr(_compression, "units_of", lambda model: [unit])
    monkeypatch.setattr(
        _compression, "_meet", lambda unit, asked: SimpleNamespace(crosses_nodes=not inside)
    )
    with pytest.raises(ValueError, match=r"blocks.0 are gathered on meta: compress\(\) is for mod"):
        _compression.compress(torch.nn.Linear(2, 2, device="meta"), "int8")
