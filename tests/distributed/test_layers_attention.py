"""ParallelAttention against an unsharded reference, and against nn.MultiheadAttention."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_tp.core.partition import shard_range
from fused_tp.nn import ContextKVCache, KVCache, PagedContextKVCache, ParallelAttention, RotaryEmbedding
from fused_tp.nn.attention import check_head_sharding
from fused_tp.ops.sequence import shard_sequence, unshard_sequence
from tests.distributed.layers import EXACT, HEAD_DIM, HEADS, HIDDEN, Attention, assert_same
from tests.reference import refuses, seeded
from tests.workers import device_mesh, fresh_ranks, on_ranks, run_fresh, run_ranks

TOKENS = 7
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]).bool()


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


class LearntRope(nn.Module):
    """Scale features by a parameter that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(seeded(HEAD_DIM, dtype=torch.float64, seed=6))

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return q * self.scales, k * self.scales


@on_ranks(1, 2, 3, 4)
def test_attention_equals_the_unsharded(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    rope = RotaryEmbedding(HEAD_DIM)
    for kv_heads in (1, 2, 4, 12):
        if kv_heads % group.size() and group.size() % kv_heads:
            continue
        for sequence_parallel in (False, True):
            for bias, norms, hook, causal in (
                (True, False, None, False),
                (False, True, rope, True),
                (False, False, LearntRope(), True),
            ):
                full = Attention(kv_heads, bias, norms, hook, causal)
                where: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence_parallel}
                if not isinstance(hook, nn.Module):  # from_module would not move a module
                    sharded = ParallelAttention.from_module(full, rope=hook, **where)
                    check(group, full, sharded, sequence_parallel)
                options: dict[str, Any] = {"bias": bias, "qk_norm": norms, "causal": causal, **where}
                options |= {"rope": copy.deepcopy(hook), "dtype": torch.float64}
                made = ParallelAttention(HIDDEN, HEADS, kv_heads, HEAD_DIM, **options)
                full.load_state_dict({name: p.full_tensor() for name, p in made.state_dict().items()})
                check(group, full, made, sequence_parallel)


