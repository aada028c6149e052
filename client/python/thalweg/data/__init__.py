"""Brings batches to the device ahead of time, and mixes images where they are loaded.

    loader = DataLoader(dataset, 32, num_workers=4, pin_memory=True,
                        collate_fn=thalweg.data.CollateMixup(mixup_alpha=0.8, num_classes=1000))
    for images, targets in (batches := thalweg.data.DevicePrefetcher(loader, "cuda")):
        ...
    print(batches.wait_seconds)

`wait_seconds` is the time for which training has waited for data.
"""

from thalweg.data._mixup import CollateMixup
from thalweg.data._prefetcher import DevicePrefetcher

__all__ = ["CollateMixup", "DevicePrefetcher"]
