"""Loads images from folders, in equal shares for all workers, mixed and ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, UnidentifiedImageError
from timm.data import Mixup
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from thalweg.data import CollateMixup, DevicePrefetcher
from thalweg.examples.swin import SwinError
from thalweg.examples.swin.config import Augmentation, Config
from thalweg.examples.swin.folders import PREPARE, folder_of
from thalweg.examples.swin.model import variant_of

# By the mean and deviation of ImageNet's channels.
_NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Batch = tuple[torch.Tensor, torch.Tensor]


class Loaders(NamedTuple):
    """The data of one worker."""

    train: DevicePrefetcher[Batch]
    val: DevicePrefetcher[Batch]
    own_val: int  # so many images at the beginning of `val` are no other worker's as well
    sampler: DistributedSampler[Any]  # of `train`
    random: torch.Generator  # which seeds the processes that load `train`
    mixup: Mixup | None  # what the loop applies; None: nothing, or the loader has done so
    num_classes: int

    def begin_epoch(self, epoch: int) -> None:
        """Chooses the epoch's order, and what the processes that load draw. Neither depends on
        earlier epochs, so that a resumed training has the same.
        """
        self.sampler.set_epoch(epoch)
        place = self.sampler.num_replicas * epoch + self.sampler.rank
        self.random.manual_seed(self.sampler.seed + place)


def load(config: Config, device: torch.device) -> Loaders:
    """Opens the folders of DATA.PATH. Raises SwinError that says what is missing there."""
    size = variant_of(config.MODEL.NAME).img_size
    train = _images(
        folder_of(config.DATA.PATH, "train"),
        transforms.RandomResizedCrop(size, scale=(0.6, 1.0)),
        transforms.RandomHorizontalFlip(),
    )
    val = _images(
        folder_of(config.DATA.PATH, "val"), transforms.Resize(size), transforms.CenterCrop(size)
    )
    if val.classes != train.classes:
        differing = sorted(set(val.classes) ^ set(train.classes))
        raise SwinError(
            f"{config.DATA.PATH}: train/ and val/ have different classes, such as {differing[0]}"
        )
    classes = len(train.classes)
    mix = _mixing(config.AUG, config.MODEL.LABEL_SMOOTHING, classes)
    collate = CollateMixup(**mix) if mix and config.AUG.COLLATE_MIXUP else None
    sampler: DistributedSampler[Any] = DistributedSampler(train, seed=config.SEED, drop_last=True)
    random = torch.Generator()
    batches = _loader(config, train, sampler, random, collate, drop_last=True)
    if len(batches) < config.TRAIN.ACCUMULATION_STEPS:
        raise SwinError(
            f"{config.DATA.PATH} has {len(train)} images to train on, {len(sampler)} per worker: "
            f"too few for one update of TRAIN.ACCUMULATION_STEPS {config.TRAIN.ACCUMULATION_STEPS} "
            f"x DATA.BATCH_SIZE {config.DATA.BATCH_SIZE}; make more with {PREPARE} "
            f"{config.DATA.PATH} --train NUMBER"
        )
    in_order: DistributedSampler[Any] = DistributedSampler(val, shuffle=False)
    tested = _loader(config, val, in_order, torch.Generator(), None, drop_last=False)
    depth = config.DATA.PREFETCH
    return Loaders(
        DevicePrefetcher(batches, device, depth=depth),
        DevicePrefetcher(tested, device, depth=depth),
        len(range(in_order.rank, len(val), in_order.num_replicas)),
        sampler,
        random,
        Mixup(**mix) if mix and collate is None else None,
        classes,
    )


def _images(folder: Path, *steps: Callable[[Any], Any]) -> ImageFolder:
    """Returns the images of a folder. Raises SwinError if there are none."""
    transform = transforms.Compose([*steps, transforms.ToTensor(), _NORMALIZE])
    try:
        return ImageFolder(str(folder), transform=transform, loader=_open)
    except FileNotFoundError as error:
        raise SwinError(f"{folder} has no images in folders by class: {error}") from None


def _open(path: str) -> Image.Image:
    """Returns the image. Raises SwinError with its path if it is broken."""
    try:
        with Image.open(path) as image:
            converted: Image.Image = image.convert("RGB")
            return converted
    except (OSError, UnidentifiedImageError) as error:
        raise SwinError(
            f"{path} cannot be read as an image: {error}; delete it, and let {PREPARE} … make it "
            "anew"
        ) from None


def _mixing(aug: Augmentation, smoothing: float, classes: int) -> dict[str, Any]:
    """Returns the arguments of Mixup and CollateMixup; empty: nothing is mixed."""
    if not aug.mixes:
        return {}
    return {
        "mixup_alpha": aug.MIXUP,
        "cutmix_alpha": aug.CUTMIX,
        "cutmix_minmax": aug.CUTMIX_MINMAX,
        "prob": aug.MIXUP_PROB,
        "switch_prob": aug.MIXUP_SWITCH_PROB,
        "mode": aug.MIXUP_MODE,
        "label_smoothing": smoothing,
        "num_classes": classes,
    }


def _loader(
    config: Config,
    images: ImageFolder,
    sampler: DistributedSampler[Any],
    random: torch.Generator,
    collate: CollateMixup | None,
    *,
    drop_last: bool,
) -> DataLoader[Batch]:
    """`random` seeds the processes, which are new in each epoch; torch's own generator, which a
    checkpoint has, draws for the model alone where there are some.
    """
    return DataLoader(
        images,
        config.DATA.BATCH_SIZE,
        sampler=sampler,
        num_workers=config.DATA.NUM_WORKERS,
        generator=random,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        drop_last=drop_last,
    )
