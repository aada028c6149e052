"""Disturbs an elastic training at random, and says how much it trained meanwhile.

`elastic_chaos.py --seed 1 --seconds 900 [--nodes 8] [--every 50 [--by-quorum]]` needs root, and
OMP_NUM_THREADS=1 because it forks workers from a process without other threads. Some nodes train;
after some undisturbed seconds each fault concerns one of them, and somebody starts again at once
what has died. Each line says what was done and what came of it; the last ones sum up, and --out
gets them as JSON. Exits 1 if weights differ between nodes, or a node does not come back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diary import Diary, Living
from elastic_nodes import SHARD, Node, serving
from network import Network
from waiting import pass_time, until

from thalweg_bench import torch_import
from thalweg_bench.lab import Lab, parse_rate

NODES = 4
LASTS = (0.5, 5.0)  # seconds: a node is down, stopped or cut off
GIVE_UP = 90.0  # seconds: a node that is not back then will not come
KINDS = ("worker killed", "sidecar killed", "node killed", "node stopped", "link cut")
_SOON = 0.5  # seconds: a victim that has not noticed yet may still commit
_POLL = 0.02


@dataclass
class Fault:
    kind: str
    node: int
    seconds: float  # until the victim may go on
    at: float = 0.0
    free: float = 0.0  # when the victim might go on
    pause: float = 0.0  # the longest time without a commit of the others, until the next fault
    back: float = 0.0  # seconds from `free` to the victim's commit after its longest pause

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}: node {self.node}{lasting}"


def plan(seed: int, nodes: int = NODES) -> Iterator[Fault]:
    """Gives faults without end; each kind comes once before one comes again."""
    rng = random.Random(seed)
    while True:
        for kind in rng.sample(KINDS, len(KINDS)):
            is_brief = kind in ("worker killed", "sidecar killed")
            yield Fault(kind, rng.randrange(nodes), 0.0 if is_brief else rng.uniform(*LASTS))


class Chaos:
    def __init__(self, nodes: list[Node], network: Network, *, are_apart: bool) -> None:
        self._nodes, self._network = nodes, network
        self._diary = Diary([node.log for node in nodes], are_apart=are_apart)
        self.living = Living(len(nodes))
        self.faults: list[Fault] = []
        self.began = self.disturbed = self.ended = 0.0

    def run(self, seed: int, calm: float, seconds: float, gap: float) -> None:
        """Disturbs for so long, with each kind of fault once at least. Raises AssertionError
        when nodes do not come back.
        """
        self._await("all nodes", lambda: self._diary.train_together(len(self._nodes)))
        self.began = time.monotonic()
        self._train(calm)
        self.disturbed = time.monotonic()
        rng = random.Random(seed)
        for number, fault in enumerate(plan(seed, len(self._nodes))):
            if number >= len(KINDS) and time.monotonic() > self.disturbed + seconds:
                break
            self._disturb(fault)
            self._train(fault.at + rng.uniform(0.5, 1.5) * gap - time.monotonic())
            others = {*range(len(self._nodes))} - {fault.node}
            fault.pause, _ = self._diary.longest_gap(others, fault.at)
            own = self._diary.longest_gap({fault.node}, fault.free, begun_by=fault.free + _SOON)
            fault.back = own[1] - fault.free
            print(f"{fault}: pause {fault.pause:.2f} s, back in {fault.back:.2f} s", flush=True)
            self.faults.append(fault)
        self.ended = time.monotonic()
        self._await("all nodes", lambda: self._diary.train_together(len(self._nodes)))

    def _disturb(self, fault: Fault) -> None:
        victim = self._nodes[fault.node]
        fault.at = time.monotonic()
        undo = self._begin(fault.kind, victim)
        self._train(fault.seconds)
        undo()
        since = time.monotonic()
        self._await(f"node {fault.node}", lambda: self._diary.last_of(fault.node) > since)
        fault.free = since

    def _begin(self, kind: str, victim: Node) -> Callable[[], None]:
        """Does it; returns what ends it."""
        if kind == "worker killed":
            victim.kill_worker()
        elif kind == "sidecar killed":
            victim.kill_sidecar()
        elif kind == "node killed":
            victim.go_down()
            return victim.come_up
        elif kind == "node stopped":
            victim.stop()
            return victim.go_on
        else:
            victim.is_cut = True
            mend = self._network.cut(victim.host)

            def connect() -> None:
                mend()
                victim.is_cut = False

            return connect
        return lambda: None

    def _train(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._look()
            pass_time(_POLL)

    def _await(self, what: str, happens: Callable[[], bool]) -> None:
        def has_happened() -> bool:
            self._look()
            return happens()

        until(f"a training of {what}", has_happened, GIVE_UP, every=_POLL)

    def _look(self) -> None:
        for node in self._nodes:
            node.look()
        self.living.note([node.is_living for node in self._nodes], time.monotonic())
        self._diary.read()

    def finish(self, over: Path) -> dict[str, Any]:
        """Ends the training, and returns what it has come to."""
        over.touch()
        not_well = [node.host for node in self._nodes if not node.wait(GIVE_UP)]
        self._diary.read()
        calm = self._diary.usual_rate(self.began, self.disturbed)
        disturbed = self._diary.rate(self.disturbed, self.ended)
        of_living = self._diary.share_of(self.living, self.disturbed, self.ended)
        return {
            "seconds": self.ended - self.disturbed,
            "faults": [asdict(fault) for fault in self.faults],
            "alive": self.living.share(self.disturbed, self.ended),
            "taking part": of_living,
            "committed": disturbed / calm,
            "commits of workers a second, undisturbed": calm,
            "losses": self._diary.losses(),
            "memberships": self._diary.memberships(),
            "nodes that differ": self._diary.differing(),
            "nodes that have not ended well": not_well,
        }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what is printed at the end."""
    hosts = [f"node{node}" for node in range(options.nodes)]
    rate = parse_rate(options.rate)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="elastic-"))
    with Lab([*hosts, SHARD], rate) as lab, contextlib.ExitStack() as stack:
        aggregator = stack.enter_context(serving(lab, folder)) if options.by_quorum else ""
        nodes = [
            Node(
                lab,
                number,
                folder,
                nodes=hosts,
                codec=options.codec,
                every=options.every,
                aggregator=aggregator,
            )
            for number in range(options.nodes)
        ]
        chaos = Chaos(nodes, Network(lab), are_apart=options.by_quorum)
        try:
            gap = 3600 / options.faults_per_hour
            chaos.run(options.seed, options.calm, options.seconds, gap)
            result = chaos.finish(folder / "over")
            if result["nodes that differ"] or result["nodes that have not ended well"]:
                raise RuntimeError(json.dumps(result))
            return result
        except (AssertionError, RuntimeError):
            for node in nodes:
                print(f"--- {node.host}\n{node.output()}", file=sys.stderr)
            raise
        finally:
            for node in nodes:
                node.go_down()
            if options.logs is None:
                shutil.rmtree(folder)


