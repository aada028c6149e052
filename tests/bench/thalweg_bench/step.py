"""Defines systems that run one training step of a DDP module with almost no computation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from thalweg import ddp
from thalweg.codecs import FP32, PowerSGD, parse
from thalweg_bench import hollow
from thalweg_bench.codec_torch import giant_bucket_mb, make_state
from thalweg_bench.compression import warm_up_steps
from thalweg_bench.place import Place
from thalweg_bench.shapes import Shape, tensors_of
from thalweg_bench.worker import TIMEOUT, Factories, System


class Memory:
    """Memory of the parameters and gradients of one model. Allocate it before forking workers.

    All models of a worker share that of the parameters, which is never accessed, and of the
    gradients, which clear() makes zero: no step waits for the system to find memory.
    """

    def __init__(self, shapes: list[Shape]) -> None:
        self.parameters, self.gradients = tensors_of(shapes), tensors_of(shapes)


class _Step(hollow.Step):
    """One backward pass with communication, or, for `local`, without."""

    _compresses = False
    module: DistributedDataParallel

    def __init__(
        self,
        memory: Memory,
        place: Place,
        *,
        local: bool = False,
        bucket_cap_mb: int | None = None,
        fp16: bool = False,
    ) -> None:
        self.codec = parse(place.codec) if self._compresses else FP32()
        model = hollow.Block(memory.parameters)
        super().__init__([model], place, self.codec, local=local)
        # The hollow parameters are equal everywhere: nothing needs broadcasting.
        self.module = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=bucket_cap_mb)
        self._local, self._memory = local, memory
        if fp16:
            self.module.register_comm_hook(None, fp16_compress_hook)

    def clear(self) -> None:
        for parameter, gradient in zip(
            self.module.parameters(), self._memory.gradients, strict=True
        ):
            parameter.grad = gradient.zero_()

    def exchanging(self) -> AbstractContextManager[None]:
        return self.module.no_sync() if self._local else nullcontext()


class _Thalweg(_Step):
    _compresses = True

    def __init__(self, memory: Memory, place: Place) -> None:
        super().__init__(memory, place)
        self._state = ddp.attach(self.module, codec=place.codec, timeout=TIMEOUT)

    def close(self) -> None:
        self._state.close()


class _TorchPowerSgd(_Step):
    """torch's hook hangs over Gloo with more than one bucket."""

    _compresses = True

    def __init__(self, memory: Memory, place: Place) -> None:
        shapes = [tuple(parameter.shape) for parameter in memory.parameters]
        super().__init__(memory, place, bucket_cap_mb=giant_bucket_mb(shapes))
        assert isinstance(self.codec, PowerSGD)
        # Without epsilon a gradient that is zero everywhere would be divided by its norm.
        state = make_state(self.codec, epsilon=1e-8)
        self.module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def factories(shapes: list[Shape]) -> Factories:
    """Returns systems for a Worker whose process group has been started."""
    memory = Memory(shapes)

    def make(place: Place, *, build: Callable[[Memory, Place], _Step]) -> System:
        system = build(memory, place)
        system.warm_up(warm_up_steps(system.codec))
        return system

    builds: dict[str, Callable[[Memory, Place], _Step]] = {
        "thalweg": _Thalweg,
        "ddp": _Step,
        "torch-fp16": functools.partial(_Step, fp16=True),
        "torch-powersgd": _TorchPowerSgd,
        "local": functools.partial(_Step, local=True),
    }
    return {name: functools.partial(make, build=build) for name, build in builds.items()}
