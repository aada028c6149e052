"""Tests what optimizers save and load of codecs, with a stand-in for the job."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim

from thalweg import amp
from thalweg._attach import _codec_states, _jobs, _loaded, _resuming
from thalweg._attach._state import State
from thalweg._job import _collectives
from thalweg.optim import FusedLAMB

RIDING = {"codec": "powersgd:rank=4", "shared": b"bytes"}


class Stand:
    """Is a state that has something to keep, or not."""

    closed = False
    has_trained = False
    rides = True
    job = "job-1"

    def __init__(self, riding):
        self._riding = riding

    def riding(self):
        return self._riding


class Wrapped:
    """Is a model in DistributedDataParallel."""

    def __init__(self, model):
        self.module = model
        self.parameters = model.parameters


@pytest.fixture
def joined():
    """Attaches a model, and returns its state; it lives as long as the test."""
    kept = []

    def join(model, riding=RIDING):
        stand, wrapped = Stand(riding), Wrapped(model)
        kept.append((stand, wrapped))
        _jobs.begin(wrapped, stand)
        return stand

    return join


def taken(model):
    """Returns what the model goes on from."""
    found = _loaded.take(_jobs.AttachedModule(Wrapped(model), Stand(None)).parameters, 0)
    assert not any(map(_loaded.loaded_for, model.parameters()))
    return found


def test_checkpoint_of_an_optimizer_takes_along_what_its_models_codec_carries(joined):
    _resuming.install()
    model = nn.Linear(2, 2)
    optimizer = optim.AdamW(model.parameters())
    assert _resuming.KEY not in optimizer.state_dict()
    joined(model)
    assert optimizer.state_dict()[_resuming.KEY] == [RIDING | {"parameters": [0, 1]}]
    joined(model, None)
    assert _resuming.KEY not in optimizer.state_dict()


def test_optimizer_of_two_modules_keeps_their_codecs_apart(joined):
    _resuming.install()
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    groups = [{"params": list(model.parameters())} for model in reversed(models)]
    optimizer = optim.AdamW(groups)
    for number, model in enumerate(models):
        joined(model, RIDING | {"shared": bytes([number])})
    optimizer.load_state_dict(optimizer.state_dict())
    for number, model in enumerate(models):
        assert taken(model)["shared"] == bytes([number])


def test_checkpoint_that_comes_after_the_end_of_the_job_says_so_once(joined, caplog):
    _resuming.install()
    _resuming._say_that_it_has_ended.cache_clear()
    model = nn.Linear(2, 2)
    optimizer = optim.AdamW(model.parameters())
    stand = joined(model)
    stand.closed = True
    assert _resuming.KEY not in optimizer.state_dict()
    forgotten = Stand(RIDING)
    _jobs.begin(Wrapped(model), forgotten)
    del forgotten
    assert _resuming.KEY not in optimizer.state_dict()
    assert caplog.text.count("the job of its parameters has ended") == 1


def test_what_was_saved_with_an_optimizer_waits_for_its_parameters_job():
    _resuming.install()
    model = nn.Linear(2, 2)
    for optimizer in (optim.AdamW(model.parameters()), FusedLAMB(model.parameters())):
        riding = RIDING | {"parameters": [0, 1, 7]}
        optimizer.load_state_dict(optimizer.state_dict() | {_resuming.KEY: [riding]})
        assert taken(model) is riding
        for other in ({}, [{"shared": 3}], [RIDING], "text"):
            optimizer.load_state_dict(optimizer.state_dict() | {_resuming.KEY: other})
        assert taken(model) is None


def test_what_no_job_goes_on_from_is_saved_again_without_files_that_are_older_by_then(caplog):
    _resuming.install()
    _resuming._say_that_it_is_passed_on.cache_clear()
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizer = optim.AdamW([p for model in models for p in model.parameters()])
    ridings = [
        RIDING | {"shared": bytes([number]), "residuals": "files", "parameters": parameters}
        for number, parameters in enumerate(([0, 1], [2, 3]))
    ]
    with caplog.at_level("INFO", "thalweg"):
        optimizer.load_state_dict(optimizer.state_dict() | {_resuming.KEY: ridings})
        for _ in range(2):
            saved = optimizer.state_dict()[_resuming.KEY]
            assert saved == [
                {key: one[key] for key in one if key != "residuals"} for one in ridings
            ]
    assert caplog.text.count("as they were loaded: nothing here goes on from them") == 1


def test_checkpoint_before_the_first_step_has_what_was_loaded(joined):
    _resuming.install()
    model = nn.Linear(2, 2)
    optimizer = optim.AdamW(model.parameters())
    joined(model, RIDING | {"shared": b"step 0"})
    riding = RIDING | {"residuals": "files", "parameters": [0, 1]}
    optimizer.load_state_dict(optimizer.state_dict() | {_resuming.KEY: [riding]})
    assert optimizer.state_dict()[_resuming.KEY] == [riding]
    assert taken(model) == riding  # as in the first step
    assert optimizer.state_dict()[_resuming.KEY][0]["shared"] == b"step 0"


def test_checkpoint_that_is_loaded_in_the_middle_of_training_leaves_the_codec_alone(joined, caplog):
    _resuming.install()
    model = nn.Linear(2, 2)
    optimizer = optim.AdamW(model.parameters())
    stand = joined(model)
    stand.has_trained = True
    with caplog.at_level("INFO", "thalweg"):
        optimizer.load_state_dict(optimizer.state_dict())
    assert "job job-1: the codec keeps its own step counts" in caplog.text
    assert taken(model) is None


def test_job_that_has_ended_leaves_a_checkpoint_to_the_next_one_of_its_parameters(joined, caplog):
    _resuming.install()
    model = nn.Linear(2, 2)
    optimizer = optim.AdamW(model.parameters())
    saved = optimizer.state_dict() | {_resuming.KEY: [RIDING | {"parameters": [0, 1]}]}
    stand = joined(model)  # somebody keeps it
    stand.has_trained = stand.closed = True
    with caplog.at_level("INFO", "thalweg"):
        optimizer.load_state_dict(saved)
    assert taken(model)["shared"] == b"bytes"
    assert "the codec keeps its own step counts" not in caplog.text


def test_optimizer_of_masters_speaks_for_the_models_parameters(joined):
    _resuming.install()
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    joined(model)
    assert optimizer.state_dict()[_resuming.KEY] == [RIDING | {"parameters": [0, 1]}]
    optimizer.load_state_dict(optimizer.state_dict())
    assert taken(model)["shared"] == b"bytes"
    assert {p.dtype for p in model.parameters()} == {torch.float16}


class Keeper:
    """Is the session of a job that has done seven rounds, or has failed."""

    has_failed = False

    def save_codec_state(self):
        if self.has_failed:
            raise RuntimeError("node 1 is lost")
        return counts(7)

    def load_codec_state(self, state):
        pass

    def status(self):
        return "failed"

    def close(self):
        pass


def counts(rounds):
    sizes = _codec_states._Sizes(rounds, 0, 0, 0)
    return _codec_states._join([_codec_states._Parameter(b"weight", sizes, b"", b"")])


def state_of(keeper):
    return State(
        keeper,
        keeper=keeper,
        job="job-1",
        codec="powersgd:rank=4",
        sidecar="",
        starts_sidecars=False,
        listens=False,
        shards="",
        place=SimpleNamespace(num_nodes=2, node=0, local_rank=0),
        left_out=None,
        workers=2,
        rides=True,
    )


def test_checkpoint_of_a_job_that_has_failed_has_the_counts_of_the_last_one(caplog):
    keeper = Keeper()
    state = state_of(keeper)
    riding = state.riding()
    assert _codec_states.rounds_of(riding["shared"]) == 7
    keeper.has_failed = True
    assert state.riding() == riding
    assert "has an earlier one's step counts of the codec: node 1 is lost" in caplog.text


def test_checkpoint_of_a_job_that_fails_before_any_other_has_the_counts_that_were_loaded(caplog):
    keeper = Keeper()
    keeper.has_failed = True
    state = state_of(keeper)
    assert state.riding() is None
    assert "is without step counts of the codec: node 1 is lost" in caplog.text
    riding = {"codec": "powersgd:rank=4", "shared": counts(3)}
    assert state.ride_on(riding | {"parameters": [0]}, None) == ""
    assert state.riding() == riding


def test_first_step_waits_no_longer_for_workers_of_a_node_that_is_lost(monkeypatch):
    lost = []

    def wait_in_vain(value, meeting):
        assert not lost, "it waits again"
        lost.append("node 1 (gpu-b)")
        raise TimeoutError("thalweg: rank 1 has not come to the first training step within 30 s")

    monkeypatch.setattr(_collectives, "gather", wait_in_vain)
    state = SimpleNamespace(job="job-1", status=lambda: None, lost_nodes=lambda: lost)
    meeting = _collectives.Meeting(None, "group", 0, 2, 30.0)
    with pytest.raises(TimeoutError, match=r"goes on without node 1 \(gpu-b\)"):
        _resuming._gather(("", ""), meeting, 1800.0, state)


@pytest.mark.parametrize(
    ("missing", "has_files", "level", "said"),
    [
        ("", True, "INFO", "goes on, from files"),
        ("node 1 has no file", True, "WARNING", "begins at zero: node 1 has no file"),
        ("files keep it", False, "INFO", "begins at zero: files keep it"),
    ],
)
def test_who_has_asked_for_files_is_warned_that_they_are_not_there(
    missing, has_files, level, said, caplog
):
    state = SimpleNamespace(job="job-1", has_residual_files=has_files)
    with caplog.at_level("INFO", "thalweg"):
        _resuming._say_what_goes_on(state, {"shared": counts(7)}, missing)
    [record] = caplog.records
    assert record.levelname == level
    assert "goes on after step 7" in record.getMessage()
    assert record.getMessage().endswith(said)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_says_what_becomes_of_checkpoints(rank, monkeypatch, caplog):
    monkeypatch.setattr(_resuming.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(_resuming.dist, "get_rank", lambda: rank)
    for say, arguments in (
        (_resuming._say_that_it_is_passed_on, ("powersgd:rank=4",)),
        (_resuming._say_that_it_has_ended, ()),
    ):
        say.cache_clear()
        caplog.clear()
        with caplog.at_level("INFO", "thalweg"):
            say(*arguments)
        assert len(caplog.messages) == (rank == 0)
