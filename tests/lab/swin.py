#!/usr/bin/env python3
"""Trains the Swin example over links of a given rate, plainly and optimised: see --help."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from thalweg.examples.swin import plot
from thalweg_bench.lab import INTERFACE, Lab, LabError, parse_rate

EPILOG = """\
Each host is a network namespace with a host name of its own, in which launch_single_task runs with
--node_rank. Needs root. The data must be there (python -m thalweg.examples.swin.prepare).

example:
  tests/lab/swin.py --nodes 2 --nproc 2 --rate 100mbit --data data --output output
"""
BASELINE = ("--amp_level=O1",)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Trains the Swin example in a laboratory network, and draws the runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--nproc", type=int, default=2, help="workers per node")
    parser.add_argument("--rate", default="100mbit", help="of every link, or none")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--output", type=Path, default=Path("output"))
    parser.add_argument("--codec", default="powersgd:rank=4,start=4", help="of the optimised run")
    parser.add_argument(
        "--levels", nargs="+", choices=("O0", "O1", "O2"), default=["O2"], help="of optimised runs"
    )
    parser.add_argument("--batch", default="2", help="images per worker")
    parser.add_argument("--opts", nargs="*", default=["TRAIN.STEPS", "24", "PRINT_FREQ", "2"])
    args = parser.parse_args()
    names = [f"node{index}" for index in range(args.nodes)]
    ours = ("--kernel-opt", f"--codec={args.codec}")
    optimised = [(*ours, f"--amp_level={level}") for level in args.levels]
    try:
        for run in (BASELINE, *optimised):
            # Every run has a new network, whose ports and queues no other run has used.
            with Lab(names, parse_rate(args.rate)) as lab:
                code = train(lab, args, run)
            if code:
                return code
    except (LabError, ValueError) as error:
        print(f"swin: {error}", file=sys.stderr)
        return 2
    return plot.main(["--output", str(args.output)])


def train(lab: Lab, args: argparse.Namespace, run: tuple[str, ...]) -> int:
    """Runs one training on all hosts; returns the worst exit code."""
    hosts = []
    for rank, name in enumerate(lab.names):
        command = [sys.executable, "-m", "thalweg.examples.swin.launch_single_task", *run]
        command += ["--nodes", str(args.nodes), "--nproc_per_node", str(args.nproc)]
        command += ["--node_rank", str(rank), "--master_addr", lab.address(lab.names[0])]
        command += ["--data", str(args.data), "--output", str(args.output)]
        command += ["--batch_size", args.batch]
        tag = f"{args.nodes}x{args.nproc}_{args.rate}"
        command += ["--opts", "TRAIN.EPOCHS", "1000", "TAG", tag, *args.opts]
        as_host = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$1" && shift && exec "$@"',
            "sh",
            name,
        ]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
        hosts.append(lab.popen(name, [*as_host, *command], env=env, stdin=subprocess.DEVNULL))
    return max(abs(host.wait()) for host in hosts)


if __name__ == "__main__":
    sys.exit(main())
