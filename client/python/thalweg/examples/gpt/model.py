"""Defines a small GPT over bytes, 3.2 million parameters as it is trained here."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

_TOKENS = 256


class _Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.dense1 = nn.Linear(width, 4 * width)
        self.dense2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        qkv = self.project(self.norm1(x)).view(batch, count, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, count, width))
        return x + self.dense2(functional.gelu(self.dense1(self.norm2(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Predicts the next byte; input and output share their embedding."""

    def __init__(self, width: int = 256, blocks: int = 4, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_TOKENS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        for each in (self.tokens, self.places):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the mean loss of all bytes of int64 [batch, length + 1] but the first ones."""
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(given) + self.places.weight[: given.shape[1]]
        scores = self.norm(self.blocks(x)) @ self.tokens.weight.T
        return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())
