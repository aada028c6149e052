"""Whether the gradients of a hollow model are the mean of what its workers wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from thalweg.bench.rows import BenchError
from thalweg.codecs import Auto, Codec, Int8, OneBit

# Gradients, and the one number that all elements of each should be.
Gradients = Iterable[tuple[torch.Tensor, float]]


def make_check(codec: Codec, largest: float) -> Callable[[Gradients], None]:
    """Raises BenchError for gradients of one step after the other, of numbers up to `largest`."""
    if isinstance(codec, OneBit):
        return _SumCheck()
    if isinstance(codec, Int8 | Auto):
        # Nodes encode, then shards. Each time a result has the residual that there was and lacks
        # the one that is left, which are half a step of the largest element / 125 each; of sums
        # with residuals, hence the slack.
        return _ElementCheck(1.1 * 2 * largest / 125)
    # The wire's type is the coarsest on the way.
    coarsest = torch.finfo(torch.bfloat16 if "bf16" in codec.spec() else torch.float16).eps
    return _ElementCheck(4 * coarsest * largest)


class _ElementCheck:
    def __init__(self, allowed: float) -> None:
        self._allowed = allowed

    def __call__(self, gradients: Gradients) -> None:
        for index, (gradient, expected) in enumerate(gradients):
            low, high = gradient.aminmax()
            wrong = max(abs(float(low) - expected), abs(float(high) - expected))
            if not wrong <= self._allowed:  # so that NaN is wrong as well
                raise BenchError(
                    f"the gradient of parameter {index} is wrong: off by {wrong:g}, "
                    f"expected {expected:g} within {self._allowed:g}"
                )


class _SumCheck:
    """For a codec of which only the sum over steps is near.

    With r = √(1 - 2/π), the part of a rotated block that its signs do not tell, a residual stays
    below r / (1 - r) = 1.52 of what is encoded. What the shards encode is at most a node's gradient
    with its residual, so theirs stays below 1.52 · 2.52. That is what the sum of all results can
    lack or have too much, in gradients of one step.
    """

    _BOUND = 1.52 + 1.52 * 2.52

    def __init__(self) -> None:
        self._steps = 0
        self._product, self._square = 0.0, 0.0

    def __call__(self, gradients: Gradients) -> None:
        self._steps += 1
        for gradient, expected in gradients:
            self._product += expected * float(gradient.sum(dtype=torch.float64))
            self._square += expected * expected * gradient.numel()
        share = self._product / self._square
        allowed = self._BOUND / self._steps
        if not abs(share - 1) <= allowed:
            raise BenchError(
                f"the gradients of {self._steps} steps are wrong: they add up to {share:g} of what "
                f"was expected, allowed are 1 ± {allowed:g}"
            )
