"""The forward of a ring on one rank: which steps may take its state for one that holds nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_tp.attention.kernels.reference import Reference
from fused_tp.attention.layout import TokenLayout
from fused_tp.attention.plan import Step, ring_plan
from fused_tp.attention.ring import Forward, RingCall
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import AttentionMask, Scores
from tests.attention_reference import dense_attention, dense_mask
from tests.reference import seeded


class Told(Reference):
    """Keeps what it is told of each state, and writes NaN to fresh ones."""

    def __init__(self) -> None:
        self.fresh: list[bool] = []

    def forward(
        self,
        step: Step,
        scores: Scores,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SoftmaxState,
        *,
        fresh: bool = False,
    ) -> None:
        self.fresh.append(fresh)
        if fresh:
            state.weighted.fill_(torch.nan)
        super().forward(step, scores, q, k, v, state, fresh=fresh)


@pytest.mark.parametrize(
    ("mask", "rank", "fresh"),
    [
        (AttentionMask(40, 40, causal=True), 1, [True, False]),
        (AttentionMask(40, 10, causal=True), 1, [False, False]),  # its first queries see nothing
        (AttentionMask(40, 10, causal=True), 0, []),
    ],
)
def test_the_first_step_of_all_rows_has_a_fresh_state(mask: AttentionMask, rank: int, fresh: list[bool]) -> None:
    provider, plan = Told(), ring_plan(mask, 2, TokenLayout("contiguous"))
    whole = [seeded(1, n, 2, 8, seed=i) for i, n in enumerate((mask.seq_len, mask.seq_len_kv, mask.seq_len_kv))]
    rows = torch.from_numpy(plan.queries[rank].indices)
    state = Forward(RingCall(plan, rank, provider, Scores(0.3)), whole[0][:, rows], whole[2])
    for t in range(2):
        keys = torch.from_numpy(plan.keys[plan.source(rank, t)].indices)
        state.attend(t, whole[1][:, keys], whole[2][:, keys])
    out, lse = state.result()
    assert provider.fresh == fresh
    q, k, v = (x.double() for x in whole)
    seen, distance = dense_mask(mask.seq_len, mask.seq_len_kv, causal=mask.causal)
    wanted = dense_attention(q, k, v, seen, distance, scale=0.3)
    torch.testing.assert_close(out.double(), wanted[0][:, rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted[1][..., rows], rtol=1e-5, atol=1e-5)
