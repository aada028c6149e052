"""The native part: a worker's connection to its node's sidecar. `import torch` first."""

from torch import Tensor

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
    ) -> None:
        """Connects and waits until all workers of the job have.

        Raises ValueError (what the workers say of the job differs), TimeoutError (workers are
        missing), ConnectionError (no sidecar there, or it lost an aggregator) or RuntimeError.
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

    def status(self) -> str | None:
        """None while the session works, else why it has failed."""

    def close(self) -> None:
        """Leaves the job; buckets in flight fail. May be called again."""

class AllReducer:
    """Reduces single tensors. All workers must make the same calls in the same order."""

    def __init__(self, session: Session) -> None: ...
    def mean(self, tensor: Tensor, bucket: int = 0) -> Tensor:
        """The mean over all workers; blocks, releasing Python's lock. Raises RuntimeError.

        The result is read-only memory shared by the node's workers, until the next call with the
        same bucket.
        """
