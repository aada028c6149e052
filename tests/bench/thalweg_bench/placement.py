"""Measures clusters whose sidecars host shards, beside more and more aggregators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from thalweg_bench.case import Case, Outcome
from thalweg_bench.cluster import check_installed
from thalweg_bench.lab import format_rate
from thalweg_bench.lab_case import LabCase
from thalweg_bench.options import Bytes, Counts, Option, read_rate
from thalweg_bench.rows import Row, markdown, say, write_json
from thalweg_bench.shape import Shape


def _rates(text: str) -> tuple[int | None, ...]:
    return tuple(read_rate(part) for part in text.split(","))


def _show(rates: Sequence[int | None]) -> str:
    return ",".join(map(format_rate, rates))


@dataclass(frozen=True, kw_only=True)
class PlacementCase(Case):
    """allreduces through shards in the sidecars, with and without aggregators

    Every sidecar hosts a shard. Each number of nodes runs with each number of aggregators that is
    not larger, at each rate, in a cluster of its own, which takes about half a minute. The rows are
    those of `thalweg bench lab --local-shards 1`, and written after each cluster.

    examples:
      thalweg bench placement --nodes 2,3,4,5,6 --rate 250mbit,1gbit --bytes 16000000 --repeats 3
      thalweg bench placement --nodes 8 --shards 0,2,4 --rate 100mbit --bytes 24000000
    """

    nodes: Counts = (4,)
    shards: Counts = ()  # as many as nodes, and less
    rate: Annotated[tuple[int | None, ...], Option(_rates, metavar="RATE,…", show=_show)] = (
        250_000_000,
    )
    bytes: Bytes = 37_000_000

    def check(self) -> None:
        for case in self.cases():
            case.check()
        check_installed()

    @property
    def columns(self) -> Sequence[int]:
        """The numbers of aggregators."""
        return self.shards or range(max(self.nodes) + 1)

    def case(self, nodes: int, shards: int, rate: int | None) -> LabCase:
        shape = Shape(nodes=nodes, shards=shards, rate=rate, local_shards=1)
        return LabCase(shape=shape, bytes=(self.bytes,), repeats=self.repeats)

    def cases(self) -> Iterator[LabCase]:
        for rate in self.rate:
            for nodes in self.nodes:
                yield from (self.case(nodes, k, rate) for k in self.columns if k <= nodes)

    def run(self) -> Outcome:
        found = []
        for case in self.cases():
            say(case.name)
            found.append(case.run())
            if self.json is not None:
                write_json(self.json, [asdict(row) for part in found for row in part.rows])
        joined = Outcome.joined(found)
        return replace(joined, text=f"{joined}\n\n{self.grids(joined.rows)}")

    def grids(self, rows: Sequence[Row]) -> str:
        """Returns a table for each rate: times as fast as Gloo and, in parentheses, part of the
        bound, by nodes and aggregators.
        """
        of = {(row.case, row.system): row for row in rows}

        def cell(case: LabCase) -> str:
            ours, gloo = of.get((case.name, "thalweg")), of.get((case.name, "gloo"))
            if ours is None or gloo is None:
                return ""
            part = "-" if ours.bound_s is None else f"{ours.bound_s / ours.median_s:.2f}"
            return f"{gloo.median_s / ours.median_s:.2f} ({part})"

        heads = ["nodes", *(f"+ {shards}" for shards in self.columns)]
        texts = []
        for rate in self.rate:
            lines = [
                [str(n), *(cell(self.case(n, k, rate)) for k in self.columns)] for n in self.nodes
            ]
            title = f"{format_rate(rate)}: times as fast as Gloo (part of the bound)"
            texts.append(f"{title}\n\n{markdown(heads, lines, left=1)}")
        return "\n\n".join(texts)
