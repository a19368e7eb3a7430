"""Compare the plugin's hooks with SGLang's functions: python -m torch.distributed.run ... sglang_collectives.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
torch.set_num_threads(1)

from sglang.srt.distributed.parallel_state import GroupCoordinator  # noqa: E402  # after the setting
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from fused_tp.integrations import sglang as plugin  # noqa: E402


def main() -> None:
    """Compare the collectives of a subgroup, over dims and dtypes, and in place."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size() - 1
    group_ranks = [[0], list(range(1, size + 1))]  # not the world: the first rank is alone
    switches = dict.fromkeys(
        ("pynccl", "mscclpp", "custom_allreduce", "torch_symm_mem_all_reduce", "hpu_communicator", "xpu_communicator"),
        False,
    )
    group = GroupCoordinator(group_ranks, rank, "gloo", **{f"use_{name}": on for name, on in switches.items()})
    stock_all_reduce, stock_all_gather = GroupCoordinator.all_reduce, GroupCoordinator.all_gather
    plugin.register()
    HookRegistry.apply_hooks()
    assert GroupCoordinator.all_reduce is not stock_all_reduce
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        for shape in ((6, 12), (1, 6 * 1000), (6, 6, 6), (0, 3)):
            x = torch.arange(torch.Size(shape).numel()).view(shape).remainder(50).add(rank).to(dtype)  # sums are exact
            total, in_place, strided = (
                stock_all_reduce(group, x.clone()),
                x.clone(),
                x.clone().t() if x.ndim == 2 else x,
            )
            assert torch.equal(group.all_reduce(in_place), total)
            assert torch.equal(in_place, total)
            assert torch.equal(group.all_reduce(strided.clone()), total.t() if x.ndim == 2 else total)
            for dim in range(-1, len(shape)):
                assert torch.equal(group.all_gather(x, dim), stock_all_gather(group, x, dim))
            outputs = [torch.empty_like(x) for _ in range(group.world_size)]
            if group.world_size > 1:
                group.all_gather(x, output_tensor_list=outputs)
                assert torch.equal(torch.cat(outputs), group.all_gather(x, 0))
    assert len(plugin._memory_by_group) == (group.world_size > 1)
    dist.barrier()


if __name__ == "__main__":
    main()
