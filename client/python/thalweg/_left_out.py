"""Says what a policy asks for and does not get, where this is known when a job begins: parameters
that a codec leaves as they are, and rules without parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thalweg import policy
from thalweg._topology import Tensor
from thalweg.codecs import FP32, WIRE_TYPES, Codec


class LeftOut(NamedTuple):
    """Says what a codec was chosen for and does not do."""

    remarks: tuple[str, ...] = ()  # one for each reason
    everything: bool = False  # nothing is left that it does


NOTHING = LeftOut()


def find(codec: str, model: Sequence[Tensor], num_nodes: int) -> LeftOut:
    """Judges the policy `codec`, in its text form, by the codec of each parameter."""
    parsed = policy.parse(codec)
    remarks = _idle_rules(parsed, model)
    chosen = [(tensor, parsed.codec_of(tensor.name, tensor.shape)) for tensor in model]
    chosen = [(tensor, codec) for tensor, codec in chosen if not isinstance(codec, FP32)]
    double = [(tensor, codec) for tensor, codec in chosen if tensor.dtype == "float64"]
    # fp16 and bf16 are not among them: they round the gradients of a single node, too.
    alone = [
        (tensor, codec)
        for tensor, codec in chosen
        if num_nodes == 1 and tensor.dtype != "float64" and codec.name not in WIRE_TYPES
    ]
    if double:
        remarks.append(
            f"{_count(double, model)} stay uncompressed in spite of {_names(double)}: they are "
            "float64, which no codec shortens; train in float32 if they should be compressed"
        )
    if alone:
        remarks.append(
            f"{_count(alone, model)} stay uncompressed in spite of {_names(alone)}: all workers "
            "are on one node, and only what crosses a network between nodes is compressed; choose "
            "fp32, or run on several nodes"
        )
    return LeftOut(tuple(remarks), 0 < len(chosen) == len(double) + len(alone))


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


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], "…"] if len(names) > 3 else names)


def _count(pairs: Sequence[tuple[Tensor, Codec]], model: Sequence[Tensor]) -> str:
    first, more = pairs[0][0].name, ", …" if len(pairs) > 1 else ""
    return f"gradients of {len(pairs)} of {len(model)} parameters ({first}{more})"


def _names(pairs: Sequence[tuple[Tensor, Codec]]) -> str:
    return " and ".join(dict.fromkeys(codec.name for _, codec in pairs))
