"""Casting of arguments, as replaced and decorated functions do it with their tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_SHORT = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
_CASTABLE = frozenset(_SHORT)  # float64 is there because somebody needs it, and stays


class Casting:
    """Settings that all casting functions of the process consult; torch's functions are global.

    `active` and `suspended` are read without a lock: DataParallel's threads see what the thread
    that started them has set.
    """

    def __init__(self) -> None:
        self.active = False
        self.suspended = False  # by disable()
        self.stepping = False  # an optimizer takes its step, whose arithmetic is its own
        self.half_dtype = torch.float16
        self.verbose = False
        self.caching = True
        # Tensors of the host are left alone where there is an accelerator to compute on.
        self.host = True
        self.cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @property
    def on(self) -> bool:
        """Returns whether functions cast now."""
        return self.active and not self.suspended and not self.stepping

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Switches casts off within the context, which may be nested."""
        before = self.suspended
        self.suspended = True
        try:
            yield
        finally:
            self.suspended = before

    def clear_cache(self) -> None:
        """Drops all copies of parameters."""
        self.cache = WeakTensorKeyDictionary()

    def cast(self, tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        """Returns `tensor` in `dtype` if it may be cast; parameters are cast once per iteration."""
        if tensor.dtype is dtype or tensor.dtype not in _CASTABLE:
            return tensor
        if not self.host and tensor.device.type == "cpu":
            return tensor
        is_param = tensor.is_leaf and tensor.requires_grad and dtype is self.half_dtype
        # Before an evaluation, scripts write other weights through `.data`.
        keeps = self.caching and is_param and torch.is_grad_enabled()
        if keeps and not _belongs_to_others(tensor):
            return self._cached(tensor, dtype, name)
        self._say(tensor.dtype, dtype, name)
        return tensor.to(dtype)

    def _cached(self, param: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        """Returns a copy, which is kept until somebody writes into the parameter.

        Writes through `.data` are missed where they leave the memory: torch does not count them.
        """
        written = (param._version, param.data_ptr())
        found: tuple[tuple[int, int], Tensor] | None = self.cache.get(param)
        if found is None or found[0] != written or found[1].dtype is not dtype:
            self._say(param.dtype, dtype, name)
            found = self.cache[param] = (written, param.to(dtype))
        return found[1]

    def _say(self, before: torch.dtype, after: torch.dtype, name: str) -> None:
        if self.verbose:
            print(f"{_SHORT[before]}->{_SHORT[after]} ({name})")


def _belongs_to_others(tensor: Tensor) -> bool:
    """Returns whether a copy of it would end with a transform of torch.func or a CUDA graph.

    Tensors within transforms have no memory either by which a copy could be kept.
    """
    return torch._C._are_functorch_transforms_active() or _is_captured(tensor)


def _is_captured(tensor: Tensor) -> bool:
    """Returns whether a CUDA graph is being made: its copies belong to it, and its replays read
    the parameter as it is then.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


casting = Casting()


def map_tensors(
    value: Any,  # noqa: ANN401
    function: Callable[[Tensor], Tensor],
    batch: Callable[[Any], Any] | None = None,
) -> Any:  # noqa: ANN401
    """Returns `value` with `function` applied to its tensors, in containers of any depth.

    `batch` is applied to objects of other classes that have a method `to`, such as batches of
    libraries; None: they stay as they are.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        # A copy keeps the class, whose constructor is not known (models of transformers have such).
        copy = value.copy() if type(value) is dict else _shallow(value)
        for key, item in value.items():
            copy[key] = map_tensors(item, function, batch)
        return copy
    if isinstance(value, tuple | list):
        items = [map_tensors(item, function, batch) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if batch is not None and hasattr(value, "to") and not isinstance(value, nn.Module | type):
        return batch(value)
    return value


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yields the tensors of an argument, in lists, tuples and dicts of any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def cast_all(function: Callable[..., Any], to_half: bool, name: str = "") -> Callable[..., Any]:
    """Returns `function` with its tensors cast to half, or to float32, while casting is on."""
    return _cast_to(lambda *_: casting.half_dtype if to_half else torch.float32, function, name)


def promote(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Returns `function` with its tensors cast to their widest type while casting is on."""

    def widest(args: Args, kwargs: Kwargs) -> torch.dtype | None:
        types = {t.dtype for t in tensors_in((args, kwargs)) if t.dtype in _CASTABLE}
        return functools.reduce(torch.promote_types, types) if len(types) > 1 else None

    return _cast_to(widest, function, name)


def match_first(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Returns an in-place method with its other tensors cast to the type of its target."""

    def targets(args: Args, _: Kwargs) -> torch.dtype | None:
        dtype: torch.dtype = args[0].dtype
        return dtype if dtype in _CASTABLE else None

    return _cast_to(targets, function, name)


def _cast_to(
    choose: Callable[[Args, Kwargs], torch.dtype | None], function: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """Returns `function` with its tensors cast to the chosen type, if any, while casting is on."""
    shown = name or getattr(function, "__name__", "")

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if casting.on and kwargs.get("out") is not None:
            given = {key: value for key, value in kwargs.items() if key != "out"}
            return _write(kwargs["out"], wrapper(*args, **given))
        dtype = choose(args, kwargs) if casting.on else None
        if dtype is None:
            return function(*args, **kwargs)

        def one(tensor: Tensor) -> Tensor:
            return casting.cast(tensor, dtype, shown)

        return function(*map_tensors(args, one), **map_tensors(kwargs, one))

    return wrapper


def _write(out: Any, result: Any) -> Any:  # noqa: ANN401
    """Puts the result of a function into the tensors that were given as its `out`; returns them."""
    if isinstance(out, Tensor):
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)
    for target, value in zip(out, result, strict=True):
        _write(target, value)
    return out


def refuse_half(
    function: Callable[..., Any], reason: str, *, first_only: bool = False
) -> Callable[..., Any]:
    """Returns `function` with half-precision arguments refused while casting is on.

    They raise NotImplementedError with `reason`.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if casting.on:
            seen = tensors_in(args[:1] if first_only else (args, kwargs))
            if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in seen):
                raise NotImplementedError(reason)
        return function(*args, **kwargs)

    return wrapper


def half_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: floating point tensors are cast to the half type while casts are on."""
    return cast_all(function, True)


def float_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: half-precision tensors are cast to float32 while casts are on."""
    return cast_all(function, False)


def promote_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: tensors are cast to the widest type among them while casts are on."""
    return promote(function)


def _shallow(value: Any) -> Any:  # noqa: ANN401
    import copy

    return copy.copy(value)
