"""The native part: a worker's connection to its node's sidecar, and fused optimizers.

Importing it imports torch. ImportError for a torch of a minor version that this was not built for.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, Backend, GradBucket, Store, Work
from torch.futures import Future

T = TypeVar("T")

def cpu_capability() -> str:
    """Returns the name of the instruction set that the CPU kernels of this process use: "AVX2"."""

def cuda_problem(number: int) -> str:
    """Returns why the GPU of that number cannot be used here; empty if it can."""

def set_error(future: Future[Tensor], text: str) -> None:
    """Completes a future with a RuntimeError that torch's C++ code sees as well."""

def call_in_callback(function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Calls `function(*args, **kwargs)`; collectives that it begins are those of a callback."""

def reducer_parameters(reducer: object) -> list[Tensor]:
    """Returns the parameters whose gradients DistributedDataParallel's reducer averages: those that
    required gradients when the module was built.
    """

def scale_to_joined(reducer: object, gradient: Tensor) -> None:
    """Makes the mean over all ranks, of which some have left join(), one over the others, in place.

    It does so only if join() has divide_by_initial_world_size=False. Call it in a hook of
    `reducer`.
    """

class ShardOffer:
    """Asks a sidecar to host a shard of a job. The shard stays offered until this is closed, or for
    as long as the job lasts once the sidecar's node has joined it. Thread-safe.
    """

    address: str
    """host:port at which other nodes reach the shard; empty if the sidecar hosts none."""
    aggregators: list[str]
    """host:port of the shards that the sidecar was started with."""

    def __init__(self, *, sidecar_path: str, job: str, secret: str, timeout: float) -> None:
        """Raises ConnectionError (no sidecar there), TimeoutError, ValueError (the sidecar is of
        another version) or RuntimeError.
        """

    def close(self) -> None:
        """Ends the offer. May be called again."""

class ProcessGroup(Backend):
    """The back end "thalweg" of one process group."""

    def __init__(
        self,
        session: Session,
        *,
        number: int,
        rank: int,
        nodes: list[int],
        name: str,
        timeout: float,
        store: Store | None = None,
    ) -> None:
        """Makes the group known to the node's sidecar; does not wait for the other workers.

        `number` names the group in its job, where 1 is all workers; `rank` is this worker's in the
        group; `nodes` has the number of each rank's node; a collective may take `timeout` seconds.
        `store` is that of all workers, without which the group cannot have parts.
        """

    class Options(Backend.Options):
        """The group's timeout; may be copied."""

    @property
    def options(self) -> Options: ...
    def make_part(
        self, *, store: Store, ranks: list[int], name: str, timeout: float
    ) -> ProcessGroup | None:
        """Makes a group of some of this one's ranks, which all of them call with a store of their
        own. Returns None for a worker that is none of them. Raises RuntimeError.
        """

    def at_shutdown(self, listener: Callable[[], object]) -> None:
        """Lets destroy_process_group() call `listener`, once, before the session ends."""

    def perform_nocolor_split(self, device: object) -> None:
        """Does nothing: torch calls it on ranks that a split-off group leaves out."""

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions = ...) -> Work:
        """As all of a back end's calls, which torch.distributed makes; torch has no stub of it."""

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work:
        """So is this: the inputs of all ranks, one after the other in `output`."""

    def _reduce_scatter_base(self, outputTensor: Tensor, inputTensor: Tensor) -> Work:
        """And this: each rank's part of the sum of all inputs."""

