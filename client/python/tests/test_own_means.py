"""Tests what workers that take means themselves save, load and count, without servers."""

from types import SimpleNamespace

import pytest
import torch

from thalweg.ps import Signs, Sparse, _own_means

LAYOUTS = [
    [("a", torch.Size([32, 32])), ("b", torch.Size([64]))],
    [],  # a bucket of parameters without elements
    [("c", torch.Size([16, 64]))],
]
BUCKETS = (0, 2)  # those that have elements

pytestmark = pytest.mark.usefixtures("lone_group")


class Everybody:
    """Is a process group of so many workers, who all send the same."""

    def __init__(self, session, *, nodes, **_):
        self._nodes = nodes

    def _allgather_base(self, result, payload):
        return SimpleNamespace(wait=lambda: result.copy_(payload.repeat(len(self._nodes))))


class Whole:
    """Is a bucket of shards that take the mean of workers who all have the same."""

    def begin(self, values):
        return SimpleNamespace(wait=lambda: [values.clone()])


@pytest.fixture
def make(monkeypatch):
    """Makes the means of rank 0 of four workers on two nodes, or of another rank."""

    def make(codec, *, rank=0, layouts=LAYOUTS, weighted=False):
        place = SimpleNamespace(ranks=[rank, 3], local_rank=0, num_nodes=2, local_size=2)
        job = SimpleNamespace(
            session=object(),
            place=place,
            workers=[SimpleNamespace(step_timeout=30.0)] * 4,
            nodes=[0, 0, 1, 1],
        )
        return _own_means.OwnMeans(job, None, layouts, codec, weighted=weighted)

    buckets = [Whole() for _ in BUCKETS]
    monkeypatch.setattr(_own_means, "_C", SimpleNamespace(ProcessGroup=Everybody))
    monkeypatch.setattr(_own_means._buckets, "make", lambda session, layouts, group: buckets)
    return make


def changes(seed):
    """Returns what workers have changed in each bucket."""
    torch.manual_seed(seed)
    return [torch.randn(sum(shape.numel() for _, shape in LAYOUTS[n])) for n in BUCKETS]


def exchange(means, seed, *, factor=1.0, whole=False):
    """Returns the means of both buckets."""
    found = []
    for number, values in zip(BUCKETS, changes(seed), strict=True):
        mean = means.of_buckets[number]
        mean.begin(values * factor, factor=factor, whole=whole)
        found.append(mean.wait().clone())
    return found


def rests(means):
    """Returns what the next changes of each bucket are to have."""
    return [means.of_buckets[number].take_rest() for number in BUCKETS]


def are_equal(first, second):
    return [torch.equal(*pair) for pair in zip(first, second, strict=True)] == [True, True]


CODECS = [Signs(4), Sparse(0.02)]


@pytest.mark.parametrize("codec", CODECS)
def test_means_of_equal_changes_are_these_but_for_what_workers_keep(codec, make):
    means = make(codec)
    assert means.state()["turns"] == dict.fromkeys("abc", (0, False))
    for seed, whole in ((0, False), (1, True), (2, False)):
        found, kept = exchange(means, seed, whole=whole), rests(means)
        assert [mean.owes for mean in means.of_buckets] == [not whole, False, not whole]
        for mean, rest, values in zip(found, kept, changes(seed), strict=True):
            assert mean.any()
            assert (rest is None) == whole
            # float32 may round what is left.
            left = 0 if rest is None else rest
            torch.testing.assert_close(mean + left, values, rtol=0, atol=2.0**-20)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_means_go_on_from_a_state_with_the_same_bits(codec, weighted, make):
    first, second = (make(codec, weighted=weighted) for _ in range(2))
    factors = [1.0, 0.5, 0.0, 2.0] if weighted else [1.0] * 4
    for seed, factor in enumerate(factors[:3]):
        exchange(first, seed, factor=factor)
    second.load(first.state())
    kept = rests(first)
    assert all(rest.any() for rest in kept)
    assert are_equal(rests(second), kept)
    assert [mean.owes for mean in second.of_buckets] == [True, False, True]
    assert are_equal(*(exchange(means, 3, factor=factors[3]) for means in (first, second)))
    assert are_equal(rests(first), rests(second))
    assert are_equal(*(exchange(means, 4, whole=True) for means in (first, second)))


def test_state_is_a_copy_by_parameter(make):
    means = make(Signs(4))
    exchange(means, 0)
    state = means.state()
    assert {name: len(values) for name, values in state["held"].items()} == {
        "a": 1024,
        "b": 64,
        "c": 1024,
    }
    kept = {name: values.clone() for name, values in state["held"].items()}
    exchange(means, 1)
    means.of_buckets[0].rest.zero_()
    assert all(torch.equal(state["held"][name], kept[name]) for name in kept)


