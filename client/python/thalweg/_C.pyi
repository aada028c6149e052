"""The native part: a worker's connection to its node's sidecar, and fused optimizers.

`import torch` first.
"""

from collections.abc import Callable

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

def cuda_problem(number: int) -> str:
    """Why the GPU of that number cannot be used here; empty if it can."""

def set_error(future: Future[Tensor], text: str) -> None:
    """Completes a future with a RuntimeError that torch's C++ sees as well."""

class Session:
    """Thread-safe. Does nothing in forked children of the process that made it."""

    def __init__(
        self,
        *,
        sidecar_path: str,
        job: str,
        rank: int,
        world_size: int,
        node: int,
        num_nodes: int,
        node_name: str,
        local_rank: int,
        local_size: int,
        codec: str,
        chunk_bytes: int,
        timeout: float,
        cuda_device: int | None = None,
    ) -> None:
        """Connects and waits until all workers of the job have.

        `cuda_device` is the number of the GPU that has the gradients; None: the CPU has.

        Raises ValueError (what the workers say of the job differs), TimeoutError (workers are
        missing), ConnectionError (no sidecar there, it lost an aggregator, or there is no such GPU)
        or RuntimeError (also when this build has no CUDA).
        """

    def attach(self, reducer: object, named_parameters: list[tuple[str, Tensor]]) -> None:
        """Registers the communication hook with a DDP module's reducer."""

    def stats(self) -> dict[str, float]:
        """The fields of SessionStats in client/core/session.h."""

    def save_codec_state(self) -> bytes:
        """What the codec carries from round to round on this node.

        Raises RuntimeError, also while a bucket is being reduced.
        """

    def load_codec_state(self, state: bytes) -> None:
        """Puts a saved state in its place; one that does not fit fails the job.

        Raises RuntimeError, also while a bucket is being reduced.
        """

    def note_precision(self, loss_scale: float, skipped_steps: int) -> None:
        """What loss scaling has come to: the scale now, and steps skipped since the last call."""

    def path(self) -> str:
        """SessionStats.path in client/core/session.h."""

    def status(self) -> str | None:
        """None while the session works, else why it has failed."""

    def close(self) -> None:
        """Leaves the job; buckets in flight fail. May be called again."""

class DdpHook:
    """What Session.attach() registers, for hooks in Python. One thread may use it at a time."""

    def __init__(self, session: Session, named_parameters: list[tuple[str, Tensor]]) -> None: ...
    def run(self, bucket: GradBucket) -> Future[list[Tensor]]:
        """The bucket's mean over the session's workers, as the only element. Raises RuntimeError.

        On the CPU it is read-only memory, until the bucket's next round; on a GPU the bucket's own.
        """

class AllReducer:
    """Reduces single tensors. All workers must make the same calls in the same order."""

    def __init__(self, session: Session) -> None: ...
    def mean(self, tensor: Tensor, bucket: int = 0) -> Tensor:
        """The mean over all workers; blocks, releasing Python's lock. Raises RuntimeError.

        The result is read-only memory shared by the node's workers, until the next call with the
        same bucket.
        """

class NotFusable(RuntimeError):
    """What the kernels cannot update; nothing has been changed."""

def check_fusable(params: list[Tensor]) -> None:
    """Raises NotFusable unless parameters and gradients can be updated together.

    They must be dense, float32, float16 or bfloat16, and all on the CPU or on one GPU.
    """

def unscaled_grads(grads: list[Tensor], scale: float) -> tuple[list[Tensor], bool]:
    """float32 copies divided by `scale`, and whether all were finite, in one pass.

    Raises NotFusable unless all are dense, float16 or bfloat16, and on the CPU.
    """

class AdamSettings:
    def __init__(
        self,
        *,
        lr: float,
        weight_decay: float,
        maximize: bool,
        max_grad_norm: float,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool,
        bias_correction: bool,
    ) -> None:
        """`max_grad_norm`: as clip_grad_norm_'s; 0: gradients are not clipped."""

