"""Ring attention in one launch: attention of this rank's queries over all ranks' keys, while these arrive.

The equations and the blocks are those of forward.py, in another order. For a tile of queries of one head, a program
visits all chunks of keys (module `ring_keys`), this rank's own first and then source by source, and waits for the flag
of each. The sums stay in registers: no state in memory, no merge. The order is that of the steps, not of arrival, so
every run produces the same bits; copies are issued in that order too.

Heads are processed in groups: all tiles of a group are computed while the chunks of the next group, heads of the same
rows, arrive. Without groups a tile would wait for its last chunk, and nothing would overlap that wait. A program waits
only for chunks that queries of its tile see, once per chunk.

The launch is persistent: its programs must all run at once, and leave an SM to the relays between the copies. If copies
and kernel may not run concurrently (interpreter, CUDA graphs, CUDA_LAUNCH_BLOCKING=1), the groups that fit the slots
are copied, then computed, then the next ones: the bits are the same.

Sources: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (arXiv:2310.01889); Dao,
"FlashAttention-2" (arXiv:2307.08691); the overlap of Chang et al., "FLUX" (arXiv:2406.06858).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..comm import gather
from ..comm.gather import KernelLaunch
from ..comm.signals import current_call, is_last, is_unbroken, signal_local, wait
from ..comm.streams import runs_copies_concurrently
from ..device import on_device
from ..language import async_fence, or_nan, rounded
from . import ring_keys
from .blocks import (
    LOG2_E,
    UNSPECIALIZED,
    head_rows,
    head_score,
    head_vector,
    load_block,
    load_visible_keys,
    store_block,
)
from .configs import AttentionConfig
from .forward import add_all_keys, add_sink, empty_softmax, finalize_softmax
from .launch import (
    ScoreTerms,
    check_row_strides,
    default_config,
    dense_vector,
    descriptors,
    heads_tensor,
    kernel_arguments,
    mask_arguments,
)
from .ring_keys import GROUP_DONE, OP, KeysLayout, KeysPuller, RingWorkspace, arrived_flag, done_flag

CHUNK_COLUMNS = tl.constexpr(3)  # columns of a chunk: source, row in own keys or in a slot, offset of its k_indices
BOUND_COLUMNS = tl.constexpr(4)  # begin and end of a tile in a chunk, and of its blocks without a mask

RING_UNSPECIALIZED = (
    *("chunk_count", "queries", "own_rows", "first_slot_row", "slot_rows", "slots", "group_start", "group_stop"),
    "rank",
)


class RingTables(NamedTuple):
    """int32 tables of tiles and chunks, see `ChunkMasks`."""

    tiles: Any
    bounds: Any
    chunks: Any


@triton.jit(do_not_specialize=[*UNSPECIALIZED, *RING_UNSPECIALIZED])
def ring_kernel(
    q, k, v, k_tma, v_tma, out, lse, sinks, mask, scores,
    tables, tile_count, heads, batch_heads, interleaved_heads, heads_per_kv_head,
    seed_low, seed_high, dropped_below, first_head,
    chunk_count, queries, own_rows, first_slot_row, slot_rows, slots, group_start, group_stop,
    ws, rank, WORLD: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Compute attention of this rank's queries over all ranks' keys, for some groups of heads.

    k and v are this rank's memory, [1, rows, heads of a group, D or DV]; k_tma and v_tma its descriptors with TMA.
    starts and stops [chunks, queries] count keys of the chunk; tiles [tiles, 2] are rows of queries. In each group of
    heads there are `interleaved_heads` query heads; this launch computes the groups [group_start, group_stop).
    """
    items_per_group = tile_count * interleaved_heads
    arrived_chunks = tl.cast(0, tl.int64)  # bit c: this program has waited for chunk c of the group
    previous_head_group = group_start
    # Loop invariants are computed inside the loop (disable_licm): hoisted, they would take registers from the sums.
    for work_item in tl.range(
        tl.program_id(0) + group_start * items_per_group,
        group_stop * items_per_group,
        tl.num_programs(0),
        num_stages=1,
        disable_licm=True,
    ):
        head_group = work_item // items_per_group
        arrived_chunks = tl.where(head_group == previous_head_group, arrived_chunks, 0)
        previous_head_group = head_group
        index_in_group = work_item % items_per_group
        tile_index = index_in_group // interleaved_heads
        batch_and_head = head_group * interleaved_heads + index_in_group % interleaved_heads
        batch = batch_and_head // heads
        head = batch_and_head % heads
        kv_head = index_in_group % interleaved_heads // heads_per_kv_head
        row = tl.load(tables.tiles + 2 * tile_index)
        row_end = tl.load(tables.tiles + 2 * tile_index + 1)
        kv_rows = head_rows(k, 0, kv_head), head_rows(v, 0, kv_head)
        score = head_score(scores, batch, head, (first_head, seed_low, seed_high, dropped_below), C)

        row_max, row_sum, acc = empty_softmax(C)
        for c in tl.range(0, chunk_count, num_stages=1, disable_licm=True):
            chunk = tables.chunks + c * CHUNK_COLUMNS
            bound = tables.bounds + (tile_index * chunk_count + c) * BOUND_COLUMNS
            begin, end = tl.load(bound), tl.load(bound + 1)
            key_bounds = begin, end, tl.load(bound + 2), tl.load(bound + 3)
            first_row = tl.load(chunk + 1) + tl.where(
                c == 0, head_group * own_rows, first_slot_row + head_group % slots * slot_rows
            )
            bit = tl.cast(1, tl.int64) << tl.cast(c, tl.int64)
            if (c > 0) & (end > begin) & (arrived_chunks & bit == 0):
                call = current_call(ws, rank)
                wait(call, arrived_flag(head_group, c - 1, WORLD), tl.load(chunk), c, WORLD, OP)
                arrived_chunks |= bit
                if C.TMA:
                    async_fence()

            # Loaded again for each chunk: queries kept across chunks would take registers from the sums.
            q_block = load_block(head_rows(q, batch, head), row, row_end, C.D, C.ROWS, C.PADDED_D)
            chunk_k_indices = mask.k_indices + tl.load(chunk + 2)
            mask_offset = tl.cast(c, tl.int64) * queries
            visible_keys = load_visible_keys(mask.starts + mask_offset, mask.stops + mask_offset, mask, row, row_end, C)
            row_max, row_sum, acc = add_all_keys(
                row_max, row_sum, acc, q_block, kv_rows, k_tma, v_tma, 0, kv_head, first_row, key_bounds, visible_keys,
                chunk_k_indices, score, True, C,
            )  # fmt: skip

        if sinks is not None:
            row_max, row_sum, acc = add_sink(row_max, row_sum, acc, tl.load(sinks + head) * LOG2_E)
        call = current_call(ws, rank)
        is_valid = is_unbroken(call)
        acc, row_lse = finalize_softmax(row_max, row_sum, acc)
        row_indices = row + tl.arange(0, C.ROWS)
        tl.store(head_vector(lse, batch, head) + row_indices, or_nan(row_lse, is_valid), mask=row_indices < row_end)
        acc = rounded(or_nan(acc, is_valid), out.ptr.dtype.element_ty)
        store_block(head_rows(out, batch, head), acc, row, row_end, C.DV)
        if is_last(call, GROUP_DONE + head_group, items_per_group):
            signal_local(call, done_flag(head_group, WORLD))


