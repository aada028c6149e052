"""Tests CollateMixup beside timm's Mixup."""

import numpy as np
import pytest
import torch
from timm.data import Mixup
from torch.utils.data import DataLoader

from thalweg.data import CollateMixup

SIZE, CLASSES, BATCH, BATCHES = 16, 5, 4, 400
# Two samples of n numbers from one distribution are further apart than this (Kolmogorov-Smirnov)
# with probability 2 exp(-2 x^2), x = threshold * sqrt(n / 2): 0.07 % for x = 2.
APART = 2 / (BATCHES / 2) ** 0.5

WAYS = {
    "mixup": {"mixup_alpha": 0.8, "cutmix_alpha": 0.0},
    "cutmix": {"mixup_alpha": 0.0, "cutmix_alpha": 1.0},
    "minmax": {"mixup_alpha": 0.0, "cutmix_minmax": (0.2, 0.8)},
    "both": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "prob": 0.7, "switch_prob": 0.4},
}


def samples():
    """Returns images whose pixels are all their number, and labels that tell them apart."""
    return [(torch.full((1, SIZE, SIZE), float(i)), i) for i in range(BATCH)]


def features(images, targets):
    """Returns numbers of one mixed batch: the share of the first image's own label, the share of
    its pixels that are its own, and where replaced pixels begin.
    """
    first = images[0, 0].numpy()
    rows, columns = np.nonzero(first == BATCH - 1)
    begin = (rows.min(), columns.min()) if len(rows) else (-1, -1)
    return [targets[0, 0].item(), (first == 0).mean(), *begin]


def ours(mode, **way):
    collate = CollateMixup(mode=mode, label_smoothing=0.0, num_classes=CLASSES, **way)
    torch.manual_seed(1)
    return np.array([features(*collate(samples())) for _ in range(BATCHES)])


def theirs(mode, **way):
    mixup = Mixup(mode=mode, label_smoothing=0.0, num_classes=CLASSES, **way)
    np.random.seed(2)
    drawn = []
    for _ in range(BATCHES):
        images = torch.stack([image for image, _ in samples()])
        drawn.append(features(*mixup(images, torch.arange(BATCH))))
    return np.array(drawn)


def distance(one, other):
    """Returns the largest difference of two samples' distribution functions."""
    every = np.concatenate([one, other])
    ranks = [np.searchsorted(np.sort(sample), every, side="right") for sample in (one, other)]
    return np.abs(ranks[0] / len(one) - ranks[1] / len(other)).max()


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("way", WAYS)
def test_mixed_batches_have_the_distribution_of_timms(way, mode):
    found, expected = ours(mode, **WAYS[way]), theirs(mode, **WAYS[way])
    for column in range(found.shape[1]):
        assert distance(found[:, column], expected[:, column]) < APART


def test_distance_tells_other_distributions_apart():
    found = ours("batch", mixup_alpha=0.8)
    expected = theirs("batch", mixup_alpha=0.3)
    assert distance(found[:, 0], expected[:, 0]) > APART


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_labels_are_mixed_by_the_shares_of_the_pixels(mode):
    collate = CollateMixup(0.8, 1.0, mode=mode, label_smoothing=0.0, num_classes=BATCH)
    torch.manual_seed(3)
    for _ in range(50):
        images, targets = collate(samples())
        means = images.mean((1, 2, 3))
        # Pixels are their image's number, so their mean is the label's under the same shares.
        torch.testing.assert_close(targets @ torch.arange(float(BATCH)), means, atol=1e-5, rtol=0)


def test_smoothing_spreads_its_share_over_all_classes():
    collate = CollateMixup(1.0, prob=0.0, label_smoothing=0.2, num_classes=4)
    _, targets = collate(samples())
    torch.testing.assert_close(targets, torch.full((4, 4), 0.05) + 0.8 * torch.eye(4))


def test_processes_of_a_loader_mix_differently_and_follow_the_seed():
    def draw(seed):
        torch.manual_seed(seed)
        collate = CollateMixup(0.8, num_classes=CLASSES)
        loader = DataLoader(samples() * 2, BATCH, num_workers=2, collate_fn=collate)
        return [targets[0].tolist() for _, targets in loader]

    first = draw(1)
    assert first[0] != first[1]  # of two processes
    assert draw(1) == first != draw(2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "all"}, "mode is 'all', expected one of batch, pair, elem"),
        ({"prob": 1.5}, "prob is 1.5"),
        ({"mixup_alpha": 0}, "neither mixup_alpha nor cutmix_alpha is positive"),
        ({"mixup_alpha": -1}, "mixup_alpha is -1"),
        ({"cutmix_minmax": (0.8, 0.2)}, r"cutmix_minmax is \(0.8, 0.2\)"),
        ({"num_classes": 0}, "num_classes is 0"),
    ],
)
def test_malformed_arguments_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        CollateMixup(**arguments)


def test_odd_batches_are_refused():
    with pytest.raises(ValueError, match="has 3 samples, expected an even number"):
        CollateMixup()(samples()[:3])
