"""Lets newer tests of torch's back ends run over several back ends by their names: load().

They are not in the wheel. Those of torch's repository (test/distributed) are classes without a back
end, which get one here; those of torchcomms (comms/torchcomms/tests/integration/py) are started by
torchrun, with the name of a back end in the environment.
"""

from __future__ import annotations

import os
import re
import sys
import types
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_harness

COMMON = "c10d_backend_common.py"  # the file of torch's that tells the folder of its tests
_FILES = ("collectives", "p2p", "process_group", "fault_tolerance")  # test_c10d_….py beside it
_TORCHCOMMS = "*Test.py"  # the files of torchcomms'
_WORKERS = 4  # that torchcomms' tests have

# What back ends can do, of what the tests ask for by name.
_FLAGS = (
    "bitwise_reductions",
    "coalescing",
    "collectives_timing",
    "cuda_graph_barrier",
    "dropped_p2p_work",
    "gather_single",
    "sequence_numbers",
    "work_result",
    "work_sequence_number",
)
_ABLE: dict[str, set[str]] = {
    "gloo": {"bitwise_reductions", "sequence_numbers", "work_sequence_number"},
    "thalweg": {
        "bitwise_reductions",
        "dropped_p2p_work",
        "sequence_numbers",
        "work_sequence_number",
    },
}
_FLOAT8 = ("thalweg",)  # back ends that move it

# Functions by the names that they have had since torch 2.13, and before.
_RENAMED = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
# Tests, by what is found in "file: Class.test", of what older versions of torch.distributed lack.
_NEEDS = {
    r"\.test_gather_(single|into_tensor)": "gather_single",
    r"\.test_work_sequence_number": "Work._get_sequence_number",
    r"^fault_tolerance:": "_reconfigure",
}
# Tests in which a back end has no part, or another one than they expect.
_CLOSED = {
    ("thalweg", "test_sequence_numbers"): "torch asks no back end of a plug-in for the numbers of "
    "its groups",
    ("thalweg", "test_noncontiguous_all_to_all_error"): "it expects a refusal of tensors that "
    "are not contiguous, which thalweg takes",
}

NO_BACK_END = "its tests make back ends of torch's own"
OWN_COMMUNICATORS = "its tests speak to torchcomms' own communicators, not to process groups"


@dataclass(frozen=True)
class Test:
    """A test by its class's name and its own, and its test case for each back end."""

    file: str
    of: str
    name: str
    cases: dict[str, type[unittest.TestCase]]

    def __str__(self) -> str:
        return f"{self.file}: {self.of}.{self.name}"

    def why_not(self, backend: str) -> str:
        """Returns why the test does not run over a back end; empty: it does."""
        for pattern, path in _NEEDS.items():
            if re.search(pattern, str(self)) and not _has(dist, path):
                return f"torch {torch.__version__} has no torch.distributed.{path}"
        return _CLOSED.get((backend, self.name), "")


@dataclass(frozen=True)
class LeftOut:
    """A file, or a class of one, that is not run."""

    name: str
    reason: str


def install(seconds: float, hosts: int) -> None:
    """Prepares this process and its children for the tests.

    A test ends its workers after `seconds`. Thalweg takes the workers for those of so many hosts,
    in turn. The process must have no other threads.
    """
    torch_harness.fork_workers(seconds, hosts)
    for new, old in _RENAMED.items():
        vars(dist).setdefault(new, getattr(dist, old))
    # Tests of float8 ask a GPU whether it has that.
    vars(torch.cuda)["get_device_capability"] = lambda *_: (9, 0)
    # Where it is installed and asked for, it takes the place of every back end.
    vars(dist.distributed_c10d)["_TORCHCOMM_AVAILABLE"] = False
    _stand_in_for_torchcomms()


def is_known(folder: Path) -> bool:
    """Returns whether a folder is one of the two."""
    return (folder / COMMON).exists() or any(folder.glob(_TORCHCOMMS))


