"""Sharding of a sequence on one rank and on several, and invalid arguments."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp import RankMismatchError
from fused_tp.ops.sequence import sequence_positions, shard_sequence, unshard_sequence
from tests.reference import seeded
from tests.workers import on_ranks, run_ranks

# Includes dtypes not supported by gloo (bool, int16, uint16, float8) or by shared memory (complex, float8).
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.int16,
    torch.uint16,
    torch.complex64,
    torch.float8_e4m3fn,
)


def as_bytes(t: Tensor) -> Tensor:
    """View as bytes with one more dim, because rarer dtypes support few ops."""
    return t.contiguous().unsqueeze(-1).view(torch.uint8)


# Document bounds of packed sequences, with empty documents and single tokens among them.
PACKED = ((0, 0), (0, 1), (0, 0, 2, 3), (0, 5, 6, 6, 8), (0, 1, 9, 9, 10, 13), (0, 90, 100, 101, 140))


def there_and_back(group: dist.ProcessGroup, layout: str) -> list[tuple[list[int], list[int]]]:
    """Shard and unshard sequences of PACKED; return this rank's positions in each sequence and within documents."""
    held = []
    for number, bounds in enumerate(PACKED):
        cu_seqlens, seq_len = torch.tensor(bounds, dtype=(torch.int32, torch.int64)[number % 2]), bounds[-1]
        where: dict[str, Any] = {"group": group, "layout": layout}
        if layout == "balanced":
            where["cu_seqlens"] = cu_seqlens
        positions = sequence_positions(seq_len, **where)
        within = sequence_positions(seq_len, within_documents=True, **{**where, "cu_seqlens": cu_seqlens})
        held.append((positions.tolist(), within.tolist()))
        for dtype, dim in itertools.product(DTYPES, (0, 1, -1)):
            shape = [2, 3, 4]
            shape[dim] = seq_len
            x = (seeded(*shape) * 4).abs().to(dtype)
            mine = shard_sequence(x, dim, **where)
            assert torch.equal(as_bytes(mine), as_bytes(x).index_select(dim % 3, positions))
            back = unshard_sequence(mine, dim, seq_len=seq_len, **where)
            assert back.dtype == dtype and back.shape == x.shape and torch.equal(as_bytes(back), as_bytes(x))
        x, grad = seeded(2, seq_len).requires_grad_(), seeded(2, seq_len, seed=1)
        (shard_sequence(x, 1, **where) * shard_sequence(grad, 1, **where)).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, grad)  # the whole gradient, on every rank
        mine = shard_sequence(seeded(2, seq_len), 1, **where).requires_grad_()
        (unshard_sequence(mine, 1, seq_len=seq_len, **where) * grad).sum().backward()
        assert mine.grad is not None and torch.equal(mine.grad, shard_sequence(grad, 1, **where))
    return held


@pytest.mark.parametrize(("world_size", "shm"), [(1, "1"), (2, "0"), (3, "0"), (3, "1"), (4, "1")])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
def test_there_and_back(world_size: int, layout: str, shm: str) -> None:
    ranks = run_ranks(world_size, there_and_back, layout, env={"FUSED_TP_SHM": shm})
    for bounds, held in zip(PACKED, zip(*ranks, strict=True), strict=True):
        offsets = [i for start, stop in pairwise(bounds) for i in range(stop - start)]
        assert sorted(p for positions, _ in held for p in positions) == list(range(bounds[-1]))
        if layout != "zigzag":
            sizes = [len(part) for part in torch.arange(bounds[-1]).tensor_split(world_size)]
            assert [len(positions) for positions, _ in held] == sizes
        for positions, within in held:
            assert positions == sorted(positions)
            assert within == [offsets[p] for p in positions]


@on_ranks(2)
def test_packed_sequences_compile_in_one_graph(group: dist.ProcessGroup) -> None:
    cu_seqlens, x = torch.tensor([0, 5, 6, 11]), seeded(2, 11)
    where: dict[str, Any] = {"group": group, "layout": "balanced"}

    def there_and_back(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        within = sequence_positions(11, within_documents=True, cu_seqlens=cu_seqlens, **where)
        mine = shard_sequence(x * 2, 1, cu_seqlens=cu_seqlens, **where) * within
        return unshard_sequence(mine, 1, seq_len=11, cu_seqlens=cu_seqlens, **where), within

    x_compiled = x.clone().requires_grad_()
    whole, within = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x_compiled, cu_seqlens)
    wanted = there_and_back(x.requires_grad_(), cu_seqlens)
    assert torch.equal(whole, wanted[0]) and torch.equal(within, wanted[1])
    whole.sum().backward()
    wanted[0].sum().backward()
    assert x.grad is not None and x_compiled.grad is not None and torch.equal(x_compiled.grad, x.grad)


@pytest.mark.parametrize("shm", ["0", "1"])
@on_ranks(2, env=lambda shm: {"FUSED_TP_SHM": shm})
def test_ranks_that_put_together_otherwise_are_told(group: dist.ProcessGroup, shm: str) -> None:
    """Ranks disagree about the order of equally large shards; also for rows shorter than a checksum."""
    rank, bounds = dist.get_rank(group), torch.tensor([0, 1, 8])
    for dtype, shape in ((torch.float32, (4, 3)), (torch.bool, (4,)), (torch.uint8, (4, 1))):
        x = torch.ones(shape, dtype=dtype)
        for how in (
            {"layout": ("zigzag", "contiguous")[rank]},
            {"seq_len": 8 - rank, "layout": "contiguous"},
            {"layout": "balanced", "cu_seqlens": bounds + torch.tensor([0, rank, 0])},
        ):
            mine = x[: 3 if rank and "seq_len" in how else 4]
            with pytest.raises(RankMismatchError, match=rf"different shapes.*layout='{how['layout']}'"):
                unshard_sequence(mine, 0, group=group, **how)
        assert torch.equal(unshard_sequence(x, 0, group=group), x.repeat(2, *[1] * (x.ndim - 1)))


X = torch.zeros(2, 4)


def packed(op: Any, cu_seqlens: Any) -> Any:
    return op(X, 1, group=None, layout="balanced", cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: shard_sequence(X, 2, group=None), ValueError, "dim=2 is out of range"),
        (lambda: shard_sequence([1], 0, group=None), TypeError, "x must be a Tensor"),
        (lambda: shard_sequence(X, 1, group=None, layout="stripe"), ValueError, "layout is 'stripe'"),
        (
            lambda: unshard_sequence(X, 1, group=None, seq_len=5),
            ValueError,
            "seq_len=5 .* 5 tokens .*, but x_shard holds 4",
        ),
        (lambda: unshard_sequence(X, 1, group=None, seq_len=-1), ValueError, "seq_len is -1"),
        (lambda: sequence_positions(True, group=None), TypeError, "seq_len must be an int"),
        (lambda: sequence_positions(4, group=None, within_documents=True), ValueError, "pass cu_seqlens"),
        (lambda: sequence_positions(4, group=None, layout="balanced"), ValueError, "needs their cu_seqlens"),
        (lambda: shard_sequence(X, 1, group=None, layout="balanced"), ValueError, "needs their cu_seqlens"),
        (
            lambda: packed(shard_sequence, torch.tensor([0, 5])),
            ValueError,
            r"cu_seqlens is \(0, 5\); .* must end with 4",
        ),
        (lambda: packed(unshard_sequence, torch.tensor([0, 3, 2, 4])), ValueError, "must not decrease"),
    ],
)
def test_bad_sequence_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
