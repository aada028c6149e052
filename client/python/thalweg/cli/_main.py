"""Parses the arguments of the `thalweg` command."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from thalweg import __version__, codecs
from thalweg._settings._checks import LOCAL_SHARDS
from thalweg._settings._config import ConfigError, parse_addresses
from thalweg.cli import (
    _command,
    _doctor_script,
    _http,
    _passed_on,
    _profile,
    _status,
    _streams,
    _trace,
    _types,
)
from thalweg.cli._supervisor import Interrupted

_RUN_EPILOG = """\
examples:
  thalweg run --nodes 2 --nproc 2 train.py --epochs 3
  thalweg run --nodes 2 --nproc 2 --shards 2 --codec fp16 -m thalweg.examples.fashion_mnist
  thalweg run --nodes 2 --codec powersgd:rank=4,start=100 plain_ddp.py
  thalweg run --nodes 2 --codec fp16 --compare plain_ddp.py
  thalweg run --nodes 3 --shards 2 --local-shards auto train.py   (sidecars host shards, too)

The script is a plain torchrun script: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK,
NODE_RANK, MASTER_ADDR and MASTER_PORT are set. It calls thalweg.ddp.attach(ddp_model), or is run
with --codec: then THALWEG_CODEC is set, and its DistributedDataParallel modules are attached
without a call.

codecs:
  @CODECS@; or with keys,
  NAME:KEY=VALUE,…
  exceptions to it by name and size: 'powersgd:4;*.bias=fp32;elems<4096=fp16' (docs/compression.md)

exit codes:
  0      all workers succeeded
  N      the worst exit code among the processes that failed (128 + signal for killed ones)
  1      a server failed
  2      wrong arguments
  130    Ctrl-C;  143  SIGTERM;  129  SIGHUP, when a terminal closes
""".replace("@CODECS@", codecs.usage())

_DOCTOR_EPILOG = """\
With a script: runs it for three steps on a cluster on this machine, with the variables that are
set, and says what was activated, what was not, and why.

With --cluster: asks every aggregator, at both of its ports, for its version and its clock, for jobs
that lack nodes or shards, and for failures of the last hour. Where kubectl knows a cluster, it also
looks at Thalweg's pods, their events, and definitions of jobs that would drop a sidecar. It changes
nothing.

exit codes:
  0      everything that was checked works; lines that begin with warn may matter
  1      something does not; its line begins with FAIL
  2      wrong arguments
"""


def main(argv: Sequence[str] | None = None) -> int:
    _streams.open_closed()
    words = list(sys.argv[1:] if argv is None else argv)
    script: list[str] = []
    if words[:1] == ["doctor"]:
        words, script = _doctor_script.split(words)
    args = _parser().parse_args(words)
    args.doctor_script = script
    try:
        code = int(args.handler(args))
        sys.stdout.flush()
    except ConfigError as error:
        return _tell(error, 2)
    except (OSError, KeyboardInterrupt, Interrupted) as error:
        if getattr(args, "here", False):  # it is the script's own, whose traceback tells more
            raise
        return _end(error)
    return code


def _end(error: OSError | KeyboardInterrupt | Interrupted) -> int:
    """Says why the command cannot go on; returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    try:
        sys.stdout.flush()
    except OSError:  # otherwise it would fail again when the interpreter ends
        _streams.discard(sys.stdout)
    if isinstance(error, Interrupted):
        return 128 + error.signum
    if isinstance(error, BrokenPipeError):  # end like a program that SIGPIPE kills
        return 128 + signal.SIGPIPE
    return _tell(error, 1)