class ChunkMasks(Protocol):
    """Masks of this rank's queries over its own keys and each chunk; the first chunk is its own keys."""

    def tables_on(self, device: torch.device, rows: int, block_size: int) -> dict[str, Tensor]:
        """Return int32 tensors on `device` for tiles of `rows` queries against blocks of `block_size` keys.

        They are tiles [tiles, 2] and bounds [tiles, chunks, BOUND_COLUMNS], as in tiles.py; chunks
        [chunks, CHUNK_COLUMNS]; starts, stops [chunks, queries], in keys of the chunk; q_positions, q_indices
        [queries]; and k_indices, those of own keys, then those of each chunk, concatenated.
        """
        ...


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: ChunkMasks,
    terms: ScoreTerms,
    layout: KeysLayout,
    *,
    workspace: RingWorkspace,
    programs: int,
    sinks: Tensor | None = None,
    precision: str = "ieee",
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [B, S, H, Dv] in the dtype of q, lse fp32 [B, H, S]): 0 and -inf for a query that sees nothing.

    Args:
        q: [B, S, H, D], k: [B, rows, Hkv, D], v: [B, rows, Hkv, Dv]: this rank's, bf16, fp16 or fp32, of any strides
            with a dense last dim.
        layout: layout of all ranks' keys in this call. This rank's part describes k and v, and has at most
            MAX_CHUNKS - 1 chunks and MAX_GROUPS groups.
        workspace: of this group and stream, of at least `layout.nbytes(W)` bytes.
        programs: number of programs that run at once; on a GPU fewer than there are SMs, to leave one to the relays.
        sinks: [H] scores of one more key per head, whose value is 0; they count in lse.
        precision: precision of fp32 products, "ieee" or "tf32".
        config: tiles that replace the default ones.

    Raises:
        ValueError: rows are too far apart, or the workspace is too small. No kernel has been launched then.
    """
    check_row_strides(q=q, k=k, v=v)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    stage = ring_keys.stage_launch(k, v, layout, workspace, programs)
    puller = KeysPuller(layout, workspace)
    with on_device(q):
        runs_concurrently = q.is_cuda and runs_copies_concurrently(q.device)
        groups_per_launch = layout.num_groups if runs_concurrently else layout.num_slots
        group_ranges = [
            range(start, min(start + groups_per_launch, layout.num_groups))
            for start in range(0, layout.num_groups, groups_per_launch)
        ]
        # All allocations happen before `stage`, which notifies the peers that this rank has begun the call.
        launches = [
            _make_launch(q, out, lse, chunks, terms, layout, workspace, programs, sinks, precision, config, groups)
            if q.numel()
            else None
            for groups in group_ranges
        ]
        if q.is_cuda:
            _load_kernels(workspace, [stage, *puller.relays_to_load(), launches[0]])
        gather.run_kernel(stage)
        for groups, launch in zip(group_ranges, launches, strict=True):
            event = ring_keys.staging_event(q)
            if not runs_concurrently:
                puller.pull(event, groups)
            if launch is not None:  # there are queries
                gather.run_kernel(launch)
            if runs_concurrently:
                # Issued after the launch: the kernel begins with this rank's keys while the host issues the copies.
                puller.pull(event, groups)
    return out, lse


def _load_kernels(workspace: RingWorkspace, launches: list[KernelLaunch | None]) -> None:
    """Load the kernels that no call of this workspace has loaded yet."""
    present_launches = [launch for launch in launches if launch is not None]
    key = tuple(specialization_key(launch) for launch in present_launches)
    if key not in workspace.loaded_keys:
        for launch in present_launches:
            gather.load_kernel(launch)
        workspace.loaded_keys.add(key)


def _make_launch(
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    chunks: ChunkMasks,
    terms: ScoreTerms,
    layout: KeysLayout,
    workspace: RingWorkspace,
    programs: int,
    sinks: Tensor | None,
    precision: str,
    config: AttentionConfig | None,
    groups: range,
) -> KernelLaunch:
    config = config or default_config("ring", q, out, terms, precision)
    tables = chunks.tables_on(q.device, config.rows, config.block_size)
    keys, values = workspace.keys(layout.rank, layout)[None].split([layout.head_dim, layout.v_head_dim], 3)
    k_tma, v_tma = descriptors(config, keys, values)
    heads = q.shape[2]
    interleaved_heads = q.shape[0] * heads // layout.num_groups
    arguments = {
        "q": heads_tensor(q),
        "k": heads_tensor(keys),
        "v": heads_tensor(values),
        "k_tma": k_tma,
        "v_tma": v_tma,
        "out": heads_tensor(out),
        "lse": heads_tensor(lse),
        "sinks": dense_vector(sinks),
        "mask": mask_arguments(tables, "starts", "stops"),
        "tables": RingTables(tables["tiles"], tables["bounds"], tables["chunks"]),
        "tile_count": len(tables["tiles"]),
        "heads": heads,
        "batch_heads": q.shape[0] * heads,
        "interleaved_heads": interleaved_heads,
        "heads_per_kv_head": interleaved_heads // layout.pairs_per_group,
        "chunk_count": 1 + len(layout.chunks),
        "queries": q.shape[1],
        "own_rows": layout.own_rows,
        "first_slot_row": layout.first_slot_row,
        "slot_rows": layout.max_chunk_rows,
        "slots": layout.num_slots,
        "group_start": groups.start,
        "group_stop": groups.stop,
        "WORLD": workspace.world_size,
        # Relays wait for peers, and signal negative flags when they give up; this deadline only bounds the wait.
        **workspace.arguments(ring_keys.scaled_timeout(workspace.timeout_ns, 2)),
        **kernel_arguments(config, q, values, terms, precision, tma=k_tma is not None),
    }
    work_items = len(tables["tiles"]) * interleaved_heads * len(groups)
    return ring_kernel, (max(1, min(programs, work_items)),), arguments


def specialization_key(launch: KernelLaunch) -> tuple[Any, ...]:
    """Return the key of the compiled variant of a kernel: launches with equal keys run the same one.

    It does not depend on the mask: sequences of any lengths have few variants.
    """
    kernel, _, arguments = launch
    return tuple(
        value
        if name.isupper() or name not in kernel.arg_names
        else _argument_key(value, name not in kernel.do_not_specialize)
        for name, value in arguments.items()
    )


def _argument_key(value: Any, is_specialized: bool) -> Any:
    """Return the properties of an argument that Triton specializes on: type, divisibility by 16, equality to 1."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(_argument_key(x, is_specialized) for x in value)
    if isinstance(value, int):
        is_64_bit = not -(1 << 31) <= value < 1 << 31
        return (is_64_bit, value % 16 == 0, value == 1) if is_specialized else is_64_bit
    if hasattr(value, "block_shape"):
        return value.base.dtype, tuple(value.block_shape)
    return type(value)  # floats and None


fix_cache_keys(__name__)
