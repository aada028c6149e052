"""Tests that training goes on where a script has another default device than tensors are on.

That device is "meta", whose tensors cannot be read: whatever is made there by mistake fails.
"""

from types import SimpleNamespace

import pytest
import torch
from amp_models import batch, casts_off_afterwards, network, setup
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thalweg import amp, elastic
from thalweg.compat import _apex_optimizers, _apex_optimizers_more
from thalweg.data import CollateMixup
from thalweg.optim import FusedAdamW, FusedLAMB, FusedSGD, _shards
from thalweg.ps import Signs, Sparse, _means, _own_means, _scaling, _snapshot_files
from thalweg.ps._clipping import Clipping
from thalweg.ps._entries import Entries
from thalweg.ps._kept import KeptWeights
from thalweg.ps._plan import Outer
from thalweg.ps._rules import KINDS
from thalweg.ps._signs import SignBlocks
from thalweg.ps._staging import Staging, on_cpu


@pytest.fixture
def meta():
    """Returns what a script does to have another default device, which ends with the test."""
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


def parameters(dtype=torch.float32):
    params = [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(2, dtype=dtype))]
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    return params


def values(tensors):
    return [tensor.tolist() for tensor in tensors]


def stepped(kind, dtype=torch.float32, before=lambda: None, **options):
    """Returns an optimizer after two steps, of a GradScaler that looks for infinities."""
    optimizer = kind(parameters(dtype), lr=0.5, **options)
    before()
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones((), device="cpu"))
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        (FusedSGD, torch.float32, {"max_grad_norm": 1.0}),
        (FusedAdamW, torch.bfloat16, {}),
        (FusedLAMB, torch.float32, {"weight_decay": 0.1}),
        (FusedLAMB, torch.float64, {"weight_decay": 0.1}),  # takes torch's operations
    ],
)
def test_fused_steps_do_what_they_do_elsewhere(meta, kind, dtype, options):
    expected = stepped(kind, dtype, **options)
    got = stepped(kind, dtype, meta, **options)
    assert values(got.param_groups[0]["params"]) == values(expected.param_groups[0]["params"])
    assert got.grad_norm == expected.grad_norm
    assert not any(value.is_meta for each in got.state.values() for value in each.values())


def test_count_of_a_group_is_loaded(meta):
    state = stepped(FusedLAMB).state_dict()
    for of_param in state["state"].values():
        del of_param["step"]
    state["param_groups"][0]["step"] = 7
    optimizer = FusedLAMB(parameters())
    meta()
    optimizer.load_state_dict(state)
    assert [float(each["step"]) for each in optimizer.state.values()] == [7, 7]


def test_norm_of_no_gradients_is_zero(meta):
    meta()
    assert _shards.total_squares([]).item() == 0


class Same:
    """Takes what it gets for the mean of all workers."""

    owes = False

    def begin(self, values, *, factor, whole):
        self._values = values

    def wait(self):
        return self._values

    def take_rest(self):
        return None


def test_outer_steps_are_done_by_workers(meta):
    ones = torch.ones(3)
    meta()
    kept = KeptWeights(Same(), Outer.of({"name": "adam", "lr": 0.5}, [ones]), 3)
    kept.write(0, ones, 0)
    kept.write(1, ones, 4)
    kept.write(2, ones, 4)
    assert kept.push(ones, 0, 0.0).wait().is_cpu
    assert kept.read(0)[1] == 5


class Alone:
    """A process group of one worker."""

    def _allgather_base(self, result, payload):
        result.copy_(payload)
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("kind", [Sparse(1.0), Signs(1)])
@pytest.mark.parametrize("number", [1, 3])
def test_means_in_few_bytes_arrive(meta, number, kind):
    changes = torch.tensor([3.0, -3.0]).repeat(2 * number)
    meta()
    make = {Sparse: Entries, Signs: SignBlocks}[type(kind)]
    mean = _own_means._OwnMean(Alone(), make([torch.Size([4])] * number, kind), 1, None, 0)
    mean.begin(changes, factor=1.0, whole=False)
    assert torch.equal(mean.wait(), changes)
    assert not mean.take_rest().any()
    assert _means._Nothing().wait().is_cpu


def test_gradients_are_collected_on_the_cpu(meta):
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()
    meta()
    staging = Staging(4, torch.float32, from_gpu=False)
    staging.fill(staging.flat.view(2, 2), gradient)
    assert staging.settled().tolist() == [1, 3, 2, 4]
    assert on_cpu(gradient).is_cpu


class Asked:
    """An optimizer whose shards have found infinities and a norm."""

    _wishes = SimpleNamespace(commits=True)
    _serving = SimpleNamespace(complete=lambda *_: None)
    _committing = SimpleNamespace(clip=lambda *_: 3.0)
    param_groups = state = ()

    def look_for_infinities(self, inverse_scale):
        return True


def test_answers_of_shards_about_gradients_can_be_read(meta, monkeypatch):
    asked = Asked()
    monkeypatch.setattr(_scaling, "_asked", {asked})
    meta()
    [found] = _scaling._unscale(None, None, asked, 0.5).values()
    assert found.item() == 1
    assert Clipping.clip_grad_norm_(asked, 1.0).item() == 3


def test_snapshots_are_read_to_the_cpu(meta):
    chunks = [(6, [torch.ones(2), torch.ones(2), torch.ones(2)])]
    meta()
    saved = _snapshot_files.Saved(6, {}, {})
    _snapshot_files._cut(saved, [("a", [2])], chunks, KINDS["adamw"])
    assert saved.states["a"]["step"].item() == 6
    assert _snapshot_files._joined([], 0).is_cpu


def test_elastic_trainings_shuffle_as_they_do_elsewhere(meta, lone_group):
    del lone_group
    expected = list(elastic.Sampler(range(8)))
    meta()
    assert list(elastic.Sampler(range(8))) == expected


def test_samples_are_mixed_on_the_device_of_their_labels(meta):
    samples = [(torch.full((1, 4, 4), float(number)), number) for number in range(4)]
    labels = torch.arange(4)
    meta()
    mix = CollateMixup(0.8, 1.0, num_classes=4)
    assert mix._smooth(labels).is_cpu
    images, _ = mix(samples)
    assert images.is_cpu


def test_optimizers_of_apex_do_what_they_do_elsewhere(meta):
    def weights(kind, before=lambda: None):
        optimizer = kind(parameters(), lr=0.5)
        before()
        for _ in range(2):
            optimizer.step()
        torch.set_default_device(None)
        return values(optimizer.param_groups[0]["params"])

    for kind in (_apex_optimizers.FusedSGD, _apex_optimizers_more.FusedNovoGrad):
        assert weights(kind, meta) == weights(kind)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_mixed_precision_trains_as_it_does_elsewhere(meta, level):
    batches = [batch(seed) for seed in range(3)]

    def weights(before=lambda: None):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with casts_off_afterwards():
            setup(model, optimizer, level)
            before()
            for inputs, labels in batches:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
            torch.set_default_device(None)
        return values(model.parameters())

    assert weights(meta) == weights()
