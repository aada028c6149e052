"""Mixes pairs of images, and their labels, while a batch is collated."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import default_collate

_MODES = ("batch", "pair", "elem")


class CollateMixup:
    """Collates (image, label) samples and mixes each image with the one opposite in the batch.

    Given to a DataLoader as `collate_fn`, it runs in the loader's processes. What it returns has
    the distribution of timm's Mixup with the same arguments applied to the collated batch. Random
    numbers follow torch's seed in the process that collates, and so differ between processes.

    Mixup adds share λ of an image to share 1-λ of the other, λ ~ Beta(alpha, alpha); CutMix
    replaces a box of that share. Labels are mixed by the same shares.

    Args:
        mixup_alpha: of the distribution of λ in mixup; 0: mixup is not used.
        cutmix_alpha: the same for CutMix.
        cutmix_minmax: smallest and largest side of the box, as shares of the image's sides, instead
            of a box by λ.
        prob: share of batches, pairs or elements that are mixed at all.
        switch_prob: share of these that CutMix gets where both ways are used.
        mode: "batch": one λ for all; "pair": one for each two opposite images; "elem": one for
            each.
        label_smoothing: share of each label that is spread over all classes.
        num_classes: number of classes.

    Raises:
        ValueError: an argument is outside of its range.
    """

    def __init__(  # noqa: PLR0917 - timm's order
        self,
        mixup_alpha: float = 1.0,
        cutmix_alpha: float = 0.0,
        cutmix_minmax: tuple[float, float] | None = None,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        mode: str = "batch",
        label_smoothing: float = 0.1,
        num_classes: int = 1000,
    ) -> None:
        for name, share in (
            ("prob", prob),
            ("switch_prob", switch_prob),
            ("label_smoothing", label_smoothing),
        ):
            if not 0 <= share <= 1:
                raise ValueError(f"thalweg: {name} is {share}, expected a number from 0 to 1")
        if mode not in _MODES:
            raise ValueError(f"thalweg: mode is {mode!r}, expected one of {', '.join(_MODES)}")
        if mixup_alpha < 0 or cutmix_alpha < 0:
            raise ValueError(
                f"thalweg: mixup_alpha is {mixup_alpha} and cutmix_alpha {cutmix_alpha}, expected "
                "0 or more"
            )
        if cutmix_minmax is not None and not 0 < cutmix_minmax[0] <= cutmix_minmax[1] <= 1:
            raise ValueError(
                f"thalweg: cutmix_minmax is {cutmix_minmax}, expected two shares of a side such as "
                "(0.2, 0.8)"
            )
        if mixup_alpha == 0 and cutmix_alpha == 0 and cutmix_minmax is None:
            raise ValueError("thalweg: neither mixup_alpha nor cutmix_alpha is positive")
        if num_classes < 1:
            raise ValueError(f"thalweg: num_classes is {num_classes}, expected 1 or more")
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = 1.0 if cutmix_minmax is not None else cutmix_alpha
        self.cutmix_minmax = cutmix_minmax
        self.prob = prob
        self.switch_prob = switch_prob
        self.mode = mode
        self.label_smoothing = label_smoothing
        self.num_classes = num_classes

    def __call__(
        self, samples: list[tuple[torch.Tensor, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns mixed images (n, channels, height, width), and targets (n, num_classes), float32.

        Raises ValueError unless the number of samples is even.
        """
        images, labels = default_collate(samples)
        count = len(labels)
        if count % 2:
            raise ValueError(
                f"thalweg: the batch has {count} samples, expected an even number: samples are "
                "mixed in pairs (let the loader drop_last)"
            )
        random = np.random.default_rng(int(torch.randint(2**63 - 1, (), device="cpu")))
        others = images.flip(0)
        mixed = images.clone()
        kept = torch.ones(count, device=labels.device)
        for rows in self._groups(count):
            if random.random() < self.prob:
                kept[rows] = self._mix(mixed, others, rows, random)
        own, opposite = self._smooth(labels), self._smooth(labels.flip(0))
        return mixed, kept[:, None] * own + (1 - kept[:, None]) * opposite

    def _groups(self, count: int) -> list[list[int]]:
        """Returns the rows that are mixed by the same shares."""
        if self.mode == "batch":
            return [list(range(count))]
        if self.mode == "pair":
            return [[row, count - 1 - row] for row in range(count // 2)]
        return [[row] for row in range(count)]

    def _mix(
        self,
        mixed: torch.Tensor,
        others: torch.Tensor,
        rows: list[int],
        random: np.random.Generator,
    ) -> float:
        """Mixes rows in place; returns the share that is kept of each."""
        both = self.mixup_alpha > 0 and self.cutmix_alpha > 0
        cuts = random.random() < self.switch_prob if both else self.cutmix_alpha > 0
        alpha = self.cutmix_alpha if cuts else self.mixup_alpha
        kept = float(random.beta(alpha, alpha))
        if not cuts:
            mixed[rows] = mixed[rows] * kept + others[rows] * (1 - kept)
            return kept
        height, width = mixed.shape[-2:]
        top, bottom = self._cut(height, kept, random)
        left, right = self._cut(width, kept, random)
        mixed[rows, ..., top:bottom, left:right] = others[rows, ..., top:bottom, left:right]
        return 1 - (bottom - top) * (right - left) / (height * width)

    def _cut(self, side: int, kept: float, random: np.random.Generator) -> tuple[int, int]:
        """Returns begin and end of the box along a side of that many pixels."""
        if self.cutmix_minmax is not None:
            low, high = (int(side * share) for share in self.cutmix_minmax)
            length = int(random.integers(low, max(low + 1, high)))
            begin = int(random.integers(0, side - length + 1))
            return begin, begin + length
        length = int(side * (1 - kept) ** 0.5)
        centre = int(random.integers(0, side))
        begin = centre - length // 2
        return max(0, begin), min(side, begin + length)

    def _smooth(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns labels (n) as shares of classes (n, num_classes)."""
        off = self.label_smoothing / self.num_classes
        targets = torch.full((len(labels), self.num_classes), off, device=labels.device)
        return targets.scatter_(1, labels[:, None], 1 - self.label_smoothing + off)
