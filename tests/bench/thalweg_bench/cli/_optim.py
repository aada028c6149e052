"""Parses the arguments of `thalweg bench optim`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from thalweg._settings._config import ConfigError
from thalweg_bench.cli import _types as types

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_Handler = Callable[[argparse.Namespace], None]

_EPILOG = """\
All systems step in turns, on parameters of their own, with torch's number of threads
(OMP_NUM_THREADS). bound_s: the least bytes a step can move, at the rate of a triad that takes its
turns as well. On a GPU a step ends when the GPU is done with it. torch is its fused optimizer,
whose moments are in the parameters' type; for lamb, which torch does not have, one written in
torch's foreach operations. With O2, torch's side is apex's sequence: gradients made float32,
checked and divided, the same step on masters, roundings.

examples:
  thalweg bench optim --optimizer adamw --numel 32000000 --peers torch --json rows.json
  thalweg bench optim --param-dtype bf16
  thalweg bench optim --numel 1000000 --tensors 1000
  thalweg bench optim --max-grad-norm 1

exit codes:
  0      measured, and results were right
  1      a result was wrong
  2      wrong arguments
  130    Ctrl-C
"""


def add_parser(
    cases: _Commands, guard: Callable[[_Handler], Callable[[argparse.Namespace], int]]
) -> None:
    parser: argparse.ArgumentParser = cases.add_parser(
        "optim",
        help="one optimizer step",
        description="Measures one step of a fused optimizer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--optimizer", choices=("sgd", "adam", "adamw", "lamb"), default="adamw", help="adamw"
    )
    parser.add_argument(
        "--param-dtype", choices=("fp32", "fp16", "bf16"), default="fp32", help="default fp32"
    )
    parser.add_argument(
        "--opt-level",
        choices=("O0", "O2"),
        default="O0",
        help="O2: from fp16 gradients to fp16 parameters, by fp32 masters; default O0",
    )
    number = types.number
    parser.add_argument(
        "--numel", type=number(1, 1 << 31), default=32_000_000, help="default 32000000"
    )
    parser.add_argument("--tensors", type=number(1, 100_000), default=1, help="default 1")
    parser.add_argument(
        "--max-grad-norm",
        type=types.positive,
        metavar="NORM",
        help="clip gradients to it: in the step, torch's by clip_grad_norm_ before it",
    )
    parser.add_argument("--repeats", type=number(1, 1000), default=11, help="default 11")
    parser.add_argument(
        "--peers",
        type=types.names(("torch", "torch-foreach", "torch-masters")),
        default=("torch",),
        metavar="NAME,…",
        help="default torch; empty: none; known: torch, torch-foreach, torch-masters (of fp16 and "
        "bf16: float32 moments as torch can have them, by masters)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; default cpu")
    parser.add_argument("--json", type=types.output, metavar="FILE", help="write the rows there")
    parser.set_defaults(handler=guard(_run))


def _run(args: argparse.Namespace) -> None:
    if args.tensors > args.numel:
        raise ConfigError(f"--tensors {args.tensors} is more than --numel {args.numel}: give fewer")
    if args.optimizer == "lamb" and args.param_dtype != "fp32" and args.peers:
        raise ConfigError("torch's side of lamb is in fp32 only: give --peers ''")
    if args.optimizer == "lamb" and args.max_grad_norm is not None:
        raise ConfigError("lamb clips to 1 always: leave out --max-grad-norm")
    mixed = args.opt_level == "O2"
    if mixed and (args.param_dtype != "fp32" or args.max_grad_norm is not None):
        raise ConfigError(
            "O2 has fp16 parameters, and is measured without clipping: leave out --param-dtype and "
            "--max-grad-norm"
        )
    if "torch-masters" in args.peers and args.param_dtype == "fp32":
        raise ConfigError("fp32 parameters need no masters: leave out torch-masters of --peers")
    _check_device(args.device)
    from thalweg_bench import optim_case, rows

    found = optim_case.run(
        optim_case.OptimCase(
            args.optimizer,
            args.param_dtype,
            args.numel,
            args.tensors,
            args.peers,
            args.repeats,
            args.device,
            args.max_grad_norm,
            mixed,
        )
    )
    print(rows.format_table(found))
    if args.json is not None:
        rows.write_json(args.json, found)


def _check_device(name: str) -> None:
    import torch

    try:
        kind = torch.device(name).type
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"--device {name} is not known: give cpu, cuda or cuda:N")
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name} cannot be used: {reason}") from error
