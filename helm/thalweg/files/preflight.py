"""Refuses definitions of jobs in this cluster that would silently drop a native sidecar.

A hook runs it before an installation or upgrade, with the pod's service account. The chart's
templates check the same where Helm can ask the cluster. Exit code 1: refused, or the cluster did
not answer; the reason is on standard error.

Arguments: NAME=PATH…, a CustomResourceDefinition and the way, dot separated, from its schema to
initContainers.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_ACCOUNT = Path(
    os.environ.get("SERVICE_ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount")
)
_FIELD = ("initContainers", "items", "properties", "restartPolicy")


def keeps(schema: dict[str, Any], path: list[str]) -> bool:
    """Returns whether an object of `schema` keeps the field at `path`."""
    for key in path:
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return True
        if key not in schema:
            return False
        schema = schema[key]
    return True


def definition(name: str) -> dict[str, Any] | None:
    """Returns the CustomResourceDefinition `name`, None if there is none, or raises URLError."""
    host = f"{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    token = (_ACCOUNT / "token").read_text(encoding="ascii").strip()
    request = urllib.request.Request(
        f"https://{host}/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}",
        headers={"Authorization": f"Bearer {token}"},
    )
    context = ssl.create_default_context(cafile=_ACCOUNT / "ca.crt")
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as response:
            return json.load(response)  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def refusals(name: str, path: list[str]) -> list[str]:
    """Returns a line for each served version that would drop the sidecar."""
    crd = definition(name)
    if crd is None:
        return []
    return [
        f"{name}, version {version['name']}, does not know initContainers[].restartPolicy and "
        "would silently drop it: the sidecar would become an init container that never ends. "
        "Update Kubeflow's training operator to 1.8.1 or newer, or set "
        "sidecar.daemonSet.enabled=true"
        for version in crd["spec"]["versions"]
        if version["served"] and not keeps(version["schema"]["openAPIV3Schema"], path)
    ]


def main() -> int:
    refused = []
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        try:
            refused += refusals(name, [*path.split("."), *_FIELD])
        except urllib.error.URLError as error:
            refused.append(f"the cluster does not say what {name} is: {error}")
    for line in refused:
        print(f"preflight: {line}", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
