"""Rival: DeepSpeed's shared-memory all-reduce for CPU ranks of one host (pip package deepspeed).

DeepSpeed compiles this C++ extension on first use, which takes a minute and needs ninja and a compiler, but no oneCCL.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .case import Unavailable
from .ranks import RankContext

_state: dict[str, bool] = {}


def load_extension(context: RankContext) -> None:
    """Set up torch.ops.deepspeed.inference_all_reduce_ on all ranks; a collective call.

    Raises:
        Unavailable: the package is missing, its extension does not compile, or the processor lacks AVX-512.
    """
    if _state.get("loaded"):
        return
    os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed searches for an accelerator, and warns
    try:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    except ImportError as error:
        raise Unavailable(f"DeepSpeed is not installed ({error}); pip install deepspeed.") from error
    try:
        extension = ShareMemCommBuilder().load_extension(verbose=False)
    except Exception as error:  # any failure of the compiler or the build tool
        raise Unavailable(f"DeepSpeed's shared-memory extension does not build here: {error}.") from error
    if extension.vector_kernel_level() < 2:
        raise Unavailable("DeepSpeed's shared-memory all-reduce of bf16 needs a processor with AVX-512.")
    # The extension names its segments in /dev/shm after these variables, is active only if LOCAL_SIZE says that all
    # ranks are local, and never removes the segments. So the name must be new, and the files are unlinked here as soon
    # as every rank has mapped them.
    variables = {"LOCAL_SIZE": str(context.world_size), "MASTER_ADDR": "bench", "MASTER_PORT": context.run_id}
    os.environ.update(variables)
    extension.initialize(context.world_size, context.rank)
    for name in variables:
        del os.environ[name]
    dist.barrier()
    for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{context.run_id}_{context.rank}"):
        segment.unlink()
    _state["loaded"] = True


def all_reduce_(tensor: Tensor) -> Tensor:
    """Sum over the ranks in place; bf16, fp16 or fp32."""
    torch.ops.deepspeed.inference_all_reduce_(tensor)
    return tensor
