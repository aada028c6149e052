"""Names of the environment's variables, and whether they ask for anything.

`import torch` runs this module (_autoload.py): it imports only what torch imports too, and defines
no dataclasses, which take a millisecond each. _config.py reads the values. The C++ counterpart is
core/base/env.cc; a test keeps the two lists equal.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

KNOWN: dict[str, str] = {
    "THALWEG_AGGREGATORS": "",
    "THALWEG_BACKEND": "0",
    "THALWEG_CHANNELS": "auto",
    "THALWEG_CHUNK_BYTES": "auto",
    "THALWEG_CODEC": "fp32",
    "THALWEG_COMPAT": "",
    "THALWEG_CPU_CAPABILITY": "",
    "THALWEG_CPUS": "",
    "THALWEG_ELASTIC": "",
    "THALWEG_ELASTIC_NODE": "",
    "THALWEG_ENABLE": "",
    "THALWEG_FP16_COMPRESSION": "0",
    "THALWEG_FUSED_OPTIMIZER": "0",
    "THALWEG_HIERARCHICAL_ALLREDUCE": "0",
    "THALWEG_HTTP": "",
    "THALWEG_HTTP_TOKEN_FILE": "",
    "THALWEG_INTERFACE": "",
    "THALWEG_JOB": "",
    "THALWEG_LISTEN": "0.0.0.0:7070",
    "THALWEG_LOCAL_SHARDS": "auto",
    "THALWEG_LOG": "info",
    "THALWEG_MATRIX_APPROXIMATION_RANK": "1",
    "THALWEG_MEMORY_LIMIT": "auto",
    "THALWEG_NCCL_LIBRARY": "libnccl.so.2",
    "THALWEG_NODE_REDUCE": "sidecar",
    "THALWEG_POLICY": "",
    "THALWEG_POWERSGD_COMPRESSION": "0",
    "THALWEG_RESIDUALS": "",
    "THALWEG_SHARD_PORTS": "0",
    "THALWEG_SIDECAR": "",
    "THALWEG_SNAPSHOT_EVERY": "0",
    "THALWEG_START_COMPRESS_ITER": "1000",
    "THALWEG_STATE_DIR": "",
    "THALWEG_STEP_TIMEOUT": "auto",
    "THALWEG_THREADS": "auto",
    "THALWEG_TIMEOUT": "30",
    "THALWEG_TLS_CA": "",
    "THALWEG_TLS_CERT": "",
    "THALWEG_TLS_KEY": "",
    "THALWEG_TRACE": "",
    "THALWEG_WEIGHT": "auto",
    "THALWEG_WINDOW_CHUNKS": "auto",
    "THALWEG_PS": "",
    "THALWEG_PS_EVERY": "",
    "THALWEG_PS_MODE": "",
    "THALWEG_LOSS_GRACE": "3",
    "THALWEG_MIN_NODES": "0",
    "THALWEG_RECONNECT": "10",
}

# AIAK-Training has these variables as AIAK_…; a variable with our own prefix takes precedence.
AIAK = {
    f"THALWEG_{name}": f"AIAK_{name}"
    for name in (
        "FP16_COMPRESSION",
        "FUSED_OPTIMIZER",
        "HIERARCHICAL_ALLREDUCE",
        "MATRIX_APPROXIMATION_RANK",
        "POWERSGD_COMPRESSION",
        "START_COMPRESS_ITER",
    )
}
# Each of these activates Thalweg without code, unless THALWEG_ENABLE is 0. All but the codec are 0
# or 1.
SWITCHES = (
    "THALWEG_CODEC",
    "THALWEG_ENABLE",
    "THALWEG_FP16_COMPRESSION",
    "THALWEG_FUSED_OPTIMIZER",
    "THALWEG_HIERARCHICAL_ALLREDUCE",
    "THALWEG_POWERSGD_COMPRESSION",
)
# They choose a codec where THALWEG_CODEC does not: two switches, and what only PowerSGD needs.
CODEC_SWITCHES = ("THALWEG_FP16_COMPRESSION", "THALWEG_POWERSGD_COMPRESSION")
POWERSGD = ("THALWEG_MATRIX_APPROXIMATION_RANK", "THALWEG_START_COMPRESS_ITER")

# Programs and modules that import torch and start workers.
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate")
# With any other value than 1, torch calls no entry point when it is imported.
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# Folders into which workers write.
FOLDERS = ("THALWEG_RESIDUALS", "THALWEG_TRACE")


class ConfigError(ValueError):
    """A setting is malformed, or settings contradict each other."""


def activation_is_wanted(
    environ: Mapping[str, str] | None = None, switches: Iterable[str] = SWITCHES
) -> bool:
    """Returns whether one of `switches` may be on; decides without parsing, in microseconds."""
    env = os.environ if environ is None else environ
    values = [env.get(name) or env.get(AIAK.get(name, name)) for name in switches]
    return env.get("THALWEG_ENABLE") != "0" and not {None, "", "0"}.issuperset(values)


def is_off(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether THALWEG_ENABLE switches all off. Raises ConfigError unless it is 0, 1 or not
    set.
    """
    name, value = look_up("THALWEG_ENABLE", environ)
    return check_choice(name, value or "1", ("0", "1")) == "0"


