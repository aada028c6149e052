"""Defines torch's own tests of back ends of torch.distributed, for a back end by its name: load().

They are in the wheel: torch/testing/_internal/distributed/distributed_test.py.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch_harness

_INTERNAL = "torch.testing._internal"
_GATE = "skip_but_pass_in_sandcastle_if"  # the decorator of most tests

# Gates that only a back end named "mpi" passes, although others have the collectives.
_OPENED = ("Only MPI supports CPU all_to_all_single", "Only MPI supports all_to_all")

# What torch itself withholds from back ends that it does not know by name.
_MONITORED = "torch.distributed.monitored_barrier() refuses every back end but gloo"
_CLOSED = {
    "test_ddp_logging_data_cpu": 'DDP logs the name "custom" for every back end of a plug-in',
    "test_monitored_barrier_failure_order": _MONITORED,
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_monitored_barrier_wait_all_ranks": _MONITORED,
}


def load(
    backend: str, world_size: int, seconds: float, *, profiled: bool = False, hosts: int = 1
) -> type[unittest.TestCase]:
    """Returns the suite as a TestCase, whose tests each fork `world_size` workers.

    A test ends its workers after `seconds` with a traceback of each. If `profiled`, collectives
    must leave the events in the profiler that torch expects of the back ends it knows by name.
    Thalweg takes the workers for those of so many hosts, in turn. The process must have no other
    threads, and can load one suite only.
    """
    # The decorators of the tests compare the back end's name with literals when they are imported,
    # and skip on all but "gloo" and "nccl" what a plug-in may well support. They get to see "gloo".
    # All that runs later, init_process_group() above all, gets the name of the back end.
    os.environ["BACKEND"] = "gloo"
    os.environ["INIT_METHOD"] = "file://"  # one decorator wants it; setUp() names the file
    os.environ["WORLD_SIZE"] = str(world_size)
    torch_harness.prepare(seconds)
    common: Any = importlib.import_module(f"{_INTERNAL}.common_utils")
    gate = getattr(common, _GATE)

    def opened(condition: bool, reason: str) -> Callable[[Any], Any]:
        decorator: Callable[[Any], Any] = gate(condition and reason not in _OPENED, reason)
        return decorator

    with mock.patch.object(common, _GATE, opened):
        suite: Any = importlib.import_module(f"{_INTERNAL}.distributed.distributed_test")
    if profiled:
        suite.PROFILING_SUPPORTED_BACKENDS.append(backend)
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    os.environ["BACKEND"] = backend
    defined = _define(suite, backend, world_size, hosts)
    if backend != "gloo":
        for name, reason in _CLOSED.items():
            setattr(defined, name, unittest.skip(reason)(getattr(defined, name)))
    return defined


def _define(suite: Any, backend: str, world_size: int, hosts: int) -> type[unittest.TestCase]:
    suite.BACKEND = backend
    bases: tuple[Any, ...] = (suite.TestDistBackend, suite.DistributedTest._DistTestBase)

    class Conformance(*bases):  # type: ignore[misc]
        """The tests; `started` is the number of workers that the last one has run in."""

        started = 0

        def setUp(self) -> None:
            super().setUp()
            suite.INIT_METHOD = os.environ["INIT_METHOD"]
            # torch's own harness spawns, and every worker loads torch: seconds for each test.
            self._start_processes(multiprocessing.get_context("fork").Process)
            self.started = len(self.processes)
            assert self.started == world_size

        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            torch_harness.place(rank, hosts)
            super()._run(rank, *args, **kwargs)

        def _test_accumulate_gradients_no_sync(self, *args: Any, **kwargs: Any) -> None:
            # It looks for the device of a back end in a list of three names.
            suite.BACKEND = "gloo"
            super()._test_accumulate_gradients_no_sync(*args, **kwargs)

    return Conformance
