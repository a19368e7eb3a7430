"""Float8 matmuls with dynamic scales, after torchao's recipes for training (torchao/float8/config.py).

Each operand of a matmul is [rows, depth], where `depth` is the dim that the matmul sums over, and is quantized as
values = round(operand * scale), with scale = (largest float8) / (largest magnitude), for the operand or for each row.

====================  ===================  ==================  ==================================
recipe                forward              dgrad               wgrad
====================  ===================  ==================  ==================================
tensorwise            e4m3, one scale      e5m2 dy, e4m3 w     float8, the operands' scales
rowwise               e4m3, one per row    e4m3, one per row   float8, one scale per row
rowwise_with_gw_hp    e4m3, one per row    e4m3, w one scale   not quantized
====================  ===================  ==================  ==================================

A "tensor" of the first recipe is this rank's shard, so that ranks need not agree on a scale before they send. Quantized
shards travel as bytes, each row with its scale (`pack`), so every transport that gathers x also gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_tp.backends.gemm import as_rows

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_ALIGNMENT = 16  # bytes; CUDA's float8 matmuls need rows and columns of such multiples
_MIN_MAGNITUDE = 1e-12  # as in torchao; the scale of zeros is finite


class Float8Recipe(NamedTuple):
    """Precision of each matmul of a linear layer.

    Attributes:
        has_row_scales: one scale for each row of an operand, a power of two, instead of one for the operand.
        grad_dtype: float8 dtype of the output's gradient. Other operands are e4m3.
        has_one_weight_scale_in_dgrad: in dgrad the weight has one scale.
        quantizes_weight_grad: wgrad multiplies in float8.
    """

    has_row_scales: bool
    grad_dtype: torch.dtype
    has_one_weight_scale_in_dgrad: bool
    quantizes_weight_grad: bool

    @property
    def gathers_float8_for_weight_grad(self) -> bool:
        """True if wgrad uses the quantized values of the other matmuls. Row scales along another dim need others."""
        return self.quantizes_weight_grad and not self.has_row_scales

    def quantize_input(self, rows: Tensor) -> Float8:
        """Quantize x [M, K], or a weight [N, K], for y = x @ weight^T."""
        return quantize(rows, _E4M3, self.has_row_scales, self.has_row_scales)

    def quantize_grad(self, rows: Tensor) -> Float8:
        """Quantize dy [M, N] for dx = dy @ weight."""
        return quantize(rows, self.grad_dtype, self.has_row_scales, self.has_row_scales)

    def quantize_weight_for_grad(self, weight: Tensor) -> Float8:
        """Quantize weight^T [K, N] of a weight [N, K] for dx = dy @ weight."""
        has_row_scales = self.has_row_scales and not self.has_one_weight_scale_in_dgrad
        return quantize(weight.t(), _E4M3, has_row_scales, self.has_row_scales)


RECIPES = {
    "tensorwise": Float8Recipe(False, _E5M2, True, True),
    "rowwise": Float8Recipe(True, _E4M3, False, True),
    "rowwise_with_gw_hp": Float8Recipe(True, _E4M3, True, False),
}


class Float8(NamedTuple):
    """Matrix [rows, depth] of float8 values.

    Attributes:
        values: [rows, depth rounded up to a multiple of 16], zeros after `depth`.
        inverse_scales: float32, [rows, 1] or, for one scale, [1, 1]; the matrix is values * inverse_scales.
    """

    values: Tensor
    inverse_scales: Tensor
    depth: int


def quantize(rows: Tensor, dtype: torch.dtype, has_row_scales: bool, rounds_scales: bool) -> Float8:
    """Quantize `rows` [rows, depth]. `rounds_scales`: round scales down to powers of two, which multiply exactly.

    NaN and infinite elements make all elements of the same scale NaN.
    """
    num_rows, depth = rows.shape
    if not rows.numel():
        magnitudes = rows.new_zeros((num_rows if has_row_scales else 1, 1))
    else:
        magnitudes = rows.abs().amax(dim=1 if has_row_scales else (0, 1), keepdim=True)
    limit = torch.finfo(dtype).max
    # In float64, because compiled and eager float32 divisions may differ by a rounding (as in torchao).
    scales = (limit / magnitudes.double().clamp(min=_MIN_MAGNITUDE)).float()
    if rounds_scales:
        scales = torch.exp2(torch.floor(torch.log2(scales)))
    values = (rows.float() * scales).clamp(-limit, limit)
    return Float8(F.pad(values, (0, -depth % _ALIGNMENT)).to(dtype).contiguous(), scales.reciprocal(), depth)


def multiply(a: Float8, b: Float8, dtype: torch.dtype, *, is_forward: bool = False) -> Tensor:
    """Return a @ b^T [rows of a, rows of b] in `dtype`.

    `is_forward` allows GPUs to accumulate in fewer bits, as torchao does in forward passes only.
    """
    num_rows, num_columns = len(a.values), len(b.values)
    if not (num_rows and num_columns and a.depth):
        return a.inverse_scales.new_zeros((num_rows, num_columns), dtype=dtype)
    values, scale_a, scale_b = b.values, a.inverse_scales, b.inverse_scales.t()
    has_row_scales = scale_a.numel() > 1 or scale_b.numel() > 1
    # Kernels for row scales on GPUs are slow without `use_fast_accum`, and return bfloat16 only.
    scales_after = has_row_scales and a.values.is_cuda and not (is_forward and dtype is torch.bfloat16)
    product_dtype = torch.float32 if scales_after else dtype
    if scales_after:
        matmul_scales = (torch.ones_like(scale_a[0, 0]), torch.ones_like(scale_b[0, 0]))
    elif has_row_scales:
        matmul_scales = (scale_a.expand(num_rows, 1).contiguous(), scale_b.expand(1, num_columns).contiguous())
    else:
        matmul_scales = (scale_a[0, 0], scale_b[0, 0])
    if values.is_cuda and num_columns % _ALIGNMENT:
        num_padding = -num_columns % _ALIGNMENT
        values = F.pad(values.view(torch.uint8), (0, 0, 0, num_padding)).view(values.dtype)
        if has_row_scales and not scales_after:
            matmul_scales = (matmul_scales[0], F.pad(matmul_scales[1], (0, num_padding), value=1.0))
    product = torch._scaled_mm(
        a.values.contiguous() if a.values.is_cuda else a.values,  # rows that arrived have their scales between them
        values.t(),
        scale_a=matmul_scales[0],
        scale_b=matmul_scales[1],
        out_dtype=product_dtype,
        use_fast_accum=is_forward,
    )
    if product.shape[1] != num_columns:
        product = product[:, :num_columns].contiguous()
    return product.mul_(scale_a).mul_(scale_b).to(dtype) if scales_after else product


# -- quantized shards as bytes ----------------------------------------------------------------------------------------


def packed_width(depth: int, dtype: torch.dtype) -> int:
    """Return the length of the last dim of `pack`'s result."""
    return (depth + -depth % _ALIGNMENT + _ALIGNMENT) // dtype.itemsize


