"""Makes a wheel that Debian 12 has built one for all with glibc 2.34 and GCC 11's libstdc++.

Usage: repair_wheel.py WHEEL FOLDER: writes the repaired wheel into the folder and prints its path.

auditwheel copies the libraries that such systems lack into the wheel, under names that no other
package has, and refuses what needs newer symbols of the system's libraries.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from auditwheel.wheeltools import InWheelCtx
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

# RHEL 9's; Ubuntu has had newer ones since 22.04, Debian since 12.
PLATFORM = "manylinux_2_34_x86_64"
BUILT_FOR = "manylinux_2_35_x86_64"
# The extension finds torch's libraries in the process.
FROM_TORCH = ("libtorch*.so*", "libc10*.so*", "libshm.so*", "libgomp*.so*")

# GCC 12 gave this function a new version because it lost its `noexcept`, which matters only to
# pthread_cancel(). Older libstdc++ have it under the old version.
NEW, OLD = b"GLIBCXX_3.4.30", b"GLIBCXX_3.4.11"
RENAMED = "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"


def main() -> None:
    wheel, target = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as work:
        repair(wheel, BUILT_FOR, Path(work) / "bundled", "--strip", "--no-update-tags")
        bundled, lowered = Path(work) / "bundled" / wheel.name, Path(work) / wheel.name
        with InWheelCtx(bundled, lowered) as content:
            for path in content.path.rglob("*"):
                if path.is_file():
                    lower(path)
        repair(lowered, PLATFORM, target, "--only-plat")
    print(target / wheel.name.replace("linux_x86_64", PLATFORM))


def repair(wheel: Path, platform: str, folder: Path, *options: str) -> None:
    """Lets auditwheel write the wheel for this platform into the folder."""
    excluded = [f"--exclude={name}" for name in FROM_TORCH]
    fixed = (f"--plat={platform}", f"--wheel-dir={folder}")
    command = ["auditwheel", "repair", *fixed, *excluded, *options, str(wheel)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def lower(path: Path) -> None:
    """Makes a program or library ask for RENAMED in its old version.

    Raises ValueError when it needs something else in the new version.
    """
    with path.open("r+b") as file:
        try:
            elf = ELFFile(file)
        except ELFError:
            return
        needs = elf.get_section_by_name(".gnu.version_r")
        if needs is None:
            return
        for offset, needed in list(auxiliaries(needs)):
            if needed.name.encode() != NEW:
                continue
            number = needed["vna_other"]
            others = set(symbols(elf, number)) - {RENAMED}
            if others:
                raise ValueError(f"{path.name} needs {NEW.decode()} for {', '.join(others)}")
            rename(file, elf, offset)


def auxiliaries(needs: GNUVerNeedSection) -> Iterator[tuple[int, Any]]:
    """Yields the offset in the file and the entry of each version that is needed."""
    at = needs["sh_offset"]
    for need, entries in needs.iter_versions():
        where = at + need["vn_aux"]
        for entry in entries:
            yield where, entry
            where += entry["vna_next"]
        at += need["vn_next"]


def symbols(elf: ELFFile, number: int) -> Iterator[str]:
    """Yields the names of the symbols that are needed in the version of this number."""
    versions = elf.get_section_by_name(".gnu.version")
    for version, symbol in zip(
        versions.iter_symbols(), elf.get_section_by_name(".dynsym").iter_symbols(), strict=True
    ):
        if version["ndx"] == number:
            yield symbol.name


def rename(file: BinaryIO, elf: ELFFile, offset: int) -> None:
    """Replaces the name and the hash of the version whose entry lies at this offset."""
    file.seek(offset)
    _, flags, other, name, following = struct.unpack("<IHHII", file.read(16))
    file.seek(offset)
    file.write(struct.pack("<IHHII", elf_hash(OLD), flags, other, name, following))
    file.seek(elf.get_section_by_name(".dynstr")["sh_offset"] + name)
    file.write(OLD)  # as long as NEW, which no other entry can share: it is a version's name


def elf_hash(name: bytes) -> int:
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


if __name__ == "__main__":
    main()
