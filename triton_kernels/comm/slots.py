"""Slots for tiles in a workspace, and the order in which programs fill them; for all matmuls that sum over ranks.

A slot is BLOCK_M x BLOCK_N contiguous elements, so that tiles are sent whole, without masks and in full vectors, for
any M and N. Flag W + i of a rank signals that its slot number i is filled.

Tiles are numbered by owner: owner o has tiles [o * per_owner, (o+1) * per_owner). Program p of P computes tiles
p, p+P, ... on every rank, and waits only for programs p of the other ranks.
"""

import triton
import triton.language as tl

from ..cache_keys import fix_cache_keys
from ..language import halves, rounded, zeros
from .ptx import store_release, thread_barrier
from .signals import flag_at, half_at, wait_all


@triton.jit
def slot_at(call, rank, slot, data_offset, ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointer to slot number `slot` at `rank`; slots begin `data_offset` bytes into the half."""
    # The compiler cannot know the alignment of an address from a table, and would move single elements.
    data = tl.multiple_of((half_at(call, rank) + data_offset).to(tl.pointer_type(ELEMENT)), 16)
    return data + tl.cast(slot, tl.int64) * (BLOCK_M * BLOCK_N)


@triton.jit
def slot_pointers(call, rank, slot, data_offset, ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers [BLOCK_M, BLOCK_N] to slot number `slot` at `rank`."""
    tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return slot_at(call, rank, slot, data_offset, ELEMENT, BLOCK_M, BLOCK_N) + tile


@triton.jit
def store_slot(call, rank, slot, values, data_offset, ELEMENT: tl.constexpr, SPLIT: tl.constexpr = False):
    """Write `values` to a slot of their shape, rounded to ELEMENT; with SPLIT the left columns, then the right ones.

    Plain stores, never TMA: the flag that follows orders stores of threads only.
    """
    BLOCK_M: tl.constexpr = values.shape[0]
    BLOCK_N: tl.constexpr = values.shape[1]
    if SPLIT:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(values)
        rows = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, HALF)[None, :]
        data = slot_at(call, rank, slot, data_offset, ELEMENT, BLOCK_M, BLOCK_N)
        tl.store(data + rows, rounded(left, ELEMENT))
        tl.store(data + HALF + rows, rounded(right, ELEMENT))
    else:
        tl.store(slot_pointers(call, rank, slot, data_offset, ELEMENT, BLOCK_M, BLOCK_N), rounded(values, ELEMENT))


@triton.jit
def wait_terms(call, first_slot, tile, WORLD: tl.constexpr, OP: tl.constexpr):
    """True once the terms of a tile have arrived from all ranks; False if one will not."""
    return wait_all(call, WORLD + first_slot, tile, WORLD, OP)


@triton.jit
def sum_terms(call, first_slot, strip, data_offset, ELEMENT: tl.constexpr, WORLD: tl.constexpr, C: tl.constexpr):
    """Sum over ranks in fp32 of strip number `strip` of a tile; rank s's term is in slot first_slot + s here.

    A strip is [STRIP_M, BLOCK_N], some rows of a tile: tiles have the best size for the matmul, and the sum of a whole
    tile and its terms would not fit into registers. Terms are added in rank order.
    """
    total = zeros(C.STRIP_M, C.BLOCK_N)
    for source in tl.static_range(WORLD):
        place = (first_slot + source) * (C.BLOCK_M // C.STRIP_M) + strip
        term = slot_pointers(call, call.rank, place, data_offset, ELEMENT, C.STRIP_M, C.BLOCK_N)
        total += tl.load(term).to(tl.float32)
    return total


@triton.jit
def rounds_of(program, programs, tiles):
    """Number of tiles of program number `program`."""
    return tl.maximum(tl.cdiv(tiles - program, programs), 0)


@triton.jit
def tile_of(step, first_tile, rounds, program, programs):
    """Number of the tile that a program computes in round `step`: in order from `first_tile` on, wrapping around.

    If `first_tile` is the next rank's first tile, ranks write to different owners at any time and end with their own.
    """
    skipped = tl.cdiv(tl.maximum(first_tile - program, 0), programs)
    return program + (step + skipped) % rounds * programs


@triton.jit
def put_tile(call, step, first_tile, rounds, program, programs, per_owner, WORLD: tl.constexpr):
    """Release: `signals.put` of the tile that this program stored at its owner in round `step`; none if `step` < 0.

    For a loop that stores the next tile now. The fence of a release stalls the program until its stores have arrived;
    those of the previous tile arrived while this one was multiplied. So each flag is put one tile late, the last one
    after the loop. Slots at an owner are ordered by its tile, then by source.
    """
    tile = tile_of(tl.maximum(step, 0), first_tile, tl.maximum(rounds, 1), program, programs)
    slot = tile % per_owner * WORLD + call.rank
    thread_barrier()
    store_release(flag_at(call, tile // per_owner, WORLD + slot), call.epoch, step >= 0)


fix_cache_keys(__name__)
