"""The shared-memory all-reduce by itself, in place, from a token's worth to a whole layer's."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import rivals_deepspeed
from .case import DTYPES, OURS, Case, Contestant, Maker, Rival, Unavailable, checked
from .ranks import RankContext
from .ratios import TIME_RATIO

DEEPSPEED = "DeepSpeed"
GLOO = "gloo"
SIZES = tuple(1024 * 4**i for i in range(9))  # bytes: 1 KiB to 64 MiB


def cases() -> list[Case]:
    """All of this file."""
    rivals = {DEEPSPEED: Rival(TIME_RATIO, bar=1.1), GLOO: Rival(TIME_RATIO)}
    return [
        Case(f"all_reduce/bf16/{_words(size)}", all_reduce, {"dtype": "bf16", "nbytes": size}, rivals, seconds=4.0)
        for size in SIZES
    ]


def all_reduce(context: RankContext, dtype: str, nbytes: int) -> dict[str, Maker]:
    """Sums a tensor of `nbytes` over the ranks into itself."""
    kind = DTYPES[dtype]
    count = nbytes // kind.itemsize
    ones = torch.ones(count, dtype=kind)
    expected = ones * context.world_size
    # The race sums zeros, which do not grow.
    zeros = torch.zeros_like(ones).add_(0)

    def contestant(all_reduce_, note: str = "") -> Contestant:  # type: ignore[no-untyped-def]  # Tensor -> Tensor
        check = checked(lambda: all_reduce_(ones.clone()), expected).check
        return Contestant(lambda: all_reduce_(zeros), check, note)

    def ours() -> Contestant:
        from fused_tp.runtime.group import resolve_group
        from fused_tp.transport.shm import shm_transport, shm_unavailable_reason

        group = resolve_group(None)
        transport = shm_transport(group)
        if transport is None:
            raise Unavailable(f"fused_tp has no shared memory here: {shm_unavailable_reason(group)}.")
        return contestant(lambda tensor: transport.all_reduce(tensor, out=tensor))

    def deepspeed() -> Contestant:
        rivals_deepspeed.load(context)
        return contestant(rivals_deepspeed.all_reduce_)

    def gloo() -> Contestant:
        def all_reduce_(tensor: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(tensor)
            return tensor

        return contestant(all_reduce_)

    return {OURS: ours, DEEPSPEED: deepspeed, GLOO: gloo}


def _words(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
