"""Makes certificates for tests with openssl: a CA, and the certificates that it signs."""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_OPENSSL = shutil.which("openssl") or "openssl"  # looked up once: tests change PATH
_CONFIG = """\
[req]
distinguished_name = name
[name]
[ca]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign
subjectKeyIdentifier = hash
[ca_without_usage]
basicConstraints = critical,CA:TRUE
subjectKeyIdentifier = hash
[signed]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
"""
_USAGES = {"server auth": "serverAuth", "client auth": "clientAuth"}  # by cert-manager's names


class Secret(NamedTuple):
    """A folder with the files of a Kubernetes TLS secret."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def environment(self) -> dict[str, str]:
        """Returns the variables that make Thalweg's programs use the files."""
        names = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}
        return {f"THALWEG_TLS_{key}": str(self.folder / name) for key, name in names.items()}


class Authority:
    """A CA in a folder of its own; `extensions` is the section of _CONFIG for its certificate."""

    def __init__(self, folder: Path, extensions: str = "ca") -> None:
        folder.mkdir()
        self._folder = folder
        (folder / "config").write_text(_CONFIG, encoding="ascii")
        self._make(folder / "ca.crt", folder / "ca.key", "CA of tests", "-extensions", extensions)

    def fulfil(self, certificate: dict[str, Any], *hosts: str) -> Secret:
        """Returns what cert-manager makes of a Certificate, valid for `hosts` too."""
        spec = certificate["spec"]
        usages = [_USAGES[usage] for usage in spec["usages"] if usage in _USAGES]
        return self.issue(spec["secretName"], *spec["dnsNames"], *hosts, usages=usages)

    def issue(
        self,
        name: str,
        *hosts: str,
        days: int = 60,
        usages: Iterable[str] = ("serverAuth", "clientAuth"),
    ) -> Secret:
        """Makes a certificate for host names, addresses and URIs, in a new folder."""
        secret = Secret(self._folder / name)
        secret.folder.mkdir()
        subject = ["-addext", f"subjectAltName={','.join(map(_name, hosts))}"]
        subject += ["-addext", f"extendedKeyUsage={','.join(usages)}"]
        signer = ["-CA", str(self._folder / "ca.crt"), "-CAkey", str(self._folder / "ca.key")]
        arguments = [*signer, *subject, "-extensions", "signed", "-days", str(days)]
        self._make(secret.folder / "tls.crt", secret.folder / "tls.key", name, *arguments)
        secret.ca.write_bytes((self._folder / "ca.crt").read_bytes())
        return secret

    def let_expire(self, secret: Secret) -> None:
        """Replaces the certificate by one that is valid until this second."""
        request, key = str(secret.folder / "request"), str(secret.folder / "tls.key")
        config = ["-config", str(self._folder / "config"), "-subj", "/CN=late"]
        _run([_OPENSSL, "req", "-new", *config, "-key", key, "-out", request])
        signer = ["-CA", str(self._folder / "ca.crt"), "-CAkey", str(self._folder / "ca.key")]
        signed = ["-days", "0", "-set_serial", "7", "-out", str(secret.folder / "tls.crt")]
        _run([_OPENSSL, "x509", "-req", "-in", request, *signer, *signed])

    def _make(self, certificate: Path, key: Path, name: str, *arguments: str) -> None:
        command = [_OPENSSL, "req", "-x509", "-config", str(self._folder / "config"), "-nodes"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command += ["-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
        _run([*command, *arguments])


def _run(command: list[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert made.returncode == 0, made.stderr


def _name(host: str) -> str:
    if "://" in host:
        return f"URI:{host}"
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"
