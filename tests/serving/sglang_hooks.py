"""Compare the plugin's hooks with SGLang's functions: python -m torch.distributed.run ... sglang_hooks.py."""

from __future__ import annotations

import os
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
torch.set_num_threads(1)

from sglang.srt.distributed.parallel_state import GroupCoordinator  # noqa: E402  # after the setting
from sglang.srt.layers.layernorm import Gemma3RMSNorm, GemmaRMSNorm, RMSNorm  # noqa: E402
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from fused_tp.integrations import sglang as plugin  # noqa: E402


def compare_layers(norms: dict[Any, Any]) -> None:
    """Compare norms with SGLang's functions (`norms`, by class), and linear layers with torch's."""
    x, residual, weight = torch.randn(3, 512), torch.randn(3, 512), torch.randn(768, 512)
    with torch.no_grad(), mock.patch.object(plugin, "add_rms_norm", wraps=plugin.add_rms_norm) as kernel:
        for norm_class, stock in norms.items():
            norm = norm_class(512)
            norm.weight.normal_()
            torch.testing.assert_close(norm.forward_native(x), stock(norm, x))
            torch.testing.assert_close(norm.forward_native(x, residual), stock(norm, x, residual))
        assert kernel.call_count == len(norms)
        with mock.patch.object(plugin, "linear", wraps=plugin.linear) as kernel:
            y = UnquantizedLinearMethod().apply(SimpleNamespace(weight=weight), x, weight[:, 0])
        assert kernel.called
        # Sums of 512 products, up to about 100, in another order: a few roundings of 100 * 6e-8.
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, weight[:, 0]), rtol=0.0, atol=1e-4)


def main() -> None:
    """Compare layers on each rank, and the collectives of a subgroup, over dims and dtypes, and in place."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size() - 1
    group_ranks = [[0], list(range(1, size + 1))]  # not the world: the first rank is alone
    switches = dict.fromkeys(
        ("pynccl", "mscclpp", "custom_allreduce", "torch_symm_mem_all_reduce", "hpu_communicator", "xpu_communicator"),
        False,
    )
    group = GroupCoordinator(group_ranks, rank, "gloo", **{f"use_{name}": on for name, on in switches.items()})
    stock_all_reduce, stock_all_gather = GroupCoordinator.all_reduce, GroupCoordinator.all_gather
    norms = {norm_class: norm_class.forward_native for norm_class in (RMSNorm, GemmaRMSNorm, Gemma3RMSNorm)}
    stock = {target: resolve_name(f"sglang.srt.{target}") for target in plugin._HOOKS}
    plugin.register()
    HookRegistry.apply_hooks()
    assert all(resolve_name(f"sglang.srt.{target}") is not function for target, function in stock.items())
    compare_layers(norms)
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
