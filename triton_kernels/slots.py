"""Places for tiles in a workspace, and the order in which programs fill them. For every matmul that ends in a sum.

A slot is BLOCK_M x BLOCK_N elements in a row, so that tiles travel whole, without masks and in full vectors, whatever
M and N are. Slot number i at a rank is announced by flag W + i of that rank.

Tiles are numbered by owner: owner o has tiles [o * per_owner, (o+1) * per_owner). Program p of P computes tiles
p, p+P, ... on every rank; what it waits for comes from programs p of the others.
"""

import triton
import triton.language as tl

from .signals import half_at, wait
from .tiles import rounded


@triton.jit
def slot_pointers(call, rank, slot, data_offset, ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers [BLOCK_M, BLOCK_N] to slot number `slot` at `rank`; slots begin `data_offset` bytes into the half."""
    # An address out of a table carries no alignment; without it the compiler would move single elements.
    data = tl.multiple_of((half_at(call, rank) + data_offset).to(tl.pointer_type(ELEMENT)), 16)
    tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return data + tl.cast(slot, tl.int64) * (BLOCK_M * BLOCK_N) + tile


@triton.jit
def store_slot(
    call, rank, slot, values, data_offset, ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Writes `values` to a slot, rounded to ELEMENT."""
    tl.store(slot_pointers(call, rank, slot, data_offset, ELEMENT, BLOCK_M, BLOCK_N), rounded(values, ELEMENT))


@triton.jit
def sum_slots(
    call,
    first_slot,
    tile,
    data_offset,
    ELEMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORLD: tl.constexpr,
    OP: tl.constexpr,
):
    """(sum over ranks in fp32 [BLOCK_M, BLOCK_N], whether all arrived); rank s's term is in slot first_slot + s here.

    Added in the order of the ranks, as they arrive: a term that is early waits for those of lower ranks.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    good = True
    for source in tl.static_range(WORLD):
        slot = first_slot + source
        good = wait(call, WORLD + slot, source, tile, WORLD, OP) & good
        pointers = slot_pointers(call, call.rank, slot, data_offset, ELEMENT, BLOCK_M, BLOCK_N)
        total += tl.load(pointers).to(tl.float32)
    return total, good


@triton.jit
def rounds_of(program, programs, tiles):
    """How many tiles program number `program` has."""
    return tl.maximum(tl.cdiv(tiles - program, programs), 0)


@triton.jit
def tile_of(step, first_tile, rounds, program, programs):
    """Number of the tile that a program computes in round `step`: in order, from `first_tile` on, and around.

    With `first_tile` the next rank's first one, ranks write to different owners at any time, and end with their own.
    """
    skipped = tl.cdiv(tl.maximum(first_tile - program, 0), programs)
    return program + (step + skipped) % rounds * programs
