"""Says which parameters a codec leaves as they are, where this is known when a job begins."""

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
    chosen = [(tensor, _codec_of(tensor, parsed)) for tensor in model]
    chosen = [(tensor, codec) for tensor, codec in chosen if not isinstance(codec, FP32)]
    double = [(tensor, codec) for tensor, codec in chosen if tensor.dtype == "float64"]
    # fp16 and bf16 are not among them: they round the gradients of a single node, too.
    alone = [
        (tensor, codec)
        for tensor, codec in chosen
        if num_nodes == 1 and tensor.dtype != "float64" and codec.name not in WIRE_TYPES
    ]
    remarks = []
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


def _codec_of(tensor: Tensor, parsed: policy.Policy) -> Codec:
    applying = (rule.codec for rule in parsed.rules if rule.matches(tensor.name, tensor.shape))
    return next(applying, parsed.default)


def _count(pairs: Sequence[tuple[Tensor, Codec]], model: Sequence[Tensor]) -> str:
    first, more = pairs[0][0].name, ", …" if len(pairs) > 1 else ""
    return f"gradients of {len(pairs)} of {len(model)} parameters ({first}{more})"


def _names(pairs: Sequence[tuple[Tensor, Codec]]) -> str:
    return " and ".join(dict.fromkeys(codec.name for _, codec in pairs))
