"""Who computes one step: the seam between what moves keys and what computes with them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fused_tp.attention.plan import Step
from fused_tp.attention.scores import Scores
from fused_tp.attention.softmax import SoftmaxState


class AttentionProvider(Protocol):
    """Computes one step that is not empty, on its rows alone: q, state, ... are those of queries [q_start, q_stop), k
    and v those of keys [k_start, k_stop).

    q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]: any strides, last dim dense; query head h reads key head
    h // (H / Hkv), and K/V are never repeated in memory. Sums (state, dq, dk, dv, d_slopes) are fp32, or fp64 for
    fp64; those of S rows may be views of larger ones.
    """

    name: str

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
        """Fold these keys into `state`; `fresh`: it holds nothing yet, and need not be initialised."""
        ...

    def alone(
        self, step: Step, scores: Scores, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """(out, lse) as `SoftmaxState.result` gives them, of a call that is this step and no other; None where the
        provider has no faster way than a state."""
        ...

    def backward(
        self,
        step: Step,
        scores: Scores,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        sums: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        d_slopes: Tensor | None,
        out: Tensor,
    ) -> None:
        """Add this step's terms to dq [B, Sq, H, D], dk [B, Sk, Hkv, D], dv [B, Sk, Hkv, Dv] and d_slopes [H].

        `lse`, `sums` [B, H, Sq] and `out` [B, Sq, H, Dv] are those of the whole (`state.row_sums`): with
        p = exp(score - lse) over these keys and p' = p after dropout,

            dv = p'^T grad_out,  dscore = p' * (grad_out v^T) - p * sums,  dq = scale * dcap * dscore k, and so on.

        (Dao et al., FlashAttention, arXiv:2205.14135, section 3.1; Liu et al., Ring Attention, arXiv:2310.01889.)
        """
        ...
