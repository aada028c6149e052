"""Makes a text of what every machine with Python has: the sources of the standard library."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idle_test", "encodings"}
_TEST_SHARE = 20  # one of so many files is for testing


class Text(NamedTuple):
    """Bytes, as tokens from 0 to 255."""

    train: Tensor  # uint8 [bytes]
    test: Tensor

    def batch(self, count: int, length: int, seed: int) -> Tensor:
        """Returns int64 [count, length + 1]: pieces of the training text from random places."""
        random = torch.Generator().manual_seed(seed)
        begins = torch.randint(len(self.train) - length, (count, 1), generator=random)
        return self.train[begins + torch.arange(length + 1)].long()

    def tests(self, count: int, length: int) -> Tensor:
        """Returns int64 [count, length + 1]: pieces of the test text, evenly spread."""
        begins = torch.linspace(0, len(self.test) - length - 1, count).long().unsqueeze(1)
        return self.test[begins + torch.arange(length + 1)].long()


def load() -> Text:
    """Reads the files in the order of their names; the same on machines with the same Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _LEFT_OUT.intersection(name.parts):
            is_test = zlib.crc32(str(name).encode()) % _TEST_SHARE == 0
            parts[is_test].append(path.read_bytes())
    train, test = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return Text(train, test)
