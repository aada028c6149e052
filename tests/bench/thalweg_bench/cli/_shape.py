"""Makes the shape of a cluster from the arguments of `thalweg bench`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from thalweg._settings._config import ConfigError

if TYPE_CHECKING:
    from thalweg_bench.cluster import Shape


def shape_of(args: argparse.Namespace) -> Shape:
    """Returns the cluster's shape. Raises ConfigError for an impossible one."""
    from thalweg_bench import iperf
    from thalweg_bench.cluster import Shape, check_installed

    local = args.local_shards == "1"
    if args.shards == 0 and args.nodes != 1 and not local:
        raise ConfigError(
            f"--shards 0 is for one node, got --nodes {args.nodes}: nodes need a shard to meet "
            "at; give --local-shards 1"
        )
    if local and args.nodes == 1:
        raise ConfigError("--local-shards 1 is for several nodes: give --nodes")
    if args.slow_node > 1 and (args.nodes < 2 or args.rate is None or not local):
        raise ConfigError(
            "--slow-node makes one link of several slow: give --nodes 2, --rate, --local-shards 1"
        )
    if "iperf3" in args.peers:
        if args.shards == 0 and not local:
            raise ConfigError("--peers iperf3 sends to an aggregator: give --shards 1 or more")
        iperf.check_installed()
    if args.slow_shard > 1 and (args.shards < 2 or args.rate is None):
        raise ConfigError("--slow-shard makes one link of several slow: give --shards 2 and --rate")
    if args.weighted and args.slow_shard == 1:
        raise ConfigError("--weighted is about a slow shard: give --slow-shard as well")
    check_installed()
    return Shape(
        args.nodes,
        args.shards,
        args.workers,
        args.rate,
        args.codec,
        slow_factor=args.slow_shard,
        weighted=args.weighted,
        local=local,
        slow_node=args.slow_node,
    )
