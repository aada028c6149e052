"""Makes mock images in the layout of ImageNet: FOLDER/{train,val}/CLASS/NUMBER.JPEG.

    python -m thalweg.examples.swin.prepare --folder data --classes 10 --train 64 --val 16

Each class has its own colours and stripes, with noise, so that a model can learn it. Files that are
there already stay as they are.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm


def paths(folder: Path, classes: int, train: int, val: int) -> Iterator[tuple[Path, int]]:
    """Yields the path of every image, and its class."""
    for part, count in (("train", train), ("val", val)):
        for label in range(classes):
            for number in range(count):
                yield folder / part / f"n{label:08d}" / f"{number:05d}.JPEG", label


def draw(label: int, classes: int, size: int, seed: int) -> Image.Image:
    """Returns an image of size x size pixels; equal arguments give equal pixels."""
    random = np.random.default_rng(seed)
    of_class = np.random.default_rng(label)
    angle = math.pi * label / classes + random.normal(0, 0.1)
    y, x = np.mgrid[0:size, 0:size] / size
    phase = (
        2
        * math.pi
        * (random.random() + (2 + label % 3) * (x * math.cos(angle) + y * math.sin(angle)))
    )
    stripes = 0.5 + 0.5 * np.sin(phase)[..., None]
    light, dark = of_class.random(3), of_class.random(3)
    pixels = stripes * light + (1 - stripes) * dark + random.normal(0, 0.15, (size, size, 3))
    return Image.fromarray((255 * pixels.clip(0, 1)).astype(np.uint8))


def prepare(
    folder: Path, *, classes: int, train: int, val: int, size: int, quiet: bool = False
) -> int:
    """Writes the images that are missing; returns how many those were.

    An image is complete or not there, also when this is interrupted.
    """
    missing = [(p, label) for p, label in paths(folder, classes, train, val) if not p.exists()]
    for path, label in tqdm(missing, desc=str(folder), unit="image", disable=quiet or not missing):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        seed = zlib.crc32(str(path.relative_to(folder)).encode())
        draw(label, classes, size, seed).save(part, format="JPEG", quality=90)
        part.replace(path)
    return len(missing)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="prepare", description="Makes mock images in the layout of ImageNet."
    )
    parser.add_argument("--folder", type=Path, default=Path("data"))
    parser.add_argument("--classes", type=_count, default=10)
    parser.add_argument("--train", type=_count, default=64, help="images per class in train/")
    parser.add_argument("--val", type=_count, default=16, help="images per class in val/")
    parser.add_argument("--size", type=_count, default=40, help="pixels; 256 for Swin-T")
    args = parser.parse_args(argv)
    made = prepare(
        args.folder, classes=args.classes, train=args.train, val=args.val, size=args.size
    )
    total = args.classes * (args.train + args.val)
    print(f"{args.folder}: {total} images in {args.classes} classes, {made} of them new")
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 100000, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
