import pytest
from job_of_threads import Workers, worker

from thalweg._job import _collectives
from thalweg._job._topology import (
    Placement,
    Tensor,
    check,
    host_id,
    introduce,
    may_host,
    place,
    starters,
)
from thalweg._settings._config import ConfigError

WEIGHT, BIAS = worker().model


def test_workers_of_one_host_and_socket_are_a_node():
    sidecars = [("a", "/1"), ("a", "/2"), ("a", "/1"), ("b", "/1"), ("a", "/2")]
    assert [place(sidecars, rank) for rank in range(5)] == [
        Placement(node=0, num_nodes=3, local_rank=0, ranks=(0, 2)),
        Placement(node=1, num_nodes=3, local_rank=0, ranks=(1, 4)),
        Placement(node=0, num_nodes=3, local_rank=1, ranks=(0, 2)),
        Placement(node=2, num_nodes=3, local_rank=0, ranks=(3,)),
        Placement(node=1, num_nodes=3, local_rank=1, ranks=(1, 4)),
    ]


def test_lowest_rank_of_each_host_starts_a_sidecar():
    workers = [worker("a"), worker("b"), worker("b"), worker("a"), worker("c", "/run/c.sock")]
    assert starters(workers) == {0: [0, 3], 1: [1, 2]}


def test_configured_sidecars_are_not_started():
    assert starters([worker(sidecar="/s")] * 3) == {}


def test_running_sidecar_is_used_again_only_if_it_serves_all_workers_of_the_host():
    running = worker(running="/tmp/x/sidecar.sock")
    assert starters([running, running]) == {}
    assert starters([running, worker()]) == {0: [0, 1]}
    assert starters([running, worker(running="/tmp/y/sidecar.sock")]) == {0: [0, 1]}


def test_running_sidecar_is_used_again_only_if_it_listens_as_the_job_needs_it():
    running = {"running": "/tmp/x/sidecar.sock"}
    listening = running | {"running_listens": True}
    assert starters([worker(**listening)] * 2) == {0: [0, 1]}
    assert starters([worker("a", **running), worker("b", **listening)]) == {0: [0]}
    off = {"local_shards": "0"}
    assert starters([worker("a", **running, **off), worker("b", **listening, **off)]) == {1: [1]}


def test_sidecars_may_host_shards_where_there_are_several_nodes():
    assert not may_host([worker("a"), worker("a")])
    assert may_host([worker("a"), worker("b")])
    assert may_host([worker("a", "/1"), worker("a", "/2")])
    assert not may_host([worker("a", local_shards="0"), worker("b", local_shards="0")])


def test_workers_that_agree_pass():
    check([worker(), worker()])
    check([worker("a", "/s"), worker("b", "/s")])
    check([worker("a"), worker("b")])
    off = {"local_shards": "0", "aggregators": ("x:1",)}
    check([worker("a", **off), worker("b", **off)])


def test_problem_of_one_worker_names_its_rank():
    with pytest.raises(ConfigError, match="rank 1: no CPU"):
        check([worker(), worker(problem="no CPU")])


DIFFERENT = [
    ((BIAS, WEIGHT), r"parameter 0: weight float32\[10, 3\] on rank 0, bias .* on rank {rank}"),
    ((WEIGHT, Tensor("bias", "float32", (11,))), r"parameter 1: .*\[10\].*\[11\] on rank {rank}"),
    ((WEIGHT, Tensor("bias", "float16", (10,))), "bias float32.* rank 0, bias float16"),
    ((WEIGHT,), "rank 0 has 2 parameters, rank {rank} has 1; only rank 0 has bias"),
    ((WEIGHT, BIAS, WEIGHT), "rank 0 has 2 .* rank {rank} has 3; only rank {rank} has weight"),
]


@pytest.mark.parametrize(("model", "message"), DIFFERENT)
def test_models_that_differ_are_refused(model, message):
    with pytest.raises(ValueError, match=message.format(rank=1)):
        check([worker(), worker(model=model)])


ARGUMENTS = [
    ("AdamW; every 4; betas (0.9, 0.9)", "every 3 on rank 0 but every 4 on rank 1"),
    ("AdamW; every 3; betas (0.9, 0.9); codec x", "none of these on rank 0 but codec x on rank 1"),
]


