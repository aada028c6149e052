"""Parses the arguments of `thalweg bench suite`, `report` and `micro`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg._settings._config import ConfigError
from thalweg_bench.cli import _types as types
from thalweg_bench.suite_cases import CASES

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_Handler = Callable[[argparse.Namespace], None]

_SUITE_EPILOG = """\
Each case is one or more commands of `thalweg bench`; --list shows them. It leaves DIR/NAME.json, a
list of rows {case, system, bytes, median_s, min_s, max_s, bound_s}, and some a list of {case,
process, cpu_s_per_gb, rss_mb, sent_mb} in DIR/NAME.resources.json. DIR/machine.json says where and
when. Cases measured earlier stay in DIR unless they are measured again.

exit codes:
  0      every case was measured
  1      a case failed; it is named at the end, and the others were measured
  2      wrong arguments, not root, or a program is missing
  130    Ctrl-C;  143  SIGTERM
"""

_REPORT_EPILOG = """\
A block is what lies between `<!-- generated: NAME -->` and `<!-- end -->`; everything else in FILE
stays as it is. The same measurements give the same blocks.

exit codes:
  0      written
  1      measurements cannot be read
  2      wrong arguments, FILE has not exactly the known blocks, or matplotlib is missing
"""

_MICRO_EPILOG = """\
exit codes:
  0      measured
  1      a program failed or hung; it is named
  2      wrong arguments, or there is no program
  130    Ctrl-C
"""


def add_parsers(
    cases: _Commands, guard: Callable[[_Handler], Callable[[argparse.Namespace], int]]
) -> None:
    suite = _add(cases, "suite", "all cases of docs/measurements/performance.md", _SUITE_EPILOG)
    what = suite.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="where to write; made if need be")
    what.add_argument("--list", action="store_true", help="show the cases and leave")
    suite.add_argument("--only", type=types.names(CASES), default=(), metavar="NAME,…")
    _add_programs(suite, "--micro-dir")
    suite.set_defaults(handler=guard(_run_suite))

    report = _add(cases, "report", "tables and plots of a suite's measurements", _REPORT_EPILOG)
    report.add_argument("dir", type=types.folder, metavar="DIR", help="the suite's --out")
    report.add_argument(
        "--markdown", type=Path, metavar="FILE", help="fill in its blocks; default: show all"
    )
    report.add_argument("--plots", type=Path, metavar="DIR", help="write PNG files there")
    report.set_defaults(handler=guard(_run_report))

    micro = _add(cases, "micro", "the Google Benchmark programs of a build", _MICRO_EPILOG)
    _add_programs(micro, "--dir")
    micro.add_argument("--json", type=types.output, metavar="FILE", help="write the rows there")
    micro.set_defaults(handler=guard(_run_micro))


def _add(cases: _Commands, name: str, text: str, epilog: str) -> argparse.ArgumentParser:
    return cases.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_programs(parser: argparse.ArgumentParser, option: str) -> None:
    parser.add_argument(
        option,
        type=Path,
        default=Path("build/release"),
        metavar="DIR",
        help="where the *_bench programs are; default build/release",
    )


def _run_suite(args: argparse.Namespace) -> None:
    from thalweg_bench.rows import BenchError
    from thalweg_bench.suite import Suite, select

    if args.list:
        _list(args.only or tuple(CASES))
        return
    suite = Suite(args.out, select(args.only, args.micro_dir), args.micro_dir)
    suite.check()
    if failures := suite.run():
        raise BenchError(f"failed: {', '.join(failures)}; all others were measured")


def _list(names: tuple[str, ...]) -> None:
    for case in (CASES[name] for name in names):
        print(f"{case.name}  (about {case.seconds} s)")
        for line in case.command_lines():
            print(f"    {line}")
    print(f"about {sum(CASES[name].seconds for name in names) / 60:.0f} min")


def _run_report(args: argparse.Namespace) -> None:
    from thalweg_bench import plots, report
    from thalweg_bench.results import Results

    results = Results.read(args.dir)
    if args.markdown is not None:
        report.fill_file(args.markdown, results)
    else:
        print("\n\n".join(report.make_blocks(results).values()))
    if args.plots is not None:
        plots.write(args.plots, results)


def _run_micro(args: argparse.Namespace) -> None:
    from thalweg_bench import micro, report, rows

    if not micro.find_programs(args.dir):
        raise ConfigError(f"there is no program *_bench in {args.dir}: build first, or give --dir")
    found = micro.run(args.dir)
    print(report.micro_table(found))
    if args.json is not None:
        rows.write_json(args.json, found)
