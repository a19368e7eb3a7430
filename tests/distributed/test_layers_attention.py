"""ParallelAttention against unsharded attention written out here, and against nn.MultiheadAttention."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_tp.nn import ContextKVCache, KVCache, PagedContextKVCache, ParallelAttention, RotaryEmbedding
from fused_tp.nn.attention import check_heads
from fused_tp.nn.local_attention import attention_with_mask
from fused_tp.ops.ring_attention import attention_over
from fused_tp.ops.sequence import shard_sequence, unshard_sequence
from fused_tp.runtime.partition import shard_range
from tests.distributed.layers import EXACT, assert_same
from tests.reference import refuses, seeded
from tests.workers import device_mesh, fresh_ranks, on_ranks, run_ranks

HEADS, HEAD_DIM, HIDDEN, TOKENS = 12, 4, 10, 7


class Attention(nn.Module):
    """What ParallelAttention computes, in the plainest words, with the names of Llama's attention."""

    def __init__(self, kv_heads: int, bias: bool, norms: bool, rope: RotaryEmbedding | None, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias, dtype=torch.float64)
        self.k_proj = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, bias, dtype=torch.float64)
        self.v_proj = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, bias, dtype=torch.float64)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias, dtype=torch.float64)
        if norms:
            self.q_norm = nn.RMSNorm(HEAD_DIM, 1e-6, dtype=torch.float64)
            self.k_norm = nn.RMSNorm(HEAD_DIM, 1e-6, dtype=torch.float64)
            with torch.no_grad():
                self.q_norm.weight.copy_(seeded(HEAD_DIM, dtype=torch.float64, seed=8))
                self.k_norm.weight.copy_(seeded(HEAD_DIM, dtype=torch.float64, seed=9))
        self.head_dim, self.kv_heads, self.rope, self.is_causal, self.norms = HEAD_DIM, kv_heads, rope, causal, norms
        self.sliding_window: int | None = None
        self.attn_logit_softcapping: float | None = None
        self.sinks: nn.Parameter | None = None
        self.slopes: Tensor | None = None
        self.documents: list[int] = []

    def with_everything(self) -> Attention:
        """A window, a cap and sinks, under their names in transformers, and ALiBi, which has none there."""
        self.sliding_window, self.attn_logit_softcapping = 4, 2.0
        self.sinks = nn.Parameter(seeded(HEADS, dtype=torch.float64, seed=5))
        self.slopes = 0.1 / torch.arange(1, HEADS + 1)
        return self

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: additive or bool, [batch, heads, seq, seq] or broadcastable."""
        q = self.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, HEAD_DIM))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, HEAD_DIM))
        if self.norms:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            places = [torch.arange(b - a) for a, b in itertools.pairwise([0, *self.documents[1:-1], x.shape[1]])]
            q, k = self.rope(q, k, torch.cat(places))
        k, v = (t.repeat_interleave(HEADS // self.kv_heads, dim=2) for t in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / HEAD_DIM**0.5
        if self.attn_logit_softcapping is not None:
            scores = self.attn_logit_softcapping * torch.tanh(scores / self.attn_logit_softcapping)
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        if self.slopes is not None:
            scores = scores - self.slopes.double()[:, None, None] * distance.abs()
        if self.is_causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if self.sliding_window is not None:
            scores = scores.masked_fill(distance.abs() >= self.sliding_window, -torch.inf)
        if self.documents:
            document = torch.bucketize(torch.arange(x.shape[1]), torch.tensor(self.documents), right=True)
            scores = scores.masked_fill(document[:, None] != document, -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if self.sinks is not None:
            extra = self.sinks[None, :, None, None].expand(x.shape[0], HEADS, x.shape[1], 1)
            scores, v = torch.cat([scores, extra], -1), torch.cat([v, torch.zeros_like(v[:, :1])], 1)
        # 0 for rows that see nothing
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(-1e300).detach())
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
        return self.o_proj(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2))


def check(
    group: dist.ProcessGroup,
    full: nn.Module,
    sharded: nn.Module,
    sequence_parallel: bool = False,
    mask: Tensor | None = None,
    full_mask: Tensor | None = None,
) -> None:
    dim, seq_len = (1, TOKENS) if sequence_parallel else (None, None)
    given: dict[str, Any] = {"cut": dim, "out_cut": dim, "attention_mask": mask, "seq_len": seq_len}
    assert_same(group, full, sharded, (2, TOKENS, HIDDEN), full_given=(full_mask,), **given)


@on_ranks(1, 2, 3, 4)
def test_attention_equals_the_unsharded(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    rope = RotaryEmbedding(HEAD_DIM)
    for kv_heads in (1, 2, 4, 12):
        if kv_heads % group.size() and group.size() % kv_heads:
            continue
        for sequence_parallel in (False, True):
            for bias, norms, hook, causal in ((True, False, None, False), (False, True, rope, True)):
                full = Attention(kv_heads, bias, norms, hook, causal)
                sharded = ParallelAttention.from_module(full, mesh=mesh, rope=hook, sequence_parallel=sequence_parallel)
                check(group, full, sharded, sequence_parallel)
                options: dict[str, Any] = {"bias": bias, "qk_norm": norms, "rope": hook, "causal": causal}
                options |= {"mesh": mesh, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
                made = ParallelAttention(HIDDEN, HEADS, kv_heads, HEAD_DIM, **options)
                full.load_state_dict({name: p.full_tensor() for name, p in made.state_dict().items()})
                check(group, full, made, sequence_parallel)


@on_ranks(1, 4)
def test_masks(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    padding = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]).bool()
    blind = padding.clone()
    blind[1] = False  # the second text sees nothing: 0, not NaN, also in the gradients
    per_head = seeded(1, HEADS, TOKENS, TOKENS, dtype=torch.float64, seed=3)
    pairs = seeded(2, TOKENS, TOKENS, dtype=torch.float64, seed=4) > -0.5
    for causal in (False, True):
        full = Attention(4, True, False, None, causal)
        sharded = ParallelAttention.from_module(full, mesh=mesh)
        assert sharded.causal == causal
        check(group, full, sharded, mask=padding, full_mask=padding[:, None, None])
        check(group, full, sharded, mask=blind, full_mask=blind[:, None, None])
        check(group, full, sharded, mask=pairs, full_mask=pairs[:, None])
        check(group, full, sharded, mask=per_head, full_mask=per_head)
        bias = per_head[:, :1].masked_fill(~pairs[:, None], -torch.inf)
        check(group, full, sharded, mask=bias, full_mask=bias)


@on_ranks(1, 2, 4)
def test_generation_with_a_cache(group: dist.ProcessGroup) -> None:
    full = Attention(2, False, True, RotaryEmbedding(HEAD_DIM), True)
    sharded = ParallelAttention.from_module(full, mesh=device_mesh(group), rope=RotaryEmbedding(HEAD_DIM)).eval()
    x = seeded(2, 40, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        wanted = full(x)
        for cache in (KVCache(), KVCache(max_length=40)):
            for _ in range(2):
                parts = [sharded(x[:, :5], kv_cache=cache), sharded(x[:, 5:8], kv_cache=cache)]
                parts += [sharded(x[:, i : i + 1], kv_cache=cache) for i in range(8, 40)]
                torch.testing.assert_close(torch.cat(parts, 1), wanted, **EXACT)
                assert cache.length == 40
                cache.reset()
        padded = torch.ones(2, 8, dtype=torch.bool)
        padded[0, :3] = False  # a shorter prompt, padded on the left
        cache = KVCache()
        sharded(x[:, :7], kv_cache=cache, attention_mask=padded[:, :7])
        step = sharded(x[:, 7:8], kv_cache=cache, attention_mask=padded)
        torch.testing.assert_close(step, full(x[:, :8], padded[:, None, None])[:, 7:8], **EXACT)


def dropped(group: dist.ProcessGroup) -> list[Tensor]:
    full = Attention(4, True, False, None, True)
    sharded = ParallelAttention.from_module(full, mesh=device_mesh(group))
    x = seeded(2, TOKENS, HIDDEN, dtype=torch.float64).requires_grad_()
    sharded.dropout = 0.4
    torch.manual_seed(11)
    y = sharded(x)
    assert not torch.equal(y, sharded(x))  # other draws
    y.sum().backward()
    assert x.grad is not None
    sharded.eval()
    torch.testing.assert_close(sharded(x), full(x), **EXACT)
    return [y.detach(), x.grad]


def test_dropout_does_not_depend_on_the_number_of_ranks() -> None:
    wanted = run_ranks(1, dropped)[0]
    for world_size in (2, 4):
        for results in run_ranks(world_size, dropped):
            for mine, theirs in zip(results, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, **EXACT)


def converted(full: Attention, **more: Any) -> ParallelAttention:
    """`full` over a mesh; ALiBi is set after, since modules that from_module knows have none."""
    sharded = ParallelAttention.from_module(full, rope=full.rope, **more)
    sharded.alibi_slopes = None if full.slopes is None else tuple(full.slopes.double().tolist())
    return sharded


@on_ranks(1, 2)
def test_window_softcap_sinks_alibi_and_documents(group: dist.ProcessGroup) -> None:
    mesh, rope = device_mesh(group), RotaryEmbedding(HEAD_DIM)
    for causal in (False, True):
        full = Attention(4, True, False, rope, causal).with_everything()
        sharded = converted(full, mesh=mesh)
        assert sharded.window == (3, 0 if causal else 3) and sharded.softcap == 2.0
        check(group, full, sharded)
        check(group, full, converted(full, mesh=mesh, sequence_parallel=True), True)
        padding = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]).bool()
        check(group, full, sharded, mask=padding, full_mask=padding[:, None, None])
    made = ParallelAttention(
        HIDDEN, HEADS, 4, HEAD_DIM, mesh=mesh, window=(3, 3), softcap=2.0, sinks=True, alibi_slopes=full.slopes
    )
    assert made.sinks is not None and torch.equal(made.sinks.full_tensor(), torch.zeros(HEADS))
    assert set(dict(made.named_parameters())) == set(dict(full.named_parameters()))
    full.documents = [0, 1, 5, 5, TOKENS]
    x = seeded(2, TOKENS, HIDDEN, dtype=torch.float64)
    y = sharded(x, cu_seqlens=torch.tensor(full.documents))
    torch.testing.assert_close(y, full(x), **EXACT)
    for index, (start, stop) in enumerate(itertools.pairwise(full.documents)):
        if start < stop:  # the same as each document alone
            torch.testing.assert_close(sharded(x[:, start:stop]), y[:, start:stop], msg=f"{index}", **EXACT)


@on_ranks(2)
def test_generation_with_every_score(group: dist.ProcessGroup) -> None:
    """With a KVCache on this rank, every score must see the whole cache."""
    full = Attention(2, False, True, RotaryEmbedding(HEAD_DIM), True).with_everything()
    sharded = converted(full, mesh=device_mesh(group)).eval()
    x = seeded(2, 12, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        cache = KVCache()
        parts = [sharded(x[:, a:b], kv_cache=cache) for a, b in ((0, 5), (5, 8), (8, 9), (9, 10), (10, 12))]
        torch.testing.assert_close(torch.cat(parts, 1), full(x), **EXACT)


@on_ranks(4)
@pytest.mark.parametrize("tp", [1, 2])
def test_generation_with_a_cache_cut_over_ranks(group: dist.ProcessGroup, tp: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("cp", "tp"))
    full = Attention(2, False, True, RotaryEmbedding(HEAD_DIM), True).with_everything()
    sharded = converted(full, mesh=mesh["tp"], cp_group=mesh["cp"]).eval()
    x = seeded(2, 23, HIDDEN, dtype=torch.float64)
    pool = PagedContextKVCache(mesh["cp"], 16, page_size=3, block=2)
    with torch.no_grad():
        wanted = full(x)
        for cache in (
            ContextKVCache(mesh["cp"], block=2),
            ContextKVCache(mesh["cp"], block=4, max_length=23),
            pool.batch([pool.allocate(), pool.allocate()]),
        ):
            chunks = [(0, 7), (7, 12), *((i, i + 1) for i in range(12, 23))]
            parts = [sharded(x[:, a:b], kv_cache=cache) for a, b in chunks]
            torch.testing.assert_close(torch.cat(parts, 1), wanted, **EXACT)
            assert cache.length == 23 and cache.lengths == [23, 23]
        # A prompt of which each rank projects its part, in two chunks of odd lengths.
        for layout in ("zigzag", "contiguous"):
            sharded.cp_layout = layout
            cache = ContextKVCache(mesh["cp"], block=2)
            for a, b in ((0, 9), (9, 20)):
                mine = shard_sequence(x[:, a:b], 1, group=mesh["cp"], layout=layout)
                y = sharded(mine, kv_cache=cache, seq_len=b - a, sharded_chunk=True)
                theirs = shard_sequence(wanted[:, a:b], 1, group=mesh["cp"], layout=layout)
                torch.testing.assert_close(y, theirs, **EXACT)
            torch.testing.assert_close(sharded(x[:, 20:], kv_cache=cache), wanted[:, 20:], **EXACT)
        # A shorter prompt, padded on the left.
        cache = ContextKVCache(mesh["cp"], block=2)
        short = torch.cat([seeded(1, 3, HIDDEN, dtype=torch.float64, seed=9), x[1:, :4]], 1)
        first = sharded(torch.cat([x[:1, :7], short]), kv_cache=cache, new_lengths=[7, 4])
        torch.testing.assert_close(first[0], wanted[0, :7], **EXACT)
        torch.testing.assert_close(first[1, 3:], wanted[1, :4], **EXACT)
        for i in range(3):
            step = sharded(torch.stack([x[0, 7 + i : 8 + i], x[1, 4 + i : 5 + i]]), kv_cache=cache)
            torch.testing.assert_close(step[:, 0], torch.stack([wanted[0, 7 + i], wanted[1, 4 + i]]), **EXACT)
    for given, message in (
        ({"kv_cache": KVCache()}, "pass a ContextKVCache"),
        (
            {"kv_cache": cache, "attention_mask": torch.ones(2, 23).bool()},
            "attention_mask cannot be used with cp_group",
        ),
        ({"kv_cache": cache, "cu_seqlens": torch.tensor([0, 23])}, "cu_seqlens and kv_cache cannot be combined"),
        ({"new_lengths": [3, 4]}, "new_lengths is for a ContextKVCache"),
        ({"sharded_chunk": True}, "sharded_chunk is for a ContextKVCache over cp_group"),
        ({"kv_cache": cache}, "generate under torch.no_grad"),
    ):
        with pytest.raises(ValueError, match=message):
            sharded(x, **given)
    sharded.dropout = 0.1
    refuses(ValueError, "dropout is for training", sharded.train(), x, kv_cache=cache)


def turned_in_fp32(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return RotaryEmbedding(4)(q.float(), k.float(), positions)


def autocast_generation(group: dist.ProcessGroup) -> None:
    """Rotary embeddings may leave q and k in fp32, while v is bf16."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    torch.manual_seed(0)
    given: dict[str, Any] = {"causal": True, "rope": turned_in_fp32, "mesh": mesh["tp"]}
    windowed: dict[str, Any] = {"window": (40, 0)}  # attention by another way, of the same tokens
    x = seeded(2, 23, 16)
    for more in ({}, windowed):
        attention = ParallelAttention(16, 4, **given, **more).eval()
        shared = ParallelAttention(16, 4, cp_group=mesh["cp"], **given, **more).eval()
        shared.load_state_dict(attention.state_dict())
        with torch.no_grad():
            wanted = attention(x)
            with torch.autocast("cpu", torch.bfloat16):
                for one, cache in ((attention, KVCache()), (shared, ContextKVCache(mesh["cp"], block=2))):
                    parts = [one(x[:, a:b], kv_cache=cache) for a, b in ((0, 20), (20, 22), (22, 23))]
                    out = torch.cat(parts, 1)
                    assert out.dtype == torch.bfloat16
                    torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0.02)


