"""Compares iterations of PowerSGD with torch's communication hook: `… NAME OUT`."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jobs import job, main
from powersgd_jobs import START, Net
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

import thalweg.ddp

ITERATIONS = START + 10
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def fnv1a(text: str) -> int:
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value


def first_factor(name: str, columns: int, rank: int, use: int) -> torch.Tensor:
    """Returns Thalweg's first Q, columns x rank, as docs/compression.md describes it."""
    q = np.empty((columns, rank))
    for column in range(rank):
        key = 0
        for part in (0, fnv1a(name), column, use):
            key = mix((key + GOLDEN + mix((part + GOLDEN) & MASK)) & MASK)
        for j in range(columns):
            key = (key + GOLDEN) & MASK
            q[j, column] = ((mix(key) >> 40) - 2**23) / 2**23
    return torch.from_numpy(q)


def read_states(saved: bytes) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns each parameter's residual and factor, in float64, of a node's saved codec state.

    server/sidecar/codec/parameter_states.h describes the bytes. Either may be empty.
    """
    assert saved[:4] == b"TWS3"
    states, at = {}, 8
    for _ in range(int.from_bytes(saved[4:8], "little")):
        length = int.from_bytes(saved[at : at + 4], "little")
        name = saved[at + 4 : at + 4 + length].decode()
        at += 4 + length
        _, *sizes = np.frombuffer(saved, "<u8", 4, at).tolist()
        at += 32
        vectors = []
        for size in sizes:
            values = np.frombuffer(saved, "<f4", size, at).astype(np.float64)
            vectors.append(torch.from_numpy(values))
            at += 4 * size
        factor, residual, _ = vectors
        states[name] = (residual, factor)
    return states


class Given(nn.Module):
    """A module with the parameters of Net whose gradients are exactly those it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, parameter in Net().named_parameters():
            zeros = torch.zeros_like(parameter, dtype=dtype)
            self.register_parameter(name.replace(".", "_"), nn.Parameter(zeros))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(p * g.to(p.dtype)).sum() for p, g in pairs]).sum()


class Matrix:
    """A parameter that PowerSGD compresses, with the state that Thalweg has for it."""

    def __init__(self, name: str, shape: torch.Size, rank: int) -> None:
        self.rows, self.columns = shape[0], shape[1:].numel()
        self.rank = min(self.rows, self.columns, rank)
        self.residual = torch.zeros(self.rows * self.columns, dtype=torch.float64)
        self.factor = first_factor(name, self.columns, self.rank, START)

    def is_compressed(self) -> bool:
        return (self.rows + self.columns) * self.rank * 2 < self.rows * self.columns

    def take(self, residual: torch.Tensor, factor: torch.Tensor) -> None:
        if len(residual):
            self.residual = residual
        if len(factor):
            self.factor = factor.view(self.rank, self.columns).T

    def bound(self, gradient: torch.Tensor) -> float:
        """Returns how far float32 arithmetic may be from this iteration's exact result.

        The result is Q Qᵀ M where the columns of Q span those of P = M F; M is the mean of what
        the workers have and F the factor. To first order, with n as the longest sum and g = n u:
        each column of P is off by at most g |M|, twice if F is orthogonalised before. So the space
        that P spans turns by at most the norm of these errors, over the smallest singular value,
        both after the columns of P have been scaled to 1 (Wedin). Gram-Schmidt leaves Q as far
        from orthogonal as g times the scaled P's condition number, and the two products with Q add
        g each.
        """
        mine = gradient.double().flatten() + self.residual
        everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, mine)
        size = torch.stack([m.norm() for m in everybody]).mean()
        mean = torch.stack(everybody).mean(0).view(self.rows, self.columns)
        p = mean @ (self.factor / self.factor.norm(dim=0))
        lengths = p.norm(dim=0)
        smallest = torch.linalg.svdvals(p / lengths)[-1]
        turn = (size / lengths).norm() / smallest
        gamma = (self.rows + self.columns + len(everybody)) * 2.0**-24
        return float(gamma * (2 * turn + self.rank / smallest + 2) * size)


