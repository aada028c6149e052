"""Checks the values of settings, from the environment or as arguments.

Each function takes the setting's name, which its ConfigError names, and the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thalweg._settings._variables import ConfigError, check_choice

if TYPE_CHECKING:
    from thalweg.codecs import Codec
    from thalweg.policy import Policy

LOCAL_SHARDS = ("auto", "0", "1")
NODE_REDUCE = ("sidecar", "workers")
MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 4 << 20
MAX_TIMEOUT = 86400  # seconds
_MAX_PATIENCE = 3600  # seconds
PS_KINDS = ("sgd", "adam", "adamw", "lamb")  # of optimizers that shards can run
# What THALWEG_PS may say beside the kind.
_WISHES = {"pull": ("fp32", "bf16", "fp16", "int8", "onebit"), "overlap": ("0", "1")}


def check_codec(what: str, value: Codec | Policy | str) -> str:
    from thalweg import codecs, policy

    if isinstance(value, codecs.Codec | policy.Policy):
        return value.spec()
    if not isinstance(value, str):
        raise ConfigError(
            f"{what} is {value!r}, expected one such as thalweg.PowerSGD(rank=4), a policy, or its "
            "text"
        )
    try:
        return policy.parse(value, what).spec()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_chunk_bytes(what: str, value: str | int) -> int:
    if value == "auto":
        return 0
    number = _whole(value)
    if not MIN_CHUNK_BYTES <= number <= MAX_CHUNK_BYTES:
        bounds = f"{MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
        raise ConfigError(f"{what} is {value!r}, expected auto or a number from {bounds}")
    return number


def check_count(what: str, value: str | int) -> int:
    number = _whole(value)
    if number < 0:
        raise ConfigError(f"{what} is {value!r}, expected a whole number, 0 or more")
    return number


def check_local_shards(what: str, value: str | bool) -> str:
    return check_choice(what, str(int(value)) if isinstance(value, bool) else value, LOCAL_SHARDS)


def check_ports(what: str, value: str) -> str:
    ends = value.split("-")
    numbers = [_whole(end) for end in ends]
    is_range = len(numbers) == 2 and 1 <= numbers[0] <= numbers[1] < 65536
    if not is_range and not (len(numbers) == 1 and 0 <= numbers[0] < 65536):
        raise ConfigError(f"{what} is {value!r}, expected a port, 0 for any, or FIRST-LAST")
    return value


def check_timeout(what: str, value: str | float) -> float:
    number = _seconds(value)
    if not 0 < number <= MAX_TIMEOUT:
        raise ConfigError(
            f"{what} is {value!r}, expected seconds, more than 0 and at most {MAX_TIMEOUT}"
        )
    return number


def check_step_timeout(what: str, value: str | float) -> float:
    try:
        return 0.0 if value == "auto" else check_timeout(what, value)
    except ConfigError as error:
        raise ConfigError(f"{error}, or auto") from None


def parse_addresses(what: str, value: str) -> tuple[str, ...]:
    """Splits "host:port,host:port"; the port is a number, the host may be an IPv6 address in [].

    Refuses schemes, such as https:// and dns:///, as ParseTargets() of server/net/address.cc does.
    """
    addresses = tuple(part.strip() for part in value.split(",") if part.strip())
    for address in addresses:
        if "//" in address:
            raise ConfigError(f"{what} contains {address!r}, expected host:port, without a scheme")
        host, _, port = address.rpartition(":")
        if not host or not 0 < _whole(port) < 65536:
            raise ConfigError(f"{what} contains {address!r}, expected host:port")
        if ":" in host and host[0] + host[-1] != "[]":
            raise ConfigError(f"{what} contains {address!r}, expected an IPv6 address in []")
    return addresses


def check_patience(what: str, value: str | float) -> float:
    """Takes what client/core/patience.cc takes."""
    number = _seconds(value)
    if not 0 <= number <= _MAX_PATIENCE:
        raise ConfigError(f"{what} is {value!r}, expected seconds from 0 to {_MAX_PATIENCE}")
    return number


def check_interval(what: str, value: str) -> int:
    number = _whole(value)
    if number < 1:
        raise ConfigError(f"{what} is {value!r}, expected a number of steps, such as 50")
    return number


def parse_served(what: str, value: str) -> tuple[str, str | None, bool]:
    """Reads `KIND`, or `KIND:pull=bf16,overlap=1`.

    Returns "auto" or one of PS_KINDS, or "" for nothing; how weights travel, None: as they do by
    default; and whether they travel during the next forward pass.
    """
    kind, _, rest = value.partition(":")
    if kind in ("", "0"):
        return "", None, False
    check_choice(what, kind, ("auto", *PS_KINDS))
    found: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, _, given = part.partition("=")
        if key not in _WISHES:
            raise ConfigError(f"{what} has {part!r}, expected pull=… or overlap=…")
        if key in found:
            raise ConfigError(f"{what} is {value!r}: {key} is given twice")
        found[key] = check_choice(f"{what}'s {key}", given, _WISHES[key])
    return kind, found.get("pull"), found.get("overlap") == "1"


def _whole(value: str | int) -> int:
    """Returns the number; -1 if it is none in ASCII digits: servers read no others."""
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() else -1


def _seconds(value: str | float) -> float:
    """Returns the number; -1 if it is none that servers would read."""
    text = str(value)
    try:
        return float(text) if text.isascii() and "_" not in text else -1.0
    except ValueError:
        return -1.0