def in_a_world_of_two(check: Callable[[dist.ProcessGroup], None]) -> None:
    """For what makes meshes: on two of the pool's four ranks they would number groups otherwise than the others."""
    for outcome in fresh_ranks(2, check):
        outcome.unwrap()


@pytest.mark.full
def test_generation_under_autocast() -> None:
    in_a_world_of_two(autocast_generation)


@on_ranks(4)
def test_a_cache_is_not_cut_over_ranks_of_other_heads(group: dist.ProcessGroup) -> None:
    """Ranks that hold different heads cannot share the tokens of each."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for wrong in (mesh, group, None):
        cache = ContextKVCache(wrong)
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match=r"group of the cache shares the ranks \[0, 1, 2, 3\] with"),
        ):
            ParallelAttention(16, 4, mesh=mesh)(torch.ones(1, 2, 16), kv_cache=cache)
        assert cache.length == 0
    both = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    for wrong in (both["tp"], group):
        with pytest.raises(ValueError, match=r"cp_group shares the ranks \[\d, \d\] with the tensor parallel mesh"):
            ParallelAttention(16, 4, mesh=both["tp"], cp_group=wrong)
    torch.manual_seed(0)
    attention = ParallelAttention(16, 4, mesh=both["tp"]).eval()
    with torch.no_grad():
        assert attention(torch.ones(1, 2, 16), kv_cache=ContextKVCache(both["cp"])).shape == (1, 2, 16)


class Writer(nn.Module):
    """The smallest model that writes: an embedding, attention twice, and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        rope, self.words = RotaryEmbedding(8), nn.Embedding(50, 32, dtype=torch.float64)
        self.head = nn.Linear(32, 50, bias=False, dtype=torch.float64)
        self.layers = nn.ModuleList(
            ParallelAttention(32, 4, 2, causal=True, rope=rope, dtype=torch.float64, **options, **how)
            for how in ({"window": (6, 0), "sinks": True}, {"softcap": 5.0})
        )

    def write(self, ids: Tensor, caches: list[Any], count: int) -> Tensor:
        new, draws = ids, torch.Generator().manual_seed(6)
        for _ in range(count):
            x = self.words(new)
            for layer, cache in zip(self.layers, caches, strict=True):
                x = 0.1 * x + 5 * layer(x, kv_cache=cache)
            new = torch.multinomial(self.head(x[:, -1]).softmax(-1), 1, generator=draws)
            ids = torch.cat([ids, new], 1)
        return ids


