"""Checks that the gradients of a hollow model are the mean of what its workers wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from thalweg.codecs import Auto, Codec, Lossy
from thalweg_bench.rows import BenchError

# Each gradient comes with the one number that all its elements should have.
Gradients = Iterable[tuple[torch.Tensor, float]]


def make_check(codec: Codec, largest: float) -> Callable[[Gradients], None]:
    """Returns a check of successive gradients, of numbers up to `largest`; raises BenchError."""
    if isinstance(codec, Lossy) and codec.is_coarse:
        return _SumCheck()
    if isinstance(codec, Lossy | Auto):
        # Nodes encode, then shards. Each time a result contains the previous residual and lacks the
        # remaining one, which are half a step of the largest element / 125 each; the encoded sums
        # contain residuals, hence the slack.
        return _ElementCheck(1.1 * 2 * largest / 125)
    # The wire's type is the coarsest of all.
    coarsest = torch.finfo(torch.bfloat16 if "bf16" in codec.spec() else torch.float16).eps
    return _ElementCheck(4 * coarsest * largest)


class _ElementCheck:
    def __init__(self, allowed: float) -> None:
        self._allowed = allowed

    def __call__(self, gradients: Gradients) -> None:
        for index, (gradient, expected) in enumerate(gradients):
            low, high = gradient.aminmax()
            wrong = max(abs(float(low) - expected), abs(float(high) - expected))
            if not wrong <= self._allowed:  # so that NaN is wrong too
                raise BenchError(
                    f"the gradient of parameter {index} is wrong: off by {wrong:g}, "
                    f"expected {expected:g} within {self._allowed:g}"
                )


class _SumCheck:
    """For a codec of which only the sum over steps is accurate.

    With r = √(1 - 2/π), the part of a rotated block that its signs do not describe, a residual
    stays below r / (1 - r) = 1.52 of what is encoded. What the shards encode is at most a node's
    gradient with its residual, so theirs stays below 1.52 · 2.52. The sum of all results can be
    wrong by that, in gradients of one step.
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