class Session:
    """A worker's connection. Thread-safe. Does nothing in forked children of the process that made
    it.
    """

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
        step_timeout: float | None = None,
        cuda_device: int | None = None,
        shards: list[str] = ...,
        hosts: list[int] = ...,
        secret: str = "",
        min_nodes: int = 0,
    ) -> None:
        """Connects and waits until all workers of the job have connected.

        Fails when a process that is awaited shows no sign of life for `timeout` seconds, or does
        not come to a round for `step_timeout`; None: as long.
        `cuda_device` is the number of the GPU that holds the gradients; None: the CPU does.
        `shards` are the addresses of the job's shards, in an order that is equal on all nodes;
        empty: those that the sidecar was started with, or its own on a single node. hosts[k] is the
        number of the node that hosts shards[k]; -1: a machine of its own does. `secret`, 64
        hexadecimal digits, proves to shards and nodes that they belong to the job. The job goes on
        when nodes are lost as long as `min_nodes` are left; 0: it needs all.

        Raises ValueError (the workers disagree about the job), TimeoutError (workers are missing),
        ConnectionError (no sidecar there, it lost an aggregator, or there is no such GPU) or
        RuntimeError (also when this build has no CUDA).
        """

    def attach(self, reducer: object, named_parameters: list[tuple[str, Tensor]]) -> None:
        """Registers the communication hook with a DDP module's reducer."""

    def set_settings(
        self,
        number: int,
        groups: list[dict[str, float]],
        *,
        grad_scale: float = 1.0,
        max_grad_norm: float = 0.0,
        grad_squares: float = 0.0,
        measures: bool = False,
        waits_for_all: bool = False,
        gives_nothing: bool = False,
    ) -> None:
        """Numbers, from 1, the settings of an update, by group, that later pushes or pulls name.

        The keys are lr, weight_decay, momentum, dampening, beta1, beta2 and eps, which are 0 unless
        given, and trust_ratio, which is 1. For updates that commit: the gradients' scale, the norm
        to which all together are clipped (0: they are not), and the sum of the squares of the
        scaled ones. `measures`: they are for measure(). With a quorum: pushes wait until all nodes
        have made one with settings that say `waits_for_all`, of which those with `gives_nothing`
        give no values. All workers of the job give the same. Raises RuntimeError.
        """

    def stats(self) -> dict[str, float]:
        """Returns the fields of SessionStats in client/core/session.h."""

    def save_codec_state(self) -> bytes:
        """Returns what the codec carries from round to round on this node.

        Raises RuntimeError, also while a bucket is being reduced.
        """

    def load_codec_state(self, state: bytes) -> None:
        """Restores a saved state; one that does not fit fails the job.

        Raises RuntimeError, also while a bucket is being reduced.
        """

    def note_precision(self, loss_scale: float, skipped_steps: int) -> None:
        """Reports the loss scale, and the steps skipped since the last call."""

    def path(self) -> str:
        """Returns SessionStats.path of client/core/session.h."""

    def num_shards(self) -> int:
        """Returns the number of the job's shards."""

    def placement(self) -> str:
        """Says which shard sums how much, and what that takes; empty on a single node."""

    def lost_nodes(self) -> list[str]:
        """Returns the nodes without which the job goes on, each with the reason."""

    def snapshots(self) -> tuple[bool, list[tuple[int, int]]]:
        """Returns whether a shard is writing one, and the branch and the step of each that all
        shards have, ascending.
        """

    def take_snapshot(self, branch: int, step: int) -> bool:
        """Lets all shards begin one, between two updates. Returns whether they have, which they
        have not while one of them still writes.
        """

    def restore_snapshot(self, branch: int, step: int) -> None:
        """Makes the weights on all shards those of the snapshot."""

    def has_lost_weights(self) -> bool:
        """Whether the session has failed because a shard has lost the weights that it kept."""

    def status(self) -> str | None:
        """Returns None while the session works, else why it has failed."""

    def close(self) -> None:
        """Leaves the job; buckets in flight fail. May be called again."""

    def abort(self) -> None:
        """Fails the job for all its workers at once, whatever they wait for."""

def cancel_connects() -> None:
    """Ends all calls of Session() that wait for other workers: they raise RuntimeError."""

def read_snapshot_header(path: str) -> dict[str, Any]:
    """Returns what a file of a snapshot (docs/snapshots.md) says of itself: job, identity in
    hexadecimal, branch, step, shard, num_shards, and the description of each bucket, by its three
    numbers. Raises RuntimeError, naming the file, as does the next one.
    """

def read_snapshot(
    path: str,
) -> tuple[dict[str, Any], list[tuple[tuple[int, int, int], int, int, list[Tensor]]]]:
    """Returns the same, and of each chunk the bucket, its number, the steps done, and the values of
    all slices in float32.
    """

class DdpHook:
    """The hook that Session.attach() registers, for hooks in Python, which call scale_to_joined()
    themselves. One thread at a time may use it.
    """

    def __init__(self, session: Session, named_parameters: list[tuple[str, Tensor]]) -> None: ...
    def run(self, bucket: GradBucket) -> Future[list[Tensor]]:
        """Returns the bucket's mean over the session's workers as the only element. Raises
        RuntimeError.

        On the CPU it is read-only memory, valid until the bucket's next round; on a GPU it is the
        bucket's own memory.
        """

class ServedBucket:
    """Parameters whose weights the shards keep and update. All workers of a job make the same ones
    in the same order; one thread at a time may use it.
    """

    def __init__(
        self,
        session: Session,
        *,
        number: int,
        named_parameters: list[tuple[str, Tensor]],
        groups: list[int],
        optimizer: str,
        decoupled: bool,
        nesterov: bool,
        maximize: bool,
        commits: bool,
        down: str,
        ahead: int,
        alone: bool,
        delay_aware: bool,
        quorum: int,
        grace: float | None,
        drops_late: bool,
    ) -> None:
        """`number` is the bucket's in the session. `groups` has the number of each parameter's
        group, `optimizer` is "sgd", "adam" or "lamb", of which the last two may be `decoupled` as
        AdamW is; with `commits`, which "lamb" needs, an update takes a push and a pull; `down` is
        the format in which weights come: "fp32", "fp16" or "bf16". One of three may be set: a node
        may be so many rounds `ahead` of others, at most 64, or, `alone`, waits for none, and then
        shards may divide its rates by its staleness (`delay_aware`), or it waits for a `quorum` of
        so many nodes and for a `grace` in seconds (None: the shards measure it), after which what
        others push counts in the next update or not (`drops_late`).

        Parameters are dense, of one type out of float32, float16 and bfloat16, and on the CPU.
        Raises RuntimeError.
        """

    def push(self, gradients: Tensor, settings: int, waited: float) -> Future[Tensor]:
        """Pushes the gradients of all parameters, one after the other in one tensor of their type,
        which may be reused at once. `waited`: the seconds for which this worker has waited for the
        weights of the push before.

        The result is the new weights in the same order and type: read-only memory that the node's
        workers share, until the next push. With `commits`, `settings` is 0, and the result is
        float64: the squares of the mean by granule of 4096 elements of a parameter, and last how
        many elements of it are not finite.
        """

    def pull(self, settings: int) -> Future[Tensor]:
        """With `commits`: returns the new weights."""

    def measure(self, settings: int) -> Future[Tensor]:
        """With "lamb", between push and pull: returns in float64, by granule, the squares of the
        weights, then those of the update, and one number more.
        """

    def read(self, slice: int) -> tuple[Tensor | None, int]:
        """Returns the weights (0) or a moment of the optimizer (1, 2), and the steps done.

        The values are float32, of all parameters one after the other; None: nobody has written the
        weights, or the moment is zeros. Between two rounds only. Raises RuntimeError.
        """

    def write(self, slice: int, values: Tensor | None, steps: int) -> None:
        """Replaces them, before the first push of all workers; one worker does that."""

