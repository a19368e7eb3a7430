"""Decoding over a sharded cache against dense fp64 attention over all of it."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp import RankMismatchError, context_parallel_decode
from fused_tp.attention.layout import BlockCyclicLayout
from fused_tp.nn import ContextKVCache, PagedContextKVCache
from fused_tp.ops.sequence import shard_sequence
from tests.attention_cases import ROUTES, of_route, per_head
from tests.attention_reference import dense_attention, dense_mask
from tests.reference import refuses, seeded
from tests.workers import on_ranks, run_ranks

Case = dict[str, Any]
KEYWORDS = ("window", "softcap", "causal", "block", "scale")


def case(lengths: list[int], new: int = 1, **more: Any) -> Case:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 6, "dtype": torch.float32, "block": 4}
    return {"lengths": lengths, "new": new, **shape, **more}


CASES: dict[str, Case] = {
    "ragged": case([37, 1, 16, 5, 0]),
    "equal lengths": case([19, 19], block=1),
    "several new tokens": case([37, 3, 16, 9], new=3),
    "more new tokens than there are": case([1, 0, 12], new=4),
    "window": case([37, 4, 21], window=(5, 0)),
    "window, several new tokens": case([37, 4, 21], new=5, window=(3, 0), block=2),
    "window of itself": case([37, 4], window=(0, 0)),
    "softcap": case([23, 9], softcap=2.0),
    "ALiBi": case([23, 9], new=2, alibi=True),
    "sinks": case([23, 1, 0], sinks=True),
    "all scores": case([29, 14], new=3, softcap=4.0, alibi=True, sinks=True, window=(9, 0)),
    "not causal": case([29, 14], new=3, causal=False, window=(4, 1)),
    "MQA": case([23, 9], kv_heads=1, scale=0.7),
    "MHA": case([23, 9], kv_heads=4),
    "bf16": case([150, 61], new=2, dtype=torch.bfloat16, block=64),
    "fp16": case([61, 3], dtype=torch.float16, sinks=True),
    "fp64": case([61, 3], dtype=torch.float64, alibi=True, sinks=True, window=(17, 0)),
    "chunk": case([97, 97], new=33),
    "chunk, ragged": case([97, 33, 97, 20, 0], new=33, kv_heads=4, v_head_dim=8),
    "chunk, window": case([97, 50], new=33, window=(20, 0), sinks=True),
    "chunk, all scores": case([97, 50], new=33, softcap=4.0, alibi=True, sinks=True, window=(40, 0)),
    "chunk, not causal": case([97, 50], new=33, causal=False),
    "not causal, more new tokens than there are": case([1, 0, 12], new=4, causal=False, alibi=True),
    "looks ahead, more new tokens than there are": case([2, 6, 1], new=5, causal=False, window=(3, 4), sinks=True),
    "chunk, not causal, more than there are": case([20, 97, 0], new=33, causal=False, window=(50, 30)),
    "no new token": case([5, 0], new=0),
    "chunk, bf16": case([300], new=130, dtype=torch.bfloat16, block=64),
    "chunk, fp64": case([97, 50], new=33, dtype=torch.float64, block=16),
}


def whole(one: Case) -> list[Tensor]:
    """Full q, and keys and values as long as the longest text."""
    batch, longest = len(one["lengths"]), max(one["lengths"])
    q = seeded(batch, one["new"], one["heads"], one["head_dim"], dtype=one["dtype"])
    k = seeded(batch, longest, one["kv_heads"], one["head_dim"], dtype=one["dtype"], seed=1)
    return [q, k, seeded(batch, longest, one["kv_heads"], one["v_head_dim"], dtype=one["dtype"], seed=2)]


def keywords(one: Case) -> dict[str, Any]:
    return {**{name: one[name] for name in KEYWORDS if name in one}, **per_head(one)}


def held(x: Tensor, lengths: list[int], distribution: BlockCyclicLayout) -> Tensor:
    """Shard of x on this rank, with NaN in unused rows."""
    rows = max(distribution.count_before(length) for length in lengths) + 3
    shard = x.new_full((x.shape[0], rows, *x.shape[2:]), torch.nan)
    for text, length in enumerate(lengths):
        own = torch.from_numpy(distribution.indices(0, distribution.count_before(length)))
        shard[text, : len(own)] = x[text, own]
    return shard


def paged(shards: list[Tensor], size: int, in_order: bool) -> tuple[list[Tensor], Tensor]:
    """Arrange shards in pages, in any order and with extra pages of NaN."""
    batch, rows = shards[0].shape[:2]
    count = -(-rows // size)
    order = torch.arange(batch * count + 2)
    table = (order if in_order else order.flip(0))[: batch * count].view(batch, count)
    pools = []
    for shard in shards:
        pool = shard.new_full((batch * count + 2, size, *shard.shape[2:]), torch.nan)
        padded = shard.new_full((batch, count * size, *shard.shape[2:]), torch.nan)
        padded[:, :rows] = shard
        pool[table] = padded.unflatten(1, (count, size))
        pools.append(pool)
    return pools, table.to(torch.int32)


def of_rank(group: dist.ProcessGroup, one: Case) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """q, this rank's shards, and keywords of the call."""
    distribution = BlockCyclicLayout(dist.get_world_size(group), dist.get_rank(group), one["block"])
    q, *both = whole(one)
    shards = [held(x, one["lengths"], distribution) for x in both]
    lengths = torch.tensor(one["lengths"])
    return q, shards, {"group": group, "cache_seqlens": lengths, "return_lse": True, **keywords(one)}


