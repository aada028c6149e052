"""Passes word of rank 0's checkpoints to the other nodes, through the process group's store.

A store sets no deadline for a look into it: where its machine has fallen silent, check() never
returns. So a thread of its own asks the store, and is given up if it does not come back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

_LOOK_SECONDS = 0.1  # how often a call that waits asks whether a node is lost


class Notes:
    """Notes of rank 0. A call that raises RuntimeError, saying why, must be the last one.

    One thread calls it at a time.
    """

    def __init__(
        self,
        shared: Store,
        job: str,
        *,
        timeout: float,
        lost: Callable[[], list[str]],
        status: Callable[[], str | None],
    ) -> None:
        """No call waits longer than `timeout` seconds for the store, nor after a node is `lost` or
        the `status` says that the job has failed.
        """
        self._shared, self._job, self._timeout = shared, job, timeout
        self._lost, self._status = lost, status
        self._count = 0  # that were written or seen

    def write(self) -> None:
        """Writes a note, and returns when it is there."""
        self._ask(self._write)

    def are_new(self) -> bool:
        """Returns whether there are notes that have not been seen."""
        seen = self._count
        self._ask(self._see)
        return self._count > seen

    def _write(self) -> None:
        self._shared.set(self._next(), "")
        self._shared.check([self._next()])  # set() does not wait until it is there
        self._count += 1

    def _see(self) -> None:
        while self._shared.check([self._next()]):
            self._count += 1

    def _next(self) -> str:
        return f"thalweg/residuals/{self._job}/{self._count}"

    def _ask(self, question: Callable[[], None]) -> None:
        """Lets a thread ask the store, and returns when it has the answer."""
        self._check_lost()
        answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def ask() -> None:
            try:
                question()
            except Exception as error:  # noqa: BLE001 - it is raised below
                answers.put(error)
            else:
                answers.put(None)

        try:
            threading.Thread(target=ask, name="thalweg-notes", daemon=True).start()
        except RuntimeError:  # the interpreter is about to end
            ask()
        if (error := self._await(answers)) is not None:
            raise error

    def _await(self, answers: queue.SimpleQueue[Exception | None]) -> Exception | None:
        last = time.monotonic() + self._timeout
        while True:
            try:
                return answers.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                pass
            self._check_lost()
            if (ended := self._status()) is not None:
                raise RuntimeError(ended)
            if time.monotonic() >= last:
                raise RuntimeError(
                    "the process group's store has not answered within "
                    f"{self._timeout:g} s (THALWEG_TIMEOUT)"
                )

    def _check_lost(self) -> None:
        """Raises RuntimeError if a node is lost: no later checkpoint can be resumed by all."""
        if lost := self._lost():
            raise RuntimeError(f"the job goes on without {lost[0]}")
