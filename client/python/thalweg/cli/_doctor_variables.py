"""Which variables are set, what they do, and which do nothing and why, for `thalweg doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from thalweg._variables import AIAK, CODEC_SWITCHES, KNOWN, POWERSGD, SWITCHES, misspelt
from thalweg.cli._finding import Finding

# docs/settings.md and docs/zero_code.md say more.
MEANINGS = {
    "THALWEG_AGGREGATORS": "addresses of the aggregators",
    "THALWEG_BACKEND": "1: the default process group is Thalweg's",
    "THALWEG_CHANNELS": "TCP connections to each shard",
    "THALWEG_CHUNK_BYTES": "bytes of gradient that travel as one chunk",
    "THALWEG_CODEC": "attaches scripts without code, with this codec",
    "THALWEG_COMPAT": "gives torch the names of AIAK-Training, or scripts a module apex",
    "THALWEG_CPU_CAPABILITY": "limits kernels to these vector instructions",
    "THALWEG_CPUS": "cores for a sidecar or an aggregator",
    "THALWEG_ENABLE": "1: attaches scripts without code; 0: never",
    "THALWEG_FP16_COMPRESSION": "1: attaches scripts without code, with codec fp16",
    "THALWEG_FUSED_OPTIMIZER": "1: runs torch's SGD, Adam and AdamW fused",
    "THALWEG_HIERARCHICAL_ALLREDUCE": "1: attaches scripts without code",
    "THALWEG_HTTP": "address of metrics and the live page",
    "THALWEG_HTTP_TOKEN_FILE": "token that readers of metrics and page present",
    "THALWEG_INTERFACE": "interface or address at which other hosts reach this one",
    "THALWEG_JOB": "name of the job in messages",
    "THALWEG_LISTEN": "address on which an aggregator serves",
    "THALWEG_LOCAL_SHARDS": "whether sidecars host shards",
    "THALWEG_LOG": "least severe level that is logged",
    "THALWEG_MATRIX_APPROXIMATION_RANK": "rank of PowerSGD",
    "THALWEG_MEMORY_LIMIT": "memory for the jobs of a shard",
    "THALWEG_NCCL_LIBRARY": "the NCCL library that sidecars load",
    "THALWEG_NODE_REDUCE": "who sums the gradients of a node",
    "THALWEG_POLICY": "file that says who may take part in a shard's jobs",
    "THALWEG_POWERSGD_COMPRESSION": "1: attaches scripts without code, with codec powersgd",
    "THALWEG_PS": "moves the optimizer of scripts to the shards",
    "THALWEG_RECONNECT": "seconds for which a connection may be lost",
    "THALWEG_SHARD_PORTS": "ports for the shard of a sidecar",
    "THALWEG_SIDECAR": "socket of the sidecar to use",
    "THALWEG_START_COMPRESS_ITER": "iteration at which PowerSGD begins",
    "THALWEG_STEP_TIMEOUT": "seconds that a living worker may be late",
    "THALWEG_THREADS": "threads of a sidecar or an aggregator",
    "THALWEG_TIMEOUT": "seconds without a sign of life after which a job fails",
    "THALWEG_TLS_CA": "certificates to trust",
    "THALWEG_TLS_CERT": "certificate of this host's programs",
    "THALWEG_TLS_KEY": "key of that certificate",
    "THALWEG_TRACE": "folder for traces",
    "THALWEG_WEIGHT": "an aggregator's share of the gradients",
    "THALWEG_WINDOW_CHUNKS": "chunks that may be under way to a shard",
}
# They work through the entry point that torch calls when it is imported.
_WITHOUT_CODE = {*SWITCHES, *POWERSGD, "THALWEG_BACKEND", "THALWEG_COMPAT", "THALWEG_PS"}
# They are for a sidecar that a worker starts, where that hosts a shard.
_HOSTING = ("THALWEG_INTERFACE", "THALWEG_SHARD_PORTS")
# With 0 they switch others off.
_OFF = ("THALWEG_ENABLE", "THALWEG_LOCAL_SHARDS", "TORCH_DEVICE_BACKEND_AUTOLOAD")


def findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yields one for each variable that is set, in the order of their names."""
    names = {name: name for name in KNOWN} | {theirs: ours for ours, theirs in AIAK.items()}
    for variable in sorted(names):
        if env.get(variable):
            text = f"{variable}={env[variable]} ({MEANINGS[names[variable]]})"
            why = without_effect(env, variable, names[variable])
            yield Finding("note", f"{text}; {why}") if why else Finding("ok", text)
    for variable, like in misspelt(env):
        yield Finding("warn", f"{variable}={env[variable]} means nothing{like}")


def without_effect(env: Mapping[str, str], variable: str, name: str) -> str:
    """Returns why a variable that stands for `name` does nothing; empty: it does something."""
    of_powersgd, hosting = name in POWERSGD, name in _HOSTING
    no_code = name in _WITHOUT_CODE and name != "THALWEG_ENABLE"
    switch = "THALWEG_POWERSGD_COMPRESSION"
    powersgd_is_on = "1" in (env.get(switch), env.get(AIAK[switch]))
    off = {variable: env.get(variable) == "0" for variable in _OFF}
    reasons = (
        (variable != name and env.get(name), f"because {name} wins over it"),
        (no_code and off["THALWEG_ENABLE"], "without code, because THALWEG_ENABLE is 0"),
        (
            name in _WITHOUT_CODE and off["TORCH_DEVICE_BACKEND_AUTOLOAD"],
            "without code, because TORCH_DEVICE_BACKEND_AUTOLOAD is 0",
        ),
        (
            (of_powersgd or name in CODEC_SWITCHES) and env.get("THALWEG_CODEC"),
            "because THALWEG_CODEC wins over it",
        ),
        (of_powersgd and not powersgd_is_on, f"because {AIAK[switch]} is off"),
        (hosting and env.get("THALWEG_SIDECAR"), "because THALWEG_SIDECAR names one that runs"),
        (hosting and off["THALWEG_LOCAL_SHARDS"], "because THALWEG_LOCAL_SHARDS is 0"),
    )
    return next((f"it does nothing {why}" for holds, why in reasons if holds), "")
