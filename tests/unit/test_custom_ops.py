"""Torch's own checks of custom ops (schema, fake, autograd, tracing), on a group of one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import fused_tp
from fused_tp.ops import matmul_all_reduce
from fused_tp.ops.all_gather_matmul import ALL_GATHER_MATMUL
from fused_tp.ops.all_reduce_rms_norm import ALL_REDUCE_RMS_NORM
from fused_tp.ops.attention_arguments import build_arguments, checked_arguments
from fused_tp.ops.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fused_tp.ops.column_parallel_matmul import COLUMN_PARALLEL_MATMUL
from fused_tp.ops.context_parallel_decode import CONTEXT_PARALLEL_DECODE
from fused_tp.ops.float8_column_matmul import FLOAT8_COLUMN_MATMUL
from fused_tp.ops.float8_row_matmul import FLOAT8_ROW_MATMUL
from fused_tp.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from fused_tp.ops.matmul_all_reduce import MATMUL_ALL_REDUCE
from fused_tp.ops.matmul_all_reduce_rms_norm import MATMUL_ALL_REDUCE_RMS_NORM
from fused_tp.ops.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from fused_tp.ops.op import all_ops
from fused_tp.ops.ring_attention import RING_ATTENTION
from fused_tp.ops.sequence import SEQUENCE_POSITIONS, SHARD_SEQUENCE, UNSHARD_SEQUENCE
from fused_tp.ops.vocab_parallel_cross_entropy import VOCAB_PARALLEL_CROSS_ENTROPY
from tests.reference import seeded


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return seeded(*shape, dtype=torch.float64, seed=seed).requires_grad_()


HALF = leaf(2, 3, 4).bfloat16()
Q, K = leaf(2, 6, 4, 8), leaf(2, 6, 2, 8, seed=1)
CACHE = Q[:, :1].detach(), K.detach(), K.detach()
BOUNDS = torch.tensor([0, 2, 6])
BY_HEAD = {"alibi_slopes": leaf(4).abs(), "sinks": leaf(4, seed=2)}
GIVEN = build_arguments("ring_attention", {"causal": True, "dropout_p": 0.5, "cu_seqlens": BOUNDS, **BY_HEAD})
ATTENTION = checked_arguments(GIVEN, Q, K, K, 1, 0)
SAMPLES: list[tuple[Any, tuple[Any, ...]]] = [
    (ALL_GATHER_MATMUL, (leaf(2, 3, 4), [leaf(5, 4), leaf(6, 4)], [leaf(6)], [False, True], 1, 3, True, "")),
    (MATMUL_REDUCE_SCATTER, (leaf(2, 3, 4), leaf(5, 4), leaf(5), 1, "")),
    (MATMUL_ALL_REDUCE, (leaf(3, 4), leaf(5, 4), None, "")),
    (COLUMN_PARALLEL_MATMUL, (leaf(3, 4), [leaf(5, 4), leaf(2, 4)], [leaf(5)], [True, False], "")),
    (FLOAT8_COLUMN_MATMUL, (HALF, [leaf(5, 4).bfloat16()], [], [False], 1, 3, "rowwise", "")),
    (FLOAT8_COLUMN_MATMUL, (HALF, [leaf(5, 4).bfloat16()], [], [False], None, None, "tensorwise", "")),
    (FLOAT8_ROW_MATMUL, (HALF, leaf(5, 4).bfloat16(), leaf(5).bfloat16(), 1, "tensorwise", "")),
    (FLOAT8_ROW_MATMUL, (HALF, leaf(5, 4).bfloat16(), None, None, "rowwise_with_gw_hp", "")),
    (ALL_REDUCE_RMS_NORM, (leaf(3, 4), leaf(3, 4, seed=1), leaf(4), 1e-6, "")),
    (MATMUL_ALL_REDUCE_RMS_NORM, (leaf(3, 4), leaf(5, 4), leaf(3, 5), leaf(5), 1e-6, "")),
    (VOCAB_PARALLEL_CROSS_ENTROPY, (leaf(3, 4), torch.tensor([0, -100, 3]), 4, 0.1, -100, "mean", "")),
    (
        LINEAR_CROSS_ENTROPY,
        (
            leaf(3, 4),
            leaf(5, 4),
            leaf(5),
            torch.tensor([0, -100, 3]),
            None,
            "none",
            5,
            0.1,
            -100,
            0.5,
            2.0,
            0.1,
            "",
        ),
    ),
    (ALL_GATHER, (leaf(3, 4), 1, 4, "")),
    (REDUCE_SCATTER, (leaf(3, 4), 0, "")),
    (ALL_REDUCE, (leaf(3, 4), "")),
    (RING_ATTENTION, (Q, K, leaf(2, 6, 2, 8, seed=3), *ATTENTION, "")),
    (CONTEXT_PARALLEL_DECODE, (*CACHE, torch.tensor([6, 3]), None, None, None, True, [-1, -1], 0.3, 0.0, 4, 0, 1, "")),
    (SEQUENCE_POSITIONS, (BOUNDS, 6, "contiguous", True, "")),
    (SHARD_SEQUENCE, (leaf(2, 6), 1, "balanced", BOUNDS, "")),
    (UNSHARD_SEQUENCE, (leaf(2, 6), 1, "zigzag", 6, None, "")),
]


@pytest.mark.parametrize(("op", "args"), SAMPLES, ids=[op.name for op, _ in SAMPLES])
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(op.overload, args)


def test_single_process_keeps_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch.distributed, a repeated call takes the path with a plan, as it does with a process group."""
    x, weight = seeded(2, 8), seeded(4, 8)
    expected = fused_tp.matmul_all_reduce(x, weight, group=None)
    monkeypatch.setattr(MATMUL_ALL_REDUCE, "_call_without_plan", None)
    assert torch.equal(fused_tp.matmul_all_reduce(x, weight, group=None), expected)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="not initialised"):
        fused_tp.matmul_all_reduce(x, weight, group=None)


def test_compilers_decompose_no_op() -> None:
    """Inductor, and export, refuse an op in the table of decompositions, which is built on import."""
    from torch._decomp import core_aten_decompositions

    table = core_aten_decompositions()
    assert not [op.name for op in all_ops().values() if op.overload in table]


@pytest.mark.long
def test_inductor_after_fused_tp() -> None:
    program = (
        "import torch, fused_tp; x, w = torch.ones(2, 8), torch.ones(6, 8); "
        "f = lambda x, w: fused_tp.matmul_all_reduce(x, w, group=None) + 1; "
        "assert torch.equal(torch.compile(f, fullgraph=True)(x, w), f(x, w))"
    )
    no_cache = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240, env=no_cache)


def test_local_op_can_be_differentiated_twice() -> None:
    x, w = leaf(3, 4), leaf(5, 4)
    assert torch.autograd.gradgradcheck(lambda x, w: matmul_all_reduce.matmul_all_reduce(x, w, group=None), (x, w))


def test_selective_checkpointing_sees_the_op() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE

    x, w = leaf(3, 4), leaf(5, 4)
    y = checkpoint(
        lambda x: matmul_all_reduce.matmul_all_reduce(x, w, group=None).sin(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    y.sum().backward()
    assert MATMUL_ALL_REDUCE.overload in seen
