"""Steps by this package's own kernels, in Triton: every mask and kind of score, and a state that is never rounded."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fused_tp.attention.plan import Step
from fused_tp.attention.scores import Scores
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.transport.kernels import has_triton


def obstacle(
    device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int, scores: Scores | None = None
) -> str | None:
    """Why `TritonFlash` cannot compute steps of such tensors and scores, or None.

    >>> obstacle(torch.device("cuda"), torch.float64, 64, 64)  # doctest: +SKIP
    'the Triton kernels of attention compute in bf16, fp16 and fp32, not in torch.float64'
    """
    if not has_triton():
        return "Triton is not installed"

    here = None if device.type == "cuda" and not torch.cuda.is_available() else device
    try:
        kernels = _kernels()
    except ImportError as error:
        return f"the Triton kernels cannot be loaded ({error})"
    why: str | None = kernels.obstacle(dtype, head_dim, v_head_dim, terms_of(scores or Scores(1.0)), here)
    return why


class TritonFlash:
    """Serves what has no `obstacle`. `precision` is of products of fp32: "ieee", or "tf32" (10-bit mantissas)."""

    name = "triton"

    def __init__(self, precision: str = "ieee") -> None:
        self.precision = precision

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
        """Fold these keys into `state`; where it is `fresh` it is not read."""
        sums = (state.weighted, state.highest, state.total)
        _kernels().flash_forward(q, k, v, step, terms_of(scores), sums, fresh=fresh, precision=self.precision)

    def last(
        self,
        step: Step,
        scores: Scores,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SoftmaxState | None,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Fold these keys in, and write what `state.result` would give for the rows of the step to `out` and `lse`.

        `state` is read only; None: nothing was seen before. Saves a call of one step all of the state.
        """
        sums = None if state is None else (state.weighted, state.highest, state.total)
        _kernels().flash_attention(
            q,
            k,
            v,
            step,
            terms_of(scores),
            sinks=sinks,
            state=sums,
            out=out,
            lse=lse,
            precision=self.precision,
        )

    def alone(
        self, step: Step, scores: Scores, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = (
            q.new_empty((*q.shape[:3], v.shape[3])),
            q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32),
        )
        self.last(step, scores, q, k, v, None, out, lse, sinks)
        return out, lse

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
        out: Tensor | None = None,
    ) -> None:
        """Add this step's terms; every run gives the same bits. `out` is not needed."""
        _kernels().flash_backward(
            grad_out,
            q,
            k,
            v,
            lse,
            sums,
            dq,
            dk,
            dv,
            step,
            terms_of(scores),
            d_slopes=d_slopes,
            precision=self.precision,
        )


def _kernels() -> ModuleType:
    from fused_tp.triton_kernels.attention import flash_attention

    return flash_attention


def terms_of(scores: Scores) -> Any:
    """`scores` as the kernels take them."""
    kernels = _kernels()
    drop = scores.dropout
    dropout = None if drop is None else kernels.Dropout(drop.p, drop.seed, drop.first_head)
    return kernels.Terms(scores.scale, scores.softcap, scores.alibi_slopes, dropout)


TRITON = TritonFlash()
