"""A laboratory network: namespaces on this machine, each with a link of a given rate.

with Lab(["node0", "node1"], rate=parse_rate("250mbit")) as lab:
    lab.run("node0", ["ping", "-c1", lab.address("node1")])
"""

from thalweg_bench.lab._lab import Lab
from thalweg_bench.lab._namespaces import INTERFACE, LabError, check_possible
from thalweg_bench.lab._rate import format_rate, parse_rate

__all__ = ["INTERFACE", "Lab", "LabError", "check_possible", "format_rate", "parse_rate"]