def _tell(error: Exception, code: int) -> int:
    try:
        print(f"thalweg: {error}", file=sys.stderr, flush=True)
    except OSError:
        _streams.discard(sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="thalweg", description="Gradient aggregation for data-parallel PyTorch training."
    )
    parser.add_argument("--version", action="version", version=f"thalweg {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run a training script on a whole cluster on this machine",
        description="Starts a sidecar per node, the workers and aggregators, all on this machine.",
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--nodes", type=_types.count, default=1, metavar="N", help="nodes (default 1)")
    run.add_argument("--nproc", type=_types.count, default=1, metavar="L", help="workers per node")
    run.add_argument(
        "--shards",
        type=_types.shards,
        default=0,
        metavar="S",
        help="aggregators (default 0: the nodes' sidecars host the shards)",
    )
    run.add_argument(
        "--local-shards",
        choices=LOCAL_SHARDS,
        help="sets THALWEG_LOCAL_SHARDS: do sidecars host shards? (default: as it says, else only "
        "with --shards 0)",
    )
    run.add_argument("--codec", type=_types.codec, metavar="CODEC", help="sets THALWEG_CODEC")
    run.add_argument(
        "--compare",
        action="store_true",
        help="run the script twice, with plain DDP and with the codec, and tabulate both",
    )
    run.add_argument(
        "--timeout", type=_types.timeout, metavar="SECONDS", help="sets THALWEG_TIMEOUT"
    )
    run.add_argument(
        "--port", type=_types.port, default=0, help="MASTER_PORT (default: a free one)"
    )
    _command.add_arguments(run)
    run.set_defaults(handler=_run)

    doctor = commands.add_parser(
        "doctor",
        help="check this machine, a script, or with --cluster all servers",
        usage="%(prog)s [options] [SCRIPT.py ARGS | -m MODULE ARGS]",
        description="Checks this machine and, if given, aggregators and a sidecar, or a script.",
        epilog=_DOCTOR_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--aggregators", metavar="HOST:PORT,…", help="default: THALWEG_AGGREGATORS")
    doctor.add_argument("--sidecar", metavar="PATH", help="its socket; default: THALWEG_SIDECAR")
    doctor.add_argument(
        "--cluster", action="store_true", help="check the cluster, not this machine"
    )
    doctor.add_argument(
        "--shards",
        metavar="HOST:PORT,…",
        help="with --cluster: HTTP addresses; default: port 7071 of the aggregators",
    )
    doctor.add_argument(
        "--namespace", metavar="NAME", help="with --cluster: of Kubernetes; default: kubectl's"
    )
    trial = doctor.add_argument_group("with a script")
    trial.add_argument("--nodes", type=_types.count, metavar="N", help="nodes (default 2)")
    trial.add_argument(
        "--nproc", type=_types.count, metavar="L", help="workers per node (default 1)"
    )
    trial.add_argument("--codec", type=_types.codec, metavar="CODEC", help="sets THALWEG_CODEC")
    trial.add_argument(
        "--rate",
        type=_types.rate,
        metavar="RATE",
        help="say how seldom to exchange over links of that rate, such as 50mbit",
    )
    _http.add_arguments(doctor)
    doctor.set_defaults(handler=_doctor)

    _status.add_parser(commands)
    _trace.add_parser(commands)
    _profile.add_parser(commands)
    _passed_on.add_parsers(commands)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(handler=_version)
    return parser


def _run(args: argparse.Namespace) -> int:
    from thalweg.cli import _compare, _run

    plan = _run.Plan(
        nodes=args.nodes,
        nproc=args.nproc,
        shards=args.shards,
        local_shards=args.local_shards,
        codec=args.codec,
        timeout=args.timeout,
        port=args.port,
        command=_command.of(args),
    )
    return _compare.compare(plan) if args.compare else _run.run(plan)


def _doctor(args: argparse.Namespace) -> int:
    from thalweg._settings._config import Config, Network
    from thalweg.cli import _doctor

    of_cluster = (args.shards, args.namespace, args.tls_ca, args.http_token_file)
    if args.doctor_script:
        of_servers = (*of_cluster, args.aggregators, args.sidecar, args.cluster or None)
        if any(value is not None for value in of_servers):
            raise ConfigError(
                "--aggregators, --sidecar, --cluster, --shards, --namespace, --tls-ca and "
                "--http-token-file are not for a script, which gets servers of its own"
            )
        trial = _doctor_script.Trial(
            args.nodes or 2, args.nproc or 1, args.codec, rate=args.rate or 0.0
        )
        return _doctor_script.examine(args.doctor_script, trial)
    of_script = (args.nodes, args.nproc, args.codec, args.rate)
    if any(value is not None for value in of_script):
        raise ConfigError(
            "--nodes, --nproc, --codec and --rate are for a script: thalweg doctor train.py"
        )
    config = Config.from_env()
    aggregators = config.aggregators
    if args.aggregators is not None:
        aggregators = parse_addresses("--aggregators", args.aggregators)
    if args.cluster:
        return _cluster(args, aggregators)
    if any(value is not None for value in of_cluster):
        raise ConfigError("--shards, --namespace, --tls-ca and --http-token-file are for --cluster")
    sidecar = config.sidecar if args.sidecar is None else args.sidecar
    return _doctor.doctor(aggregators, sidecar, Network.from_env())


def _cluster(args: argparse.Namespace, aggregators: Sequence[str]) -> int:
    from thalweg.cli import _cluster

    shards = parse_addresses("--shards", args.shards or "")
    if not aggregators and not shards:
        raise ConfigError(
            "--cluster needs to know the shards: set THALWEG_AGGREGATORS, --aggregators or --shards"
        )
    access = _http.access_of(args)
    return _cluster.cluster(aggregators, shards, access, args.namespace or "")


def _version(_: argparse.Namespace) -> int:
    print(f"thalweg {__version__}")
    return 0
