"""JSON schemas for kubeconform, from what Kubernetes and operators publish.

Usage: schemas.py swagger SWAGGER_JSON OUT   api/openapi-spec/swagger.json of k8s.io/kubernetes
       schemas.py crds CRD_YAML… OUT         CustomResourceDefinitions, one document per file

OUT gets KIND-GROUP-VERSION.json, as kubeconform -schema-location
'OUT/{{.ResourceKind}}{{.KindSuffix}}.json' looks for them. Unknown properties are refused. A schema
knows shapes and types; what only the API server checks (selectors that do not match their template,
names that are too long) it does not see.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

# Quantities and ports are either a number or a name.
_INT_OR_STRING = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"


def strict(node: Any) -> Any:
    """Returns `node` of an OpenAPI schema as a JSON schema that refuses unknown properties."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    # The check is for True: a schema of schemas has properties of these names.
    if node.get("format") == "int-or-string" or node.get("x-kubernetes-int-or-string") is True:
        return _INT_OR_STRING
    result = {key: strict(value) for key, value in node.items()}
    lax = node.get("x-kubernetes-preserve-unknown-fields") is True
    if isinstance(node.get("properties"), dict) and node.get("type") == "object" and not lax:
        result.setdefault("additionalProperties", False)
    return result


def file_name(group: str, version: str, kind: str) -> str:
    """Returns kubeconform's {{.ResourceKind}}{{.KindSuffix}}, with the group's first label."""
    parts = (kind, group.partition(".")[0], version)
    return "-".join(part for part in parts if part).lower() + ".json"


def from_swagger(swagger: Path, out: Path) -> int:
    """Writes a file per kind; returns how many."""
    definitions = json.loads(swagger.read_text(encoding="utf-8"))["definitions"]
    schemas = {name: strict(node) for name, node in definitions.items()}
    schemas[_QUANTITY] = {"oneOf": [{"type": "string"}, {"type": "number"}]}
    _write(out / "_definitions.json", {"definitions": schemas})
    kinds = 0
    for name, node in definitions.items():
        versions = node.get("x-kubernetes-group-version-kind", [])
        if len(versions) != 1:  # every kind has it, e.g. DeleteOptions
            continue
        file = file_name(*(versions[0][key] for key in ("group", "version", "kind")))
        _write(out / file, {"$ref": f"_definitions.json#/definitions/{name}"})
        kinds += 1
    return kinds


def from_crds(files: list[Path], out: Path) -> int:
    """Writes a file per version of each definition; returns how many."""
    kinds = 0
    for path in files:
        # The parser in C is used: these files have ten thousand lines.
        spec = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            # A definition leaves metadata to the API server.
            schema["properties"]["metadata"] = {"type": "object"}
            file = file_name(spec["group"], version["name"], spec["names"]["kind"])
            _write(out / file, schema)
            kinds += 1
    return kinds


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def main() -> None:
    command, *sources, out = sys.argv[1:]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    files = [Path(source) for source in sources]
    kinds = from_swagger(files[0], folder) if command == "swagger" else from_crds(files, folder)
    print(f"{kinds} kinds in {folder}")


if __name__ == "__main__":
    main()