def summary(result: dict[str, Any]) -> str:
    """Returns a line for each kind of fault, and the shares."""
    lines = []
    for kind in KINDS:
        found = [fault for fault in result["faults"] if fault["kind"] == kind]
        worst = [max(fault[key] for fault in found) for key in ("pause", "back")]
        lines.append(f"{kind} | {len(found)} | {worst[0]:.1f} s | {worst[1]:.1f} s")
    shares = (f"{name}: {result[name]:.3f}" for name in ("alive", "taking part", "committed"))
    return "\n".join([*lines, ", ".join(shares)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--calm", type=float, default=20, help="undisturbed seconds before")
    parser.add_argument("--faults-per-hour", type=float, default=125)
    parser.add_argument("--codec", default="fp16")
    parser.add_argument("--every", type=int, default=0, help="steps between local updates; 0: none")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument(
        "--by-quorum",
        action="store_true",
        help="exchange local updates as soon as most nodes have come, over an aggregator",
    )
    parser.add_argument("--rate", default="250mbit", help="of each node's link")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, help="an empty folder to keep what nodes write")
    arguments = parser.parse_args()
    if arguments.by_quorum and not arguments.every:
        parser.error("--by-quorum goes with --every")
    torch_import.import_torch()
    import thalweg.ddp
    import thalweg.elastic  # noqa: F401 - workers are forked with it

    print(f"seed {arguments.seed}, {arguments.seconds:g} s", flush=True)
    # Ends this process, and all others with it.
    signal.alarm(round(arguments.calm + arguments.seconds + 20 * GIVE_UP))
    result = run(arguments)
    print(json.dumps({name: value for name, value in result.items() if name != "losses"}, indent=1))
    print(summary(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