def written(group: dist.ProcessGroup) -> Tensor:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    ids = torch.arange(26).view(2, 13)
    with torch.no_grad():
        wanted = Writer(mesh=mesh["tp"]).write(ids, [KVCache(), KVCache()], 12)
        cut = Writer(mesh=mesh["tp"], cp_group=mesh["cp"])
        got = cut.write(ids, [ContextKVCache(mesh["cp"], block=4) for _ in range(2)], 12)
    assert torch.equal(got, wanted)
    return got


def test_a_model_writes_the_same_text_with_a_sharded_cache() -> None:
    texts = run_ranks(4, written)
    assert len(set(texts[0][0, 13:].tolist())) > 3  # not one word over and over
    assert all(torch.equal(text, texts[0]) for text in texts)


def dropped_over_sequences(group: dist.ProcessGroup, cp: int) -> list[Tensor]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (cp, group.size() // cp), mesh_dim_names=("cp", "tp"))
    full = Attention(4, True, False, None, True)
    sharded = converted(full, mesh=mesh["tp"], cp_group=mesh["cp"])
    sharded.dropout = 0.4
    x = seeded(2, TOKENS, HIDDEN, dtype=torch.float64)
    mine = shard_sequence(x, 1, group=mesh["cp"]).requires_grad_()
    torch.manual_seed(11)
    y = sharded(mine, seq_len=TOKENS)
    y.sum().backward()
    assert mine.grad is not None
    return [unshard_sequence(t.detach(), 1, group=mesh["cp"], seq_len=TOKENS) for t in (y, mine.grad)]


def test_dropout_is_that_of_one_rank_over_sequences_too() -> None:
    wanted = run_ranks(1, dropped)[0]
    for cp in (2, 4):
        for results in run_ranks(4, dropped_over_sequences, cp):
            for mine, theirs in zip(results, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, **EXACT)


def test_dropout_under_a_mask_is_that_without() -> None:
    q, k, v = (seeded(2, TOKENS, n, HEAD_DIM, dtype=torch.float64, seed=seed) for seed, n in enumerate((12, 4, 4)))
    everything = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    torch.manual_seed(3)
    masked = attention_with_mask(q, k, v, everything, causal=True, scale=None, dropout_p=0.4, first_head=2)
    torch.manual_seed(3)
    how: dict[str, Any] = {"causal": True, "layout": "contiguous", "dropout_p": 0.4, "first_head": 2}
    torch.testing.assert_close(masked, attention_over(q, k, v, "", 1, 0, **how)[0], **EXACT)


@on_ranks(4)
@pytest.mark.parametrize("documents", [False, True])
def test_with_context_parallelism(group: dist.ProcessGroup, documents: bool) -> None:
    """Sequences cut over cp ranks, heads over tp ranks, and with sequence parallelism the sequence again over these."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    rope, tokens = RotaryEmbedding(HEAD_DIM), 11
    full = Attention(4, True, True, rope, True).with_everything()
    x_full = seeded(2, tokens, HIDDEN, dtype=torch.float64).requires_grad_()
    full.documents = [0, 4, 5, tokens] if documents else []
    bounds = torch.tensor(full.documents) if documents else None
    y_full = full(x_full)
    grad = seeded(*y_full.shape, dtype=torch.float64, seed=1)
    y_full.backward(grad)
    assert x_full.grad is not None
    for layout in ("balanced", "zigzag") if documents else ("zigzag", "contiguous"):
        for sequence_parallel in (False, True):
            sharded = converted(
                full,
                mesh=mesh["tp"],
                cp_group=mesh["cp"],
                cp_layout=layout,
                sequence_parallel=sequence_parallel,
            )

            def mine(t: Tensor, layout: str = layout, cut: bool = sequence_parallel) -> Tensor:
                t = shard_sequence(t.detach(), 1, group=mesh["cp"], layout=layout, cu_seqlens=bounds)
                start, stop = shard_range(t.shape[1], 2, mesh["tp"].get_local_rank()) if cut else (0, t.shape[1])
                return t[:, start:stop].clone()

            x = mine(x_full).requires_grad_()
            y = sharded(x, seq_len=tokens, cu_seqlens=bounds)
            y.backward(mine(grad))
            torch.testing.assert_close(y, mine(y_full), **EXACT)
            torch.testing.assert_close(x.grad, mine(x_full.grad), **EXACT)
            for name, parameter in sharded.named_parameters():
                assert isinstance(parameter.grad, DTensor)
                total = parameter.grad.full_tensor()
                dist.all_reduce(total, group=mesh["cp"].get_group())  # as over data parallel ranks
                torch.testing.assert_close(total, full.get_parameter(name).grad, **EXACT)
    refuses(ValueError, "layout", ParallelAttention, 8, 4, mesh=mesh["tp"], cp_group=mesh["cp"], cp_layout="stripes")


@on_ranks(1, 3)
def test_from_multihead_attention(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    for bias in (True, False):
        torch.manual_seed(0)
        full = nn.MultiheadAttention(24, HEADS, bias=bias, batch_first=True, dtype=torch.float64)
        sharded = ParallelAttention.from_module(full, mesh=mesh)
        x_full = seeded(2, TOKENS, 24, dtype=torch.float64).requires_grad_()
        x = x_full.detach().clone().requires_grad_()
        y_full, y = full(x_full, x_full, x_full, need_weights=False)[0], sharded(x)
        grad = seeded(*y_full.shape, dtype=torch.float64, seed=1)
        y_full.backward(grad)
        y.backward(grad)
        torch.testing.assert_close(y, y_full, **EXACT)
        torch.testing.assert_close(x.grad, x_full.grad, **EXACT)
        packed = torch.cat([getattr(sharded, f"{name}_proj").weight.grad.full_tensor() for name in "qkv"])
        torch.testing.assert_close(packed, full.in_proj_weight.grad, **EXACT)
        torch.testing.assert_close(sharded.o_proj.weight.grad.full_tensor(), full.out_proj.weight.grad, **EXACT)
    options: list[tuple[dict[str, Any], str]] = [
        ({}, "batch_first=False"),
        ({"batch_first": True, "kdim": 12}, "kdim=12"),
        ({"batch_first": True, "add_bias_kv": True}, "bias_k"),
        ({"batch_first": True, "add_zero_attn": True}, "add_zero_attn"),
    ]
    for option, message in options:
        with pytest.raises(ValueError, match=message):
            ParallelAttention.from_module(nn.MultiheadAttention(24, HEADS, **option), mesh=mesh)
    memo: dict[Tensor, nn.Parameter] = {}
    ParallelAttention.from_module(full, mesh=mesh, memo=memo)
    refuses(ValueError, "in_proj_weight", ParallelAttention.from_module, full, mesh=mesh, memo=memo)
    refuses(ValueError, "num_heads is 6", ParallelAttention.from_module, full, mesh=mesh, num_heads=6)


@on_ranks(2)
def test_bfloat16(group: dist.ProcessGroup) -> None:
    full = Attention(4, True, False, None, True)
    x = seeded(2, TOKENS, HIDDEN, dtype=torch.bfloat16)
    wanted = full(x.double())
    sharded = ParallelAttention.from_module(copy.deepcopy(full).bfloat16(), mesh=device_mesh(group))
    # Rounded weights, q, k, v, context and sum: a few times 2^-8 of values of order 0.3.
    torch.testing.assert_close(sharded(x).double(), wanted, rtol=0.05, atol=0.02)


def test_head_counts_that_cannot_be_cut_name_those_that_can() -> None:
    for heads, kv_heads, world_size, message in (
        (12, 12, 5, r"Group sizes that work: \[1, 2, 3, 4, 6, 12\]"),
        (12, 2, 3, r"Group sizes that work: \[1, 2, 4, 6, 12\]"),
        (12, 5, 1, r"num_kv_heads is 5; .* one of \[1, 2, 3, 4, 6, 12\]"),
    ):
        with pytest.raises(ValueError, match=message):
            check_heads(heads, kv_heads, world_size)


def bad_inputs(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    over = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    cut: dict[str, Any] = {"mesh": over["tp"], "cp_group": over["cp"]}
    attention = ParallelAttention(8, 4, mesh=mesh, causal=True)
    x = torch.ones(2, 3, 8)
    refuses(ValueError, "cannot be cut over 2 ranks", ParallelAttention, 9, 3, mesh=mesh)
    refuses(ValueError, "no multiple of num_heads", ParallelAttention, 9, 4, mesh=mesh)
    refuses(ValueError, "dropout must be in", ParallelAttention, 8, 4, mesh=mesh, dropout=1.0)
    refuses(ValueError, r"x must be a Tensor \[batch, seq, 8\]", attention, x[0])
    refuses(ValueError, r"x must be a Tensor \[batch, seq, 8\]", attention, torch.ones(2, 3, 9))
    refuses(TypeError, r"mask\.bool\(\)", attention, x, attention_mask=torch.ones(2, 3, dtype=torch.int64))
    refuses(ValueError, "attention_mask has shape", attention, x, attention_mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="cu_seqlens and attention_mask cannot be combined"):
        attention(x, attention_mask=torch.ones(2, 3, dtype=torch.bool), cu_seqlens=torch.tensor([0, 3]))
    refuses(ValueError, r"cu_seqlens is \(0, 4\)", attention, x, cu_seqlens=torch.tensor([0, 4]))
    refuses(ValueError, "needs their cu_seqlens", ParallelAttention(8, 4, **cut, cp_layout="balanced"), x)
    refuses(ValueError, "positions were given", attention, x, positions=torch.arange(3))
    turned = ParallelAttention(8, 4, mesh=mesh, rope=RotaryEmbedding(2))
    refuses(ValueError, r"positions has shape \(4,\)", turned, x, positions=torch.arange(4))
    refuses(ValueError, "said to be 4 long", turned, x, seq_len=4)
    refuses(ValueError, "does not fit", attention, x, attention_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_mask cannot be used with cp_group"):
        ParallelAttention(8, 4, **cut)(x, attention_mask=torch.ones(2, 3, dtype=torch.bool))
    refuses(ValueError, "a KVCache holds all tokens on one rank", ParallelAttention(8, 4, **cut), x, kv_cache=KVCache())
    pool: Any = PagedContextKVCache(None, 4)
    for cache, message in (
        (pool, r"pass those of x, kv_cache\.batch\(\[sequence"),
        ((x, x), "kv_cache is a tuple; ParallelAttention"),
    ):
        with pytest.raises(TypeError, match=message):
            attention(x, kv_cache=cache)
    refuses(ValueError, "has no q_proj", ParallelAttention.from_module, nn.Linear(3, 3), mesh=mesh)
    refuses(ValueError, "pass num_heads", ParallelAttention.from_module, _llama(), mesh=mesh)
    with pytest.raises(ValueError, match="submodule extra"):
        module = _llama()
        module.extra = nn.Linear(2, 2)
        ParallelAttention.from_module(module, mesh=mesh, num_heads=4)
    for name, value, message in (
        ("sinks", nn.Parameter(torch.ones(3)), r"sinks of Module has shape \(3,\); it must be \[4\]"),
        ("gates", nn.Parameter(torch.ones(4)), "parameters of its own"),
    ):
        module = _llama()
        setattr(module, name, value)
        with pytest.raises(ValueError, match=message):
            ParallelAttention.from_module(module, mesh=mesh, num_heads=4)
    for given, message in (
        ({"window": 4}, "window must be"),
        ({"softcap": -1.0}, "softcap is -1"),
        ({"alibi_slopes": [0.5, 0.25]}, "alibi_slopes has 2 numbers"),
        ({"cp_layout": "stripes"}, "layout is 'stripes'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            ParallelAttention(8, 4, mesh=mesh, **given)
    module = _llama()
    module.config = type("Config", (), {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]})()
    for module.layer_idx, window in ((0, None), (1, (3, 3))):
        assert ParallelAttention.from_module(module, mesh=mesh, num_heads=4).window == window
    with pytest.raises(TypeError, match="q_proj is a Identity"):
        module = _llama()
        module.q_proj = nn.Identity()
        ParallelAttention.from_module(module, mesh=mesh, num_heads=4)
    with pytest.raises(ValueError, match="rotary embeddings"):
        module = _llama()
        module.config = type("Config", (), {"rope_theta": 1e4})()
        ParallelAttention.from_module(module, mesh=mesh, num_heads=4)

    cache = KVCache(max_length=4)
    refuses(ValueError, r"torch\.no_grad", attention, x, kv_cache=cache)
    with torch.no_grad():
        attention(x, kv_cache=cache)
        refuses(ValueError, "room for max_length=4", attention, x, kv_cache=cache)
        refuses(ValueError, r"reset\(\) it", attention, x[:1, :1], kv_cache=cache)
    refuses(ValueError, "max_length must be a positive integer", KVCache, 0)
    refuses(ValueError, "k and v must be alike", KVCache().append, torch.ones(1, 2, 3, 4), torch.ones(1, 3, 3, 4))
    refuses(ValueError, "head_dim must be even", RotaryEmbedding, 5)
    refuses(ValueError, "theta must be positive", RotaryEmbedding, 4, 0.0)


def _llama() -> Any:
    module = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        module.add_module(name, nn.Linear(8, 8))
    return module


def test_bad_inputs_are_refused() -> None:
    in_a_world_of_two(bad_inputs)


def test_rotary_embedding_turns_by_position_only() -> None:
    """The score of q at i and k at j depends on i - j."""
    rope = RotaryEmbedding(6, theta=100.0)
    q, k = seeded(1, 1, 2, 6, dtype=torch.float64), seeded(1, 1, 2, 6, dtype=torch.float64, seed=1)

    def score(i: int, j: int) -> Tensor:
        turned_q, _ = rope(q, q, torch.tensor([i]))
        turned_k, _ = rope(k, k, torch.tensor([[j]]))
        return (turned_q * turned_k).sum(-1)

    torch.testing.assert_close(score(5, 3), score(12, 10), rtol=1e-5, atol=1e-5)  # angles are fp32
    torch.testing.assert_close(score(0, 0), (q * k).sum(-1))
    assert not torch.allclose(score(5, 3), score(5, 4))
