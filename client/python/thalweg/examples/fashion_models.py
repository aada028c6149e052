"""Defines small models for the 28 x 28 images of Fashion-MNIST: `MODELS` by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

_CLASSES = 10


class Cnn(nn.Module):
    """Two convolutions, two dense layers, 0.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.dense1 = nn.Linear(32 * 7 * 7, 128)
        self.dense2 = nn.Linear(128, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.dense1(x.flatten(1)))
        return self.dense2(x)  # type: ignore[no-any-return]


class _Residual(nn.Module):
    """Two 3 x 3 convolutions beside an identity; beside a 1 x 1 one where shapes change."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, out)
        same = channels == out and stride == 1
        self.beside = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(x)) + self.beside(images))


class ResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels, one residual block each, 78 thousand parameters.

    It uses group norm, because batch norm would make replicas depend on the distribution of images.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, 16)
        self.stages = nn.Sequential(
            _Residual(16, 16, 1), _Residual(16, 32, 2), _Residual(32, 64, 2)
        )
        self.head = nn.Linear(64, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stages(functional.relu(self.norm(self.stem(images))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    """Multi-head self-attention and a two-layer perceptron, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.dense1 = nn.Linear(width, 2 * width)
        self.dense2 = nn.Linear(2 * width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, count, width = tokens.shape
        qkv = self.project(self.norm1(tokens)).view(batch, count, 3, self.heads, -1)
        mixed = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        x = tokens + self.join(mixed.transpose(1, 2).reshape(batch, count, width))
        return x + self.dense2(functional.gelu(self.dense1(self.norm2(x))))  # type: ignore[no-any-return]


class Vit(nn.Module):
    """16 patches of 7 x 7 pixels, four attention blocks of width 64, 0.14 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 64, 7, stride=7)
        self.position = nn.Parameter(torch.randn(1, 16, 64) * 0.02)
        self.blocks = nn.Sequential(*(_Attention(64, heads=4) for _ in range(4)))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": Cnn, "resnet": ResNet, "vit": Vit}
