"""How a matrix in memory gets into a kernel, and what the GPU under it is: the host's side of `tiles.load_operand`.

TMA loads blocks of a matrix whose rows (or, transposed, columns) are in one piece and begin at multiples of 16 bytes;
anything else is loaded by pointers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .tiles import INTERPRETED


def is_swapped(t: Tensor) -> bool:
    """Whether columns, not rows, are in one piece."""
    return t.stride(0) == 1 and t.stride(1) != 1 and t.shape[1] > 1


def fits_tma(t: Tensor) -> bool:
    """Whether TMA can load (or store) blocks of `t`."""
    if t.numel() == 0:
        return False
    rows = t.t() if is_swapped(t) else t
    in_one_piece = rows.stride(1) == 1
    aligned = rows.shape[0] == 1 or (rows.stride(0) > 0 and rows.stride(0) * t.element_size() % 16 == 0)
    return in_one_piece and aligned and t.data_ptr() % 16 == 0


def descriptor(t: Tensor, block: Sequence[int] = (1, 16)) -> TensorDescriptor:
    """Of blocks [rows, columns] of `t`; where it is `swapped`, of the transposed matrix in blocks [columns, rows]."""
    block = list(block)
    if is_swapped(t):
        t = t.t()
        block.reverse()
    size, length = t.shape
    # torch lets the stride of a dimension of one element be anything; TMA wants a multiple of 16 bytes.
    stride = t.stride(0) if size > 1 else -(-length // 16) * 16
    return TensorDescriptor(t, [size, length], [stride, 1], block)


def check_current(device: torch.device) -> None:
    """Raises ValueError where `device` is a GPU other than the one that kernels are launched on."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"x is on {device}, and kernels are launched on cuda:{torch.cuda.current_device()}, the current device; "
            "call this inside of torch.cuda.device(x.device)."
        )


def arch_of(device: torch.device) -> int:
    """The architecture whose configs are taken, 80, 90 or 100; 0 under the interpreter, and of a GPU before sm_80."""
    return _arch_of_gpu(device.index) if device.type == "cuda" and not INTERPRETED.value else 0


def sms_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 on CPU, so that interpreted launches have several programs."""
    return _sms_of_gpu(device.index) if device.type == "cuda" else 4


@functools.lru_cache
def _sms_of_gpu(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@functools.lru_cache
def _arch_of_gpu(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return kernels_of(10 * major + minor)


def kernels_of(capability: int) -> int:
    """The architecture whose configs a GPU takes: 80, 90 or 100; 0 before sm_80.

    Example: `kernels_of(89)` is 80.
    """
    major = capability // 10
    # sm_120 has neither wgmma nor tcgen05: mma.sync and asynchronous copies, as sm_80.
    return {8: 80, 9: 90, 10: 100}.get(major, 80 if major > 8 else 0)
