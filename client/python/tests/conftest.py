"""Sets up and cleans up every test of this folder."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Cases that hypothesis makes up are the same in each run, but for those of `make fuzz`.
hypothesis.settings.register_profile("tests", derandomize=True, database=None)
hypothesis.settings.register_profile("fuzz", max_examples=20_000)
hypothesis.settings.load_profile("tests")

# tests/e2e has certificates.py.
sys.path.append(str(Path(__file__).parents[3] / "tests" / "e2e"))


@pytest.fixture
def lone_group() -> Iterator[None]:
    """Makes this process the only one of a process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # otherwise a thread of Gloo may release a tensor while Python ends
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_decorations_are_left() -> Iterator[None]:
    """Checks that no decorated optimizer is left: GradScalers follow aiak_amp_decorate() while one
    lives.

    An optimizer in a cycle lives until the garbage collection and would affect other tests.
    """
    yield
    decorations = sys.modules.get("thalweg.amp._gradscaler")
    if decorations is not None:
        decorations._decorated.clear()
