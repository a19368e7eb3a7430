"""Single-process fp64 references and the tolerances of the tests, each with its reason.

The references take the same tensors as the ranks (already rounded to bf16, fp16, ...) and compute in fp64, so that a
result differs from its reference only by the implementation's own rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

# Dtype in which sums over ranks, and matmuls within a rank, accumulate.
ACCUMULATE = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}

# Tolerance in standard deviations of the rounding error. The error of one rounding is bounded by eps / 2, that of a sum
# only statistically; 8 sigma over 1e6 elements fails by chance less than once in 1e8 runs.
SIGMAS = 8.0


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal random numbers, the same on every rank and in the test: drawn in fp64, then rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, dtype=torch.float64, generator=generator) * scale).to(dtype)


def assert_within_dtype_error(
    actual: Tensor,
    reference64: Tensor,
    dtype: torch.dtype,
    *,
    reduced_over: int,
    roundings: int = 1,
    name: str = "result",
) -> None:
    """Assert that `actual` is as close to its fp64 reference as `dtype` allows.

    `reduced_over` is the number of terms that each element sums (K of a matmul; K times the steps for chained sums);
    `roundings` is how often a value is rounded to `dtype` (1 for one op; W if W partial results are sent in `dtype`).
    With the rms of the reference, the bound per element is

        eps(dtype) * roundings * (|reference| + rms) + SIGMAS * eps(sum) * sqrt(reduced_over) * rms

    The first term is the rounding of the result and of partial results of like size. The second is the error of a sum
    of n terms of random sign, which grows as sqrt(n) relative to the sum (Higham & Mary, "A new approach to
    probabilistic rounding error analysis", 2019). Neither depends on W: the error must not grow with the group size.
    """
    assert actual.dtype == dtype, f"{name} has dtype {actual.dtype}, expected {dtype}"
    assert actual.shape == reference64.shape, f"{name} has shape {tuple(actual.shape)}, not {tuple(reference64.shape)}"
    if actual.numel() == 0:
        return
    wanted = reference64.double()
    got = actual.detach().double()
    finite = torch.isfinite(wanted)
    same = (got == wanted) | (torch.isnan(got) & torch.isnan(wanted))
    assert bool((finite | same).all()), f"{name} differs from the reference where that is inf or NaN"
    rms = wanted[finite].pow(2).mean().sqrt() if bool(finite.any()) else wanted.new_zeros(())
    rounding = torch.finfo(dtype).eps * roundings * (wanted.abs() + rms)
    summing = SIGMAS * torch.finfo(ACCUMULATE[dtype]).eps * reduced_over**0.5 * rms
    error = torch.where(finite, (got - wanted).abs(), 0.0)
    excess = torch.where(finite, error / (rounding + summing).clamp_min(torch.finfo(dtype).tiny), 0.0)
    excess = torch.where(finite & ~torch.isfinite(got), torch.inf, excess)
    if bool((excess > 1).any()):
        flat = int(excess.argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), excess.shape))
        raise AssertionError(
            f"{name}{list(where)} is {got.flatten()[flat].item():.9g}, reference {wanted.flatten()[flat].item():.9g}: "
            f"{excess.max().item():.3g} times the error that {dtype} allows; "
            f"{int((excess > 1).sum())} of {excess.numel()} elements are off (rms of the reference {rms.item():.3g})"
        )


def matmul64(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N] in fp64."""
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def rms_norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim in fp64."""
    x64 = x.double()
    return x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def gradients64(
    fn: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """(fn(*inputs), gradients of all inputs for `grad_output`), all in fp64; `fn` must be differentiable."""
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    output = fn(*leaves)
    output.backward(grad_output.double())
    return output.detach(), [leaf.grad for leaf in leaves]


def refuses(error: type[Exception], says: str, call: Callable[..., Any], *args: Any, **keywords: Any) -> None:
    """Assert that call(*args, **keywords) raises an `error` whose text matches `says`."""
    with pytest.raises(error, match=says):
        call(*args, **keywords)
