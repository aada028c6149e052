"""Defines policies, which say which tensor uses which codec: a default, and rules as exceptions.

    thalweg.Policy(thalweg.PowerSGD(rank=4), [thalweg.Rule(thalweg.FP32(), name="*.bias")])

The text form is the default's and after it, separated by semicolons, the rules': matches joined by
&, an equals sign, a codec.

    powersgd:rank=4;*.bias=fp32;head.*&elems<4096&dims>1=int8

This module loads neither torch nor native code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thalweg import codecs
from thalweg.codecs import FP16, Auto, Codec, Lossy, PowerSGD

_MAX_BYTES = 64 << 10  # limit of the text form
_MAX_CODECS = 5
_MAX_BOUND = 1 << 48  # no tensor has more elements
# Tensors of fewer elements are small: the largest block of any format.
SMALL_ELEMS = max(kind.block[0] for kind in codecs.LOSSY if kind.block)
_SPACES = " \t\n\v\f\r"
_SEPARATORS = ";&=<>"
_BOUND = re.compile(r"(elems|dims)([<>])(.*)", re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """Assigns `codec` to the tensors that meet all the other conditions."""

    codec: Codec
    name: str = "*"  # the parameter's name; * stands for any bytes, ? for one
    min_elems: int = 0
    max_elems: int | None = None
    min_dims: int = 0
    max_dims: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise ValueError(f"Rule: codec is {self.codec!r}, expected one such as thalweg.FP16()")
        if isinstance(self.codec, Auto):
            raise ValueError("Rule: auto chooses for whole buckets: make it the policy's default")
        if not _is_pattern(self.name):
            raise ValueError(
                f"Rule: name is {self.name!r}, expected a pattern without any of {_SEPARATORS} "
                "and without spaces around it"
            )
        for what in ("elems", "dims"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            for field, bound in ((f"min_{what}", least), (f"max_{what}", most or 0)):
                if type(bound) is not int or not 0 <= bound < _MAX_BOUND:
                    raise ValueError(
                        f"Rule: {field} is {bound!r}, expected a whole number from 0, "
                        f"below {_MAX_BOUND}"
                    )

    def matches(self, name: str, shape: Sequence[int]) -> bool:
        """Returns whether the rule applies to the parameter `name`."""
        elems = 1
        for extent in shape:
            elems *= extent
        return (
            self.min_elems <= elems
            and (self.max_elems is None or elems <= self.max_elems)
            and self.min_dims <= len(shape)
            and (self.max_dims is None or len(shape) <= self.max_dims)
            and _regex(self.name).fullmatch(name.encode()) is not None
        )

    def spec(self) -> str:
        matches = []
        for what in ("elems", "dims"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            matches += [f"{what}>{least - 1}"] if least else []
            matches += [] if most is None else [f"{what}<{most + 1}"]
        if self.name != "*" or not matches:
            matches.insert(0, self.name)
        return f"{'&'.join(matches)}={self.codec.spec()}"


@dataclass(frozen=True)
class Policy:
    """Assigns to a tensor the codec of the first rule that applies, or else the default."""

    default: Codec
    rules: Sequence[Rule] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        if not isinstance(self.default, Codec):
            raise ValueError(
                f"Policy: default is {self.default!r}, expected one such as thalweg.PowerSGD()"
            )
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise ValueError(f"Policy: a rule is {rule!r}, expected a thalweg.Rule")
        found = [codec.name for codec in self.codecs]
        if len(found) > _MAX_CODECS:
            raise ValueError(
                f"Policy: {len(found)} different codecs ({', '.join(found)}), at most "
                f"{_MAX_CODECS} are allowed"
            )
        size = len(self.spec().encode())
        if size > _MAX_BYTES:
            raise ValueError(
                f"Policy: {size} bytes of text, at most {_MAX_BYTES} are allowed: let one pattern "
                "stand for several names"
            )

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Returns the distinct codecs in order of first mention; Auto's candidates replace it."""
        first = self.default
        found = first.candidates if isinstance(first, Auto) else (first,)
        return tuple(dict.fromkeys([*found, *(rule.codec for rule in self.rules)]))

    def codec_of(self, name: str, shape: Sequence[int]) -> Codec:
        """Returns the codec of a parameter, possibly an Auto."""
        applying = (rule.codec for rule in self.rules if rule.matches(name, shape))
        return next(applying, self.default)

    def spec(self) -> str:
        """Returns the text form with every key, equal for equal policies; `parse` reads it."""
        return ";".join([self.default.spec(), *(rule.spec() for rule in self.rules)])


