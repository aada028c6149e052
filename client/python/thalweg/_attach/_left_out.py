"""Says what a policy asks for and does not get, where this is known when a job begins: parameters
that a codec leaves as they are, and rules without parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from thalweg import policy
from thalweg._job._topology import Tensor
from thalweg.codecs import FP32, WIRE_TYPES, Codec, PowerSGD, TopK


class LeftOut(NamedTuple):
    """Says what a codec was chosen for and does not do."""

    remarks: tuple[str, ...] = ()  # one for each reason
    everything: bool = False  # nothing is left that it does


NOTHING = LeftOut()
_NODES = "(two torchruns on one machine are one node; `thalweg run --nodes 2` makes two)"
# An entry of topk takes 5 bytes or more, and an element of fp32 4 (docs/codecs.md).
_BYTES_OF_TOPK = 5 / 4


def find(codec: str, model: Sequence[Tensor], num_nodes: int) -> LeftOut:
    """Judges the policy `codec`, in its text form, by the codec of each parameter."""
    parsed = policy.parse(codec)
    remarks = _idle_rules(parsed, model)
    chosen = [(tensor, parsed.codec_of(tensor.name, tensor.shape)) for tensor in model]
    chosen = [(tensor, codec) for tensor, codec in chosen if not isinstance(codec, FP32)]
    double = [(tensor, codec) for tensor, codec in chosen if tensor.dtype == "float64"]
    idle = [pair for pair in chosen if num_nodes == 1 and pair not in double]
    # fp16 and bf16 round the gradients of a single node, too.
    rounded = [pair for pair in idle if pair[1].name in WIRE_TYPES and pair[0].dtype == "float32"]
    alone = [pair for pair in idle if pair[1].name not in WIRE_TYPES]
    if double:
        remarks.append(
            f"{_count(double, model)} stay uncompressed in spite of {_names(double)}: they are "
            "float64, which no codec shortens; train in float32 if they should be compressed"
        )
    remarks += _longer(parsed)
    whole = [] if idle else [pair for pair in chosen if pair not in double and _is_whole(*pair)]
    matrices = [pair for pair in whole if len(pair[0].shape) > 1]
    # That small ones stay whole beside others is what everybody expects.
    if matrices and not any(_is_in_factors(*pair) for pair in chosen):
        remarks.append(
            f"{_count(matrices, model)} stay uncompressed in spite of {_names(matrices)}: their "
            "factors would not be smaller by min_rate: choose a lower rank, or another codec"
        )
    short = [] if idle else [pair for pair in chosen if _is_short(*pair)]
    if short:
        remarks.append(
            f"{_count(short, model)} stay as they are in spite of {_names(short)}: they are "
            f"{short[0][0].dtype}, which is as short"
        )
    if alone:
        remarks.append(
            f"{_count(alone, model)} stay uncompressed in spite of {_names(alone)}: all workers "
            "are on one node, and only what crosses a network between nodes is compressed; choose "
            f"fp32, or run on several nodes {_NODES}"
        )
    elif rounded:
        remarks.append(
            f"{_count(rounded, model)} are rounded to {_names(rounded)}, and no byte is saved: all "
            "workers are on one node, and nothing crosses a network between nodes; choose fp32, or "
            f"run on several nodes {_NODES}"
        )
    return LeftOut(tuple(remarks), 0 < len(chosen) == sum(map(len, (double, alone, whole, short))))


def _is_whole(tensor: Tensor, codec: Codec) -> bool:
    """Returns whether PowerSGD sends all elements of the tensor, as in docs/compression.md."""
    if not isinstance(codec, PowerSGD) or codec.wire != FP32.name:
        return False
    rows = tensor.shape[0] if tensor.shape else 1
    columns = math.prod(tensor.shape) // max(rows, 1)
    rank = min(rows, columns, codec.rank)
    return (rows + columns) * rank * codec.min_compression_rate >= rows * columns


def _is_in_factors(tensor: Tensor, codec: Codec) -> bool:
    return isinstance(codec, PowerSGD) and not _is_whole(tensor, codec)


def _is_short(tensor: Tensor, codec: Codec) -> bool:
    """Returns whether the tensor is in another 16-bit type than that of a cast."""
    types = {"fp16": "float16", "bf16": "bfloat16"}
    return codec.name in types and tensor.dtype in {*types.values()} - {types[codec.name]}


def _idle_rules(parsed: policy.Policy, model: Sequence[Tensor]) -> list[str]:
    """Returns a remark for each rule that applies to no parameter."""
    remarks: list[str] = []
    taken: set[str] = set()
    for rule in parsed.rules:
        matching = {tensor.name for tensor in model if rule.matches(tensor.name, tensor.shape)}
        if matching <= taken:
            why = (
                f"rules before it apply to all that it matches ({_some(sorted(matching))})"
                if matching
                else f"the parameters are {_some([tensor.name for tensor in model])}"
            )
            remarks.append(f"the rule {rule.spec()!r} applies to no parameter: {why}")
        taken |= matching
    return remarks


def _longer(parsed: policy.Policy) -> list[str]:
    """Returns a remark for each codec of which it is known that it sends more than fp32."""
    return [
        f"topk with ratio={codec.ratio:g} sends at least {_BYTES_OF_TOPK * codec.ratio:.3g} times "
        "the bytes of fp32, because an entry names its place too: choose a smaller ratio, such as "
        "topk:0.01, or fp32"
        for codec in parsed.codecs
        if isinstance(codec, TopK) and _BYTES_OF_TOPK * codec.ratio >= 1
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], "…"] if len(names) > 3 else names)


def _count(pairs: Sequence[tuple[Tensor, Codec]], model: Sequence[Tensor]) -> str:
    first, more = pairs[0][0].name, ", …" if len(pairs) > 1 else ""
    return f"gradients of {len(pairs)} of {len(model)} parameters ({first}{more})"


def _names(pairs: Sequence[tuple[Tensor, Codec]]) -> str:
    return " and ".join(dict.fromkeys(codec.name for _, codec in pairs))
