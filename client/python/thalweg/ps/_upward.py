"""The codecs in which gradients go up to shards that keep the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from thalweg import policy
from thalweg._settings._config import ConfigError
from thalweg.codecs import BF16, FP16, FP32, Codec, Lossy
from thalweg.policy import Policy

_DENSE = (FP32, FP16, BF16)
# A lossy codec's default. DistributedDataParallel puts its buckets in order in the first steps;
# here they have theirs from the beginning.
_FIRST = 2


def are_dense(codecs: Policy) -> bool:
    """Whether all gradients go up in floats."""
    return all(isinstance(codec, _DENSE) for codec in codecs.codecs)


def chosen(
    codecs: Policy, parameters: Iterable[tuple[str, Sequence[int]]], *, why_dense: str
) -> Policy:
    """Returns how the gradients of these parameters go up, small ones in floats, all of them in
    that way from the first step on. `why_dense` says what needs floats; empty: nothing does.
    Raises ConfigError.
    """
    if are_dense(codecs):
        return codecs
    codecs = policy.except_small_tensors(codecs, parameters)
    rules = [
        dataclasses.replace(rule, codec=_from_the_first(rule.codec, why_dense))
        for rule in codecs.rules
    ]
    return Policy(_from_the_first(codecs.default, why_dense), rules)


def _from_the_first(codec: Codec, why_dense: str) -> Codec:
    if isinstance(codec, _DENSE):
        return codec
    if why_dense or not isinstance(codec, Lossy):
        others = "" if why_dense else ", int8, onebit or topk"
        floats = "fp32, fp16 or bf16" if why_dense else "fp32, fp16, bf16"
        raise ConfigError(
            f"codec {codec.spec()} does not go with {why_dense or 'ServerOptimizer'}: expected "
            f"{floats}{others} (codec=, THALWEG_CODEC)"
        )
    if codec.start_iter > _FIRST:
        raise ConfigError(
            f"codec {codec.spec()} does not go with ServerOptimizer, whose shards take gradients "
            f"in the same way from the first step on: expected start=0 (codec=, THALWEG_CODEC)"
        )
    return dataclasses.replace(codec, start_iter=0)  # type: ignore[type-var]