@on_ranks(1, 4)
def test_masks(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    blind = PADDING.clone()
    blind[1] = False  # the second text attends to nothing: outputs and gradients must be 0, not NaN
    per_head = seeded(1, HEADS, TOKENS, TOKENS, dtype=torch.float64, seed=3)
    pairs = seeded(2, TOKENS, TOKENS, dtype=torch.float64, seed=4) > -0.5
    for causal in (False, True):
        full = Attention(4, True, False, None, causal)
        sharded = ParallelAttention.from_module(full, mesh=mesh)
        assert sharded.causal == causal
        for mask in (PADDING, blind):
            check(group, full, sharded, mask=mask, full_mask=mask[:, None, None])
        check(group, full, sharded, mask=pairs, full_mask=pairs[:, None])
        for bias in (per_head, per_head[:, :1].masked_fill(~pairs[:, None], -torch.inf)):
            mine, theirs = (bias.clone().requires_grad_() for _ in range(2))
            check(group, full, sharded, mask=mine, full_mask=theirs)
            torch.testing.assert_close(mine.grad, theirs.grad, **EXACT)


@on_ranks(1, 2, 4)
def test_generation_with_a_cache(group: dist.ProcessGroup) -> None:
    """Generation with and without windows, caps, sinks and ALiBi, which apply to the whole cache."""
    full = Attention(2, False, True, RotaryEmbedding(HEAD_DIM), True)
    x = seeded(2, 40, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        every = copy.deepcopy(full).with_everything()
        cache, sharded = KVCache(), converted(every, mesh=device_mesh(group)).eval()
        parts = [sharded(x[:, a:b], kv_cache=cache) for a, b in ((0, 5), (5, 8), (8, 9), (9, 10), (10, 12))]
        torch.testing.assert_close(torch.cat(parts, 1), every(x[:, :12]), **EXACT)
    sharded = ParallelAttention.from_module(full, mesh=device_mesh(group), rope=RotaryEmbedding(HEAD_DIM)).eval()
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


def converted(full: Attention, **more: Any) -> ParallelAttention:
    """Convert `full` to a mesh; ALiBi is set afterwards, as no module that from_module supports has it."""
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
        check(group, full, sharded, mask=PADDING, full_mask=PADDING[:, None, None])
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
        # A prompt in two chunks of odd lengths, of which each rank projects its shard.
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
    masked = {"kv_cache": cache, "attention_mask": torch.ones(2, 23).bool()}
    for given, message in (
        ({"kv_cache": KVCache()}, "a KVCache holds all tokens on one rank, .*Pass a ContextKVCache"),
        (masked, "attention_mask cannot be used with cp_group"),
        ({"kv_cache": cache, "cu_seqlens": torch.tensor([0, 23])}, "cu_seqlens and kv_cache cannot be combined"),
        ({"new_lengths": [3, 4]}, "new_lengths is for a ContextKVCache"),
        ({"sharded_chunk": True}, "sharded_chunk is for a ContextKVCache over cp_group"),
        ({"kv_cache": cache}, "Use torch.no_grad"),
    ):
        refuses(ValueError, message, sharded, x, **given)
    sharded.dropout = 0.1
    refuses(ValueError, "does not support dropout", sharded.train(), x, kv_cache=cache)


def turned_in_fp32(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return RotaryEmbedding(4)(q.float(), k.float(), positions)


@pytest.mark.full
@on_ranks(2, run=run_fresh)  # its meshes would get other group numbers than on the rest of the pool
def test_generation_under_autocast(group: dist.ProcessGroup) -> None:
    """Rotary embeddings may leave q and k in fp32, while v is bf16."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    torch.manual_seed(0)
    given: dict[str, Any] = {"causal": True, "rope": turned_in_fp32, "mesh": mesh["tp"]}
    windowed: dict[str, Any] = {"window": (40, 0)}  # another attention path with the same tokens
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


@on_ranks(4)
def test_a_cache_is_not_cut_over_ranks_of_other_heads(group: dist.ProcessGroup) -> None:
    """Ranks that hold different heads cannot share the tokens of each."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for wrong in (mesh, group, None):
        cache = ContextKVCache(wrong)
        said, layer = r"group of the cache shares the ranks \[0, 1, 2, 3\] with", ParallelAttention(16, 4, mesh=mesh)
        with torch.no_grad():
            refuses(ValueError, said, layer, torch.ones(1, 2, 16), kv_cache=cache)
        assert cache.length == 0
    both = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    for wrong in (both["tp"], group):
        said = r"cp_group shares the ranks \[\d, \d\] with the tensor parallel mesh"
        refuses(ValueError, said, ParallelAttention, 16, 4, mesh=both["tp"], cp_group=wrong)
    torch.manual_seed(0)
    attention = ParallelAttention(16, 4, mesh=both["tp"]).eval()
    with torch.no_grad():
        assert attention(torch.ones(1, 2, 16), kv_cache=ContextKVCache(both["cp"])).shape == (1, 2, 16)


def dropped(group: dist.ProcessGroup, cp: int, mask: Tensor | None = None) -> list[Tensor]:
    """Full y and gradient of x under dropout, with tokens sharded over cp ranks and heads over the others."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (cp, group.size() // cp), mesh_dim_names=("cp", "tp"))
    full = Attention(4, True, False, None, True)
    sharded = converted(full, mesh=mesh["tp"], **({"cp_group": mesh["cp"]} if cp > 1 else {}))
    sharded.dropout = 0.4
    x = seeded(2, TOKENS, HIDDEN, dtype=torch.float64)
    mine = shard_sequence(x, 1, group=mesh["cp"]).requires_grad_()
    torch.manual_seed(11)
    y = sharded(mine, seq_len=TOKENS if cp > 1 else None, attention_mask=mask)
    assert not torch.equal(y, sharded(mine, seq_len=TOKENS if cp > 1 else None))  # different random numbers
    y.sum().backward()
    assert mine.grad is not None
    if cp == 1:
        torch.testing.assert_close(sharded.eval()(x), full(x), **EXACT)
    return [unshard_sequence(t.detach(), 1, group=mesh["cp"], seq_len=TOKENS) for t in (y, mine.grad)]


def test_dropout_depends_on_no_number_of_ranks_and_no_mask() -> None:
    wanted = fresh_ranks(1, dropped, 1)[0].unwrap()
    everything = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    for cp, mask in ((1, None), (1, everything), (2, None), (4, None)):
        for results in run_ranks(4, dropped, cp, mask):
            torch.testing.assert_close(results, wanted, **EXACT)


@on_ranks(4)
@pytest.mark.parametrize("documents", [False, True])
def test_with_context_parallelism(group: dist.ProcessGroup, documents: bool) -> None:
    """Shard sequences over cp ranks and heads over tp ranks; sequence parallelism shards tokens over tp ranks, too."""
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
                full, mesh=mesh["tp"], cp_group=mesh["cp"], cp_layout=layout, sequence_parallel=sequence_parallel
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
    options: dict[str, dict[str, Any]] = {"kdim=12": {"kdim": 12}, "bias_k": {"add_bias_kv": True}}
    options |= {"batch_first=False": {"batch_first": False}, "add_zero_attn": {"add_zero_attn": True}}
    for message, option in options.items():
        module = nn.MultiheadAttention(24, HEADS, **{"batch_first": True, **option})
        refuses(ValueError, message, ParallelAttention.from_module, module, mesh=mesh)
    memo: dict[Tensor, nn.Parameter] = {}
    ParallelAttention.from_module(full, mesh=mesh, memo=memo)
    refuses(ValueError, "in_proj_weight", ParallelAttention.from_module, full, mesh=mesh, memo=memo)
    refuses(
        ValueError, "num_heads must be that of .* got 6", ParallelAttention.from_module, full, mesh=mesh, num_heads=6
    )


def test_head_counts_that_cannot_be_cut_name_those_that_can() -> None:
    for heads, kv_heads, world_size, message in (
        (12, 12, 5, r"Use one of the group sizes \[1, 2, 3, 4, 6, 12\]"),
        (12, 2, 3, r"Use one of the group sizes \[1, 2, 4, 6, 12\]"),
        (12, 5, 1, r"num_kv_heads must divide num_heads 12: one of \[1, 2, 3, 4, 6, 12\], got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            check_head_sharding(heads, kv_heads, world_size)


@on_ranks(2, run=run_fresh)
def test_bad_inputs_are_refused(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    over = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    cut: dict[str, Any] = {"mesh": over["tp"], "cp_group": over["cp"]}
    attention = ParallelAttention(8, 4, mesh=mesh, causal=True)
    x = torch.ones(2, 3, 8)
    refuses(ValueError, "cannot be sharded over 2 ranks", ParallelAttention, 9, 3, mesh=mesh)
    refuses(ValueError, "not a multiple of num_heads", ParallelAttention, 9, 4, mesh=mesh)
    refuses(ValueError, "dropout must be in", ParallelAttention, 8, 4, mesh=mesh, dropout=1.0)
    refuses(ValueError, r"x must be a Tensor \[batch, seq, 8\]", attention, x[0])
    refuses(ValueError, r"x must be a Tensor \[batch, seq, 8\]", attention, torch.ones(2, 3, 9))
    refuses(TypeError, r"mask\.bool\(\)", attention, x, attention_mask=torch.ones(2, 3, dtype=torch.int64))
    refuses(ValueError, "attention_mask has shape", attention, x, attention_mask=torch.ones(3, dtype=torch.bool))
    both = {"attention_mask": torch.ones(2, 3, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 3])}
    refuses(ValueError, "cu_seqlens and attention_mask cannot be combined", attention, x, **both)
    refuses(ValueError, r"cu_seqlens is \(0, 4\)", attention, x, cu_seqlens=torch.tensor([0, 4]))
    refuses(ValueError, "needs their cu_seqlens", ParallelAttention(8, 4, **cut, cp_layout="balanced"), x)
    refuses(ValueError, "positions are used only by rope", attention, x, positions=torch.arange(3))
    turned = ParallelAttention(8, 4, mesh=mesh, rope=RotaryEmbedding(2))
    refuses(ValueError, r"positions has shape \(4,\)", turned, x, positions=torch.arange(4))
    refuses(ValueError, "gather_size must be the size", turned, x, seq_len=4)
    refuses(
        ValueError, "attention_mask must broadcast to", attention, x, attention_mask=torch.ones(2, 5, dtype=torch.bool)
    )
    pool: Any = PagedContextKVCache(None, 4)
    refuses(TypeError, r"Pass the sequences of x: kv_cache\.batch\(\[sequence", attention, x, kv_cache=pool)
    refuses(TypeError, "kv_cache must be a KVCache .* got tuple", attention, x, kv_cache=(x, x))
    refuses((ValueError, TypeError), "window must be", ParallelAttention, 8, 4, mesh=mesh, window=4)
    refuses(ValueError, "softcap is -1", ParallelAttention, 8, 4, mesh=mesh, softcap=-1.0)
    refuses(
        ValueError, "alibi_slopes must have 4 numbers", ParallelAttention, 8, 4, mesh=mesh, alibi_slopes=[0.5, 0.25]
    )
    refuses(ValueError, "layout is 'stripes'", ParallelAttention, 8, 4, mesh=mesh, cp_layout="stripes")

    def llama(**attributes: Any) -> Any:
        module = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module.add_module(name, nn.Linear(8, 8))
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    convert = partial(ParallelAttention.from_module, mesh=mesh)
    refuses(ValueError, "has no q_proj", convert, nn.Linear(3, 3))
    refuses(ValueError, "Pass num_heads", convert, llama())
    for attributes, kind, message in (
        ({"extra": nn.Linear(2, 2)}, ValueError, "submodule extra"),
        ({"sinks": nn.Parameter(torch.ones(3))}, ValueError, r"sinks of Module must have shape \[4\], .* got \(3,\)"),
        ({"gates": nn.Parameter(torch.ones(4))}, ValueError, "has the parameters gates"),
        ({"q_proj": nn.Identity()}, TypeError, "q_proj must be an nn.Linear, got Identity"),
        ({"config": SimpleNamespace(rope_theta=1e4)}, ValueError, "rotary embeddings"),
    ):
        refuses(kind, message, convert, llama(**attributes), num_heads=4)
    config = SimpleNamespace(sliding_window=4, layer_types=["full_attention", "sliding_attention"])
    for layer, window in ((0, None), (1, (3, 3))):
        assert convert(llama(config=config, layer_idx=layer), num_heads=4).window == window

    cache = KVCache(max_length=4)
    refuses(ValueError, r"torch\.no_grad", attention, x, kv_cache=cache)
    with torch.no_grad():
        attention(x, kv_cache=cache)
        refuses(ValueError, "room for max_length=4", attention, x, kv_cache=cache)
        refuses(ValueError, r"Call reset\(\)", attention, x[:1, :1], kv_cache=cache)
    refuses(ValueError, "max_length must be a positive integer", KVCache, 0)
    refuses(ValueError, "may differ in head_dim only", KVCache().append, torch.ones(1, 2, 3, 4), torch.ones(1, 3, 3, 4))
    refuses(ValueError, "head_dim must be even", RotaryEmbedding, 5)
    refuses(ValueError, "theta must be positive", RotaryEmbedding, 4, 0.0)


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