class SgdSettings:
    def __init__(
        self,
        *,
        lr: float,
        weight_decay: float,
        maximize: bool,
        max_grad_norm: float,
        momentum: float,
        dampening: float,
        nesterov: bool,
    ) -> None:
        """`max_grad_norm`: as clip_grad_norm_'s; 0: gradients are not clipped."""

class LambSettings:
    def __init__(
        self,
        *,
        lr: float,
        weight_decay: float,
        maximize: bool,
        max_grad_norm: float,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool,
        bias_correction: bool,
        grad_averaging: bool,
        trust_ratio: bool,
    ) -> None:
        """`max_grad_norm`: as apex's, without an epsilon; 0: gradients are not clipped."""

class BackwardWatch:
    """Tells that a backward pass is about to add to the gradients of some parameters."""

    def __init__(self) -> None: ...
    def add(self, param: Tensor) -> None:
        """For as long as it lives; it must require a gradient."""

    def arm(self, told: Callable[[], object]) -> None:
        """Has `told` called before the next gradient arrives, once, by the backward's thread."""

    def disarm(self) -> None: ...

class FusedTensors:
    """Parameters of one group on the CPU, updated in one parallel region; not thread-safe.

    Methods take the parameters' .grad divided by `grad_scale`, leave out parameters without, and
    say how many they updated. `grad_squares`: of all gradients that are clipped together, wanted
    where settings have max_grad_norm. They raise NotFusable if there is a gradient that they cannot
    take.
    """

    def __init__(
        self,
        params: list[Tensor],
        states: list[list[Tensor]],
        steps: list[Tensor],
        copies: list[Tensor | None],
    ) -> None:
        """`states[k][i]`: state k of params[i], float32 of its shape.

        `steps[i]`: one number, how many it has done; may be empty for SGD without momentum.
        `copies[i]`, of the same shape, gets what params[i] becomes, rounded; may be empty. Raises
        NotFusable.
        """

    def check_grads(self) -> None:
        """Raises NotFusable if there is a gradient that a step cannot take."""

    def adam(self, settings: AdamSettings, *, grad_scale: float, grad_squares: float = 0.0) -> int:
        """States: exp_avg, exp_avg_sq, and with AMSGrad max_exp_avg_sq."""

    def sgd(self, settings: SgdSettings, *, grad_scale: float, grad_squares: float = 0.0) -> int:
        """States: the momentum, or none."""

    def lamb(self, settings: LambSettings, *, grad_scale: float, grad_squares: float = 0.0) -> int:
        """States: exp_avg, exp_avg_sq."""

    def grad_squares(self) -> float:
        """The sum of the squares of all gradients, the same bits for any number of threads."""

class FusedDeviceTensors:
    """The same on a GPU, in the current stream and without waiting. Only in builds with CUDA.

    Tensors of one number are read when the step runs: `lr` in place of the settings', `grad_scale`,
    and `found_inf`: unless it is 0, nothing changes and no step is counted. Steps are float32 on
    the device.
    """

    def __init__(
        self,
        params: list[Tensor],
        states: list[list[Tensor]],
        steps: list[Tensor],
        copies: list[Tensor | None],
    ) -> None: ...
    def check_grads(self) -> None: ...
    def adam(
        self,
        settings: AdamSettings,
        *,
        lr: Tensor | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        grad_squares: Tensor | None = None,
    ) -> int: ...
    def sgd(
        self,
        settings: SgdSettings,
        *,
        lr: Tensor | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        grad_squares: Tensor | None = None,
    ) -> int: ...
    def lamb(
        self,
        settings: LambSettings,
        *,
        lr: Tensor | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        grad_squares: Tensor | None = None,
    ) -> int: ...
    def grad_squares(self) -> Tensor:
        """One float64 on the device; the bits of FusedTensors."""