def parse(text: str, what: str = "codec") -> Policy:
    """Returns the policy that `text` describes. ValueError says what is wrong with `what`."""
    first, *rest = (piece.strip(_SPACES) for piece in text.split(";"))
    default = codecs.parse(first, what)
    rules = []
    for number, piece in enumerate(rest, start=1):
        try:
            rules.append(_parse_rule(piece))
        except ValueError as error:
            raise ValueError(f"{what}: rule {number} {piece!r}: {error}") from None
    try:
        return Policy(default, rules)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def except_embeddings(policy: Policy, embeddings: Iterable[tuple[str, Sequence[int]]]) -> Policy:
    """Adds rules that keep the given parameters (name and shape) from becoming factors by default.

    Few rows of an embedding's gradient are nonzero, and they differ in every step: its rank is the
    number of such rows, and it has no direction worth keeping from step to step.
    """
    if not isinstance(policy.default, PowerSGD | Auto):
        return policy
    wire = policy.default.wire if isinstance(policy.default, PowerSGD) else "fp32"
    dense = codecs.parse(wire)
    added = [
        Rule(dense, name=re.sub(rf"[*{_SEPARATORS}\s]", "?", name, flags=re.ASCII))
        for name, shape in embeddings
        if not any(rule.matches(name, shape) for rule in policy.rules)
    ]
    return Policy(policy.default, [*policy.rules, *added]) if added else policy


def except_small_tensors(policy: Policy, parameters: Iterable[tuple[str, Sequence[int]]]) -> Policy:
    """Adds a rule that sends small ones of the given parameters in fp16 if the default is lossy.

    In a format with blocks a small tensor takes a whole block, and topk, which sends the largest
    elements of a chunk, may never choose one of a small tensor.
    """
    small = Rule(FP16(), max_elems=SMALL_ELEMS - 1)
    if not isinstance(policy.default, Lossy) or not any(
        small.matches(name, shape) and not any(rule.matches(name, shape) for rule in policy.rules)
        for name, shape in parameters
    ):
        return policy
    return Policy(policy.default, [*policy.rules, small])


def for_any_model(policy: Policy) -> Policy:
    """As except_small_tensors(), for parameters that are not known yet; unless that makes too many
    codecs.
    """
    try:
        return except_small_tensors(policy, [("", (1,))])
    except ValueError:
        return policy


def _parse_rule(text: str) -> Rule:
    left, equals, codec = text.partition("=")
    if not equals:
        raise ValueError("expected MATCH=CODEC, such as *.bias=fp32")
    values: dict[str, int | str] = {}
    for match in left.split("&"):
        field, value = _parse_match(match.strip(_SPACES))
        if field in values:
            raise ValueError(f"two matches of one sort, the second {match!r}: make it two rules")
        values[field] = value
    return Rule(codecs.parse(codec.strip(_SPACES), "the codec"), **values)  # type: ignore[arg-type]


def _parse_match(text: str) -> tuple[str, int | str]:
    """Returns a field of a rule, and its value."""
    bound = _BOUND.fullmatch(text)
    if bound is None:
        if not _is_pattern(text):
            raise ValueError(
                f"{text!r} is neither a pattern of names nor a bound: expected elems<N, elems>N, "
                "dims<N or dims>N"
            )
        return "name", text
    what, relation, number = bound.groups()
    least = 1 if relation == "<" else 0
    if not (number.isascii() and number.isdigit()) or int(number) < least:
        raise ValueError(f"the bound of {text!r} is {number!r}, expected a number from {least}")
    if relation == "<":
        return f"max_{what}", int(number) - 1
    return f"min_{what}", int(number) + 1


def _is_pattern(text: object) -> bool:
    ok = isinstance(text, str) and text == text.strip(_SPACES) and text != ""
    return ok and not set(_SEPARATORS).intersection(str(text))


def _regex(pattern: str) -> re.Pattern[bytes]:
    escaped = re.escape(pattern.encode())
    return re.compile(escaped.replace(rb"\*", b".*").replace(rb"\?", b"."), re.DOTALL)