def autoload_is_off(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether torch leaves Thalweg out when it is imported, so that all is off without
    code.
    """
    env = os.environ if environ is None else environ
    return env.get(AUTOLOAD, "1") != "1"


def backend_is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether the default process group is to be ours. Raises ConfigError."""
    return is_on("THALWEG_BACKEND", environ) and not is_off(environ)


def process_groups_are_watched(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether a variable, ours or torch's, decides what makes process groups."""
    env = os.environ if environ is None else environ
    ours = activation_is_wanted(env, ["THALWEG_BACKEND"])
    return ours or env.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0") not in ("", "0")


def compat_is_wanted(environ: Mapping[str, str] | None = None) -> tuple[bool, bool]:
    """Returns whether torch gets the names of AIAK-Training, and whether there is to be an `apex`.

    Any switch asks for the former. Raises ConfigError for a malformed THALWEG_COMPAT or
    THALWEG_ENABLE.
    """
    env = os.environ if environ is None else environ
    value = env.get("THALWEG_COMPAT", "")
    check_choice("THALWEG_COMPAT", value or "0", ("0", "1", "apex"))
    if is_off(env) or value == "0":
        return False, False
    return value != "" or activation_is_wanted(env), value == "apex"


def look_up(name: str, environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Returns the variable that is set, and its value; empty ones count as unset."""
    env = os.environ if environ is None else environ
    for variable in (name, AIAK.get(name, name)):
        if env.get(variable):
            return variable, env[variable]
    return name, KNOWN[name]


def assignments(names: Iterable[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns NAME=value of those that are set."""
    env = os.environ if environ is None else environ
    found = [look_up(name, env) for name in names]
    return [f"{variable}={value}" for variable, value in found if env.get(variable)]


def absolute_folders(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns those of FOLDERS that are relative, made absolute before a script leaves its own; ~
    is a home, as in a shell.
    """
    env = os.environ if environ is None else environ
    relative = [name for name in FOLDERS if (env.get(name) or "/")[0] != "/"]
    # Path.expanduser() raises where there is no such home.
    homes = {name: os.path.expanduser(env[name]) for name in relative}  # noqa: PTH111
    return {name: str(Path(folder).absolute()) for name, folder in homes.items()}


def is_on(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether a switch is 1. Raises ConfigError unless it is 0, 1 or not set."""
    variable, value = look_up(name, environ)
    return check_choice(variable, value or "0", ("0", "1")) == "1"


def check_choice(what: str, value: str, choices: Iterable[str]) -> str:
    *others, last = choices
    if value not in (*others, last):
        raise ConfigError(f"{what} is {value!r}, expected {', '.join(others)} or {last}")
    return value


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Names with a prefix of ours that mean nothing; those that Kubernetes makes are left out."""
    ours = [name for name in environ if name.startswith(("THALWEG_", "AIAK_"))]
    known = {*KNOWN, *AIAK.values()}
    unknown = sorted(name for name in ours if name not in known)
    if not unknown:
        return []
    import re

    # A service that is called thalweg-… gives these to every pod of its namespace.
    of_services = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP).*)?$")
    return [name for name in unknown if not of_services.search(name)]


def misspelt(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Returns unknown names, also those whose prefix is misspelt, each with did_you_mean()."""
    env = os.environ if environ is None else environ
    known = [*KNOWN, *AIAK.values()]
    found = [(name, did_you_mean(name, known)) for name in unknown_variables(env)]
    for name in env:
        prefix, _, rest = name.partition("_")
        like = did_you_mean(prefix, ("THALWEG", "AIAK"))
        if rest and like and f"THALWEG_{rest}" in KNOWN and prefix not in ("THALWEG", "AIAK"):
            found.append((name, f" (did you mean THALWEG_{rest}?)"))
    return found


@functools.cache
def warn_of_unknown() -> None:
    """Names unknown variables, once per process; of a node's workers only the first one does, and
    the launcher does not.
    """
    if not is_first_of_node() or _is_launcher():
        return
    for name in unknown_variables(os.environ):
        known = [*AIAK.values()] if name.startswith("AIAK_") else [*KNOWN]
        logging.getLogger("thalweg").warning(
            "thalweg: unknown environment variable %s is ignored%s",
            name,
            did_you_mean(name, known) or f"; known are {', '.join(known)}",
        )


def warn_of_unused() -> None:
    """Names a variable that does nothing without another; of a node's workers the first does."""
    every = activation_is_wanted(switches=["THALWEG_PS_EVERY"])
    if every and not activation_is_wanted(switches=["THALWEG_PS_MODE"]):
        if not is_first_of_node() or _is_launcher():
            return
        text = "thalweg: THALWEG_PS_EVERY=%s has no effect without THALWEG_PS_MODE=local"
        logging.getLogger("thalweg").warning(text, os.environ["THALWEG_PS_EVERY"])


def is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "") in ("", "0")


def _is_launcher() -> bool:
    """Whether this process has been started to start workers, which warn themselves."""
    words = {word.rpartition("/")[2] for word in sys.orig_argv[1:]}
    return "RANK" not in os.environ and not words.isdisjoint(_LAUNCHERS)


def is_launched_first(environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether the launcher, such as torchrun, has made this process rank 0."""
    env = os.environ if environ is None else environ
    return env.get("RANK", "") in ("", "0")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a question that names the known word which is most like `word`; empty: none is."""
    import difflib

    prefix = word[: word.find("_") + 1]  # what all have in common makes none more alike
    rests = {name.removeprefix(prefix).lower(): name for name in known}
    found = difflib.get_close_matches(word.removeprefix(prefix).lower(), rests, n=1)
    return f" (did you mean {rests[found[0]]}?)" if found else ""