@pytest.mark.parametrize(("other", "differing"), ARGUMENTS)
def test_arguments_that_differ_are_named_without_those_that_are_equal(other, differing):
    ours, theirs = (
        worker(model=(Tensor(text, "", ()), WEIGHT))
        for text in ("AdamW; every 3; betas (0.9, 0.9)", other)
    )
    with pytest.raises(ValueError, match=f"optimizers' arguments differ: {differing}$"):
        check([ours, theirs])


def test_min_nodes_that_differ_are_named_although_local_shards_follow_from_them():
    with pytest.raises(ConfigError, match="min_nodes is 1 on rank 0 but 0 on rank 1"):
        check([worker(min_nodes=1, local_shards="0"), worker()])


def test_snapshots_of_several_nodes_without_aggregators_are_refused_by_their_name():
    workers = [worker(host, local_shards="0", needs_disks=True) for host in "ab"]
    with pytest.raises(ConfigError, match=r"snapshots need aggregators.* leave snapshot_every= "):
        check(workers)


@pytest.fixture
def introduced(monkeypatch):
    """Returns a function that lets workers introduce themselves: (what each learns, the values that
    they have sent).
    """

    def run(introductions):
        job, sent = Workers(len(introductions), monkeypatch), []

        def exchange(value):
            sent.append(value)
            return _collectives.gather(value, None)

        return job.run(lambda rank: introduce(introductions[rank], rank, exchange)), sent

    return run


def test_workers_with_the_same_model_do_not_send_its_parameters(introduced):
    learned, sent = introduced([worker("a"), worker("b"), worker("c")])
    assert [[one.host for one in workers] for workers in learned] == [["a", "b", "c"]] * 3
    assert len(sent) == 3
    assert "weight" not in str(sent)
    for workers in learned:
        check(workers)


@pytest.mark.parametrize(("model", "message"), DIFFERENT)
def test_models_that_differ_are_refused_on_all_workers_after_two_have_sent_theirs(
    introduced, model, message
):
    learned, sent = introduced([worker(), worker(), worker(model=model), worker(model=(BIAS,))])
    for workers in learned:
        with pytest.raises(ValueError, match=message.format(rank=2)):
            check(workers)
    assert sorted(sent[4:], key=len)[:2] == [(), ()]


@pytest.mark.parametrize(
    "setting",
    [
        {"codec": "fp16"},
        {"chunk_bytes": 8192},
        {"local_shards": "1"},
        {"node_reduce": "workers"},
        {"timeout": 5.0},
    ],
)
def test_settings_that_differ_are_refused(setting):
    (name, value) = next(iter(setting.items()))
    with pytest.raises(ConfigError, match=f"{name} is .* on rank 0 but {value} on rank 2"):
        check([worker(), worker(), worker(**setting)])


def test_several_hosts_need_aggregators_where_sidecars_may_host_no_shards():
    text = r"2 nodes, but a has no aggregator.*THALWEG_LOCAL_SHARDS is 0.*THALWEG_AGGREGATORS"
    with pytest.raises(ConfigError, match=text):
        check([worker(host, local_shards="0") for host in ("a/boot1", "b/boot2")])


def uneven(**settings):
    there = {"aggregators": ("x:1",), "local_shards": "0"} | settings
    return [worker(host, **there) for host in ("a/boot1", "a/boot1", "b/boot2", "c/boot3")]


def test_workers_of_uneven_nodes_do_not_reduce_among_themselves_where_nodes_may_be_lost():
    text = r"b has 1 of the workers and a 2: when a node is lost, the mean .* would be wrong"
    with pytest.raises(ConfigError, match=text):
        check(uneven(node_reduce="workers", min_nodes=2))


def test_workers_of_nodes_reduce_among_themselves_where_the_mean_stays_right():
    check(uneven(node_reduce="workers"))
    check(uneven(node_reduce="workers", min_nodes=3))
    check(uneven(node_reduce="sidecar", min_nodes=2))
    even = uneven(node_reduce="workers", min_nodes=1)
    check(even[:2] + 2 * even[2:3])


def test_host_id_is_stable_and_names_the_host():
    assert host_id() == host_id()
    name, _, boot = host_id().partition("/")
    assert name
    assert boot
