"""Nodes gather: those that answer each other find the leader, who plans the next membership."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from thalweg.elastic import _mailbox, _quorum
from thalweg.elastic._mailbox import Mailbox, Plan
from thalweg.elastic._nodes import Address
from thalweg.elastic._quorum import Rules, Standing

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.25  # from one look of a node that waits at all the others to the next
_WATCH_SECONDS = 0.5
_MISSES = 3  # looks in a row at which a node of a plan is not there
_GONE_SECONDS = 5.0  # this node's first worker does not answer for so long: it has gone
_SAY_SECONDS = 10.0

_log = logging.getLogger("thalweg")


class Finished(RuntimeError):
    """The others have ended the training."""


class FirstWorker:
    """Gathers for a node, and may lead."""

    def __init__(
        self,
        addresses: tuple[Address, ...],
        standing: Standing,
        rules: Rules,
        open_store: Callable[[], Address],
        on_left: Callable[[], None],
    ) -> None:
        """`open_store` starts a store for a membership's workers to meet. `on_left` is called on
        another thread when a membership that has begun has lost a member, who has come again.
        """
        self._addresses = addresses
        self._node = standing.node
        self._ended = standing.ended
        self._rules = rules
        self._open_store = open_store
        self._mailbox = Mailbox(addresses[standing.node], standing, on_left)
        self._lookers = ThreadPoolExecutor(len(addresses), "thw-look")

    def gather(
        self, standing: Standing, last: Plan | None, seconds: float, silence: float = math.inf
    ) -> Plan:
        """Returns the next plan. Raises Finished; TimeoutError, which says why, after `seconds`, or
        when no other node has answered for `silence` seconds.
        """
        del last  # the leader makes no plan twice
        asking = standing._replace(question=secrets.token_hex(8))
        self._mailbox.set_standing(asking)
        began = said = heard = time.monotonic()
        led_since: float | None = None
        why = ""
        answering: dict[int, Standing] = {}
        looked = 0.0
        while time.monotonic() < min(began + seconds, heard + silence):
            come = self._mailbox.come()
            if not come.keys() <= answering.keys() or time.monotonic() > looked + _LOOK_SECONDS:
                answering = self._look() | {self._node: asking}
                looked = time.monotonic()
                heard = looked if len(answering) > 1 else heard
                self._check_ended(answering)
                self._call(answering, asking)
            leader = _quorum.leader(answering)
            if leader == self._node:
                led_since = led_since or time.monotonic()
                come = {n: one for n, one in come.items() if n in answering}
                come[self._node] = asking
                waited = time.monotonic() - led_since
                why = _quorum.why_wait(come, answering, waited, self._rules)
                plan = None if why else self._offer(come, asking.question)
            else:
                led_since, why = None, f"node {leader} at {self._addresses[leader]} decides"
                plan = _mailbox.come_to(self._addresses[leader], asking)
            if plan is not None:
                self._mailbox.set_plan(plan)
                return plan
            if time.monotonic() > said + _SAY_SECONDS:
                said = time.monotonic()
                _log.info("elastic: node %d waits: %s", self._node, why)
            time.sleep(_POLL_SECONDS)
        waited = time.monotonic() - began
        raise TimeoutError(f"thalweg: no membership within {waited:.1f} s: {why}")

    @contextlib.contextmanager
    def guard(self, plan: Plan, give_up: Callable[[], None]) -> Iterator[None]:
        """Calls `give_up`, on another thread, when a node of `plan` is lost while it begins."""
        is_over = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(plan, give_up, is_over), name="thw-watch", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()

    def begin(self, standing: Standing) -> None:
        """Says that this node trains in the membership of `standing`."""
        self._mailbox.set_standing(standing)

    def has_comers(self) -> bool:
        """Returns whether nodes have come that this worker must let in."""
        return bool(self._mailbox.come())

    def finish(self, standing: Standing) -> None:
        """Says that the training has ended, until the others have heard it too."""
        self._mailbox.set_standing(standing._replace(has_finished=True))
        deadline = time.monotonic() + _GONE_SECONDS
        while time.monotonic() < deadline:
            # Who has begun the next training has heard it.
            others = [one for node, one in self._look().items() if node in standing.members]
            if all(one.has_finished or one.ended > standing.ended for one in others):
                return
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        self._mailbox.close()
        self._lookers.shutdown(wait=False, cancel_futures=True)

    def _watch(self, plan: Plan, give_up: Callable[[], None], is_over: threading.Event) -> None:
        missed = 0
        while not is_over.wait(_WATCH_SECONDS):
            seen = self._look()
            others = [node for node in plan.nodes if node != self._node]
            missed = 0 if all(plan.holds(node, seen.get(node)) for node in others) else missed + 1
            if missed == _MISSES:
                _log.warning("elastic: a node of membership %d does not begin it", plan.generation)
                give_up()
                return

    def _look(self) -> dict[int, Standing]:
        """Returns what others say of themselves, but for those that are a training behind."""
        others = [number for number in range(len(self._addresses)) if number != self._node]
        found = self._lookers.map(lambda one: _mailbox.look_at(self._addresses[one]), others)
        seen = zip(others, found, strict=True)
        return {
            number: one
            for number, one in seen
            if one is not None and one.node == number and one.ended >= self._ended
        }

    def _check_ended(self, answering: Mapping[int, Standing]) -> None:
        """Raises Finished where the others have ended this training, or have begun a later one."""
        if any(one.has_finished for one in answering.values()):
            raise Finished("thalweg: the other nodes have ended the training")
        if ahead := [node for node, one in answering.items() if one.ended > self._ended]:
            raise Finished(
                f"thalweg: node {ahead[0]} has ended {answering[ahead[0]].ended} trainings in "
                f"its process and begins the next, this one has ended {self._ended}: a node "
                "that is started again comes to the first run() of a script only"
            )

    def _call(self, answering: Mapping[int, Standing], asking: Standing) -> None:
        """Tells those that train that this node waits, so that all of them leave at one commit."""
        for node, one in answering.items():
            if one.generation and not one.question and not one.has_finished:
                self._lookers.submit(_mailbox.come_to, self._addresses[node], asking)

    def _offer(self, come: Mapping[int, Standing], question: str) -> Plan | None:
        """Returns a plan that all who have come have got; None: one of them has gone."""
        plan = self._plan(come)
        self._mailbox.offer(plan, question)
        deadline = time.monotonic() + _mailbox.FRESH_SECONDS
        while not self._mailbox.is_taken():
            if time.monotonic() > deadline:
                self._mailbox.withdraw()
                return None
            time.sleep(_POLL_SECONDS / 10)
        return plan

    def _plan(self, come: Mapping[int, Standing]) -> Plan:
        nodes = tuple(sorted(come))
        lost, new = _quorum.changes(come)
        return Plan(
            generation=_quorum.newest(come.values()).generation + 1,
            name=secrets.token_hex(8),
            nodes=nodes,
            workers=tuple(come[node].workers for node in nodes),
            questions=tuple(come[node].question for node in nodes),
            store=self._open_store(),
            lost=lost,
            come=new,
        )


class FurtherWorker:
    """Hears the plans of its node from the node's first worker."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def gather(
        self, standing: Standing, last: Plan | None, seconds: float, silence: float = math.inf
    ) -> Plan:
        """Returns the plan after `last`. Raises TimeoutError; ConnectionError if the first worker
        has gone, as it does after `silence`.
        """
        del silence
        after = "" if last is None else last.name
        heard = began = time.monotonic()
        while time.monotonic() < began + seconds + _GONE_SECONDS:
            try:
                plan = _mailbox.plan_after(self._address, after, standing.ended)
                heard = time.monotonic()
            except ConnectionError:
                plan = None
                # At the beginning it may still be on its way.
                if last is not None and time.monotonic() > heard + _GONE_SECONDS:
                    raise
            if plan is not None:
                return plan
            time.sleep(_POLL_SECONDS)
        raise TimeoutError(
            f"thalweg: this node's first worker has had no membership within {seconds:g} s"
        )

    def guard(self, plan: Plan, give_up: Callable[[], None]) -> AbstractContextManager[None]:
        """Does nothing: first workers look at each other."""
        del plan, give_up
        return contextlib.nullcontext()

    def begin(self, standing: Standing) -> None:
        """Does nothing: the first worker says it."""

    def has_comers(self) -> bool:
        """Returns False: nodes come to first workers."""
        return False

    def finish(self, standing: Standing) -> None:
        """Does nothing, as begin()."""

    def close(self) -> None: ...
