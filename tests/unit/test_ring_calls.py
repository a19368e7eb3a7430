"""State kept by attention calls: kernel variants, plans of graphs, tensors that other streams read."""

from __future__ import annotations

import weakref
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_tp.attention import decode
from fused_tp.attention.kernels.reference import REFERENCE_KERNEL
from fused_tp.attention.layout import BlockCyclicLayout, TokenLayout
from fused_tp.attention.ring_fused import kv_chunks, make_keys_layout
from fused_tp.attention.ring_plan import ring_plan
from fused_tp.attention.spec import AttentionArguments, AttentionMask, ScoreParameters
from fused_tp.backends.local import LocalSchedule
from fused_tp.ops.attention_arguments import checked_arguments

ring_attention = import_module("fused_tp.ops.ring_attention")  # the module; the op has the same name
decode_op = import_module("fused_tp.ops.context_parallel_decode")


def variants(seq: int, head_dim: int = 16, seconds: float = 1.0, softcap: float = 0.0, **how: Any) -> tuple[Any, ...]:
    """Variants of all kernels that rank 0 of 2 launches for a sequence with that mask."""
    from fused_tp.triton_kernels.attention import ring_forward, ring_keys
    from fused_tp.triton_kernels.attention.configs import AttentionConfig
    from fused_tp.triton_kernels.attention.launch import ScoreTerms
    from fused_tp.triton_kernels.comm.signals import WorkspaceArguments

    q = torch.empty(1, seq // 2, 4, head_dim, dtype=torch.bfloat16)
    plan = ring_plan(AttentionMask(seq, seq, **how), 2, TokenLayout("contiguous"))
    layout = make_keys_layout(plan, 0, q, q)
    words = torch.zeros(8, dtype=torch.int64)
    workspace: Any = SimpleNamespace(
        rank=0,
        world_size=2,
        streams=[],
        timeout_ns=int(seconds * 1e9),
        arguments=lambda timeout_ns=int(seconds * 1e9): {
            "ws": WorkspaceArguments(words, words, words, 1 << 20, timeout_ns),
            "rank": 0,
        },
        keys=lambda rank, layout: torch.empty(layout.shape, dtype=layout.dtype),
    )
    launch = ring_forward._make_launch(
        q,
        q,
        q.new_empty((1, 4, seq // 2), dtype=torch.float32),
        kv_chunks(plan, 0),
        ScoreTerms(0.25, softcap),
        layout,
        workspace,
        4,
        None,
        "ieee",
        AttentionConfig(16, 16, 4, 1, False),
        range(layout.num_groups),
    )
    stage = ring_keys.stage_launch(q, q, layout, workspace, 4)
    relays = ring_keys.KeysPuller(layout, workspace).relays_to_load()
    return tuple(ring_forward.specialization_key(one) for one in (stage, *relays, launch))


def test_kernels_are_loaded_by_variant_and_not_by_mask() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    known = {
        variants(64),
        variants(96, causal=True),
        variants(640, causal=True, window=(7, 0)),
        variants(160, causal=True, cu_seqlens=(0, 50, 160), cu_seqlens_kv=(0, 50, 160)),
    }
    assert len(known) == 1
    assert known.isdisjoint({variants(64, head_dim=32), variants(64, softcap=3.0), variants(64, seconds=5.0)})


class OnGpu(Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = True


def test_a_plan_of_a_graph_is_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(ring_attention, "_captured_plans", type(ring_attention._captured_plans)())
    q = torch.ones(1, 4, 1, 8)
    rest = (*checked_arguments(AttentionArguments(causal=True), q, q, q, 1, 0), "")
    for _ in range(3):
        args = ring_attention.RING_ATTENTION.pack((q.as_subclass(OnGpu), q, q, *rest))
        ring_attention._prepare_call(LocalSchedule(), args, has_grad_lse=False)
    assert len(ring_attention._captured_plans) == 1


def test_tables_that_a_graph_reads_outlive_the_cache_they_were_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture keeps each table once and creates none, which would need a copy from the host."""
    monkeypatch.setattr(decode, "_captured_tables", set())
    monkeypatch.setattr("fused_tp.triton_kernels.attention.decode.flash_decode", lambda *_, **__: None)
    monkeypatch.setattr(decode, "to_kernel_terms", lambda _: None)
    distribution, scores, q = (
        BlockCyclicLayout(2, 0, 4),
        ScoreParameters(1.0, alibi_slopes=torch.ones(2)),
        torch.ones(1, 1, 2, 4),
    )

    def attend(length: int) -> None:
        decode.attend_with_kernel(
            decode.CacheCall(distribution, scores, (-1, -1), REFERENCE_KERNEL, False), q, [length], q, q, None
        )

    real = decode._table_on_device
    monkeypatch.setattr(decode, "_table_on_device", lambda *given: real(*given).as_subclass(OnGpu))
    monkeypatch.setattr(OnGpu, "record_stream", lambda *_: None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    decode._visible_row_tables.cache_clear()
    decode._row_token_indices.cache_clear()
    attend(9)
    assert not decode._captured_tables
    monkeypatch.setattr(decode, "is_capturing", lambda _: True)
    for _ in range(3):
        attend(9)
    held = [weakref.ref(table) for table in decode._captured_tables]
    with pytest.raises(RuntimeError, match="cannot be copied to the GPU during CUDA graph capture"):
        attend(10)
    decode._visible_row_tables.cache_clear()
    decode._row_token_indices.cache_clear()
    assert len(held) == 2 and all(table() is not None for table in held)


@pytest.mark.parametrize("paged", [True, False])
def test_a_graph_cannot_be_captured_of_what_is_read_on_the_host(paged: bool) -> None:
    lengths = torch.ones(2, dtype=torch.int32, device="cpu" if paged else "meta")
    with pytest.raises(ValueError, match="a page_table during" if paged else "cache_seqlens on meta during"):
        decode_op._check_capture(lengths, torch.zeros(2, 1) if paged else None)
    decode_op._check_capture(torch.ones(2), None)
