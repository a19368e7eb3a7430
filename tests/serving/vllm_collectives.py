"""Compare the plugin's communicator with vLLM's: python -m torch.distributed.run ... vllm_collectives.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

os.environ["VLLM_DIST_IDENT"] = "fused_tp_test"
torch.set_num_threads(1)

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: E402  # after the settings
from vllm.platforms import current_platform  # noqa: E402

from fused_tp.integrations.vllm_cpu_layers import SharedMemoryCommunicator  # noqa: E402


def main() -> None:
    """Compare all collectives of a subgroup, over dims and dtypes."""
    current_platform.import_kernels()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group(list(range(1, size + 1)))  # not the world: the first rank is of no tensor-parallel group
    if rank == 0:
        dist.barrier()
        return
    own = SharedMemoryCommunicator(group, torch.device("cpu"), group, "tp:0")
    assert own.transport is not None
    stock = CpuCommunicator(group, torch.device("cpu"), group, "other:0")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((6, 12), (1, 6 * 1000), (6, 6, 6)):
            x = torch.arange(torch.Size(shape).numel()).view(shape).remainder(50).add(rank).to(dtype)  # sums are exact
            total = stock.all_reduce(x.clone())
            assert torch.equal(own.all_reduce(x), total)
            assert torch.equal(own.all_reduce_(x.clone()), total)
            for dim in (-1, 0):
                if shape[dim] % size == 0:  # vLLM's own needs a backend that scatters sums, which gloo does not
                    assert torch.equal(own.reduce_scatter(x, dim), total.chunk(size, dim)[dist.get_rank(group)])
            for dim in range(-1, len(shape)):
                assert torch.equal(own.all_gather(x, dim), stock.all_gather(x, dim))
                for dst in range(size):
                    gathered, wanted = own.gather(x, dst, dim), stock.gather(x, dst, dim)
                    assert (gathered is None) == (wanted is None)
                    assert gathered is None or torch.equal(gathered, wanted)
    dist.barrier()


if __name__ == "__main__":
    main()
