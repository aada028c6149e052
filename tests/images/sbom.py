"""Lists the contents of the built images as CycloneDX 1.6: IMAGES/NAME.cdx.json for each.

Usage: sbom.py IMAGES

Debian's packages, Python's, and those Debian packages whose libraries the wheel has brought from
where it was built. Exit code 1 when a document does not follow CycloneDX's own schema, or a library
that was brought is of no package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from container import Image
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parents[2]
_STATUS, _LISTS = "/var/lib/dpkg/status", "/var/lib/dpkg/info"


def main() -> None:
    images = Path(sys.argv[1]).resolve()
    built_in = Image.load(images / "build.json")
    for name in ("aggregator", "sidecar", "training"):
        bom = describe(name, Image.load(images / f"{name}.json"), built_in)
        text = JsonV1Dot6(bom).output_as_string(indent=1)
        if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
            sys.exit(f"{name}: {error}")
        (images / f"{name}.cdx.json").write_text(text, encoding="utf-8")
        print(f"{name}.cdx.json: {len(bom.components)} components")


def describe(name: str, image: Image, built_in: Image) -> Bom:
    """Describes an image; `built_in` is the stage that the wheel and its libraries come from."""
    version = thalweg_version()
    kind = ComponentType.CONTAINER
    bom = Bom()
    bom.metadata.component = Component(name=f"thalweg-{name}", version=version, type=kind)
    bom.components.update(debian(packages(image)))
    installed = packages(built_in)
    brought = {owner(library, built_in) for library in libraries(image)}
    bom.components.update(debian({package: installed[package] for package in brought}))
    bom.components.update(python(image))
    if name != "training":  # in that image it is a Python package
        bom.components.add(
            Component(name="thalweg", version=version, type=ComponentType.APPLICATION)
        )
    bom.register_dependency(bom.metadata.component, bom.components)
    return bom


def packages(image: Image) -> dict[str, tuple[str, str]]:
    """Returns the versions and architectures of Debian's packages, by name."""
    status = image.find(_STATUS)
    assert status is not None
    result = {}
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^(\S+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            result[fields["Package"]] = (fields["Version"], fields["Architecture"])
    return result


def debian(found: dict[str, tuple[str, str]]) -> Iterator[Component]:
    for name, (version, architecture) in found.items():
        url = PackageURL("deb", "debian", name, version, {"arch": architecture})
        yield Component(name=name, version=version, purl=url, bom_ref=url.to_string())


def libraries(image: Image) -> list[str]:
    """Returns the names of the shared libraries that came with the wheel."""
    folders = [Path(layer, "opt/thalweg/lib") for layer in image.layers]
    folders += [
        folder
        for layer in image.layers
        for folder in Path(layer).glob("opt/venv/lib/python3*/site-packages/thalweg/lib")
    ]
    return sorted({file.name for folder in folders for file in folder.glob("*.so*")})


def owner(library: str, image: Image) -> str:
    """Returns the Debian package that has a library of that name."""
    for layer in image.layers:
        for listing in Path(layer, _LISTS.lstrip("/")).glob("*.list"):
            if f"/{library}\n" in listing.read_text(encoding="utf-8"):
                return listing.stem.partition(":")[0]
    sys.exit(f"{library}: no package of the build stage has it")


def python(image: Image) -> Iterator[Component]:
    for layer in image.layers:
        for path in Path(layer).glob("opt/venv/lib/python3*/site-packages/*.dist-info/METADATA"):
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
