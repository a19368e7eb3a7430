"""Forward and backward of a Llama block under tensor and sequence parallelism, all gradients complete at the end.

Contestants share the block and differ in its linear layers only. There is no optimizer step: it is the same for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .block import Block, BlockSize, Layers, PlainLayers, full_weights
from .case import DTYPES, OURS, Case, Contestant, Maker, Rival, assert_close
from .ranks import RankContext
from .ratios import SPEEDUP

MEGATRON = "Megatron-Core on gloo"
PLAIN = "fused_tp, plain schedule"

SIZES = {
    "hidden=1024 seq=1024": BlockSize(hidden=1024, intermediate=2816, heads=16, seq=1024),
    "hidden=2048 seq=512": BlockSize(hidden=2048, intermediate=5632, heads=32, seq=512),
}


def cases() -> list[Case]:
    """All of this file."""
    rivals = {MEGATRON: Rival(SPEEDUP, bar=1.3, aim=1.6), PLAIN: Rival(SPEEDUP)}
    return [
        Case(f"llama_block/{dtype}/{name}", llama_block, {"dtype": dtype, "size": size}, rivals, seconds=20.0)
        for dtype in DTYPES
        for name, size in SIZES.items()
    ]


def llama_block(context: RankContext, dtype: str, size: BlockSize) -> dict[str, Maker]:
    """Tokens first, [seq/W, 1, hidden] on a rank, which is Megatron's layout and no worse for others."""
    kind = DTYPES[dtype]
    weights = full_weights(size, kind)
    random = torch.Generator().manual_seed(1)
    x, d_out = (torch.randn(size.seq, 1, size.hidden, generator=random).to(kind) for _ in range(2))
    rows = slice(context.rank * size.seq // context.world_size, (context.rank + 1) * size.seq // context.world_size)
    expected_out, expected_dx, expected_dnorm = Block(size, PlainLayers(weights)).step(x, d_out)

    def contestant(layers: Callable[[], Layers], schedule: str | None) -> Contestant:
        with forced_schedule(schedule):
            block = Block(size, layers())

        def run() -> tuple[Tensor, Tensor, Tensor]:
            with forced_schedule(schedule):
                return block.step(x[rows], d_out[rows])

        def check() -> None:
            out, dx, dnorm = run()
            assert_close(out, expected_out[rows])
            assert_close(dx, expected_dx[rows])
            assert_close(dnorm, expected_dnorm)

        return Contestant(run, check)

    def ours(schedule: str | None) -> Contestant:
        from .block_fused_tp import FusedLayers

        return contestant(lambda: FusedLayers(weights), schedule)

    def megatron() -> Contestant:
        from . import rivals_megatron

        rivals_megatron.prepare(context)
        return contestant(lambda: rivals_megatron.MegatronLayers(weights), None)

    return {OURS: lambda: ours(None), PLAIN: lambda: ours("plain"), MEGATRON: megatron}


@contextmanager
def forced_schedule(name: str | None) -> Iterator[None]:
    """Within it fused_tp runs on the named schedule; None leaves the choice to it."""
    if name is None:
        yield
        return
    os.environ["FUSED_TP_SCHEDULE"] = name
    try:
        yield
    finally:
        del os.environ["FUSED_TP_SCHEDULE"]
