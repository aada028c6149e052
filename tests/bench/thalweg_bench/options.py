"""Makes command lines from dataclasses: a field whose type is annotated with an Option is one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from thalweg import policy
from thalweg.cli import _types
from thalweg.codecs import LOSSY, WIRE_TYPES, Auto, Codec, Lossy, PowerSGD, parse
from thalweg_bench.compression import TORCH_START, shorten
from thalweg_bench.lab import parse_rate
from thalweg_bench.shapes import MODELS, parse_shapes

_T = TypeVar("_T")


@dataclass(frozen=True)
class Option:
    """What argparse needs to know of a field, besides its name and its default."""

    parse: Callable[[str], Any] = str
    help: str = ""
    metavar: str | None = None
    choices: Sequence[str] | None = None
    action: str | None = None  # argparse's; "store_true" has no value
    show: Callable[[Any], str] = str  # formats the default

    def add_to(self, parser: argparse.ArgumentParser, name: str, default: Any) -> None:  # noqa: ANN401
        shown = [self.help] if self.help else []
        if default not in (None, ()) and default is not False:
            shown.append(f"default {self.show(default)}")
        settings: dict[str, Any] = {"help": "; ".join(shown)}
        if self.action != "store_true":
            settings |= {"type": self.parse, "metavar": self.metavar, "choices": self.choices}
        if self.action is not None:
            settings["action"] = self.action
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)


def add_options(parser: argparse.ArgumentParser, defaults: object) -> None:
    """Adds the fields of a dataclass's instance, whose values are the defaults."""
    for name, option in _options(type(defaults)).items():
        option.add_to(parser, name, getattr(defaults, name))


def make(defaults: _T, args: argparse.Namespace) -> _T:
    """Makes an instance with what was given; the parser must suppress what was not."""
    given = {name: value for name, value in vars(args).items() if name in _options(type(defaults))}
    for name, value in given.items():
        given[name] = tuple(value) if isinstance(value, list) else value
    return replace(defaults, **given)  # type: ignore[type-var]


def _options(kind: type) -> dict[str, Option]:
    hints = get_type_hints(kind, include_extras=True)
    extras = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: found[0] for name, found in extras.items() if found}


def _listed(values: Collection[object]) -> str:
    return ",".join(map(str, values))


def number(low: int, high: int, text: str = "") -> Option:
    return Option(_types.whole(low, high), text, "N")


def names(known: Collection[str], text: str = "") -> Option:
    """Takes some of the known names, separated by commas."""

    def parse(given: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(name for name in given.split(",") if name))
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; known are {', '.join(known)}"
            )
        return chosen

    what = f"{text or 'separated by commas; empty: none'}; known: {', '.join(known)}"
    return Option(parse, what, "NAME,…", show=_listed)


def peers(*known: str) -> Option:
    return names(known, "measured beside Thalweg; empty: none")


def one_of(known: Collection[str], text: str = "") -> Option:
    return Option(str, text, choices=tuple(known))


def flag(text: str) -> Option:
    return Option(help=text, action="store_true")


def _size(text: str) -> int:
    value = _types.whole(4, 4 << 30)(text)
    if value % 4:
        raise argparse.ArgumentTypeError(f"expected a multiple of 4, got {text!r}")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part) for part in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(number(0, 64).parse(part) for part in text.split(","))


def _seeds(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,3")
    return tuple(dict.fromkeys(map(int, parts)))


def _output(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def _read(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Turns a ValueError of `parse` into what argparse shows."""

    def read(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _codec(text: str) -> Codec:
    return _read(lambda given: parse(given, "the codec"))(text)


def step_codec(text: str) -> str:
    """Returns the text of a codec whose compression starts at once, unless `text` says when."""
    parsed = _codec(text)
    if isinstance(parsed, PowerSGD | Auto):
        return shorten(parsed if "start=" in text else replace(parsed, start_iter=TORCH_START))
    known = (*WIRE_TYPES, *(kind.name for kind in LOSSY if kind.block is not None))
    if parsed.name not in known:
        raise argparse.ArgumentTypeError(
            f"{text} is not measured here: expected {', '.join(known)}, powersgd or auto"
        )
    return shorten(parsed)


def step_codecs(text: str) -> tuple[str, ...]:
    return tuple(step_codec(one) for one in text.split(",") if one)


def compressing_codec(text: str) -> str:
    parsed = _codec(text)
    if not isinstance(parsed, PowerSGD | Lossy):
        known = ", ".join((PowerSGD.name, *(kind.name for kind in LOSSY)))
        raise argparse.ArgumentTypeError(f"{text} is not measured here: expected {known}")
    return shorten(parsed)


def policy_text(text: str) -> str:
    """Returns the text of a codec or policy, the same for equal ones; short for one codec."""
    parsed = _read(lambda given: policy.parse(given, "the codec"))(text)
    return parsed.spec() if parsed.rules else shorten(parsed.default)


def _shapes(text: str) -> str:
    _read(parse_shapes)(text)
    return text


_DEVICE = "a device works so long in a forward pass, and twice as long in a backward pass"
_SHAPES = f"of the gradients; known: {', '.join(MODELS)}"

POSITIVE = Option(_types.above_zero)
Bytes = Annotated[int, Option(_size)]
Sizes = Annotated[tuple[int, ...], Option(_sizes, "one or more", "N,…", show=_listed)]
Counts = Annotated[tuple[int, ...], Option(_counts, "one or more", "N,…", show=_listed)]
DType = Annotated[str, one_of(WIRE_TYPES, "of the tensor")]
Model = Annotated[str, one_of(MODELS, "whose parameters")]
TensorShapes = Annotated[str, Option(_shapes, _SHAPES, "MODEL|NxM,…")]
Seeds = Annotated[tuple[int, ...], Option(_seeds, metavar="N,…", show=_listed)]
Seconds = Annotated[float, Option(_types.above_zero, metavar="SECONDS")]
Forward = Annotated[float, Option(_types.above_zero, _DEVICE, "SECONDS")]
Norm = Annotated[float | None, Option(_types.above_zero, "clip gradients to it", "NORM")]
OutputFile = Annotated[Path | None, Option(_output, "write the rows there", "FILE")]
Resources = Annotated[Path | None, Option(_output, "write CPU time, memory, bytes sent", "FILE")]
Programs = Annotated[Path, Option(Path, "the build, where the programs are", "DIR")]
StepCodecs = Annotated[tuple[str, ...], Option(step_codecs, metavar="CODEC,…", show=_listed)]
read_rate = _read(parse_rate)
