"""Tests DevicePrefetcher on the CPU, and with a simulated GPU."""

import contextlib
import itertools
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from thalweg.data import DevicePrefetcher, _prefetcher

Pair = namedtuple("Pair", ["images", "labels"])


class Recorded:
    """A loader that notes which batches were asked for; `failing` raises in the place of one."""

    def __init__(self, count, failing=None):
        self.count, self.failing = count, failing
        self.asked = []

    def __len__(self):
        return self.count

    def __iter__(self):
        for number in range(self.count):
            self.asked.append(number)
            if number == self.failing:
                raise OSError(f"batch {number} is broken")
            yield torch.tensor([number])


def test_all_batches_come_in_their_order_in_every_iteration():
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=3)
    batches = DevicePrefetcher(loader)
    for _ in range(2):
        assert [batch.tolist() for (batch,) in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert (len(batches), batches.batches) == (4, 8)


def test_as_many_batches_are_loaded_ahead_as_was_asked_for():
    loader = Recorded(6)
    taken = iter(DevicePrefetcher(loader, depth=2))
    assert next(taken).item() == 0
    assert loader.asked == [0, 1, 2]
    assert next(taken).item() == 1
    assert loader.asked == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_batches_before_a_broken_one_are_given_and_then_its_error(depth):
    taken = iter(DevicePrefetcher(Recorded(6, failing=3), depth=depth))
    assert [batch.item() for batch in itertools.islice(taken, 3)] == [0, 1, 2]
    with pytest.raises(OSError, match="batch 3 is broken"):
        next(taken)


def test_empty_loader_gives_no_batch():
    assert list(DevicePrefetcher([])) == []


def test_tensors_are_found_in_nested_batches_and_all_else_is_kept():
    batch = {"pair": Pair(torch.ones(2), [torch.zeros(1), "name"]), "number": 3}
    (got,) = DevicePrefetcher([batch], "meta")
    assert type(got["pair"]) is Pair
    assert got["pair"].images.device.type == got["pair"].labels[0].device.type == "meta"
    assert (got["pair"].labels[1], got["number"]) == ("name", 3)


def test_wait_for_data_is_what_the_loader_took_after_the_first_batches(monkeypatch):
    clock = itertools.count()  # every look at the clock is a second later
    monkeypatch.setattr(_prefetcher.time, "perf_counter", lambda: next(clock))
    batches = DevicePrefetcher(Recorded(5), depth=2)
    assert len(list(batches)) == 5
    # Batches 2, 3 and 4, and the look that finds the end.
    assert (batches.fill_seconds, batches.wait_seconds) == (1, 4)


def test_same_random_numbers_are_drawn_as_without_it():
    data = TensorDataset(torch.arange(32))

    def draw(wrap):
        torch.manual_seed(7)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        return [batch.tolist() for (batch,) in wrap(loader)]

    assert draw(DevicePrefetcher) == draw(lambda loader: loader)


@pytest.mark.parametrize("depth", [0, 1.5])
def test_depth_must_be_a_positive_whole_number(depth):
    with pytest.raises(ValueError, match=f"depth is {depth}, expected a whole number, 1 or more"):
        DevicePrefetcher([], depth=depth)


class FakeStream:
    """A queue of copies that are done only when somebody waits for them."""

    def __init__(self, *_):
        self.queue = []
        self.done = 0

    def record_event(self):
        return (self, len(self.queue))

    def wait_event(self, event):
        stream, until = event
        while stream.done < until:
            target, source = stream.queue[stream.done]
            target.copy_(source)
            stream.done += 1


@pytest.fixture
def fake_gpu(monkeypatch):
    """Replaces what the prefetcher asks of CUDA; returns the stream in use, and what it noted."""
    main, used, pinned, kept = FakeStream(), [], set(), []
    side = FakeStream()

    @contextlib.contextmanager
    def stream(entered):
        used.append(entered)
        yield
        used.pop()

    def pin(tensor):
        copy = tensor.clone()
        pinned.add(id(copy))
        return copy

    def to(tensor, device, non_blocking):
        assert device.type == "cuda"
        assert non_blocking
        assert used == [side], "a copy on the stream that computes"
        assert id(tensor) in pinned, "a copy from memory that is not pinned"
        target = torch.full_like(tensor, -1)
        side.queue.append((target, tensor))
        return target

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: side)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: id(tensor) in pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *call: kept.append(call))
    monkeypatch.setattr(torch.Tensor, "to", to)
    return main, side, kept


def test_batches_for_a_gpu_are_copied_ahead_beside_computation_and_waited_for_one_by_one(fake_gpu):
    main, side, kept = fake_gpu
    loader = [(torch.tensor([i, i]), {"label": torch.tensor(i)}, "name") for i in range(5)]
    seen = []
    for images, labels, name in DevicePrefetcher(loader, "cuda", depth=2):
        seen.append([*images.tolist(), labels["label"].item(), name])
        # The two tensors of each batch up to this one have arrived, and two batches are under way.
        assert side.done == 2 * len(seen)
        assert len(side.queue) == 2 * min(len(seen) + 2, len(loader))
        assert [(id(t), s) for t, s in kept[-2:]] == [
            (id(images), main),
            (id(labels["label"]), main),
        ]
    assert seen == [[i, i, i, "name"] for i in range(5)]