def load(folder: Path, backends: Sequence[str]) -> Iterator[Test | LeftOut]:
    """Yields the tests of a folder that is known."""
    if (folder / COMMON).exists():
        files = {name: folder / f"test_c10d_{name}.py" for name in _FILES}
        of = _of_torch
    else:
        files = {path.stem: path for path in sorted(folder.glob(_TORCHCOMMS))}
        of = _of_torchcomms
    for name, path in files.items():
        try:
            yield from of(path, name, backends)
        except Exception as error:  # noqa: BLE001 - whatever the file does when it is loaded
            yield LeftOut(name, torch_harness.why_not_loaded(error))


def _has(holder: object, path: str) -> bool:
    for name in path.split("."):
        holder = getattr(holder, name, None)
    return holder is not None


def _of_torch(path: Path, file: str, backends: Sequence[str]) -> Iterator[Test | LeftOut]:
    if not path.exists():
        yield LeftOut(file, "the folder has no such file")
        return
    module = torch_harness.load(path)
    common: Any = torch_harness.load(path.with_name(COMMON))
    for name, value in vars(module).items():
        if isinstance(value, type) and name.startswith("Abstract"):
            cases = {backend: _case(value, backend, common) for backend in backends}
            of = name.removeprefix("Abstract").removesuffix("Test")
            yield from (Test(file, of, test, cases) for test in torch_harness.tests(value))
    for case in torch_harness.cases(module):
        if not hasattr(case, "backend_name"):
            yield LeftOut(f"{file}: {case.__name__}", NO_BACK_END)


def _case(abstract: type, backend: str, common: Any) -> type[unittest.TestCase]:
    harness: Any = sys.modules["torch.testing._internal.common_distributed"]
    able = _ABLE.get(backend, set())
    members = {
        "backend_name": backend,
        "device_type": "cpu",
        "dtypes": common.STANDARD_DTYPES,
        "complex_dtypes": common.COMPLEX_DTYPES,
        "float8_dtypes": common.FLOAT8_DTYPES if backend in _FLOAT8 else (),
        **{f"supports_{flag}": flag in able for flag in _FLAGS},
    }
    made: type[unittest.TestCase] = type(
        abstract.__name__, (abstract, harness.MultiProcessTestCase), members
    )
    return made


def _of_torchcomms(path: Path, file: str, backends: Sequence[str]) -> Iterator[Test | LeftOut]:
    if "dist.init_process_group(" not in path.read_text():
        yield LeftOut(file, OWN_COMMUNICATORS)
        return
    for case in torch_harness.cases(torch_harness.load(path)):
        cases = {backend: _started(case, backend) for backend in backends}
        for name in torch_harness.tests(case):
            yield Test(file, case.__name__, name, cases)


def _started(case: type[unittest.TestCase], backend: str) -> type[unittest.TestCase]:
    """Returns a test case of the same tests, which starts workers for each as torchrun does."""
    harness: Any = sys.modules["torch.testing._internal.common_distributed"]
    utils: Any = sys.modules["torch.testing._internal.common_utils"]

    class Started(harness.MultiProcessTestCase):  # type: ignore[misc]
        world_size = _WORKERS

        def setUp(self) -> None:
            super().setUp()
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(utils.find_free_port()),
                WORLD_SIZE=str(_WORKERS),
                TEST_BACKEND=backend,
            )
            self._spawn_processes()

        def run_here(self, name: str) -> None:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(self.rank)
            result = unittest.TestResult()
            unittest.TestSuite([case(name)]).run(result)
            for _, reason in result.skipped:
                self.skipTest(reason)
            for _, error in [*result.errors, *result.failures]:
                raise AssertionError(error)
            self.assertEqual(result.testsRun, 1)

    for name in torch_harness.tests(case):
        setattr(Started, name, lambda self, name=name: self.run_here(name))
    return Started


def _stand_in_for_torchcomms() -> None:
    """Provides what those of torchcomms' tests that speak to process groups import of it."""

    def rank_and_size() -> tuple[int, int]:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    _stand_in("torchcomms.tests.helpers.py.test_helpers", skip_if_ncclx=lambda case: case)
    _stand_in(
        "torchcomms.tests.integration.helpers.TorchCommTestHelpers",
        get_device=lambda backend, rank: torch.device("cpu"),
        get_rank_and_size=rank_and_size,
    )


def _stand_in(name: str, **members: object) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        sys.modules.setdefault(path, types.ModuleType(path))
    vars(sys.modules[name]).update(members)
