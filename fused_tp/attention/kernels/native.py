"""Flash attention of the native C++ core (csrc/attention): supports every mask and score, on any CPU.

Probabilities are multiplied with the values in the dtype of the values. All sums are fp32 (fp64 for fp64) and are not
rounded between steps, so a ring rounds no more often than one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_tp.attention.kernels.base import AttentionKernel, BackwardTensors, GradientSums, KernelRequest
from fused_tp.attention.kernels.torch_flash import plain_scores_availability
from fused_tp.attention.ring_plan import Step
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import ScoreParameters
from fused_tp.core import dispatch, settings
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.core.native import DTYPE_NUMBERS
from fused_tp.core.native import core as _core
from fused_tp.core.pending import accumulate_dtype

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class NativeCpu(AttentionKernel):
    """Attention of CPU tensors on `torch.get_num_threads()` threads. The result is bitwise equal for any thread count.

    Args:
        isa: the highest instruction set to use (plain, avx2, avx512, avx512_bf16). Empty: the value of FUSED_TP_ISA if
            it is set, else the best available.

    (Dao, "FlashAttention-2", arXiv:2307.08691.)
    """

    name = "native-cpu"
    reason = "the native kernels support every mask and score"
    devices = ("cpu",)

    def __init__(self, isa: str = "") -> None:
        self.isa = isa

    def available(self, request: KernelRequest) -> Availability:
        if _core is None:
            return unavailable("the native core is not built")
        if request.device.type != "cpu":
            return unavailable(f"it supports CPU tensors only, got tensors on {request.device}")
        settings.isa()  # raises if FUSED_TP_ISA is invalid, before anything is sent; the C++ core reads the variable
        if request.dtype not in _DTYPES:
            dtype_name = str(request.dtype).removeprefix("torch.")
            return unavailable(f"it supports float32, bfloat16, float16 and float64, got {dtype_name}")
        return AVAILABLE

    def reason_to_avoid(self, request: KernelRequest) -> str:
        return (
            self.reason_torch_is_faster(request)
            if request.allows_tile_rounding and plain_scores_availability(request)
            else ""
        )

    def reason_torch_is_faster(self, request: KernelRequest) -> str:
        """Return the reason why torch's kernels are faster for `request` on this CPU; empty if they are not.

        The dispatch table decides if it has an entry; otherwise torch is faster in bf16 if the CPU has matrix tiles
        (AMX).
        """
        head_dim = max(request.head_dim, request.v_head_dim)
        fastest_kernel = dispatch.choose_attention_kernel(request.dtype, head_dim, request.is_backward)
        if fastest_kernel is not None:
            return "" if fastest_kernel == self.name else "torch's kernels are faster here by the dispatch table"
        has_tiles: bool = request.dtype == torch.bfloat16 and _core.has_matrix_tiles()
        return "torch's kernels use this CPU's matrix tiles (AMX)" if has_tiles else ""

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
        if is_uninitialized:
            state.clear()
        slopes, vectors = _accumulation_slopes(score_parameters, q.dtype), _step_vectors(step, score_parameters)
        _core.attention_forward(
            _make_problem(score_parameters, slopes, vectors, q, k, v),
            (state.acc.data_ptr(), *state.acc.stride()[:3]),
            _address_and_strides(state.row_max),
            _address_and_strides(state.row_sum),
            torch.get_num_threads(),
            self.isa,
        )

    def backward(
        self, step: Step, score_parameters: ScoreParameters, inputs: BackwardTensors, sums: GradientSums
    ) -> None:
        q = inputs.q
        # Autograd may pass gradients with stride 0 (expanded), or of another dtype.
        grad_out = inputs.grad_out.to(q.dtype)
        if grad_out.shape[-1] > 1 and grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        wide_dtype = accumulate_dtype(q.dtype)
        lse, delta = inputs.lse.to(wide_dtype), inputs.delta.to(wide_dtype)
        slopes, vectors = _accumulation_slopes(score_parameters, q.dtype), _step_vectors(step, score_parameters)
        slope_gradients = (
            None if sums.d_slopes is None else sums.d_slopes.new_zeros(sums.d_slopes.shape, dtype=wide_dtype)
        )
        _core.attention_backward(
            _make_problem(score_parameters, slopes, vectors, q, inputs.k, inputs.v),
            (grad_out.data_ptr(), *grad_out.stride()[:3]),
            _address_and_strides(lse),
            _address_and_strides(delta),
            *((x.data_ptr(), *x.stride()[:3]) for x in (sums.dq, sums.dk, sums.dv)),
            0 if slope_gradients is None else slope_gradients.data_ptr(),
            torch.get_num_threads(),
            self.isa,
        )
        if sums.d_slopes is not None and slope_gradients is not None:
            sums.d_slopes.add_(slope_gradients)


# Addresses of a step's int32 vectors (0 for a vector that is not needed), and the tensors that own this memory. The
# tensors are kept here because the step may not keep them: if two threads create a step's tensors at the same time, the
# step keeps only those of one thread.
_StepVectors = tuple[list[int], list[Tensor]]
_CPU = torch.device("cpu")


def _step_vectors(step: Step, score_parameters: ScoreParameters) -> _StepVectors:
    """Return the addresses of the intervals of visible keys, and of positions if scores use them; cached in `step`."""
    needs_positions = score_parameters.alibi_slopes is not None or score_parameters.dropout is not None
    cached_vectors: _StepVectors | None = step.native_vectors.get(needs_positions)
    if cached_vectors is None:
        device_vectors = step.index_tensors_on(_CPU)
        tensors = [
            device_vectors[name]
            for name in ("starts", "stops", *(("q_positions", "q_indices", "k_indices") if needs_positions else ()))
        ]
        cached_vectors = step.native_vectors[needs_positions] = (
            [*(x.data_ptr() for x in tensors), *[0] * (5 - len(tensors))],
            tensors,
        )
    return cached_vectors


def _accumulation_slopes(score_parameters: ScoreParameters, dtype: torch.dtype) -> Tensor | None:
    """Return the ALiBi slopes in the accumulation dtype; None without ALiBi."""
    slopes = score_parameters.alibi_slopes
    return None if slopes is None else slopes.detach().to(accumulate_dtype(dtype)).contiguous()


def _make_problem(
    score_parameters: ScoreParameters, slopes: Tensor | None, vectors: _StepVectors, q: Tensor, k: Tensor, v: Tensor
) -> Any:
    """Build the arguments that forward and backward share. They hold addresses, so callers must keep the tensors alive.

    q, k and v [batch, rows, heads, dim] are passed as address and strides of all dims but the last.
    """
    dropout = score_parameters.dropout
    batch, length, heads, dim = q.shape
    return _core.AttentionProblem(
        DTYPE_NUMBERS[q.dtype],
        (batch, heads, k.shape[2], length, k.shape[1], dim, v.shape[3]),
        vectors[0],
        score_parameters.scale,
        score_parameters.softcap,
        0 if slopes is None else slopes.data_ptr(),
        None
        if dropout is None
        else (dropout.threshold, 1 / (1 - dropout.p) if dropout.p < 1 else 0.0, dropout.seed, dropout.first_head),
        (q.data_ptr(), *q.stride()[:3]),
        (k.data_ptr(), *k.stride()[:3]),
        (v.data_ptr(), *v.stride()[:3]),
    )


def _address_and_strides(x: Tensor) -> tuple[int, int, int, int]:
    """Return the address and the strides (batch, rows, heads) of `x` [batch, heads, rows]."""
    return x.data_ptr(), x.stride(0), x.stride(2), x.stride(1)


NATIVE_KERNEL = NativeCpu()
