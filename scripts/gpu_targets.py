"""Compares the results of scripts/gpu_check with torch and with the project's targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Row = dict[str, Any]

_MODELS = {"resnet50": "ResNet-50", "bert-large": "BERT-large"}
# Several of our cases together do what one of torch's does.
_OPTIMIZERS = {
    "torch's fused AdamW, fp32": ("adamw fp32",),
    "torch's sequence for AdamW, O2": ("norm O2 fp16", "adamw O2 fp16"),
    "torch's sequence for LAMB, O2": ("lamb O2 fp16",),
}
_TIMES_TORCH = {
    "torch's fused AdamW, fp32": 1.1,
    "torch's sequence for AdamW, O2": 1.3,
    "torch's sequence for LAMB, O2": 1.4,
    "Gloo, 2 workers, 25 MiB": 5.0,
    "Gloo, 2 workers, 256 MiB": 5.0,
    **{f"torch's PowerSGD hook, {name}": 3.0 for name in _MODELS.values()},
}
# These are fractions of a copy's rate, by the beginnings of case names.
_OF_COPY = {
    "fold ": 0.85,
    "cast ": 0.85,
    "int8 ": 0.85,
    "adamw fp32": 0.9,
    "adamw O2 fp16": 0.9,
    "lamb O2 fp16": 0.9,
    "gradient, 25 MiB": 0.8,
    "gradient, 256 MiB": 0.8,
    "result, 25 MiB": 0.8,
    "result, 256 MiB": 0.8,
}
_WHOLE_CASES = tuple(case for case in _OF_COPY if not case.endswith(" "))
_LAUNCHES = 12
_STEPS = ("ResNet-50", "GPT-2")
_HOOK_MS = 0.020  # compared with two copies


def against_torch(benches: Mapping[str, Row], torch: Row) -> list[Row]:
    """Returns torch's time divided by ours, for each case that both have."""
    ours = {row["case"]: row["ms"] for row in _rows(benches)}
    pairs = {
        f"torch's PowerSGD hook, {name}": (f"{model} rank 4 round",)
        for model, name in _MODELS.items()
    }
    pairs |= {case.replace("path ipc", "Gloo"): (case,) for case in ours if "path ipc" in case}
    pairs |= _OPTIMIZERS
    peers = {row["case"]: row["ms"] for row in torch.get("rows", ())}
    return [
        {
            "case": " + ".join(cases),
            "peer": peer,
            "ratio": round(peers[peer] / sum(ours[case] for case in cases), 2),
        }
        for peer, cases in pairs.items()
        if peer in peers and all(case in ours for case in cases)
    ]


def targets(benches: Mapping[str, Row], compared: list[Row], steps: Row) -> list[Row]:
    """Returns each of the project's targets with the measured value; null where there is none."""
    kernels = [*_speed(benches), *_times_torch(compared), *_powersgd(benches)]
    return [*kernels, _hook(benches), *_steps(steps)]


def _rows(benches: Mapping[str, Row]) -> list[Row]:
    return [row for bench in benches.values() for row in bench.get("rows", ())]


def _target(what: str, value: float | None, *, least: bool, bound: float) -> Row:
    reached = value is not None and (value >= bound if least else value <= bound)
    return {"what": what, "value": value, "at least" if least else "at most": bound, "ok": reached}


def _speed(benches: Mapping[str, Row]) -> Iterator[Row]:
    of_copy = {row["case"]: row["of_copy"] for row in _rows(benches) if "of_copy" in row}
    for begin, bound in _OF_COPY.items():
        cases = [begin] if begin in _WHOLE_CASES else [c for c in of_copy if c.startswith(begin)]
        for case in cases or [f"{begin}…"]:
            what = f"{case}: share of a copy's rate"
            yield _target(what, of_copy.get(case), least=True, bound=bound)


def _times_torch(compared: list[Row]) -> Iterator[Row]:
    ratios = {row["peer"]: row["ratio"] for row in compared}
    for peer, bound in _TIMES_TORCH.items():
        what = f"times as fast as: {peer}"
        yield _target(what, ratios.get(peer), least=True, bound=bound)


def _powersgd(benches: Mapping[str, Row]) -> Iterator[Row]:
    launches = {row["case"]: row["launches"] for row in _rows(benches) if "launches" in row}
    for model in _MODELS:
        case = f"{model} rank 4 round"
        yield _target(f"{case}: launches", launches.get(case), least=False, bound=_LAUNCHES)


def _hook(benches: Mapping[str, Row]) -> Row:
    """Returns the time of the call that submits a gradient, which does not wait for the GPU."""
    case = "path ipc, 2 workers, 25 MiB"
    rows = [row for row in _rows(benches) if row["case"] == case]
    beyond = round(rows[0]["call_ms"] - rows[0]["two_copies_ms"], 5) if rows else None
    what = f"{case}: milliseconds of the call beyond two copies"
    return _target(what, beyond, least=False, bound=_HOOK_MS)


def _steps(steps: Row) -> Iterator[Row]:
    """Returns how many times as long as Thalweg's steps those of DDP alone take."""
    times = {row["case"]: row["ms"] for row in steps.get("rows", ())}
    for model in _STEPS:
        ours, theirs = (times.get(f"{model} O2, {by}") for by in ("Thalweg", "DDP over Gloo"))
        ratio = round(theirs / ours, 2) if ours and theirs else None
        yield _target(f"steps of {model}: times as fast", ratio, least=True, bound=1.0)
