"""Tests that nodes find each other, agree on a plan, and hear of what is not a node's."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from thalweg._job._addresses import free_port
from thalweg._settings._config import ConfigError
from thalweg.elastic import _gathering, _mailbox, _nodes
from thalweg.elastic._gathering import Finished, FirstWorker, FurtherWorker
from thalweg.elastic._mailbox import Mailbox, Plan
from thalweg.elastic._nodes import Address
from thalweg.elastic._quorum import Rules, Standing

SECONDS = 60.0
SHORT = 0.5  # where a node is absent


class Cluster:
    """First workers of some nodes, in threads of this process."""

    def __init__(self, count: int) -> None:
        self.patience = SECONDS  # of nodes that start, for one that does not come
        self.addresses = tuple(Address("127.0.0.1", free_port()) for _ in range(count))
        self.workers: dict[int, FirstWorker] = {}
        self.standings = {node: self.fresh(node) for node in range(count)}
        self.aborted = {node: threading.Event() for node in range(count)}
        self._threads = ThreadPoolExecutor(count)

    def fresh(self, node: int) -> Standing:
        return Standing(node, workers=2, nodes=",".join(map(str, self.addresses)))

    def start(self, node: int) -> FirstWorker:
        rules = Rules(len(self.addresses), 1, self.patience, self.patience)
        store = Address("127.0.0.1", 1000 + node)
        on_left = self.aborted[node].set
        worker = FirstWorker(self.addresses, self.standings[node], rules, lambda: store, on_left)
        self.workers[node] = worker
        return worker

    def begin_to_gather(self, *nodes: int, seconds: float = SECONDS) -> dict[int, Future[Plan]]:
        return {
            node: self._threads.submit(
                self.workers[node].gather, self.standings[node], None, seconds
            )
            for node in nodes
        }

    def gather(self, *nodes: int) -> Plan:
        """Lets these nodes gather, and train in what they have agreed upon."""
        plans = {n: found.result(SECONDS) for n, found in self.begin_to_gather(*nodes).items()}
        plan = plans[nodes[0]]
        assert set(plans.values()) == {plan}
        for node in nodes:
            self.standings[node] = self.standings[node]._replace(
                generation=plan.generation, members=plan.nodes
            )
            self.workers[node].begin(self.standings[node])
        return plan

    def begin_next(self, node: int) -> None:
        """Lets a node's process begin its next training."""
        self.close(node)
        self.standings[node] = self.fresh(node)._replace(ended=1)
        self.start(node)

    def close(self, node: int) -> None:
        self.workers.pop(node).close()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    # On a busy machine answers take long; who is closed refuses connections at once.
    monkeypatch.setattr(_mailbox, "_ANSWER_SECONDS", SECONDS)
    found = Cluster(3)
    for node in range(3):
        found.start(node)
    yield found
    for node in list(found.workers):
        found.close(node)


def test_all_nodes_get_the_same_plan_with_ranks_by_node(cluster):
    plan = cluster.gather(0, 1, 2)
    assert (plan.generation, plan.nodes, plan.workers) == (1, (0, 1, 2), (2, 2, 2))
    assert [plan.first_rank(node) for node in plan.nodes] == [0, 2, 4]
    assert plan.store == Address("127.0.0.1", 1000)
    assert not any(worker.has_comers() for worker in cluster.workers.values())


def test_others_plan_when_the_leader_is_lost(cluster):
    cluster.gather(0, 1, 2)
    cluster.close(0)
    plan = cluster.gather(1, 2)
    assert (plan.generation, plan.nodes) == (2, (1, 2))
    assert plan.store == Address("127.0.0.1", 1001)
    assert plan.membership(0).lost == (0,)


def test_node_that_comes_back_is_noticed_by_all_and_planned_in(cluster):
    cluster.gather(0, 1, 2)
    cluster.close(0)
    cluster.gather(1, 2)
    cluster.standings[0] = cluster.fresh(0)
    cluster.start(0)
    back = cluster.begin_to_gather(0)
    while not all(cluster.workers[node].has_comers() for node in (1, 2)):
        assert not back[0].done()
    plan = cluster.begin_to_gather(1, 2)[1].result(SECONDS)
    assert back[0].result(SECONDS) == plan
    assert (plan.generation, plan.nodes) == (3, (0, 1, 2))
    assert plan.membership(0).come == (0,)


def test_membership_ends_at_once_when_a_member_comes_back_to_the_leader(cluster):
    cluster.gather(0, 1, 2)
    assert not any(aborted.is_set() for aborted in cluster.aborted.values())
    cluster.close(2)
    cluster.standings[2] = cluster.fresh(2)
    cluster.start(2)
    back = cluster.begin_to_gather(2)
    assert cluster.aborted[0].wait(SECONDS)
    assert cluster.begin_to_gather(0, 1)[0].result(SECONDS) == back[2].result(SECONDS)


