"""Uses the example: `torchrun --nproc-per-node 2 try_it.py`. It imports nothing of the back end."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("store_demo")
    rank, size = dist.get_rank(), dist.get_world_size()

    numbers = (
        torch.arange(6.0).reshape(2, 3).t() + 10 * rank
    )  # its elements do not lie side by side
    expected = size * torch.arange(6.0).reshape(2, 3).t() + 10 * sum(range(size))
    work = dist.all_reduce(numbers, async_op=True)
    assert work is not None
    (result,) = work.get_future().wait()
    assert torch.equal(numbers, expected)
    assert torch.equal(result, expected)

    word = torch.full((1000,), rank, dtype=torch.uint8)
    dist.broadcast(word, src=size - 1)
    assert torch.equal(word, torch.full((1000,), size - 1, dtype=torch.uint8))

    try:
        dist.all_gather([torch.empty(1) for _ in range(size)], torch.ones(1))
    except RuntimeError as error:
        print(f"rank {rank} of {size}: sums and copies are right; refused: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
