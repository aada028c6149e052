"""Jobs whose loss scale changes while codecs carry residuals: `loss_scale_jobs.py NAME OUT`."""

import gc
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jobs import job, main
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp
from thalweg import amp
from thalweg._torch import _precision

# PowerSGD compresses the matrix and the others all of it; none of them before the third step.
CODECS = ("powersgd:rank=2,start=2", "int8", "onebit", "topk:0.05")
STEPS = 14
# All scalers below double their scale after step 5, and halve it for the infinity of step 9.
CLEAN_STEPS = 6
OVERFLOW = 9

Average = Callable[[DistributedDataParallel, Tensor], Tensor]


class Given(nn.Module):
    """A matrix whose gradient is what the module is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(48, 64))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def gradient(step: int) -> Tensor:
    """Returns this worker's gradient: multiples of 2^-6 below 4, exact in float16 times 2^10."""
    data = torch.Generator().manual_seed(100 * step + dist.get_rank())
    values = torch.randint(-255, 256, (48, 64), generator=data) / 64
    if step == OVERFLOW and dist.get_rank() == 0:
        values[7, 5] = torch.inf
    return values


def averages(model: nn.Module, codec: str, average: Average) -> list[Tensor]:
    """Returns the average of every step's gradient, without the loss scale."""
    module = DistributedDataParallel(model)
    state = thalweg.ddp.attach(module, codec)
    result = []
    for step in range(STEPS):
        module.zero_grad()
        result.append(average(module, gradient(step)))
    state.close()
    return result


def without_scale(module: DistributedDataParallel, values: Tensor) -> Tensor:
    module(values).backward()
    return gradient_of(module)


def gradient_of(module: DistributedDataParallel) -> Tensor:
    assert module.module.weight.grad is not None
    return module.module.weight.grad.clone()


class Native:
    """Averages under torch's GradScaler on the CPU, which changes its scale by itself."""

    def __init__(self, model: nn.Module, **settings: float) -> None:
        settings = {"init_scale": 2.0**16, "growth_interval": CLEAN_STEPS} | settings
        self.scaler = torch.amp.GradScaler("cpu", **settings)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.scales: list[float] = []

    def __call__(self, module: DistributedDataParallel, values: Tensor) -> Tensor:
        self.scaler.scale(module(values)).backward()
        self.scales.append(self.scaler.get_scale())
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()
        return gradient_of(module)


