"""The scripts of training libraries in clients/, and what they are run with."""

from __future__ import annotations

from pathlib import Path

from harness import DEADLINE

SCRIPTS = Path(__file__).parent / "clients"
SHORT = ["accelerated", "lightning_strategy", "lightning_training", "timm_training", "trainer"]
LONG = ["compiled", "compiled_ddp", "compiled_inductor", "spawned"]  # compilers take a minute
# A variable must be set when torch is imported; the script then chooses others.
VARIABLES = {"THALWEG_CODEC": "fp32", "HF_HUB_OFFLINE": "1"}
# These halve Inductor's time: no processes that load torch, no trial of the compiler's options.
VARIABLES |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
SECONDS = 4 * DEADLINE  # Inductor loads a core of each worker for most of a minute,
VARIABLES["THALWEG_STEP_TIMEOUT"] = str(SECONDS)  # and not both of them for as long
