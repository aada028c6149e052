"""Lists the contents of built images as CycloneDX 1.6: OUT/NAME.cdx.json for each.

Usage: sbom.py OUT BUILT_IN NAME…     of the images localhost/thalweg-NAME, in podman's storage

Debian's packages, Python's, and those Debian packages whose libraries the wheel has brought from
where it was built: the image BUILT_IN, or this machine if that is `/`. Exit code 1 when a document
does not follow CycloneDX's own schema, or a library that was brought is of no package.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parents[2]
_STATUS, _LISTS = "var/lib/dpkg/status", "var/lib/dpkg/info"
_SITE_PACKAGES = "opt/venv/lib/python3*/site-packages"


def main() -> None:
    out, built_in, *names = sys.argv[1:]
    with mounted(built_in) as builder:
        for name in names:
            with mounted(f"localhost/thalweg-{name}") as image:
                bom = describe(name, image, builder)
            text = JsonV1Dot6(bom).output_as_string(indent=1)
            if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
                sys.exit(f"{name}: {error}")
            Path(out, f"{name}.cdx.json").write_text(text, encoding="utf-8")
            print(f"{out}/{name}.cdx.json: {len(bom.components)} components")


@contextlib.contextmanager
def mounted(image: str) -> Iterator[Path]:
    """Mounts an image's file system; `/` is this machine's."""
    if image == "/":
        yield Path("/")
        return
    mount = ["podman", "image", "mount", image]
    result = subprocess.run(mount, check=True, stdout=subprocess.PIPE, text=True)
    try:
        yield Path(result.stdout.strip())
    finally:
        unmount = ["podman", "image", "unmount", image]
        subprocess.run(unmount, check=True, stdout=subprocess.DEVNULL)


def describe(name: str, image: Path, builder: Path) -> Bom:
    """Describes an image; the wheel and its libraries come from `builder`."""
    version = thalweg_version()
    kind = ComponentType.CONTAINER
    bom = Bom()
    bom.metadata.component = Component(name=f"thalweg-{name}", version=version, type=kind)
    bom.components.update(debian(packages(image)))
    installed = packages(builder)
    brought = {owner(library, builder) for library in libraries(image)}
    bom.components.update(debian({package: installed[package] for package in brought}))
    bom.components.update(python(image))
    if name != "training":  # in that image it is a Python package
        bom.components.add(
            Component(name="thalweg", version=version, type=ComponentType.APPLICATION)
        )
    bom.register_dependency(bom.metadata.component, bom.components)
    return bom


def packages(image: Path) -> dict[str, tuple[str, str]]:
    """Returns the versions and architectures of Debian's packages, by name."""
    result = {}
    for paragraph in (image / _STATUS).read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^(\S+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            result[fields["Package"]] = (fields["Version"], fields["Architecture"])
    return result


def debian(found: dict[str, tuple[str, str]]) -> Iterator[Component]:
    for name, (version, architecture) in found.items():
        url = PackageURL("deb", "debian", name, version, {"arch": architecture})
        yield Component(name=name, version=version, purl=url, bom_ref=url.to_string())


def libraries(image: Path) -> list[str]:
    """Returns the names of the shared libraries that came with the wheel."""
    folders = [image / "opt/thalweg/lib", *image.glob(f"{_SITE_PACKAGES}/thalweg/lib")]
    return sorted({file.name for folder in folders for file in folder.glob("*.so*")})


def owner(library: str, image: Path) -> str:
    """Returns the Debian package that has a library of that name."""
    for listing in (image / _LISTS).glob("*.list"):
        if f"/{library}\n" in listing.read_text(encoding="utf-8"):
            return listing.stem.partition(":")[0]
    sys.exit(f"{library}: no package of {image} has it")


def python(image: Path) -> Iterator[Component]:
    for path in image.glob(f"{_SITE_PACKAGES}/*.dist-info/METADATA"):
        metadata = Parser().parsestr(path.read_text(encoding="utf-8"), headersonly=True)
        name, version = str(metadata["Name"]), str(metadata["Version"])
        url = PackageURL("pypi", None, name.lower().replace("_", "-"), version)
        yield Component(name=name, version=version, purl=url, bom_ref=url.to_string())


def thalweg_version() -> str:
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    match = re.search(r"project\(thalweg VERSION ([0-9.]+)", text)
    assert match is not None
    return match[1]


if __name__ == "__main__":
    main()