def test_rests_that_somebody_else_has_saved_are_left_out_and_that_is_said_once(make, caplog):
    first, second = make(Signs(4), weighted=True), make(Signs(4), rank=1, weighted=True)
    for seed in range(3):
        exchange(first, seed)
    second.load(first.state())
    assert rests(second) == [None, None]
    assert not second.state()["counted"]
    assert second.state()["turns"] == first.state()["turns"]
    [message] = caplog.messages
    assert "by rank 0 of 4 with signs:parts=4, and this is rank 1 of 4 with signs" in message


def test_what_is_in_the_parameters_that_somebody_else_has_saved_goes_on(make, caplog):
    first, second = make(Signs(4), weighted=True), make(Signs(4), rank=1, weighted=True)
    exchange(first, 0)
    rests(first)  # they are in the parameters now
    second.load(first.state())
    assert not caplog.messages
    assert are_equal(*(exchange(means, 1, factor=0.5) for means in (first, second)))


def test_another_codec_counts_its_turns_anew_and_sends_what_was_not_sent(make, caplog):
    first, second = make(Sparse(0.02)), make(Signs(4))
    exchange(first, 0)
    second.load(first.state())
    assert not caplog.messages
    assert second.state()["turns"] == dict.fromkeys("abc", (0, True))
    assert are_equal(rests(first), rests(second))
    assert are_equal(*(exchange(means, 1) for means in (second, make(Signs(4)))))


FLOATS = {"codec": "powersgd:rank=4", "saved_by": "node 0 of 2", "held": b"of another kind"}


@pytest.mark.parametrize("state", [{}, FLOATS])
def test_state_without_workers_rests_begins_anew(state, make, caplog):
    means = make(Signs(4), weighted=True)
    exchange(means, 0)
    means.load(state)
    assert rests(means) == [None, None]
    assert means.state()["turns"] == dict.fromkeys("abc", (0, False))
    assert not caplog.messages
    assert are_equal(*(exchange(each, 1) for each in (means, make(Signs(4)))))


def test_rests_that_shards_have_no_place_for_are_said_to_be_lost(make, caplog):
    means = make(Signs(4))
    _own_means.warn_of_loss(means.state(), 1)
    assert not caplog.messages
    exchange(means, 0)
    _own_means.warn_of_loss(means.state(), 1)
    [message] = caplog.messages
    assert "rank 0 of 4 with signs:parts=4, and this is rank 1 with a codec of floats" in message


def test_bucket_owes_what_any_of_its_parameters_does(make):
    means = make(Signs(4))
    turns = {"b": (3, True), "c": (3, False)}
    means.load({"codec": "signs:parts=4", "saved_by": "rank 0 of 4", "turns": turns, "held": {}})
    assert [mean.owes for mean in means.of_buckets] == [True, False, False]


def test_bucket_of_parameters_that_counted_otherwise_has_nothing_that_counts_otherwise(make):
    first = make(Signs(4), weighted=True)
    exchange(first, 0)
    state = first.state()
    for divisors, is_kept in (({"a": 2.0, "b": 2.0}, True), ({"a": 2.0, "b": 3.0}, False)):
        of = {name: (state["held"][name], divisor) for name, divisor in divisors.items()}
        second = make(Signs(4), weighted=True)
        second.load(state | {"counted": of})
        assert set(second.state()["counted"]) == (set(of) if is_kept else set())


def test_equal_parameters_leave_no_rests(make):
    means = make(Signs(4), weighted=True)
    exchange(means, 0)
    means.forget_rests()
    assert rests(means) == [None, None]
    assert not any(mean.owes for mean in means.of_buckets)
    assert not means.state()["counted"]


def test_bytes_are_counted_once_for_each_worker_of_another_node_and_each_own_one(make):
    means = make(Signs(1))
    exchange(means, 0)
    # Bits in words of four bytes, and two for each row of 32, 64 and 64, in pairs.
    payloads = (32 * 32 + 64) // 8 + 2 * (32 + 1) + 2 + 16 * 64 // 8 + 2 * 16
    assert means.bytes_sent() == 2 * payloads
    exchange(means, 1, whole=True)  # which the session counts
    assert means.bytes_sent() == 2 * payloads


def test_elements_of_means_that_are_not_finite_are_counted(make):
    means = make(Signs(1))
    changes = torch.ones(32 * 32 + 64)
    changes[5] = torch.inf
    for times in (1, 2):
        means.of_buckets[0].begin(changes, factor=1.0, whole=False)
        means.of_buckets[0].wait()
        assert means.nonfinite_elems() == times * 32  # its row
