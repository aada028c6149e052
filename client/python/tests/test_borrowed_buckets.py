"""Tests buckets that are borrowed of DistributedDataParallel, without servers."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from thalweg._job import _buckets

pytestmark = pytest.mark.usefixtures("lone_group")
LAYOUTS = [
    [("a", torch.Size([2, 3])), ("b", torch.Size([4]))],
    [("c", torch.Size([5]))],
    [("d", torch.Size([]))],
]


class Hook:
    """Takes the double of what is in a bucket for the mean, and fails of what is not finite."""

    made: list["Hook"]

    def __init__(self, session, parameters):
        self.session, self.names = session, [name for name, _ in parameters]
        Hook.made.append(self)

    def run(self, bucket):
        self.bucket = bucket
        if not bucket.buffer().isfinite().all():
            raise RuntimeError("the job has failed")
        done = Future()
        done.set_result([2 * bucket.buffer()])
        return done


@pytest.fixture
def buckets(monkeypatch):
    monkeypatch.setattr(Hook, "made", [], raising=False)
    monkeypatch.setattr(_buckets, "_C", SimpleNamespace(DdpHook=Hook))
    return _buckets.make("session", LAYOUTS, dist.group.WORLD)


def test_each_layout_has_a_bucket_in_its_place(buckets):
    assert [bucket.elements for bucket in buckets] == [10, 5, 1]
    assert [hook.names for hook in Hook.made] == [["a", "b"], ["c"], ["d"]]
    assert {hook.session for hook in Hook.made} == {"session"}
    for number, bucket in enumerate(buckets):
        bucket.mean(torch.zeros(bucket.elements))
        assert Hook.made[number].bucket.index() == number


def test_values_are_given_to_the_session_and_kept_by_nobody(buckets):
    values = torch.arange(10.0)
    assert torch.equal(buckets[0].mean(values), 2 * values)
    assert torch.equal(values, torch.arange(10.0))
    assert Hook.made[0].bucket.buffer().numel() == 0


def test_values_of_a_job_that_has_failed_are_kept_by_nobody(buckets):
    with pytest.raises(RuntimeError, match="the job has failed"):
        buckets[1].begin(torch.full([5], torch.nan))
    assert Hook.made[1].bucket.buffer().numel() == 0
