"""Computes ROUGE: how much of a reference a text has, by words and by their order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import mean


def words(text: str) -> list[str]:
    """Returns the words of a text, without case and punctuation."""
    return re.findall(r"[a-z0-9]+", text.lower())


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns the mean F1 over all pairs, from 0 to 1: "rouge1" and "rouge2" count common words and
    common pairs of neighbours, "rougeL" the longest common subsequence. {} without pairs.
    """
    pairs = [(words(a), words(b)) for a, b in zip(texts, references, strict=True)]
    if not pairs:
        return {}
    return {
        "rouge1": mean(_f1(_common(a, b, 1), len(a), len(b)) for a, b in pairs),
        "rouge2": mean(_f1(_common(a, b, 2), len(a) - 1, len(b) - 1) for a, b in pairs),
        "rougeL": mean(_f1(_subsequence(a, b), len(a), len(b)) for a, b in pairs),
    }


def _f1(common: int, first: int, second: int) -> float:
    return 2 * common / (first + second) if common else 0.0


def _common(first: Sequence[str], second: Sequence[str], length: int) -> int:
    counts = [
        Counter(tuple(part[start : start + length]) for start in range(len(part) - length + 1))
        for part in (first, second)
    ]
    return (counts[0] & counts[1]).total()


def _subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    best = [0] * (len(second) + 1)
    for one in first:
        before = 0  # best[i] of the row above
        for place, other in enumerate(second):
            above = best[place + 1]
            best[place + 1] = before + 1 if one == other else max(above, best[place])
            before = above
    return best[-1]
