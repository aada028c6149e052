"""Tests the weights and the outer state that workers keep in the place of shards."""

import pytest
import torch

from thalweg.ps._kept import KeptWeights
from thalweg.ps._plan import Outer


class Same:
    """Takes what it gets for the mean of all workers."""

    def begin(self, values, *, factor, whole):
        self._values = values

    def wait(self):
        return self._values


OUTERS = {
    "nesterov": {"name": "nesterov", "lr": 0.5, "momentum": 0.5},
    "adam": {"name": "adam", "lr": 0.5},
}


def made(outer):
    kept = KeptWeights(Same(), Outer.of(OUTERS[outer], [torch.zeros(3)]), 3)
    kept.write(0, torch.ones(3), 0)
    return kept


def slices_of(kept, outer):
    """Returns the moments, and the steps done."""
    read = [kept.read(slice_) for slice_ in range(1, 2 if outer == "nesterov" else 3)]
    return [values.clone() for values, _ in read], read[0][1]


@pytest.mark.parametrize("outer", OUTERS)
def test_outer_state_that_was_loaded_is_saved_again_before_the_next_exchange(outer):
    first, second = made(outer), made(outer)
    changes = torch.tensor([1.0, -2.0, 3.0])
    for _ in range(2):
        first.push(changes, 0, 0.0).wait()
    moments, steps = slices_of(first, outer)
    second.write(0, first.read(0)[0], steps)
    for slice_, values in enumerate(moments, start=1):
        second.write(slice_, values, steps)
    again, steps_again = slices_of(second, outer)
    assert steps_again == steps == 2
    assert all(map(torch.equal, again, moments))
    pair = [kept.push(changes, 0, 0.0).wait() for kept in (first, second)]
    assert torch.equal(*pair)


@pytest.mark.parametrize("outer", OUTERS)
def test_outer_state_that_was_nothing_is_nothing_again(outer):
    kept = made(outer)
    kept.push(torch.ones(3), 0, 0.0).wait()
    kept.write(1, None, 0)
    assert kept.read(1) == (None, 0)