def test_call_that_arrives_late_does_not_end_the_membership_that_the_caller_is_in(cluster):
    plan = cluster.gather(0, 1, 2)
    late = cluster.standings[2]._replace(question=plan.questions[2])
    assert _mailbox.come_to(cluster.addresses[0], late) == plan
    assert not cluster.aborted[0].is_set()
    new = late._replace(question="new")
    assert _mailbox.come_to(cluster.addresses[0], new) is None
    assert cluster.aborted[0].is_set()


def test_members_hear_at_once_that_the_leader_has_left(cluster):
    cluster.gather(0, 1, 2)
    again = cluster.begin_to_gather(0)
    assert all(cluster.aborted[node].wait(SECONDS) for node in (1, 2))
    assert cluster.begin_to_gather(1, 2)[1].result(SECONDS) == again[0].result(SECONDS)


def test_single_node_of_three_waits_and_says_why(cluster):
    cluster.close(1)
    cluster.close(2)
    alone = cluster.begin_to_gather(0, seconds=1)[0]
    with pytest.raises(TimeoutError, match="nodes 1, 2 of 3 not there: more than half must be"):
        alone.result(SECONDS)


class Clock:
    """Time that passes only where a node sleeps."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_node_that_may_end_waits_for_others_only_while_they_answer(cluster, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_gathering, "time", clock)
    cluster.close(2)
    began = clock.now
    with pytest.raises(TimeoutError, match="decides"):
        cluster.workers[1].gather(cluster.standings[1], None, 3 * SHORT, SHORT)
    assert clock.now >= began + 3 * SHORT
    cluster.close(0)
    began = clock.now
    with pytest.raises(TimeoutError, match="nodes 0, 2 of 3 not there"):
        cluster.workers[1].gather(cluster.standings[1], None, SECONDS, SHORT)
    assert clock.now < began + 2 * SHORT


def test_workers_of_a_node_get_its_plans_one_after_the_other(cluster):
    further = FurtherWorker(cluster.addresses[1])
    first = cluster.gather(0, 1, 2)
    assert further.gather(Standing(1), None, SECONDS) == first
    waiting = ThreadPoolExecutor(1).submit(further.gather, Standing(1), first, SECONDS)
    second = cluster.gather(0, 1, 2)
    assert waiting.result(SECONDS) == second != first


@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2)])
def test_node_that_was_given_other_nodes_is_refused_by_name_and_disturbs_nobody(members, cluster):
    if 2 not in members:
        cluster.patience = SHORT
        for node in members:
            cluster.close(node)
            cluster.start(node)
    cluster.gather(*members)
    cluster.standings[2] = cluster.standings[2]._replace(nodes="a:1,b:2")
    other = cluster.begin_to_gather(2)[2]
    with pytest.raises(ConfigError, match=r"THALWEG_ELASTIC is a:1,b:2 at node 2, but 127\."):
        other.result(SECONDS)
    assert not cluster.workers[0].has_comers()
    assert not any(aborted.is_set() for aborted in cluster.aborted.values())


def test_further_worker_whose_first_one_has_gone_is_told_unless_that_may_still_come(monkeypatch):
    monkeypatch.setattr(_gathering, "_GONE_SECONDS", SHORT)
    address = Address("127.0.0.1", free_port())
    last = Plan(1, "last", (0,), (1,), ("a",), address, (), ())
    with pytest.raises(ConnectionError):
        FurtherWorker(address).gather(Standing(0), last, SECONDS)
    with pytest.raises(TimeoutError):
        FurtherWorker(address).gather(Standing(0), None, SHORT)


def test_node_holds_to_a_plan_that_it_waits_for_or_has_begun():
    plan = Plan(3, "plan", (0, 2), (1, 1), ("a", "b"), Address("a", 1), (), ())
    assert plan.holds(2, Standing(2, generation=2, question="b"))
    assert plan.holds(2, Standing(2, generation=3))
    assert not plan.holds(2, Standing(2, generation=2, question="a"))
    assert not plan.holds(2, Standing(2, generation=2))
    assert not plan.holds(2, None)


def test_plan_that_a_node_has_not_taken_is_given_to_nobody_later():
    address = Address("127.0.0.1", free_port())
    mailbox = Mailbox(address, Standing(0))
    plan = Plan(1, "plan", (0, 1), (1, 1), ("a", "b"), address, (), ())
    asking = Standing(1, question="b")
    mailbox.offer(plan, "a")
    assert not mailbox.is_taken()
    mailbox.withdraw()
    assert _mailbox.come_to(address, asking) is None
    mailbox.offer(plan, "a")
    assert _mailbox.come_to(address, asking) == plan
    assert mailbox.is_taken()
    mailbox.close()


def test_node_that_comes_after_the_end_is_told(cluster):
    cluster.gather(0, 1, 2)
    ends = [
        threading.Thread(target=cluster.workers[node].finish, args=(cluster.standings[node],))
        for node in (0, 1)
    ]
    for thread in ends:
        thread.start()
    late = cluster.begin_to_gather(2)[2]
    with pytest.raises(Finished, match="have ended the training"):
        late.result(SECONDS)
    for thread in ends:
        thread.join(SECONDS)


def test_end_is_told_until_all_members_have_ended_too(cluster, monkeypatch):
    monkeypatch.setattr(_gathering, "_GONE_SECONDS", SECONDS)
    cluster.gather(0, 1, 2)
    threads = ThreadPoolExecutor(3)
    ends = [
        threads.submit(cluster.workers[node].finish, cluster.standings[node]) for node in (0, 1)
    ]
    assert not wait(ends, SHORT).done
    ends.append(threads.submit(cluster.workers[2].finish, cluster.standings[2]))
    assert not wait(ends, SECONDS / 2).not_done


def test_nodes_that_begin_their_next_training_wait_for_those_that_end_the_last(cluster):
    further = FurtherWorker(cluster.addresses[0])
    first = cluster.gather(0, 1, 2)
    assert further.gather(Standing(0), None, SECONDS) == first
    waiting = ThreadPoolExecutor(1).submit(further.gather, Standing(0, ended=1), None, SECONDS)
    ending = threading.Thread(target=cluster.workers[2].finish, args=(cluster.standings[2],))
    ending.start()
    for node in (0, 1):
        cluster.begin_next(node)
    begun = cluster.begin_to_gather(0, 1)
    ending.join(SECONDS)
    cluster.begin_next(2)
    begun |= cluster.begin_to_gather(2)
    plans = {found.result(SECONDS) for found in begun.values()}
    assert plans == {waiting.result(SECONDS)} != {first}
    assert waiting.result().nodes == (0, 1, 2)


def test_node_that_is_started_again_hears_that_its_training_is_over(cluster):
    cluster.gather(0, 1, 2)
    cluster.patience = SHORT
    for node in (0, 1):
        cluster.begin_next(node)
    cluster.gather(0, 1)
    cluster.close(2)
    cluster.standings[2] = cluster.fresh(2)
    cluster.start(2)
    with pytest.raises(Finished, match="node 0 has ended 1 trainings in its process"):
        cluster.begin_to_gather(2)[2].result(SECONDS)
    assert not cluster.workers[0].has_comers()


@pytest.mark.parametrize("body", ["", "[]", "{", '{"question": 1}', '{"node": 1, "question": "a"}'])
def test_what_is_no_nodes_question_changes_nothing(cluster, body):
    address = cluster.addresses[0]
    connection = http.client.HTTPConnection(address.host, address.port, timeout=SECONDS)
    connection.request("POST", "/", body)
    with contextlib.suppress(http.client.HTTPException, ConnectionError):
        connection.getresponse().read()
    assert not cluster.workers[0].has_comers()
    assert _mailbox.look_at(address) == cluster.fresh(0)


@pytest.mark.parametrize(
    ("text", "node", "why"),
    [
        ("", None, "THALWEG_ELASTIC is not set"),
        ("a,,b", 0, "has '', expected host or host:port"),
        ("a:x,b", 0, "has 'a:x', expected host or host:port"),
        ("a:0,b", 0, "has 'a:0', expected host or host:port"),
        ("a,b:65536", 0, "has 'b:65536', expected host or host:port"),
        ("a,b,a:29555", 0, "a node is named twice"),
        ("a,b", 2, "THALWEG_ELASTIC_NODE is 2, expected 0 to 1"),
        ("127.0.0.1:1,127.0.0.1:2", None, "2 of them are this host's: set THALWEG_ELASTIC_NODE"),
    ],
)
def test_wrong_list_of_nodes_is_refused_with_the_reason(text, node, why):
    with pytest.raises(ConfigError, match=why):
        _nodes.find(text, node)


def test_nodes_have_a_port_each_or_the_usual_one():
    addresses, node = _nodes.find("a, b:1 ,[::1]:65535,fe80::1", 3)
    assert list(map(str, addresses)) == ["a:29555", "b:1", "[::1]:65535", "[fe80::1]:29555"]
    assert node == 3
    assert _nodes.find("192.0.2.1,127.0.0.1")[1] == 1
