"""Tests that elastic trainings go on without lost nodes, and with those that come back."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import elastic_jobs
import elastic_local_jobs
import pytest
import torch
from harness import DEADLINE, Servers, environment, fork, servers
from ports import free_port
from waiting import until

JOBS = Path(elastic_jobs.__file__)
# Each step of a trajectory may be rounded otherwise than in one process, by a few units of the last
# place; tanh and a rate of 0.05 do not amplify that over the tests' few hundred steps.
TOLERANCE = 1e-5


@dataclass
class Nodes:
    """Nodes of a worker each, with a sidecar of their own that hosts a shard."""

    cluster: Servers
    folder: Path
    addresses: list[str]
    jobs: Path
    env: dict[str, str] = field(default_factory=dict)
    processes: dict[int, Any] = field(default_factory=dict)
    sidecars: dict[int, Any] = field(default_factory=dict)

    def start(self, node: int, **env: str) -> None:
        """Starts a node, perhaps again; `env` has variables for this start."""
        self.sidecars[node] = self.cluster.add_sidecar("--shard-listen", "127.0.0.1:0")
        variables = environment(self.cluster.folder) | self.env
        variables |= {
            "THALWEG_ELASTIC": ",".join(self.addresses),
            "THALWEG_ELASTIC_NODE": str(node),
            "THALWEG_SIDECAR": self.sidecars[node].address,
            "UNTIL": str(self.folder / "over"),
            **env,
        }
        argv = [str(self.jobs), str(self.log(node))]
        output = self.folder / f"{node}.{len(self.cluster.sidecars)}.txt"
        self.processes[node] = fork(argv, variables, output)

    def kill(self, node: int) -> None:
        """Kills a node: its worker and its sidecar, and so the shard that it hosts."""
        self.sidecars[node].process.kill()
        self.processes[node].kill()
        self.processes[node].wait(DEADLINE)
        self.sidecars[node].process.wait(DEADLINE)
        Path(self.sidecars[node].address).unlink(missing_ok=True)
        Path(f"{self.sidecars[node].address}.lock").unlink(missing_ok=True)

    def log(self, node: int) -> Path:
        return self.folder / f"{node}.json"

    def entries(self, node: int, key: str) -> list[dict[str, Any]]:
        """What a node has written with that key, also in earlier lives."""
        if not self.log(node).exists():
            return []
        lines = self.log(node).read_text(encoding="utf-8").split("\n")[:-1]
        return [entry for entry in map(json.loads, lines) if key in entry]

    def until(self, what: str, happens: Callable[[], bool]) -> None:
        until(what, happens, DEADLINE, lambda: self.output, every=0.02)

    def await_commits(self, node: int, more: int) -> None:
        """Waits until a node has committed some more steps."""
        last = len(self.entries(node, "digest")) + more
        self.until(
            f"{more} more commits of node {node}",
            lambda: len(self.entries(node, "digest")) >= last,
        )

    def await_membership(self, nodes: list[int]) -> float:
        """Waits until these nodes train together, and have committed some steps; returns when the
        first one was.
        """
        self.until(
            f"a training of nodes {nodes}",
            lambda: all(self.members(node) == nodes for node in nodes),
        )
        self.await_commits(nodes[0], 1)
        first = time.monotonic()
        self.await_commits(nodes[0], 4)
        return first

    def members(self, node: int) -> list[int] | None:
        found = self.entries(node, "membership")
        return list(found[-1]["membership"][1]) if found else None

    def finish(self) -> list[list[float]]:
        """Lets the training end, and returns the results of the nodes that live."""
        (self.folder / "over").touch()
        living = [node for node, process in self.processes.items() if process.poll() is None]
        for node in living:
            assert self.processes[node].wait(DEADLINE) == 0, self.output
        return [self.entries(node, "result")[-1]["result"] for node in living]

    @property
    def output(self) -> str:
        texts = sorted(self.folder.glob("*.txt"))
        return "".join(f"--- {text.name}\n{text.read_text(encoding='utf-8')}" for text in texts)


@contextlib.contextmanager
def training(
    tmp_path: Path,
    count: int,
    env: dict[str, str] | None = None,
    jobs: Path = JOBS,
    aggregators: int = 0,
) -> Iterator[Nodes]:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    # Nobody waits longer for a shard whose node is lost.
    variables = {"THALWEG_RECONNECT": "2", **(env or {})}
    with servers(env=variables) as cluster:
        for _ in range(aggregators):
            cluster.add_aggregator(listen=f"127.0.0.1:{free_port()}")
        nodes = Nodes(cluster, tmp_path, addresses, jobs, variables)
        try:
            for node in range(count):
                nodes.start(node)
            yield nodes
        finally:
            for process in nodes.processes.values():
                if process.poll() is None:
                    process.kill()


def replay(steps: list[list[list[int]]]) -> torch.Tensor:
    """Returns the weights of a single process that does these steps, with samples by worker."""
    model, optimizer = elastic_jobs.make()
    data = elastic_jobs.inputs()
    for parts in steps:
        optimizer.zero_grad()
        for part in parts:
            (elastic_jobs.loss_of(model, data[part]) / len(parts)).backward()
        optimizer.step()
    return elastic_jobs.weights_of(model)


def check_weights(nodes: Nodes, results: list[list[float]]) -> None:
    """Checks that all nodes agree after each commit, and with a single process at the end."""
    everyone = range(len(nodes.addresses))
    begun = [entry for node in everyone for entry in nodes.entries(node, "samples")]
    done = [entry for node in everyone for entry in nodes.entries(node, "digest")]
    steps = []
    for number in range(1, max(entry["step"] for entry in done) + 1):
        # What nobody who lives has committed is done again, in a later membership.
        last = max(entry["generation"] for entry in done if entry["step"] == number)
        this = {"step": number, "generation": last}
        assert len({entry["digest"] for entry in done if this.items() <= entry.items()}) == 1
        steps.append([entry["samples"] for entry in begun if this.items() <= entry.items()])
    assert all(result == results[0] for result in results)
    torch.testing.assert_close(torch.tensor(results[0]), replay(steps), rtol=0, atol=TOLERANCE)


def replay_local(nodes: Nodes, exchanges: int) -> torch.Tensor:
    """Returns the weights of a single process that does, for each worker of each exchange that
    counts, its steps one after the other; it has the outer optimizer that workers share.
    """
    model, _ = elastic_local_jobs.make()
    steps = [nodes.entries(node, "samples") for node in range(len(nodes.addresses))]
    outer = elastic_local_jobs.OUTER
    data = elastic_jobs.inputs()
    before = elastic_jobs.weights_of(model)
    velocity = torch.zeros_like(before)
    for number in range(1, exchanges + 1):
        these = [[e for e in found if e["step"] == number] for found in steps]
        last = max(entry["generation"] for found in these for entry in found)
        mean = torch.zeros_like(before)
        workers = [[e for e in found if e["generation"] == last] for found in these]
        workers = [found for found in workers if found]
        for found in workers:
            torch.nn.utils.vector_to_parameters(before.clone(), model.parameters())
            inner = torch.optim.SGD(model.parameters(), lr=elastic_jobs.RATE)
            for entry in found:
                inner.zero_grad()
                elastic_jobs.loss_of(model, data[entry["samples"]]).backward()
                inner.step()
            mean += (before - elastic_jobs.weights_of(model)) / len(workers)
        velocity = outer["momentum"] * velocity + mean
        before = before - outer["lr"] * (mean + outer["momentum"] * velocity)
    return before


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_local_updates_go_on_without_a_lost_node_and_with_it_when_it_is_back(codec, tmp_path):
    jobs = Path(elastic_local_jobs.__file__)
    with training(tmp_path, 3, {"CODEC": codec}, jobs) as nodes:
        nodes.await_membership([0, 1, 2])
        nodes.kill(1)
        nodes.await_membership([0, 2])
        nodes.start(1)
        nodes.await_membership([0, 1, 2])
        results = nodes.finish()
    assert results[0] == results[1] == results[2]
    done = [entry for node in range(3) for entry in nodes.entries(node, "digest")]
    for entry in done:
        this = {key: entry[key] for key in ("step", "generation")}
        assert len({other["digest"] for other in done if this.items() <= other.items()}) == 1
    if codec == "fp32":
        weights = replay_local(nodes, max(entry["step"] for entry in done))
        torch.testing.assert_close(torch.tensor(results[0]), weights, rtol=0, atol=TOLERANCE)


def test_training_by_quorum_goes_on_from_its_last_commits_when_its_aggregator_is_back(tmp_path):
    env = {"QUORUM": "2", "THALWEG_RECONNECT": str(DEADLINE)}
    jobs = Path(elastic_local_jobs.__file__)
    with training(tmp_path, 3, env, jobs, aggregators=1) as nodes:
        nodes.await_membership([0, 1, 2])
        first = len(nodes.entries(0, "membership"))
        nodes.cluster.add_aggregator(listen=nodes.cluster.kill_aggregator(0))
        nodes.until("another membership", lambda: len(nodes.entries(0, "membership")) > first)
        nodes.await_membership([0, 1, 2])
        results = nodes.finish()
    assert results[0] == results[1] == results[2]
    again = nodes.entries(0, "membership")[-1]
    assert again["membership"][1] == [0, 1, 2]
    assert again["commits"] >= 4  # a node writes down the fifth before it commits that
    assert "was restarted and has lost the weights that it kept" in nodes.output


@pytest.mark.parametrize("lost", [2, 0])
def test_training_goes_on_without_a_lost_node_and_with_it_when_it_is_back(lost, tmp_path):
    others = [node for node in range(4) if node != lost]
    with training(tmp_path, 4) as nodes:
        nodes.await_membership([0, 1, 2, 3])
        began = time.monotonic()
        nodes.kill(lost)
        lost_for = nodes.await_membership(others) - began
        began = time.monotonic()
        nodes.start(lost)
        back_after = nodes.await_membership([0, 1, 2, 3]) - began
        results = nodes.finish()
    print(f"from the loss to a commit: {lost_for:.2f} s; from a start: {back_after:.2f} s")
    assert len(results) == 4
    check_weights(nodes, results)
    # By generation: one that does not last may have begun on some of the nodes alone.
    told = [entry["membership"] for node in others for entry in nodes.entries(node, "membership")]
    changes = {found[0]: (found[2], found[3]) for found in told if found[2] or found[3]}
    assert [changes[number] for number in sorted(changes)[-2:]] == [([lost], []), ([], [lost])]


@pytest.mark.parametrize("where", ["meets", "connects"])
def test_node_that_dies_while_a_membership_begins_is_not_waited_for(where, tmp_path):
    # Only who looks at the others hears of it sooner than the test waits.
    with training(tmp_path, 3, {"THALWEG_TIMEOUT": "300"}) as nodes:
        nodes.await_membership([0, 1, 2])
        nodes.kill(1)
        nodes.await_membership([0, 2])
        nodes.start(1, DIES_WHEN_IT=where)
        nodes.until("the end of node 1", lambda: nodes.processes[1].poll() == 9)
        nodes.await_membership([0, 2])
        nodes.kill(1)
        nodes.start(1)
        nodes.await_membership([0, 1, 2])
        results = nodes.finish()
    check_weights(nodes, results)
    assert "does not begin it" in nodes.output


def test_too_few_nodes_wait_for_the_others_and_keep_what_they_have(tmp_path):
    with training(tmp_path, 4) as nodes:
        nodes.await_membership([0, 1, 2, 3])
        nodes.kill(3)
        nodes.kill(1)
        nodes.await_membership([0, 2])  # half of them, with the first
        nodes.kill(0)
        for node in (0, 1, 3):
            nodes.start(node)
        nodes.await_membership([0, 1, 2, 3])
        results = nodes.finish()
    check_weights(nodes, results)
    *others, last = nodes.entries(2, "membership")
    before = [entry for entry in nodes.entries(2, "digest") if entry["step"] <= last["commits"]]
    kept = {entry["generation"] for entry in before}
    assert max(kept) < last["membership"][0]
    for members in ([0, 1, 2, 3], [0, 2]):  # others may have ended before their first commit
        assert any(
            generation in kept and found == members
            for generation, found, *_ in (other["membership"] for other in others)
        )


def test_codec_that_carries_state_goes_on_with_all_nodes_alike(tmp_path):
    with training(tmp_path, 3, {"CODEC": "powersgd:rank=1,start=3,min_rate=1"}) as nodes:
        nodes.await_membership([0, 1, 2])
        nodes.kill(1)
        nodes.await_membership([0, 2])
        nodes.start(1)
        nodes.await_membership([0, 1, 2])
        results = nodes.finish()
    assert results[0] == results[1] == results[2]
    assert "the codec begins anew" not in nodes.output


def test_fault_of_the_script_is_raised_when_it_comes_again(tmp_path):
    with training(tmp_path, 2, {"FAILS_AT": "4"}) as nodes:
        for process in nodes.processes.values():
            assert process.wait(DEADLINE) == 1
    assert nodes.output.count("RuntimeError: the script's own fault") >= 2
    tried = [entry["generation"] for entry in nodes.entries(0, "samples") if entry["step"] == 5]
    assert 1 <= len(tried) <= 3  # fewer where a membership fails before its first step
    assert len(re.findall(r"elastic: \w+Error: ", nodes.output)) >= 2 * 2  # all but the last try
