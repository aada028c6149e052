"""Defines the codecs: how gradients cross the network.

`thalweg.ddp.attach(model, CODEC)` and THALWEG_CODEC take a codec. It is a value,
`thalweg.PowerSGD(rank=4)`, and has a text form in which every key is given:

    powersgd:rank=4,start=1000,min_rate=2,wire=fp32,warm=1,feedback=1,seed=0,epsilon=0

In text that is parsed, keys are optional and may come in any order; `powersgd:4` and `topk:0.01`
are short for the first key. Exceptions for some of the tensors make it a policy (policy.py). This
module loads neither torch nor native code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from thalweg._settings._codec_keys import Key, flag, integer, real
from thalweg._settings._variables import did_you_mean

# These codecs are only a type of element.
WIRE_TYPES = ("fp32", "fp16", "bf16")
_MAX_RANK = 256
_MAX_ITERATION = 1 << 40
_MAX_PARTS = 256
_MAX_SEED = (1 << 64) - 1
_MAX_REAL = 1e6
_UP_TO_MAX = f"a number from 0 to {_MAX_REAL:g}"


class Codec:
    """Base of all codecs: immutable, compared by value, safe to share between threads."""

    name: ClassVar[str]
    _keys: ClassVar[Mapping[str, Key]] = {}  # by attribute, in the order of the text form
    _shorthand: ClassVar[str] = ""  # the key that may be given without its name

    def __post_init__(self) -> None:
        for attribute, key in self._keys.items():
            value = getattr(self, attribute)
            if not key.accepts(value):
                raise ValueError(
                    f"{type(self).__name__}: {attribute} is {value!r}, expected {key.expected}"
                )

    def spec(self) -> str:
        """Returns the text form with every key, equal for equal codecs; `parse` reads it."""
        pairs = [
            f"{key.name}={key.write(getattr(self, attribute))}"
            for attribute, key in self._keys.items()
        ]
        return f"{self.name}:{','.join(pairs)}" if pairs else self.name


def parse(text: str, what: str = "codec", also: Sequence[type[Codec]] = ()) -> Codec:
    """Returns the codec that `text` describes: one that all take, or one of `also`. ValueError says
    what is wrong with `what`.
    """
    name, colon, arguments = text.partition(":")
    known = _BY_NAME | {kind.name: kind for kind in also}
    if name not in known:
        like = did_you_mean(name, known)
        if name in {kind.name for kind in OF_WORKERS}:
            like = f"; {name} is for thalweg.ps.LocalOptimizer(codec=…), in code"
        raise ValueError(f"{what} is {text!r}, expected one of {', '.join(known)}{like}")
    kind = known[name]
    if not colon:
        return kind()
    values: dict[str, Any] = {}
    try:
        for part in arguments.split(","):
            attribute, value = _read_part(kind, part, alone=part == arguments)
            if attribute in values:
                raise ValueError(f"{part.partition('=')[0]} is given twice")
            values[attribute] = value
    except ValueError as error:
        raise ValueError(f"{what} is {text!r}: {error}") from None
    return kind(**values)


def read_value(kind: type[Codec], attribute: str, what: str, text: str) -> object:
    """Returns the attribute's value in `text`. ValueError says what is wrong with `what`."""
    key = kind._keys[attribute]
    try:
        value = key.read(text)
    except ValueError:
        value = None
    if value is None or not key.accepts(value):
        raise ValueError(f"{what} is {text!r}, expected {key.expected}")
    return value


def _read_part(kind: type[Codec], part: str, alone: bool) -> tuple[str, object]:
    """Reads one `key=value`; returns the attribute and its value."""
    by_name = {key.name: attribute for attribute, key in kind._keys.items()}
    name, equals, text = part.partition("=")
    if alone and not equals and kind._shorthand:
        name, text = kind._shorthand, part
    elif not by_name:
        raise ValueError(f"{kind.name} has no keys, got {part!r}")
    elif not equals:
        full = f" ({kind._shorthand}={part} beside other keys)" if part and kind._shorthand else ""
        raise ValueError(f"expected key=value{full}, got {part!r}; keys are {', '.join(by_name)}")
    if name not in by_name:
        like = did_you_mean(name, by_name)
        raise ValueError(f"{kind.name} has no key {name!r}{like}; keys are {', '.join(by_name)}")
    return by_name[name], read_value(kind, by_name[name], name, text)


_RANK = integer("rank", 1, _MAX_RANK)
_START = integer("start", 0, _MAX_ITERATION)
_SEED = integer("seed", 0, _MAX_SEED)
_FEEDBACK = flag("feedback")


@dataclass(frozen=True)
class FP32(Codec):
    """Gradients cross the network unchanged."""

    name = "fp32"


@dataclass(frozen=True)
class FP16(Codec):
    """fp32 gradients cross the network as IEEE half floats."""

    name = "fp16"


