"""torchtitan (0.3) on CPU ranks: the accelerator functions that its Trainer calls, implemented for a CPU."""

from __future__ import annotations

import os
import resource
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


def on_cpu() -> None:
    """Let torchtitan run on CPU ranks, over gloo. Call it before any other part of torchtitan is imported.

    Without an accelerator torchtitan assumes "cuda". FSDP2 reduces by sums, because gloo does not support averages;
    torchtitan itself divides losses by the number of tokens.

    Raises:
        ValueError: another module of torchtitan was imported before, and has stored the device that it found.

    Example:
        >>> from fused_tp.integrations.torchtitan_cpu import on_cpu
        >>> on_cpu()
        >>> from torchtitan.trainer import Trainer
    """
    if utils.device_type == "cpu":
        return
    early_modules = [name for name, module in sys.modules.items() if _has_stored_device(name, module)]
    if early_modules:
        raise ValueError(
            f"{early_modules[0]} was imported before on_cpu() and has stored another device. Call on_cpu() before "
            "importing torchtitan modules."
        )
    utils.device_type, utils.device_module = "cpu", _Cpu()
    from torchtitan.distributed import fsdp

    disable_division: Any = fsdp.disable_fsdp_gradient_division

    def disable_division_on_cpu(model: torch.nn.Module) -> None:
        disable_division(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = disable_division_on_cpu


def _has_stored_device(name: str, module: Any) -> bool:
    return name.startswith("torchtitan.") and module is not utils and "device_type" in vars(module)


class _Cpu:
    """Counterpart of torch.cuda for a process whose only device is the CPU."""

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def set_device(self, device: Any) -> None: ...
    def synchronize(self, device: Any = None) -> None: ...
    def empty_cache(self) -> None: ...
    def reset_peak_memory_stats(self) -> None: ...
