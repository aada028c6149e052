"""Which variables are set, what they do, and which do nothing and why, for `thalweg doctor`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping

from thalweg import _binaries
from thalweg._settings._variables import (
    AIAK,
    AUTOLOAD,
    CODEC_SWITCHES,
    KNOWN,
    POWERSGD,
    SWITCHES,
    ConfigError,
    autoload_is_off,
    compat_is_wanted,
    look_up,
    misspelt,
)
from thalweg.cli._finding import Finding

# They work through the entry point that torch calls when it is imported.
_PS = ("THALWEG_PS", "THALWEG_PS_EVERY", "THALWEG_PS_MODE")
_WITHOUT_CODE = {*SWITCHES, *POWERSGD, "THALWEG_BACKEND", "THALWEG_COMPAT", *_PS}
# They are for a sidecar that a worker starts, where that hosts a shard.
_HOSTING = ("THALWEG_INTERFACE", "THALWEG_SHARD_PORTS")
# With 0 they switch others off.
_OFF = ("THALWEG_ENABLE", "THALWEG_LOCAL_SHARDS")


def meanings() -> dict[str, str]:
    """Returns what the programs' help says of each variable."""
    command = [str(_binaries.find(_binaries.SIDECAR)), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    return dict(re.findall(r"^  (THALWEG_\w+) +(.*)$", text, re.MULTILINE))


def findings(env: Mapping[str, str], meanings: Mapping[str, str]) -> Iterator[Finding]:
    """Yields one for each variable that is set, in the order of their names."""
    names = {name: name for name in KNOWN} | {theirs: ours for ours, theirs in AIAK.items()}
    for variable in sorted(names):
        if env.get(variable):
            text = f"{variable}={env[variable]} ({meanings.get(names[variable], 'not explained')})"
            why = without_effect(env, variable, names[variable])
            yield Finding("note", f"{text}; {why}") if why else Finding("ok", text)
    try:
        compat_is_wanted(env)
    except ConfigError as error:
        yield Finding("FAIL", str(error))
    for variable, like in misspelt(env):
        yield Finding("warn", f"{variable}={env[variable]} means nothing{like}")


def without_effect(env: Mapping[str, str], variable: str, name: str) -> str:
    """Returns why a variable that stands for `name` does nothing; empty: it does something."""
    of_powersgd, hosting = name in POWERSGD, name in _HOSTING
    no_code = name in _WITHOUT_CODE and name != "THALWEG_ENABLE"
    switch, powersgd = look_up("THALWEG_POWERSGD_COMPRESSION", env)
    switch = switch if env.get(switch) else AIAK[switch]
    by_workers = name == "THALWEG_NODE_REDUCE" and env.get(name) == "workers"
    exchange = _exchange(env)
    off = {variable: env.get(variable) == "0" for variable in _OFF}
    reasons = (
        (variable != name and env.get(name), f"because {name} wins over it"),
        (no_code and off["THALWEG_ENABLE"], "without code, because THALWEG_ENABLE is 0"),
        (
            name in _WITHOUT_CODE and autoload_is_off(env),
            f"without code, because {AUTOLOAD} is not 1",
        ),
        (
            (of_powersgd or name in CODEC_SWITCHES) and env.get("THALWEG_CODEC"),
            "because THALWEG_CODEC wins over it",
        ),
        (
            name == "THALWEG_PS_EVERY" and env.get("THALWEG_PS_MODE") != "local",
            "because THALWEG_PS_MODE is not local",
        ),
        (by_workers and exchange, f"without code, because {exchange} wins over what attaches"),
        (of_powersgd and powersgd != "1", f"because {switch} is off"),
        (hosting and env.get("THALWEG_SIDECAR"), "because THALWEG_SIDECAR names one that runs"),
        (hosting and off["THALWEG_LOCAL_SHARDS"], "because THALWEG_LOCAL_SHARDS is 0"),
    )
    return next((f"it does nothing {why}" for holds, why in reasons if holds), "")


def _exchange(env: Mapping[str, str]) -> str:
    """Returns the variable by which optimizers, and not modules, exchange; empty: none does."""
    if env.get("THALWEG_ENABLE") == "0":
        return ""
    if env.get("THALWEG_PS_MODE") == "local":
        return "THALWEG_PS_MODE=local"
    return "THALWEG_PS" if env.get("THALWEG_PS", "0") not in ("", "0") else ""