def decoded_by_ranks(group: dist.ProcessGroup, cases: list[Case]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for one in cases:
        q, shards, given = of_rank(group, one)
        out, lse = context_parallel_decode(q, *shards, **given)
        assert out.dtype == q.dtype and out.shape == (*q.shape[:3], one["v_head_dim"])
        for size, in_order in ((3, True), (16, False)):
            pools, table = paged(shards, size, in_order)
            out_paged, lse_paged = context_parallel_decode(q, *pools, page_table=table, **given)
            close = {"rtol": 1e-5, "atol": 1e-5} if q.dtype in (torch.float32, torch.float64) else {}
            torch.testing.assert_close(out_paged, out, **close)
            torch.testing.assert_close(lse_paged, lse, rtol=1e-5, atol=1e-5)
        found.append((out, lse))
    return found


def check(one: Case, out: Tensor, lse: Tensor) -> None:
    q, k, v = whole(one)
    heads: Any = {name: t for name, t in keywords(one).items() if isinstance(t, Tensor)}
    scores = {name: one[name] for name in ("softcap", "scale") if name in one}
    for text, length in enumerate(one["lengths"]):
        before = max(0, one["new"] - length)  # queries before the start of the text
        assert (out[text, :before] == 0).all() and (one.get("sinks") or (lse[text, :, :before] == -torch.inf).all())
        if before == one["new"]:
            continue
        mask = dense_mask(one["new"] - before, length, causal=one.get("causal", True), window=one.get("window"))
        part = (q[text, None, before:], k[text, None, :length], v[text, None, :length])
        wanted, wanted_lse = dense_attention(*part, *mask, **scores, **heads)
        limit = 3e-15 if one["dtype"] == torch.float64 else 4 * torch.finfo(one["dtype"]).eps + 2e-6
        error = float((out[text, before:].double() - wanted[0]).abs().max())
        assert error <= limit, f"{one}, text {text}: {error}"
        torch.testing.assert_close(lse[text, :, before:].double(), wanted_lse[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("world_size", "route"), [(1, "one_sided"), (2, "pipelined"), (3, "plain"), (4, "one_sided")])
def test_is_attention_over_the_whole_cache(world_size: int, route: str) -> None:
    ranks = run_ranks(world_size, decoded_by_ranks, list(CASES.values()), env=ROUTES[route])
    for index, one in enumerate(CASES.values()):
        check(one, *ranks[0][index])
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(ranks[0][index], other[index], strict=True)), one


@on_ranks(2)
def test_lengths_that_differ_are_told(group: dist.ProcessGroup) -> None:
    q = torch.ones(1, 1, 2, 8)
    lengths = torch.tensor([5 + dist.get_rank(group)])
    with pytest.raises(RankMismatchError, match=r"cache_seqlens=\[\d\]"):
        context_parallel_decode(q, q.expand(1, 8, 2, 8), q.expand(1, 8, 2, 8), group=group, cache_seqlens=lengths)


@on_ranks(2)
def test_a_long_prompt_is_gathered_some_queries_at_a_time(group: dist.ProcessGroup) -> None:
    one = CASES["chunk, all scores"]
    q, shards, given = of_rank(group, one)
    wanted = context_parallel_decode(q, *shards, **given)
    module = sys.modules["fused_tp.ops.context_parallel_decode"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_MAX_GATHERED_BYTES", 4000)
        assert 1 < module._example(2, q, *shards).queries_per_gather < one["new"] // 2
        found = context_parallel_decode(q, *shards, **given)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@on_ranks(2)
def test_shards_of_different_sequences_are_told(group: dist.ProcessGroup) -> None:
    one = dist.get_rank(group)
    k = torch.ones(1, 4, 2, 8)
    for block, held, how in (
        (2, 0, {"layout": ("zigzag", "contiguous")[one]}),
        (2 + one, 0, {}),
        (2, 1 + one, {}),
        (2, 0, {"seq_len": 8 - one, "layout": "contiguous"}),
    ):
        cache = ContextKVCache(group, block=block)
        cache.append(k[:, :held], k[:, :held])
        mine = k[:, : 3 if one and "seq_len" in how else 4]
        with pytest.raises(RankMismatchError, match="append to the same cache with different keywords"):
            cache.append_sharded(mine, mine, **how)
        assert cache.length == held


@on_ranks(2)
def test_compiled(group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()
    q, shards, given = of_rank(group, CASES["all scores"])
    lengths = given.pop("cache_seqlens")

    def decode(q: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = context_parallel_decode(q * 2, *shards, cache_seqlens=lengths, **given)
        return out + 1, lse

    got = torch.compile(decode, fullgraph=True, backend="aot_eager")(q, lengths)
    assert all(torch.equal(a, b) for a, b in zip(got, decode(q, lengths), strict=True))


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **more: Any) -> Tensor:
    """Attention of the last queries of each text, on one process."""
    outs = []
    for text, length in enumerate(lengths):
        part = (q[text, None], k[text, None, :length], v[text, None, :length])
        outs.append(dense_attention(*part, *dense_mask(q.shape[1], length, causal=True), **more)[0])
    return torch.cat(outs)


@pytest.mark.parametrize(("world_size", "route"), [(1, "one_sided"), (2, "plain"), (3, "one_sided"), (4, "pipelined")])
@on_ranks(lambda world_size: world_size, env=of_route)
def test_caches(group: dist.ProcessGroup, world_size: int, route: str) -> None:
    """Texts grow, shrink, change places and leave; chunks of odd sizes equal one prefill."""
    for dtype, limit in ((torch.float64, 1e-12), (torch.bfloat16, 0.02)):
        k, v = (seeded(2, 60, 2, dim, dtype=dtype, seed=dim) for dim in (8, 6))
        q = seeded(2, 60, 4, 8, dtype=dtype)
        pool = PagedContextKVCache(group, 31, page_size=4, block=3)
        pool.allocate()
        for cache in (
            ContextKVCache(group, block=3),
            ContextKVCache(group, block=16, max_length=60),
            pool.batch([pool.allocate(), pool.allocate()]),
        ):
            at, outs = 0, []
            for index, new in enumerate((7, 1, 20, 17, 1, 1, 13)):
                rows = slice(at, at + new)
                if index % 2:
                    cache.append(k[:, rows], v[:, rows])
                else:
                    layout = ("zigzag", "contiguous")[index // 2 % 2]
                    mine = (shard_sequence(x[:, rows], 1, group=group, layout=layout) for x in (k, v))
                    cache.append_sharded(*mine, layout=layout, seq_len=new)
                assert cache.positions(1).tolist() == [at + new]
                outs.append(cache.attend(q[:, rows]))
                at += new
            wanted = reference(q, k, v, [60, 60])
            torch.testing.assert_close(torch.cat(outs, 1).double(), wanted, rtol=0, atol=limit)
    # Rejected drafts, and beams.
    dense = ContextKVCache(group, block=3)
    dense.append(k[:, :30], v[:, :30])
    dense.append(k[:, 40:45], v[:, 40:45])
    dense.crop(30)
    dense.reorder(torch.tensor([1, 0]))
    dense.append(k[[1, 0], 30:31], v[[1, 0], 30:31])
    out = dense.attend(q[[1, 0], 30:31]).double()
    torch.testing.assert_close(out, reference(q[:, 30:31], k, v, [31, 31])[[1, 0]], rtol=0, atol=limit)
    dense.reset()
    assert dense.length == 0 and dense.positions(2).tolist() == [0, 1]
    # Texts of different lengths: the last tokens of a padded batch.
    dense.append(k[:1, :9].expand(3, -1, -1, -1), v[:1, :9].expand(3, -1, -1, -1), torch.tensor([9, 4, 0]))
    assert dense.lengths == [9, 4, 0] and dense.positions(2, [2, 1, 1]).tolist() == [[9, 10], [3, 4], [0, 0]]
    out = dense.attend(q[:1, :1].expand(3, -1, -1, -1)).double()
    last, values = k[:1, 5:9], v[:1, 5:9]
    torch.testing.assert_close(out[1:2], reference(q[:1, :1], last, values, [4]), rtol=0, atol=limit)
    assert (out[2] == 0).all()
    # A pool with room for 20 pages of 4 tokens on each rank.
    pool = PagedContextKVCache(group, 20, page_size=4, block=3)
    one, other = pool.allocate(), pool.allocate()
    pool.batch([one]).append(k[:1, :40], v[:1, :40])
    used = 20 - pool.free_pages
    assert used == -(-BlockCyclicLayout(group.size(), 0, 3).count_before(40) // 4)
    pool.batch([other]).append(k[1:, :11], v[1:, :11])
    pool.batch([other, one]).append(k[[1, 0], 50:51], v[[1, 0], 50:51])
    assert (pool.length_of(one), pool.length_of(other)) == (41, 12)
    pool.crop(one, 10)
    assert pool.length_of(one) == 10
    out = pool.batch([one]).attend(q[:1, :1]).double()
    torch.testing.assert_close(out, reference(q[:1, :1], k, v, [10]), rtol=0, atol=limit)
    pool.free(one)
    refuses(ValueError, f"sequence {one} was never allocated in this cache, or has been freed", pool.batch, [one])
    refuses(ValueError, "must contain at least one sequence, and each only once", pool.batch, [other, other])
    much = 90 * group.size()  # too many tokens for all ranks, so that all raise and none waits
    more = [x[:1, :1].expand(-1, much, -1, -1) for x in (k, v)]
    said = r"\d+ more pages of 4 tokens are needed, but only \d+ of the 20 pages"
    refuses(ValueError, said, pool.batch([other]).append, *more)
    assert pool.length_of(other) == 12
    pool.free(other)
    assert pool.free_pages == 20


Q, K = torch.ones(2, 1, 4, 8), torch.ones(2, 5, 2, 8)
LENGTHS = torch.tensor([3, 5])
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": Q.requires_grad_(False)[0]}, ValueError, "q has shape (1, 4, 8); it must be [batch, new, heads, head_dim]"),
    ({"k": K[:1]}, ValueError, "k_cache_shard has a batch of 1, but q has 2"),
    ({"k": K.bfloat16()}, TypeError, "k_cache_shard has dtype torch.bfloat16, but q has torch.float32"),
    ({"k": K[..., :4]}, ValueError, "k_cache_shard has head_dim 4, but q has 8"),
    (
        {"k": torch.ones(2, 5, 3, 8)},
        ValueError,
        "q has 4 heads; their number must be a multiple of the 3 heads of k_cache",
    ),
    ({"v": K[:, :4]}, ValueError, "v_cache_shard has shape (2, 4, 2, 8), but k_cache_shard (2, 5, 2, 8)"),
    ({"cache_seqlens": [3, 5]}, TypeError, "cache_seqlens must be a Tensor, not list."),
    ({"cache_seqlens": LENGTHS.float()}, TypeError, "cache_seqlens has dtype torch.float32; it must be int32"),
    ({"cache_seqlens": LENGTHS[:1]}, ValueError, "cache_seqlens has shape (1,); it must be [2]; q has batch 2."),
    ({"cache_seqlens": LENGTHS - 4}, ValueError, "cache_seqlens is [-1, 1]; lengths must be at least 0."),
    (
        {"cache_seqlens": LENGTHS + 1},
        ValueError,
        "sequence 1 has 6 tokens, 6 of them on rank 0 of 1",
    ),
    ({"page_table": torch.ones(2, 1)}, TypeError, "page_table has dtype torch.float32; it must be int32 or int64."),
    ({"page_table": torch.ones(3, 1).int()}, ValueError, "page_table has shape (3, 1); it must be [2, max_pages]"),
    (
        {"page_table": torch.full((2, 1), 7)},
        ValueError,
        "page_table has [7] for sequence 0 on rank 0; pages must be 0 to",
    ),
    ({"page_table": torch.zeros(2, 0).int()}, ValueError, "needs 1 pages of 5 tokens, but page_table has 0 columns"),
    ({"block": 0}, ValueError, "block is 0; it must be at least 1"),
    ({"block": 1.5}, TypeError, "block must be an int, not float."),
    ({"causal": 1}, TypeError, "causal must be a bool, not int."),
    ({"window": 5}, TypeError, "window must be (left, right)"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
    ({"sinks": torch.ones(2)}, ValueError, "sinks has shape (2,); it must be [4], one for each head of q."),
    ({"group": "cp"}, TypeError, "group must be a ProcessGroup, a 1-D DeviceMesh or None, got str."),
]


def test_bad_input() -> None:
    for given, kind, message in BAD:
        arguments: dict[str, Any] = {"q": Q, "k": K, "v": K, "cache_seqlens": LENGTHS, "group": None, **given}
        tensors = [arguments.pop(name) for name in "qkv"]
        refuses(kind, re.escape(message), context_parallel_decode, *tensors, **arguments)


def test_gradients_are_refused() -> None:
    q, given = Q.clone().requires_grad_(), {"group": None, "cache_seqlens": LENGTHS}
    refuses(ValueError, "q requires a gradient", context_parallel_decode, q, K, K, **given)
    with torch.no_grad():
        context_parallel_decode(q, K, K, group=None, cache_seqlens=LENGTHS)


def test_caches_refuse_what_does_not_fit() -> None:
    for bad in (0, -1):
        refuses(ValueError, "block must be a positive integer", ContextKVCache, None, block=bad)
        refuses(ValueError, "pages must be a positive integer", PagedContextKVCache, None, bad)
    cache = ContextKVCache(None, max_length=8)
    refuses(ValueError, "the cache is empty", cache.attend, Q)
    refuses(ValueError, "may differ in head_dim only", cache.append, K, K[:, :4])
    refuses(ValueError, r"Use torch\.no_grad", cache.append, K.clone().requires_grad_(), K)
    said = r"new_lengths must be 2 numbers from 0 to 5, the number of new tokens, got \[6, 1\]"
    refuses(ValueError, said, cache.append, K, K, [6, 1])
    cache.append(K, K)
    assert cache.attend(Q, return_lse=True)[1].shape == (2, 4, 1)
    refuses(ValueError, "room for max_length=8 tokens of a sequence, but 10 are needed", cache.append, K, K)
    refuses(ValueError, "the cache holds 2 sequences, but got a batch of 1", cache.append, K[:1], K[:1])
    refuses(ValueError, "holds keys with", cache.append, K[:, :1, :1], K[:, :1, :1])
    said = r"seq_len=9 in layout 'zigzag' assigns 9 tokens to rank 0 of 1, but k holds 5"
    refuses(ValueError, said, cache.append_sharded, K, K, seq_len=9)
    said = r"sequences must be numbers from 0 to 1, got \[2\]"
    refuses(ValueError, said, cache.reorder, torch.tensor([2]))
    refuses(ValueError, "length is -1; it must be at least 0, the number of tokens that are kept", cache.crop, -1)
    for wrong in (K.tolist(), None):
        refuses(TypeError, "k must be a Tensor", cache.append, wrong, K)
        refuses(TypeError, "q must be a Tensor", cache.attend, wrong)
        refuses(TypeError, "sequences must be a Tensor", cache.reorder, wrong)
    said = r"new_lengths must have dtype int32 or int64, got torch\.float32"
    refuses(TypeError, said, cache.append, K, K, torch.ones(2))
    pool = PagedContextKVCache(None, 4)
    number = pool.allocate()
    refuses(TypeError, r"sequences must be a list of numbers that allocate\(\) returned, got int", pool.batch, number)
    refuses(ValueError, "length is -3", pool.crop, number, -3)
    cache.reset()
    cache.append(K, K, [5, 2])
    said = r"append_sharded needs sequences of equal length, but the cached sequences have \[5, 2\] tokens"
    refuses(ValueError, said, cache.append_sharded, K[:, :1], K[:, :1])
