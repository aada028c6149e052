"""Tests how workers agree on a job's shards, with sidecars that are not real."""

import pytest
from job_of_threads import Workers, worker

from thalweg import _C
from thalweg._job import _collectives, _shards, _topology
from thalweg._job._shards import Node, Shards, arrange
from thalweg._settings._config import ConfigError

A, B, C = (Node(number, f"host{number}/boot", f"10.0.0.{number}:7000", ()) for number in range(3))


@pytest.mark.parametrize(("local_shards", "hosted"), [("auto", 0), ("1", 3)])
def test_with_as_many_aggregators_as_nodes_nodes_host_only_when_told_to(local_shards, hosted):
    nodes = [node._replace(aggregators=("x:1", "y:2", "z:3")) for node in (A, B, C)]
    shards = arrange(nodes, local_shards)
    assert shards.hosts == (*range(hosted), -1, -1, -1)


def test_nodes_of_a_process_group_host_shards_beside_any_number_of_aggregators():
    nodes = [node._replace(aggregators=("x:1", "y:2", "z:3")) for node in (A, B, C)]
    shards = arrange(nodes, "auto", for_all_collectives=True)
    assert shards.hosts == (0, 1, 2, -1, -1, -1)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ((0, 1, -1), ""),
        ((0, -1), "node 1 hosts no shard: what all_gather, "),
        ((-1, -1), "nodes 0, 1 host no shard: what all_gather, "),
    ],
)
def test_nodes_whose_bytes_cross_the_network_twice_are_named(hosts, said):
    place = _topology.place([("a", "s"), ("b", "s")], 0)
    text = _shards.relays(Shards(("x:1",) * len(hosts), hosts), place)
    assert text.startswith(said)
    assert bool(text) == bool(said)


def test_shards_of_nodes_come_first_and_in_the_order_of_nodes():
    extra = ("x:1", "y:2")
    nodes = [node._replace(aggregators=extra) for node in (A, B._replace(address=""), C)]
    shards = arrange(nodes, "auto")
    assert shards.addresses == ("10.0.0.0:7000", "10.0.0.2:7000", "x:1", "y:2")
    assert shards.hosts == (0, 2, -1, -1)


def test_aggregators_alone_are_the_shards_where_no_sidecar_can_host_one():
    nodes = [node._replace(address="", aggregators=("x:1",)) for node in (A, B)]
    assert arrange(nodes, "auto")[:2] == (("x:1",), (-1,))


def test_job_without_any_shard_is_refused():
    nodes = [node._replace(address="") for node in (A, B)]
    with pytest.raises(ConfigError, match=r"2 nodes, but none of their sidecars .*--shard-listen"):
        arrange(nodes, "auto")


def test_node_that_must_host_a_shard_and_does_not_is_named():
    with pytest.raises(ConfigError, match=r"local_shards is 1, .* node 1 \(host1\) hosts no shard"):
        arrange([A, B._replace(address=""), C], "1")
    assert arrange([A, B, C], "1").hosts == (0, 1, 2)


def test_aggregators_that_differ_are_refused_with_both_nodes():
    nodes = [A._replace(aggregators=("x:1", "y:2")), B._replace(aggregators=("x:1", "y:2")), C]
    text = r"node 0 \(host0\) are x:1,y:2, but those of node 2 \(host2\) are none: .*_AGGREGATORS"
    with pytest.raises(ConfigError, match=text):
        arrange(nodes, "auto")


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "[::]:7000", "0.0.0.0:7000"])
def test_address_that_other_hosts_cannot_reach_is_refused(address):
    with pytest.raises(ConfigError, match=r"host1 would publish .*THALWEG_INTERFACE"):
        arrange([A, B._replace(address=address)], "auto")


def test_address_that_two_nodes_publish_is_refused_with_both_names():
    twice = [A, B, C._replace(address=B.address)]
    text = r"node 1 \(host1\) and node 2 \(host2\) both publish 10\.0\.0\.1:7000 .*_INTERFACE"
    with pytest.raises(ConfigError, match=text):
        arrange(twice, "auto")


def test_loopback_is_right_where_all_nodes_are_on_one_machine():
    nodes = [Node(number, "host/boot", f"127.0.0.1:700{number}", ()) for number in range(2)]
    assert arrange(nodes, "1").addresses == ("127.0.0.1:7000", "127.0.0.1:7001")


# The times are those of the table in docs/placement.md.
@pytest.mark.parametrize(("aggregators", "now", "hosting"), [(1, 4, 1.33), (2, 2, 1.2)])
@pytest.mark.parametrize("local_shards", ["0", "auto"])
def test_few_aggregators_alone_are_warned_of_with_what_they_cost(
    local_shards, aggregators, now, hosting
):
    extra = Shards(("x:1", "y:2")[:aggregators], (-1, -1)[:aggregators])
    shards = Shards() if local_shards == "0" else extra
    text = _shards.warning(shards, aggregators, 4, local_shards)
    assert f" 4 nodes. On equal links the gradients take {now} times as long" in text
    assert f"with a shard on every node they would take {hosting} times as long. " in text
    assert text.startswith("THALWEG_LOCAL_SHARDS") == (local_shards == "0")
    assert ("--shard-listen" in text) == (local_shards == "auto")
    # Users of `thalweg run` start no sidecar themselves.
    assert ("(`thalweg run --local-shards auto`)" in text) == (local_shards == "auto")


