"""Starts one training on all workers: the baseline, or with --kernel-opt the optimised one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from thalweg.examples.swin import SwinError
from thalweg.examples.swin.config import BACKENDS, Config
from thalweg.examples.swin.folders import PARTS, folder_of
from thalweg.examples.swin.logger import enable_torchacc_compiler
from thalweg.examples.swin.model import variant_of

_WORKER = "thalweg.examples.swin.train"
_EPILOG = """\
Without --kernel-opt: DistributedDataParallel and torch's AdamW, the baseline. With it, or with
USE_TORCHACC=1: Thalweg's hook and fused AdamW. --backend fsdp shards the model over all workers,
ps leaves weights and optimizer to Thalweg's shards. An option that is given again takes its last
value.

Without --node_rank all nodes are on this machine, and with several `thalweg run` starts them. With
it, run this on every host with the same --master_addr and --master_port.

examples:
  launch_single_task --amp_level O1 --batch_size 32 --nproc_per_node 8
  launch_single_task --amp_level O2 --kernel-opt --batch_size 32 --nproc_per_node 8
  launch_single_task --nodes 2 --nproc_per_node 2 --kernel-opt --codec powersgd:rank=4,start=20 \\
      --opts TRAIN.ACCUMULATION_STEPS 2 AUG.COLLATE_MIXUP True
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        config = settings(args)
        command = command_of(args, config)
    except SwinError as error:
        print(f"swin: {error}", file=sys.stderr)
        return 2
    code = subprocess.run(command, env=environment(config)).returncode
    return code if code >= 0 else 128 - code


def settings(args: argparse.Namespace) -> Config:
    """Returns the settings of a training. Raises SwinError if they make no sense."""
    config = Config()
    if args.kernel_opt or enable_torchacc_compiler():
        config.accelerate()
    config.AMP_OPT_LEVEL = args.amp_level
    config.BACKEND = args.backend or config.BACKEND
    config.MODEL.NAME = args.model
    config.MODEL.COMPILE = args.compile
    config.MODEL.CHANNELS_LAST = args.channels_last
    config.DATA.PATH = str(args.data)
    config.DATA.BATCH_SIZE = args.batch_size
    config.OUTPUT = str(args.output)
    config.CODEC = args.codec or config.CODEC
    config.merge([text for pairs in args.opts for text in pairs])
    config.complete(args.nodes, args.nproc_per_node)
    config.check()
    _check_there(config)
    return config


def command_of(args: argparse.Namespace, config: Config) -> list[str]:
    """Returns the command that starts this host's workers, or all of them."""
    worker = ["-m", _WORKER, "--opts"]
    worker += [text for key, value in config.items() for text in (key, str(value))]
    if args.nodes > 1 and args.node_rank is None:
        run = [sys.executable, "-m", "thalweg", "run", "--nodes", str(args.nodes)]
        return [*run, "--nproc", str(args.nproc_per_node), "--shards", str(args.shards), *worker]
    if args.node_rank is not None and not 0 <= args.node_rank < args.nodes:
        raise SwinError(f"--node_rank is {args.node_rank}, expected 0 to {args.nodes - 1}")
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(args.nodes)]
    run += ["--nproc-per-node", str(args.nproc_per_node), "--node-rank", str(args.node_rank or 0)]
    run += ["--master-addr", args.master_addr, "--master-port", str(args.master_port)]
    return [*run, *worker]


def environment(config: Config) -> dict[str, str]:
    """Returns the workers' environment: the back end decides who averages gradients."""
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    env["USE_TORCHACC"] = "1" if config.ACCELERATED else "0"
    if config.BACKEND == "ddp":
        env["THALWEG_ENABLE"] = "0"
    return env


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch_single_task",
        description="Starts one training on all workers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--amp_level", choices=("O0", "O1", "O2"), default="O1")
    add("--kernel-opt", action="store_true", help="the optimised path")
    add("--batch_size", type=int, default=8, help="images per worker and micro-batch")
    add("--nproc_per_node", type=int, default=1, help="workers per node")
    add("--nodes", type=int, default=1)
    add("--node_rank", type=int, help="of this host; default: all nodes are here")
    add("--master_addr", default="127.0.0.1", help="of the host with --node_rank 0")
    add("--master_port", type=int, default=29500)
    add("--shards", type=int, default=0, help="aggregators beside nodes that are all here")
    add("--backend", metavar="|".join(BACKENDS), help="default: thalweg with --kernel-opt")
    add("--codec", help="such as fp16 or powersgd:rank=4,start=100, for --backend thalweg")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--channels_last", action="store_true", help="keep channels innermost in memory")
    add("--model", default="tiny", help="tiny or swin_tiny")
    add("--data", type=Path, default=Path("data"), help="what prepare has made")
    add("--output", type=Path, default=Path("output"), help="folder of the logs")
    add("--opts", nargs="*", action="append", default=[], metavar="KEY VALUE", help="settings")
    return parser


def _check_there(config: Config) -> None:
    """Raises SwinError for what would otherwise fail on all workers at once."""
    variant_of(config.MODEL.NAME)
    for part in PARTS:
        folder_of(config.DATA.PATH, part)


if __name__ == "__main__":
    sys.exit(main())
