"""Measures what a link really carries with iperf3."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess

from thalweg._job._processes import die_with_parent
from thalweg._settings._config import ConfigError
from thalweg_bench.lab import Lab
from thalweg_bench.rows import BenchError

_SECONDS = 1
_DEADLINE = 20.0


def check_installed() -> None:
    """Raises ConfigError unless iperf3 is installed."""
    if shutil.which("iperf3") is None:
        raise ConfigError("the peer iperf3 needs the program 'iperf3': install the package iperf3")


def measure_goodput(lab: Lab, source: str, target: str) -> float:
    """Returns payload bits per second from `source` to `target` over one TCP connection."""
    with lab.popen(
        target,
        ["iperf3", "-s", "-1", "--forceflush"],
        preexec=die_with_parent(signal.SIGKILL),
        stdout=subprocess.PIPE,
    ) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if b"listening" in line:
                    break
            else:
                raise BenchError("the iperf3 server ended before it listened")
            result = lab.run(
                source,
                ["iperf3", "-c", lab.address(target), "-t", str(_SECONDS), "-J"],
                capture_output=True,
                timeout=_DEADLINE,
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"iperf3 did not end within {_DEADLINE:g} s") from None
        finally:
            server.kill()
    return _goodput(result.stdout)


def _goodput(report: bytes) -> float:
    try:
        document = json.loads(report)
        return float(document["end"]["sum_received"]["bits_per_second"])
    except (ValueError, KeyError) as error:
        text = report.decode(errors="replace").strip()
        raise BenchError(f"iperf3 reported no goodput: {text}") from error