def test_enough_aggregators_hosted_shards_and_single_nodes_are_not_warned_of():
    assert _shards.warning(Shards(), 4, 4, "0") == ""
    assert _shards.warning(arrange([A, B, C], "auto"), 3, 3, "auto") == ""
    partly = arrange([A, *(node._replace(address="") for node in (B, C))], "auto")
    assert _shards.warning(partly, 1, 3, "auto") == ""
    assert _shards.warning(Shards(), 1, 1, "auto") == ""


def test_shard_that_is_not_reached_is_told_with_both_ends_and_what_to_set():
    shards = arrange([A, B, C], "auto")
    hint = shards.hint("thalweg: 10.0.0.2:7000: connection refused", 0)
    assert "node 0 (host0), at 10.0.0.0:7000, must reach node 2 (host2) at 10.0.0.2:7000" in hint
    assert "THALWEG_INTERFACE" in hint
    assert "THALWEG_SHARD_PORTS" in hint


@pytest.mark.parametrize(
    "text",
    ["rank 1 is missing", "10.0.0.0:7000 refuses", "110.0.0.2:7000", "10.0.0.2:70001", "x:1"],
)
def test_errors_about_something_else_get_no_hint(text):
    nodes = [node._replace(aggregators=("x:1",)) for node in (A, B, C)]
    assert arrange(nodes, "auto").hint(text, 0) == ""
    assert Shards().hint(text, 0) == ""


class FakeOffer:
    """Stands in for the native ShardOffer: the socket's name says what the sidecar answers."""

    open: set[str]
    secrets: set[str]

    def __init__(self, *, sidecar_path, job, secret, timeout):
        assert (job, timeout) == ("job-1", 30.0)
        if sidecar_path == "/missing":
            raise ConnectionError("thalweg: no sidecar at /missing")
        self._path = sidecar_path
        self.address = "" if sidecar_path == "/idle" else f"127.0.0.1:{sidecar_path.strip('/')}"
        self.aggregators = ["own:1"] if sidecar_path == "/idle" else []
        FakeOffer.open.add(sidecar_path)
        FakeOffer.secrets.add(secret)

    def close(self):
        FakeOffer.open.remove(self._path)


@pytest.fixture
def offer(monkeypatch):
    """Returns a function that gives the Shards that each worker gets, or its error."""
    monkeypatch.setattr(_C, "ShardOffer", FakeOffer, raising=False)
    FakeOffer.open, FakeOffer.secrets = set(), set()

    def offered(workers, work=lambda shards: shards):
        sidecars = [(w.host, w.sidecar) for w in workers]

        def on(rank):
            place = _topology.place(sidecars, rank)
            with _shards.offered(workers, place, workers[rank].sidecar, None) as shards:
                return work(shards)

        results = Workers(len(workers), monkeypatch).run(on)
        assert not FakeOffer.open
        return results

    return offered


def test_all_workers_of_all_nodes_get_the_same_shards(offer):
    workers = [worker("a", path, secret=path * 32) for path in ("/71", "/72", "/71", "/72")]

    def note(shards):
        offers = set(FakeOffer.open)
        _collectives.gather(None, None)  # nobody leaves before
        return shards.addresses, shards.hosts, offers

    results = offer(workers, note)
    assert results == [(("127.0.0.1:71", "127.0.0.1:72"), (0, 1), {"/71", "/72"})] * 4
    assert FakeOffer.secrets == {workers[0].secret}


def test_workers_aggregators_win_over_those_of_the_sidecars(offer):
    paths = ("/idle", "/71")
    [shards, _] = offer([worker("a", path, aggregators=("x:1",)) for path in paths])
    assert (shards.addresses, shards.hosts) == (("127.0.0.1:71", "x:1"), (1, -1))


def test_sidecars_aggregators_must_agree_where_the_workers_have_none(offer):
    for error in offer([worker("a", "/71"), worker("a", "/idle")]):
        assert isinstance(error, ConfigError)
        assert "node 0 (a) are none, but those of node 1 (a) are own:1" in str(error)


@pytest.mark.parametrize(
    "workers",
    [
        [worker("a", "/71")] * 2,
        [worker("a", path, local_shards="0") for path in ("/71", "/72")],
    ],
    ids=["one node", "switched off"],
)
def test_no_sidecar_is_asked_where_none_is_to_host(workers, offer):
    assert offer(workers) == [Shards()] * 2
    assert FakeOffer.secrets == set()


def test_offers_are_closed_when_a_worker_fails(offer):
    results = offer([worker("a", path) for path in ("/71", "/missing")])
    assert [str(error) for error in results] == [
        "thalweg: rank 1: no sidecar at /missing",
        "thalweg: no sidecar at /missing",
    ]


def test_offers_are_closed_when_sessions_do_not_connect(offer):
    def fail(shards):
        raise ConnectionError(shards.addresses[0])

    results = offer([worker("a", path) for path in ("/71", "/72")], fail)
    assert [type(error) for error in results] == [ConnectionError] * 2


def test_secret_is_not_in_the_text_of_an_introduction():
    one = worker(secret="c0ffee")
    assert "c0ffee" not in repr(one) + str(one)
    assert "job-1" in repr(one)