class Mixed:
    """Averages float16 gradients of O2 under thalweg.amp's own scale; reads the masters'."""

    def __init__(self, model: nn.Module, loss_scale: float | str) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        amp.initialize(model, self.optimizer, opt_level="O2", loss_scale=loss_scale, verbosity=0)
        if (
            loss_scale == "dynamic"
        ):  # as if most of the 2000 clean steps before a doubling were over
            unskipped = 2000 - CLEAN_STEPS
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**9, "unskipped": unskipped}})
        self.scales: list[float] = []

    def __call__(self, module: DistributedDataParallel, values: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        [scale] = [scaler["loss_scale"] for scaler in amp.state_dict().values()]
        self.scales.append(scale)
        with amp.scale_loss(module(values), self.optimizer) as scaled:
            scaled.backward()
        [master] = amp.master_params(self.optimizer)
        assert master.grad is not None
        return master.grad.clone()


def differing(got: list[Tensor], want: list[Tensor]) -> list[int]:
    """Returns the steps with other bits; not those with values that are not finite."""
    pairs = enumerate(zip(got, want, strict=True))
    return [step for step, (a, b) in pairs if b.isfinite().all() and not torch.equal(a, b)]


def digest(results: list[Tensor]) -> str:
    together = torch.cat([result.flatten() for result in results])
    return hashlib.sha256(together.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@job
def native() -> dict[str, Any]:
    result = {}
    for codec in CODECS:
        model = Given()
        average = Native(model)
        got = averages(model, codec, average)
        want = averages(Given(), codec, without_scale)
        result[codec] = {
            "scales": average.scales,
            "differing": differing(got, want),
            "finite": [step for step, one in enumerate(want) if one.isfinite().all()],
            "digest": digest(got),
        }
    return result


@job
def mixed() -> dict[str, Any]:
    result = {}
    # Results of int8 and onebit are multiples of a block's scale over 125 and 32: far from where
    # float16 has fewer digits.
    for codec in ("int8", "onebit"):
        runs = []
        for loss_scale in ("dynamic", 1.0):
            model = Given()
            average = Mixed(model, loss_scale)
            runs.append((averages(model, codec, average), average.scales))
        (got, scales), (want, _) = runs
        result[codec] = {
            "scales": scales,
            "differing": differing(got, want),
            "finite": [step for step, one in enumerate(want) if one.isfinite().all()],
            "digest": digest(got),
        }
    return result


@job
def told_differently() -> dict[str, str]:
    """Tells each node scales of its own, at steps of its own, whatever its gradients carry."""
    result = {}
    for codec in CODECS:
        somebody = Given()  # in whose name scales are told
        count = 0

        def average(module: DistributedDataParallel, values: Tensor) -> Tensor:
            nonlocal count
            count += 1
            loss = module(values)
            if count % (2 + dist.get_rank()) == 0:
                scale = 2.0 ** (count % 5 - 3 * dist.get_rank())
                # It is believed once a loss has a mark of that scaler.
                _precision.carry(loss, somebody, scale)  # noqa: B023
            loss.backward()
            return gradient_of(module)

        result[codec] = digest(averages(Given(), codec, average))
    return result


class Own:
    """A module with its own codec, and a scaler or none; it takes down its averages."""

    def __init__(self, codec: str, scale: float = 0.0) -> None:
        self.module = DistributedDataParallel(Given())
        self._state = thalweg.ddp.attach(self.module, codec)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        self.averages: list[Tensor] = []
        self.begin(scale)

    def begin(self, scale: float) -> None:
        """Begins with another scaler; 0: with none."""
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None

    def loss(self, part: float = 1.0) -> Tensor:
        """The loss of its next step, or a part of it."""
        loss = self.module(finite_gradient(len(self.averages)) * part)
        return self.scaler.scale(loss) if self.scaler else loss

    def finish(self, new_scale: float | None = None) -> None:
        """Ends a step."""
        if self.scaler:
            self.scaler.unscale_(self._optimizer)
            self.scaler.update(new_scale)
        self.averages.append(gradient_of(self.module))
        self.module.zero_grad()

    def close(self) -> list[Tensor]:
        self._state.close()
        return self.averages


def finite_gradient(step: int) -> Tensor:
    return gradient(step if step < OVERFLOW else step + 1)


@job
def beside_each_other() -> dict[str, dict[str, list[int]]]:
    """Trains modules under a scaler each, or none, that begin, change and end in the middle."""
    result = {}
    for codec in ("powersgd:rank=2,start=2", "onebit"):
        alone = Own(codec)
        for _ in range(STEPS):
            alone.loss().backward()
            alone.finish()
        want = alone.close()

        jobs = {"never": Own(codec), "at times": Own(codec), "always": Own(codec, 2.0**4)}
        never, at_times, always = jobs.values()
        for step in range(STEPS):
            at_times.begin(2.0**16 if step in range(5, 10) else 0.0)
            if step == 7:
                always.begin(2.0**9)  # instead of one that is gone
                gc.collect()
                late = jobs["late"] = Own(codec, 2.0**2)
            with always.module.no_sync():
                always.loss(0.75).backward()
            rest = always.loss(0.25)
            never.loss().backward()
            at_times.loss().backward()
            rest.backward()
            if step >= 7:
                late.loss().backward()
                late.finish()
            always.finish(2.0**14 if step == 3 else None)
            for each in (at_times, never):
                each.finish()
        result[codec] = {
            name: differing(one.close(), want[: len(one.averages)]) for name, one in jobs.items()
        }
    return result


@job
def resumed() -> dict[str, list[int]]:
    """Saves in the middle under one scale, and goes on from there under another."""
    result = {}
    for codec in CODECS:
        model = Given()
        module = DistributedDataParallel(model)
        state = thalweg.ddp.attach(module, codec)
        straight = []
        average = Native(model)
        for step in range(STEPS):
            if step == CLEAN_STEPS + 1:
                saved = state.state_dict()
            module.zero_grad()
            straight.append(average(module, gradient(step)))
        state.close()

        model = Given()
        module = DistributedDataParallel(model)
        state = thalweg.ddp.attach(module, codec)
        state.load_state_dict(saved)
        average = Native(model, init_scale=2.0**3)
        again = []
        for step in range(CLEAN_STEPS + 1, STEPS):
            module.zero_grad()
            again.append(average(module, gradient(step)))
        state.close()
        result[codec] = differing(again, straight[CLEAN_STEPS + 1 :])
    return result


if __name__ == "__main__":
    main()