def total_of_squares(squares: Tensor) -> float:
    """Returns the sum of squares by granule, with the bits of FusedTensors.grad_squares()."""

class Int8Blocks:
    """The wire format int8 for some tensors of the rows of sharded models: each is whole blocks of
    256 elements, the last one filled up with zeros.
    """

    def __init__(self, tensors: list[tuple[int, int]]) -> None:
        """`tensors` has the first column of each in a row, and its number of elements."""

    def encode(self, rows: Tensor, residual: Tensor | None, bytes: Tensor) -> None:
        """Encodes rows of float32 into as many rows of `bytes`, uint8, all on the CPU. `residual`,
        float32, is added first and becomes what is lost. Raises RuntimeError (shapes do not fit).
        """

    def decode(self, bytes: Tensor, rows: Tensor) -> None:
        """Writes the tensors' columns of `rows`, of float32, float16 or bfloat16. As encode()."""

class NotFusable(RuntimeError):
    """The kernels cannot update these tensors; nothing has been changed."""

def check_fusable(params: list[Tensor]) -> None:
    """Raises NotFusable unless parameters and gradients can be updated together.

    They must be dense, float32, float16 or bfloat16, and all on the CPU or on one GPU.
    """

def unscaled_grads(
    grads: list[Tensor], scale: float, memory: list[Tensor | None]
) -> tuple[list[Tensor], bool]:
    """Returns float32 copies divided by `scale`, and whether all were finite, in one pass.

    A copy lies in its tensor of `memory`, which may be shorter than `grads`, if that has the same
    shape and strides and nothing but `memory` refers to it.

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
        """`max_grad_norm` is clip_grad_norm_'s; 0: gradients are not clipped."""

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
        """`max_grad_norm` is clip_grad_norm_'s; 0: gradients are not clipped."""

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
        """`max_grad_norm` is apex's, without an epsilon; 0: gradients are not clipped."""

class FusedTensors:
    """Parameters of one group on the CPU, updated in one parallel region; not thread-safe.

    Methods take the parameters' .grad divided by `grad_scale`, skip parameters without a gradient,
    and return how many they updated. `grad_squares` is of all gradients that are clipped together;
    it is required where settings have max_grad_norm. They raise NotFusable if there is a gradient
    that they cannot take.
    """

    def __init__(
        self,
        params: list[Tensor],
        states: list[list[Tensor]],
        steps: list[Tensor],
        copies: list[Tensor | None],
    ) -> None:
        """`states[k][i]` is state k of params[i], float32 of its shape.

        `steps[i]` is one number, the steps it has done; may be empty for SGD without momentum.
        `copies[i]`, of the same shape, receives the rounded new params[i]; may be empty. Raises
        NotFusable.
        """

    def check_grads(self) -> None:
        """Raises NotFusable if there is a gradient that a step cannot take."""

    def adam(self, settings: AdamSettings, *, grad_scale: float, grad_squares: float = 0.0) -> int:
        """The states are exp_avg, exp_avg_sq, and with AMSGrad max_exp_avg_sq."""

    def sgd(self, settings: SgdSettings, *, grad_scale: float, grad_squares: float = 0.0) -> int:
        """The state is the momentum, or none."""

    def lamb(self, settings: LambSettings, *, grad_scale: float, grad_squares: float = 0.0) -> int:
        """The states are exp_avg, exp_avg_sq."""

    def grad_squares(self) -> float:
        """Returns the sum of all gradients' squares, the same bits for any number of threads."""

class FusedDeviceTensors:
    """FusedTensors on a GPU, in the current stream and without waiting. Only in builds with CUDA.

    Tensors of one number are read when the step runs: `lr` replaces the settings', then
    `grad_scale`, and `found_inf`: unless it is 0, nothing changes and no step is counted. Steps are
    float32 on the device.
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
        """Returns one float64 on the device; it has the bits of FusedTensors."""
