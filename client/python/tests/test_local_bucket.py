"""Tests what becomes of what a worker does not send, in a job of one worker."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from thalweg.ps import Signs, Sparse, _own_means
from thalweg.ps._entries import Entries
from thalweg.ps._fragment import Fragment
from thalweg.ps._kept import KeptWeights
from thalweg.ps._local_bucket import LocalBucket
from thalweg.ps._parameters import Parameter
from thalweg.ps._plan import Outer
from thalweg.ps._rules import KINDS, rule_of
from thalweg.ps._signs import SignBlocks

MAKE = {Sparse: Entries, Signs: SignBlocks}
PULL = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Alone:
    """A process group of one worker."""

    def _allgather_base(self, result, payload):
        result.copy_(payload)
        return SimpleNamespace(wait=lambda: None)


class Whole:
    """The mean of one worker's values."""

    def begin(self, number, values):
        return SimpleNamespace(wait=lambda: [values.clone()])


class Worker:
    """A worker whose changes are the outer optimizer's, SGD with a learning rate of 1."""

    def __init__(self, weight, codec):
        self.weight = weight
        coder = MAKE[type(codec)]([weight.shape], codec)
        self.mean = _own_means._OwnMean(Alone(), coder, 1, Whole(), 0, weighted=True)
        outer = Outer.of({"name": "sgd"}, [weight])
        kept = KeptWeights(self.mean, outer, weight.numel())
        self.bucket = LocalBucket(
            None,
            0,
            [Parameter("weight", weight, 0, 0)],
            kind=KINDS[outer.kind],
            rule=rule_of(outer.groups),
            commits=False,
            pull=PULL[weight.dtype],
            kept=kept,
        )
        self.fragment = Fragment([self.bucket])
        self.begin_from(weight.detach().float())

    def begin_from(self, outer_weights):
        self.bucket.write([outer_weights], [{}], 0)
        self.bucket.place([outer_weights])

    def exchange(self, mix=0.0, factor=1.0):
        self.fragment.leave(factor, 0, 0)
        self.fragment.land(mix)

    def finish(self):
        self.fragment.leave_whole(0)
        self.fragment.land(0.0)


@pytest.mark.parametrize(
    ("codec", "columns", "mix"),
    [(Signs(1), 1, 0.0), (Signs(4), 16, 0.0), (Signs(4), 16, 0.5), (Sparse(0.02), 16, 0.5)],
)
@pytest.mark.parametrize("dtype", PULL)
def test_weights_are_what_their_worker_makes_them_but_for_rounding_once(dtype, codec, columns, mix):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(32, 32, dtype=dtype))
    worker = Worker(weight, codec)
    eps = max(torch.finfo(dtype).eps, 2.0**-18)  # float32 may round in each exchange
    change = 2 * eps * torch.randn(32, columns).sign().to(dtype)
    change[:, 0] = 2 * eps
    for step in range(100):
        with torch.no_grad():
            weight[:, :columns] += (-1) ** step * change
        worker.exchange(mix)
    assert (weight.detach().double() - 1).abs().max() <= eps
    worker.finish()
    assert (weight.detach().double() - 1).abs().max() <= eps


def train_and_exchange(worker, step):
    torch.manual_seed(step)
    with torch.no_grad():
        worker.weight += torch.randn(32, 32).div(64).to(worker.weight.dtype)
    worker.exchange()


@pytest.mark.parametrize("codec", [Signs(1), Sparse(0.02)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_parameters_type_cannot_hold_goes_on_from_a_checkpoint(dtype, codec):
    first = Worker(nn.Parameter(torch.ones(32, 32, dtype=dtype)), codec)
    for step in range(5):
        train_and_exchange(first, step)
    second = Worker(nn.Parameter(first.weight.detach().clone()), codec)
    second.begin_from(first.bucket.weights()[0])
    second.mean.turn, second.mean.owes = first.mean.turn, first.mean.owes
    second.fragment.load(first.fragment.state())
    for step in range(5, 10):
        for worker in (first, second):
            train_and_exchange(worker, step)
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bucket.weights()[0], second.bucket.weights()[0])


@pytest.mark.parametrize("codec", [Signs(4), Sparse(0.02)])
@pytest.mark.parametrize("work", [[(1, 1), (16, 0), (16, 0), (0, 1)], [(1, 2), (4, 0.5), (3, 8)]])
def test_each_change_counts_by_the_factor_of_its_own_exchange_whenever_it_is_sent(work, codec):
    worker = Worker(nn.Parameter(torch.zeros(32, 32)), codec)
    for change, factor in work:
        with torch.no_grad():
            worker.weight += change
        worker.exchange(factor=factor)
        own = worker.weight.detach().abs().max()
        assert own <= 2 * sum(each * max(factor, 1) for each, factor in work)
    worker.finish()
    counted = float(sum(change * factor for change, factor in work))
    assert worker.weight.detach() == pytest.approx(torch.full((32, 32), counted), rel=2.0**-18)
