"""Trains Swin Transformer plainly and optimised, and shows both side by side (docs/swin.md).

    python -m thalweg.examples.swin.prepare --folder data
    python -m thalweg.examples.swin.launch_single_task --data data --amp_level O1
    python -m thalweg.examples.swin.launch_single_task --data data --amp_level O2 --kernel-opt
    python -m thalweg.examples.swin.plot

Needs what `pip install thalweg[examples]` installs.
"""


class SwinError(ValueError):
    """What the user has asked for cannot be done; the message says what to change."""