class TorchFromState:
    """torch's hook in float64, which begins every iteration with the state it is given."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.rank = rank
        made = {name: Matrix(name, p.shape, rank) for p, name in self.names.items()}
        self.matrices = {name: matrix for name, matrix in made.items() if matrix.is_compressed()}

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert bucket.is_last() and bucket.index() == 0, "the comparison needs a single bucket"
        state = torch_powersgd.PowerSGDState(
            None, self.rank, START, min_compression_rate=2, orthogonalization_epsilon=0
        )
        state.iter = START
        residuals = []
        by_shape: dict[tuple[int, int], list[Matrix]] = {}
        for parameter in bucket.parameters():
            matrix = self.matrices.get(self.names[parameter])
            if matrix is None:
                residuals.append(torch.zeros(parameter.numel(), dtype=torch.float64))
            else:
                residuals.append(matrix.residual)
                by_shape.setdefault((matrix.rows, matrix.columns), []).append(matrix)
        in_order = [matrix for matrices in by_shape.values() for matrix in matrices]
        rows = sum(matrix.rows * matrix.rank for matrix in in_order)
        state.error_dict[0] = torch.cat(residuals)
        state.p_memory_dict[0] = torch.zeros(rows, dtype=torch.float64)
        state.q_memory_dict[0] = torch.cat([matrix.factor.flatten() for matrix in in_order])
        return torch_powersgd.powerSGD_hook(state, bucket)


def averages(
    model: DistributedDataParallel, gradients: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns what the model's hook makes of exactly these gradients, by parameter, in float64."""
    model.zero_grad()
    model(gradients).backward()
    parameters = model.module.named_parameters()
    return {name: p.grad.double() for name, p in parameters if p.grad is not None}


def roundings(error: torch.Tensor, gradient: torch.Tensor) -> float:
    """Returns the largest error relative to a rounding of the mean of the workers' magnitudes."""
    size = gradient.double().abs()
    dist.all_reduce(size)
    size /= dist.get_world_size()
    return float((error.abs() / (2.0**-24 * size).clamp(min=2.0**-149)).max())


@job
def step_by_step() -> dict[str, Any]:
    """Each iteration of Thalweg beside one of torch's hook in float64, from the same state.

    The result has, of every compressed iteration, the largest distance relative to the bound over
    the compressed parameters, the same where torch's hook is given no residual, and the largest
    distance of the others in roundings of float32.
    """
    result = {}
    for rank in (1, 2, 4, 8):
        exact = DistributedDataParallel(Given(torch.float64))
        reference = TorchFromState(exact.module, rank)
        exact.register_comm_hook(reference, TorchFromState.hook)
        ours = DistributedDataParallel(Given(torch.float32))
        state = thalweg.ddp.attach(ours, codec=f"powersgd:rank={rank},start={START}")
        torch.manual_seed(3)
        net = Net()
        data = torch.Generator().manual_seed(40 + dist.get_rank())
        distances: dict[str, list[float]] = {"ours": [], "no residual": [], "others": []}
        for number in range(ITERATIONS):
            x = torch.randn(8, 3, 8, 8, generator=data)
            y = torch.randint(0, 5, (8,), generator=data)
            loss = nn.functional.cross_entropy(net(x), y)
            gradients = list(torch.autograd.grad(loss, list(net.parameters())))
            [saved] = [v for k, v in state.state_dict().items() if k.startswith("node")]
            got = averages(ours, gradients)
            if number < START:
                continue
            for name, (residual, factor) in read_states(saved).items():
                if name in reference.matrices:
                    reference.matrices[name].take(residual, factor)
            by_name = dict(zip(got, gradients, strict=True))
            bounds = {name: m.bound(by_name[name]) for name, m in reference.matrices.items()}
            want = averages(exact, gradients)
            for matrix in reference.matrices.values():
                matrix.residual = torch.zeros_like(matrix.residual)
            without = averages(exact, gradients)
            distances["ours"].append(
                max(float((got[n] - want[n]).norm()) / bound for n, bound in bounds.items())
            )
            distances["no residual"].append(
                max(float((got[n] - without[n]).norm()) / bound for n, bound in bounds.items())
            )
            others = [n for n in got if n not in bounds]
            distances["others"].append(max(roundings(got[n] - want[n], by_name[n]) for n in others))
        stats = state.stats()
        state.close()
        result[rank] = distances | {
            "sent": stats["wire_bytes_sent"],
            "raw": stats["raw_bytes"],
        }
    return result


if __name__ == "__main__":
    main()
