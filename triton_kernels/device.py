"""Devices that kernels are launched on, their dtypes, and TMA descriptors of their arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .language import INTERPRETED

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # Triton's name of each dtype
# Kinds of operands: dtypes, with fp32 split by the precision of its products: "ieee", or "tf32" (tensor cores, with 10
# bits of mantissa).
OPERAND_KINDS = ("bf16", "fp16", "tf32", "ieee")
LEAST_SHARED_BYTES = 99 << 10  # shared memory of a program on every GPU since sm_80


class AssumedGpu(NamedTuple):
    """A GPU to compile for, which need not be present.

    Attributes:
        arch: compute capability as in sm_90.
        sms: multiprocessors.
        shared_bytes: shared memory available to a program.
    """

    arch: int
    sms: int
    shared_bytes: int


# The largest GPU of each architecture: A100; H100 and H200; B200.
KNOWN_GPUS = {
    80: AssumedGpu(80, 108, 163 << 10),
    90: AssumedGpu(90, 132, 227 << 10),
    100: AssumedGpu(100, 148, 227 << 10),
}
_assumed_gpu: AssumedGpu | None = None


@contextlib.contextmanager
def assume_gpu(gpu: AssumedGpu) -> Iterator[None]:
    """Treat CPU tensors as tensors of `gpu` in this context, to compile for it. Kernels must not run there."""
    global _assumed_gpu
    previous_gpu, _assumed_gpu = _assumed_gpu, gpu
    try:
        yield
    finally:
        _assumed_gpu = previous_gpu


def assumed_gpu() -> AssumedGpu | None:
    """Return the GPU that `assume_gpu` has set, or None."""
    return _assumed_gpu


def runs_kernels(device: torch.device) -> bool:
    """True if compiled kernels can be launched on tensors of `device`: a GPU, or the CPU inside `assume_gpu`."""
    return device.type == "cuda" or _assumed_gpu is not None


def arch_of(device: torch.device) -> int:
    """Return the architecture whose configs `device` uses: 80, 90 or 100; 0 if interpreted or before sm_80."""
    if _assumed_gpu is not None:
        return kernel_arch(_assumed_gpu.arch)
    if device.type != "cuda" or INTERPRETED.value:
        return 0
    properties = _properties(device.index)
    return kernel_arch(10 * properties.major + properties.minor)


def kernel_arch(capability: int) -> int:
    """Return the architecture whose configs a GPU of this compute capability uses: 80, 90 or 100; 0 before sm_80."""
    major = capability // 10
    # sm_120 has neither wgmma nor tcgen05. It uses mma.sync and asynchronous copies, as sm_80.
    return {8: 80, 9: 90, 10: 100}.get(major, 80 if major > 8 else 0)


def sms_of(device: torch.device) -> int:
    """Return the number of multiprocessors; 4 on a CPU, so that interpreted launches have several programs."""
    if _assumed_gpu is not None:
        return _assumed_gpu.sms
    return int(_properties(device.index).multi_processor_count) if device.type == "cuda" else 4


def shared_bytes_of(device: torch.device) -> int:
    """Return the shared memory available to a program, in bytes."""
    if _assumed_gpu is not None:
        return _assumed_gpu.shared_bytes
    return int(getattr(_properties(device.index), "shared_memory_per_block_optin", LEAST_SHARED_BYTES))


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return the context that makes the GPU of x current, since Triton launches on the current GPU."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def operand_kind(dtype: torch.dtype, precision: str) -> str:
    """Return the member of OPERAND_KINDS for `dtype`; `precision` ("ieee" or "tf32") matters for fp32 only."""
    return precision if dtype == torch.float32 else DTYPES[dtype]


def fits_tma(x: Tensor) -> bool:
    """True if TMA can load blocks of x (dense last dim): x and its rows begin at multiples of 16 bytes."""
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    is_aligned = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
    return x.numel() > 0 and is_aligned and x.data_ptr() % 16 == 0


def tma_descriptor(x: Tensor, block_shape: Sequence[int]) -> TensorDescriptor:
    """Return the TMA descriptor of blocks of x, which must pass `fits_tma`."""
    # torch allows any stride for a dimension of one element; TMA requires a multiple of 16 bytes.
    row_stride = -(-x.shape[-1] // 16) * 16
    strides = [stride if size > 1 else row_stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block_shape))


@functools.lru_cache
def _properties(index: int | None) -> Any:
    return torch.cuda.get_device_properties(index)
