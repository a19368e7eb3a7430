"""Interface of the kernels for one step of attention, and the query that decides their availability."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fused_tp.attention.ring_plan import Step
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import Scores
from fused_tp.core.availability import AVAILABLE, Availability


@dataclass(frozen=True)
class KernelQuery:
    """Properties of a call that decide which kernels support it.

    Attributes:
        plain: scores are scale * q.k, and nothing is dropped.
        grad_lse: the log-sum-exp has a gradient.
        single: there is one step only, in one tile, so that torch's kernels round once; or there are steps of a few
            tiles, whose sums are in this dtype anyway.
        positive_scale: scale is above 0.
        backward: gradients are computed.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    plain: bool = True
    grad_lse: bool = False
    single: bool = True
    positive_scale: bool = True
    backward: bool = False


class StepRows(NamedTuple):
    """Tensors that the backward of some rows reads: of queries q, out, grad_out [B, Sq, H, D or Dv], lse and row_sums
    [B, H, Sq]; of keys k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv]. lse, row_sums and out cover all keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    row_sums: Tensor

    def part(self, rows: slice, keys: slice) -> StepRows:
        """Views of some rows of queries and of keys."""
        q, out, grad_out = (x[:, rows] for x in (self.q, self.out, self.grad_out))
        return StepRows(
            q, self.k[:, keys], self.v[:, keys], out, self.lse[..., rows], grad_out, self.row_sums[..., rows]
        )


class Sums(NamedTuple):
    """Sums of gradients in fp32 (fp64 for fp64), shaped like q, k, v and the slopes."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_slopes: Tensor | None

    def part(self, rows: slice, keys: slice) -> Sums:
        """Views of some rows of queries and of keys."""
        return Sums(self.dq[:, rows], self.dk[:, keys], self.dv[:, keys], self.d_slopes)


class AttentionKernel(ABC):
    """Computes one non-empty step, on its rows alone.

    q and state hold queries [q_start, q_stop), k and v keys [k_start, k_stop).

    q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]: any strides, last dim dense; query head h reads key head
    h // (H / Hkv), and K/V are never repeated in memory. State and sums may be views of larger ones.

    Attributes:
        name: value of FUSED_TP_ATTENTION that selects it.
        reason: why it is chosen, for `explain`.
        devices: device types on which `explain` says why another kernel was chosen.
    """

    name: str
    reason: str
    devices: tuple[str, ...] = ()

    def available(self, query: KernelQuery) -> Availability:
        """Available if this kernel can compute such steps."""
        return AVAILABLE

    def deprioritized(self, query: KernelQuery) -> str:
        """The reason to prefer another available kernel; empty if there is none."""
        return ""

    @abstractmethod
    def forward(
        self, step: Step, scores: Scores, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, *, fresh: bool = False
    ) -> None:
        """Fold these keys into `state`; `fresh`: it is uninitialised, and is treated as empty."""

    def forward_once(self, step: Step, scores: Scores, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (out, lse) as `SoftmaxState.result` does, for a call of this step alone; None if no way is faster than
        through a state."""
        return None

    @abstractmethod
    def backward(self, step: Step, scores: Scores, saved: StepRows, sums: Sums) -> None:
        """Add this step's terms to `sums`: with p = exp(score - lse) over these keys and p' = p after dropout,

            dv = p'^T grad_out,  dscore = p' * (grad_out v^T) - p * row_sums,  dq = scale * dcap * dscore k, and so on.

        (Dao et al., FlashAttention, arXiv:2205.14135, section 3.1; Liu et al., Ring Attention, arXiv:2310.01889.)
        """
