"""Builds the models: timm's Swin-T, and a tiny variant for CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thalweg.examples.swin import SwinError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Variant:
    """Describes a Swin Transformer; stage k has embed_dim * 2^k channels and a quarter of the
    tokens of the stage before.
    """

    img_size: int  # pixels of each side
    patch_size: int
    window_size: int
    embed_dim: int
    depths: tuple[int, ...]  # blocks of each stage
    num_heads: tuple[int, ...]


# The tiny one has 4.9 million parameters, most of which see one token: its gradients are large
# beside what it computes, as they are in training on fast accelerators behind slow links.
MODELS = {
    "swin_tiny": Variant(224, 4, 7, 96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "tiny": Variant(32, 4, 4, 64, (1, 1, 1, 1), (2, 4, 8, 16)),
}


def variant_of(name: str) -> Variant:
    """Returns the variant of that name. Raises SwinError."""
    if name not in MODELS:
        raise SwinError(f"MODEL.NAME is {name!r}, expected one of {', '.join(MODELS)}")
    return MODELS[name]


def build(name: str, num_classes: int, drop_path_rate: float) -> nn.Module:
    """Returns a model that maps (n, 3, img_size, img_size) to (n, num_classes) logits."""
    from timm.models.swin_transformer import SwinTransformer

    variant: dict[str, Any] = vars(variant_of(name))
    model: nn.Module = SwinTransformer(
        **variant, num_classes=num_classes, drop_path_rate=drop_path_rate
    )
    return model