@dataclass(frozen=True)
class BF16(Codec):
    """fp32 gradients cross the network as bfloat16: fewer digits than fp16, the range of fp32."""

    name = "bf16"


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Matrices cross the network as two factors of low rank; small tensors stay as they are.

    The defaults are those of torch's PowerSGDState, where `rank` is called
    matrix_approximation_rank, `start_iter` start_powerSGD_iter, `seed` random_seed and `epsilon`
    orthogonalization_epsilon.
    """

    rank: int = 1  # a higher rank is more accurate and takes more bytes
    start_iter: int = 1000  # number of the first iterations, which are not compressed
    min_compression_rate: float = 2.0  # matrices that would shrink by less stay as they are
    wire: str = "fp32"  # type in which factors and uncompressed tensors are sent
    warm_start: bool = True  # start from the previous iteration's factors
    use_error_feedback: bool = True  # add the compression error to the next gradient
    seed: int = 0  # seed of the first factors
    epsilon: float = 0.0  # added to the norms that columns are divided by

    name = "powersgd"
    _shorthand = "rank"
    _keys: ClassVar[Mapping[str, Key]] = {
        "rank": _RANK,
        "start_iter": _START,
        "min_compression_rate": real("min_rate", _UP_TO_MAX, lambda x: 0 <= x <= _MAX_REAL),
        "wire": Key("wire", f"one of {', '.join(WIRE_TYPES)}", WIRE_TYPES.__contains__, str),
        "warm_start": flag("warm"),
        "use_error_feedback": _FEEDBACK,
        "seed": _SEED,
        "epsilon": real("epsilon", _UP_TO_MAX, lambda x: 0 <= x <= _MAX_REAL),
    }


class Lossy(Codec):
    """Base of the codecs that send chunks in a lossy format (docs/codecs.md)."""

    start_iter: int
    use_error_feedback: bool
    # The elements and the bytes of a block; None: a payload has no blocks.
    block: ClassVar[tuple[int, int] | None] = None
    # Only the sum of the results over many steps is accurate, not the result of one step.
    is_coarse: ClassVar[bool] = False


@dataclass(frozen=True)
class Int8(Lossy):
    """Gradients cross the network as 8-bit integers, with a scale per 256 of them."""

    start_iter: int = 2
    use_error_feedback: bool = True

    name = "int8"
    block = (256, 260)
    _keys: ClassVar[Mapping[str, Key]] = {"start_iter": _START, "use_error_feedback": _FEEDBACK}


@dataclass(frozen=True)
class OneBit(Lossy):
    """Gradients cross the network as their signs, with a scale per 1024 of them."""

    start_iter: int = 2
    use_error_feedback: bool = True

    name = "onebit"
    block = (1024, 132)
    is_coarse = True
    _keys: ClassVar[Mapping[str, Key]] = {"start_iter": _START, "use_error_feedback": _FEEDBACK}


@dataclass(frozen=True)
class TopK(Lossy):
    """Only the gradients of the largest magnitude cross the network."""

    ratio: float = 0.01  # fraction of the elements
    start_iter: int = 2
    use_error_feedback: bool = True

    name = "topk"
    is_coarse = True
    _shorthand = "ratio"
    _keys: ClassVar[Mapping[str, Key]] = {
        "ratio": real("ratio", "a number above 0, at most 1", lambda x: 0 < x <= 1),
        "start_iter": _START,
        "use_error_feedback": _FEEDBACK,
    }


class OfWorkers(Codec):
    """Base of the codecs in which workers send what they have changed to each other.

    For thalweg.ps.LocalOptimizer alone (docs/parameter-server.md).
    """


@dataclass(frozen=True)
class Sparse(OfWorkers):
    """Only the changes of the largest magnitude cross the network, each rounded to two bits."""

    ratio: float = 0.02  # fraction of the elements of each tensor

    name = "sparse"
    _shorthand = "ratio"
    _keys: ClassVar[Mapping[str, Key]] = {
        "ratio": real("ratio", "a number above 0, at most 1", lambda x: 0 < x <= 1),
    }


@dataclass(frozen=True)
class Signs(OfWorkers):
    """Each exchange sends one of so many parts of the rows in turn, as the signs of the changes and
    their mean magnitude in a row.
    """

    parts: int = 4

    name = "signs"
    _shorthand = "parts"
    _keys: ClassVar[Mapping[str, Key]] = {"parts": integer("parts", 1, _MAX_PARTS)}


@dataclass(frozen=True)
class Auto(Codec):
    """Each bucket uses the one of `candidates` with the shortest predicted step.

    The arguments are PowerSGD's.
    """

    rank: int = 4
    start_iter: int = 1000
    seed: int = 0

    name = "auto"
    _shorthand = "rank"
    _keys: ClassVar[Mapping[str, Key]] = {
        "rank": _RANK,
        "start_iter": _START,
        "seed": _SEED,
    }

    @property
    def candidates(self) -> tuple[Codec, ...]:
        factors = PowerSGD(rank=self.rank, start_iter=self.start_iter, seed=self.seed)
        return FP32(), FP16(), Int8(), factors


# Messages and help texts list all codecs in this order.
LOSSY: tuple[type[Lossy], ...] = (Int8, OneBit, TopK)
OF_WORKERS: tuple[type[OfWorkers], ...] = (Sparse, Signs)
ALL: tuple[type[Codec], ...] = (FP32, FP16, BF16, PowerSGD, *LOSSY, Auto)
_BY_NAME = {kind.name: kind for kind in ALL}


def usage() -> str:
    """Returns the short text forms of all codecs, as `powersgd:RANK`."""
    shorthands = {name: kind._shorthand.upper() for name, kind in _BY_NAME.items()}
    return ", ".join(f"{name}:{key}" if key else name for name, key in shorthands.items())