def pack(matrix: Float8, lead_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return `matrix` as a tensor [*lead_shape, width] of `dtype`, the bytes of each row followed by its scale.

    All transports move tensors of `dtype`, whose elements mean nothing here. A scale takes 16 bytes, so that rows stay
    aligned.
    """
    num_rows, padded_depth = matrix.values.shape
    packed = matrix.values.new_zeros((num_rows, padded_depth + _ALIGNMENT), dtype=torch.uint8)
    packed[:, :padded_depth] = matrix.values.view(torch.uint8)
    packed[:, padded_depth : padded_depth + 4] = (
        matrix.inverse_scales.expand(num_rows, 1).contiguous().view(torch.uint8)
    )
    return packed.view(dtype).view(*lead_shape, packed_width(matrix.depth, dtype))


def unpack(packed: Tensor, depth: int, dtype: torch.dtype) -> Float8:
    """Undo `pack` of values of the float8 `dtype`; the leading dims become rows. Each row has its scale."""
    rows = as_rows(packed).contiguous().view(torch.uint8)
    padded_depth = depth + -depth % _ALIGNMENT
    scales = rows[:, padded_depth : padded_depth + 4].contiguous().view(torch.float32)
    return Float8(rows[:, :padded_depth].view(dtype), scales, depth)


# -- wgrad ------------------------------------------------------------------------------------------------------------


def multiply_transposed(
    d_output: Float8, x: Float8, lead_shape: Sequence[int], dim: int, sizes: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return dY^T @ X [N, K] of `d_output` [M, N] and `x` [M, K] with one scale per shard of rows.

    The rows are tokens of `lead_shape`, sharded along `dim` in `sizes`. Shards with different scales are multiplied
    one by one and summed in float32, because a matmul cannot change scales along the dim that it sums over.
    """
    total = x.inverse_scales.new_zeros((d_output.depth, x.depth))
    d_shards, x_shards = (_transposed_shards(matrix, lead_shape, dim, sizes) for matrix in (d_output, x))
    for d_shard, x_shard in zip(d_shards, x_shards, strict=True):
        if d_shard.depth:
            total += multiply(d_shard, x_shard, torch.float32)
    return total.to(dtype)


def _transposed_shards(matrix: Float8, lead_shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[Float8]:
    shards = []
    values = matrix.values.view(torch.uint8)[:, : matrix.depth].unflatten(0, tuple(lead_shape)).split(sizes, dim)
    if len(matrix.inverse_scales) == 1:
        scales = [matrix.inverse_scales] * len(sizes)
    else:
        scales = [
            as_rows(shard)[:1] for shard in matrix.inverse_scales.unflatten(0, tuple(lead_shape)).split(sizes, dim)
        ]
    for shard_values, scale in zip(values, scales, strict=True):
        num_rows = prod(shard_values.shape[:-1])
        columns = F.pad(as_rows(shard_values).t(), (0, -num_rows % _ALIGNMENT)).contiguous()
        shards.append(Float8(columns.view(matrix.values.dtype), scale, num_rows))
    return shards
