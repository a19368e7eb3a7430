"""Interface of the kernels for one step of attention, and the description of a call that decides their availability."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fused_tp.attention.ring_plan import Step
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import ScoreParameters
from fused_tp.core.availability import AVAILABLE, Availability


@dataclass(frozen=True)
class KernelRequest:
    """Properties of a call that decide which kernels support it.

    Attributes:
        has_plain_scores: True if scores are scale * q.k, and nothing is dropped.
        has_grad_lse: True if the log-sum-exp has a gradient.
        allows_tile_rounding: True if kernels that round after every tile lose no accuracy: either the call is one step
            of one tile, or sums are accumulated in `dtype` itself (fp32, fp64).
        has_positive_scale: True if scale is above 0.
        is_backward: True for the backward.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    has_plain_scores: bool = True
    has_grad_lse: bool = False
    allows_tile_rounding: bool = True
    has_positive_scale: bool = True
    is_backward: bool = False


class BackwardTensors(NamedTuple):
    """Tensors that the backward of some rows reads.

    Per query: q [B, Sq, H, D], out and grad_out [B, Sq, H, Dv], lse and delta (`compute_delta`) [B, H, Sq]. Per key:
    k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv]. out, lse and delta are over all keys of the sequence, not only over these.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    delta: Tensor

    def select(self, rows: slice, keys: slice) -> BackwardTensors:
        """Return views of the query rows `rows` and the key rows `keys`."""
        q, out, grad_out = (x[:, rows] for x in (self.q, self.out, self.grad_out))
        return BackwardTensors(
            q, self.k[:, keys], self.v[:, keys], out, self.lse[..., rows], grad_out, self.delta[..., rows]
        )


class GradientSums(NamedTuple):
    """Tensors that accumulate gradients in fp32 (fp64 for fp64), shaped like q, k, v and the ALiBi slopes."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_slopes: Tensor | None

    def select(self, rows: slice, keys: slice) -> GradientSums:
        """Return views of the query rows `rows` and the key rows `keys`."""
        return GradientSums(self.dq[:, rows], self.dk[:, keys], self.dv[:, keys], self.d_slopes)


class AttentionKernel(ABC):
    """Kernel that computes one non-empty step of attention.

    q and state hold the queries [q_start, q_stop) of the step, and k and v its keys [k_start, k_stop).

    q is [B, Sq, H, D], k is [B, Sk, Hkv, D] and v is [B, Sk, Hkv, Dv]. Their last dim is contiguous; other strides are
    arbitrary. Query head h reads key head h // (H / Hkv). Kernels must not copy K/V to repeat key heads. State and sums
    may be views of larger tensors.

    Attributes:
        name: value of FUSED_TP_ATTENTION that selects this kernel.
        reason: the reason for choosing this kernel, for `explain`.
        devices: device types on which `explain` reports why this kernel was not chosen.
    """

    name: str
    reason: str
    devices: tuple[str, ...] = ()

    def available(self, request: KernelRequest) -> Availability:
        """Available if this kernel supports calls like `request`."""
        return AVAILABLE

    def reason_to_avoid(self, request: KernelRequest) -> str:
        """Return the reason to prefer another available kernel for `request`; empty if there is no such reason."""
        return ""

    @abstractmethod
    def forward(
        self,
        step: Step,
        score_parameters: ScoreParameters,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SoftmaxState,
        *,
        is_uninitialized: bool = False,
    ) -> None:
        """Add the attention of q to the keys k with values v to `state`.

        `is_uninitialized`: `state` is uninitialized memory, and is overwritten.
        """

    def forward_single_step(
        self, step: Step, score_parameters: ScoreParameters, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return (out, lse), like `SoftmaxState.finalize`, for a call that consists of `step` only.

        Return None if this kernel has no faster path than `forward` with a state.
        """
        return None

    @abstractmethod
    def backward(
        self, step: Step, score_parameters: ScoreParameters, inputs: BackwardTensors, sums: GradientSums
    ) -> None:
        """Add the gradients of this step to `sums`.

        With p = exp(score - lse), p' = p after dropout, and dcap = the derivative of the softcap:

            dv = p'^T grad_out
            dscore = p' * (grad_out v^T) - p * delta
            dq = scale * (dcap * dscore) k
            dk = scale * (dcap * dscore)^T q

        (Dao et al., FlashAttention, arXiv:2205.14135, section 3.1; Liu et al., Ring Attention, arXiv:2310.01889.)
        """
