"""Grouped matmuls of experts: each row is multiplied by its expert's weight, and the products are summed by token.

    y[s]   = x[s] @ w[e]^T               for the rows s of expert e: offsets[e - 1] <= s < offsets[e]
    out[t] = sum of scale[s] * y[s]      over the rows s of token t: tokens[s] = t

Rows are sorted by expert. On CPU the experts are multiplied one by one, each by the fastest library for its number of
rows (`gemm`). On GPU torch's grouped_mm is used, which reads the offsets on the device, without a host synchronization.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, grouped_mm

from fused_tp.backends.gemm import as_rows, sum_of_products
from fused_tp.core.native import DTYPE_NUMBERS
from fused_tp.core.native import core as _core

_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16  # alignment in bytes that grouped_mm requires for rows and addresses


class Routing(NamedTuple):
    """Assignment of rows to experts and tokens.

    Attributes:
        tokens: int64 [S], the token index of each row.
        offsets: int32 [experts], the end of each expert's rows.
    """

    tokens: Tensor
    offsets: Tensor

    def check(self, num_tokens: int) -> None:
        """Raise ValueError if tokens or offsets are inconsistent. Not checked on GPUs, where it would synchronize."""
        if not self.tokens.is_cpu:
            return
        ends = self.offsets.tolist()
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] != len(self.tokens):
            raise ValueError(
                f"offsets must be the ascending ends of the experts' rows, the last one equal to the number of rows, "
                f"{len(self.tokens)}; got {ends if len(ends) <= 8 else f'{ends[:8]} ...'}."
            )
        if len(self.tokens) and not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < num_tokens:
            raise ValueError(
                f"tokens must be from 0 to {num_tokens - 1}, got {int(self.tokens.min())} to {int(self.tokens.max())}."
            )

    def experts(self) -> Iterator[tuple[int, int, int]]:
        """Yield (expert, first row, end of its rows) for each expert with rows."""
        start = 0
        for expert, stop in enumerate(self.offsets.tolist()):
            if stop > start:
                yield expert, start, stop
                start = stop

    def gather_rows(self, x: Tensor) -> Tensor:
        """Return [S, n]: for each routed row, its token's row of `x` [..., n]."""
        return as_rows(x).index_select(0, self.tokens)


class GroupedProduct(NamedTuple):
    """The sum by token of `scale * (x @ weight^T)`, [num_tokens, N].

    Attributes:
        x: [S, K], rows sorted by expert.
        weight: [experts, N, K], with any strides.
        scale: [S], or None for no scaling.
    """

    x: Tensor
    weight: Tensor
    routing: Routing
    num_tokens: int
    scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_tokens, self.weight.shape[1]

    def columns(self, start: int, stop: int) -> GroupedProduct:
        """Return the product for output columns `start` to `stop`."""
        return self._replace(weight=self.weight[:, start:stop])

    def reorder_tokens(self, new_indices: Tensor) -> GroupedProduct:
        """Return the product with reordered tokens; `new_indices` [num_tokens] holds the new index of each token."""
        return self._replace(routing=self.routing._replace(tokens=new_indices[self.routing.tokens]))

    def sum(self, out: Tensor | None = None, *, rows: Tensor | None = None) -> Tensor:
        """Return the sum by token, in `out` if given.

        Rows are added in order, in float32 (float64 for float64), and the sum is rounded once.

        Args:
            rows: memory [S, N] for the products; allocating it would take as long as the summation.
        """
        y = grouped_linear(self.x, self.weight, self.routing, out=rows)
        order = self.routing.tokens.argsort(stable=True)
        token_indices = torch.arange(self.num_tokens + 1, device=order.device)
        starts = torch.searchsorted(self.routing.tokens[order], token_indices)
        scale = None if self.scale is None else self.scale[order]
        if _core is not None and y.is_cpu and y.dtype in _NATIVE_DTYPES and y.is_contiguous():
            return _sum_rows(y, order, starts, scale, y.new_empty(self.shape) if out is None else out)
        if scale is not None and scale.dtype != y.dtype:  # routing weights are often float32 with bfloat16 activations
            dtype = torch.promote_types(scale.dtype, y.dtype)
            y, scale = y.to(dtype), scale.to(dtype)
        total = embedding_bag(order, y, starts, mode="sum", include_last_offset=True, per_sample_weights=scale)
        return total.to(self.x.dtype) if out is None else out.copy_(total)


def _sum_rows(y: Tensor, order: Tensor, starts: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    """Sum rows by the native core, which multiplies rows of any dtype by float32 factors without a conversion."""
    scale = None if scale is None else scale.float()
    _core.sum_rows(
        DTYPE_NUMBERS[y.dtype],
        y.data_ptr(),
        order.data_ptr(),
        starts.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        out.data_ptr(),
        len(out),
        out.shape[1],
        torch.get_num_threads(),
    )
    return out


def grouped_linear(
    x: Tensor, weight: Tensor, routing: Routing, *, has_row_per_token: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return [S, N]: each row of `x` [S, K] times its expert's weight in `weight` [experts, N, K]; in `out` if given.

    Args:
        has_row_per_token: `x` [..., K] has one row per token instead, and each routed row uses its token's row.
    """
    if _supports_grouped_mm(x, weight):
        rows = (
            routing.gather_rows(x) if has_row_per_token else x.contiguous()
        )  # grouped_mm does not accept expanded gradients
        products = grouped_mm(rows, weight.transpose(1, 2), offs=routing.offsets)
        return products if out is None else out.copy_(products)
    x = as_rows(x)
    out = x.new_empty((len(routing.tokens), weight.shape[1])) if out is None else out
    for expert, start, stop in routing.experts():
        # Rows are gathered per expert, so that they are still in the CPU cache for the matmul.
        rows = x.index_select(0, routing.tokens[start:stop]) if has_row_per_token else x[start:stop]
        sum_of_products([(rows, weight[expert])], out=out[start:stop])
    return out


def grouped_weight_grad(d_output: Tensor, x: Tensor, weight: Tensor, routing: Routing) -> Tensor:
    """Return dW [experts, N, K], dY^T @ X over the rows of each expert; zeros for an expert without rows."""
    if _supports_grouped_mm(x, weight) and _supports_grouped_mm(d_output, weight):
        return grouped_mm(d_output.contiguous().t(), x.contiguous(), offs=routing.offsets)
    # The gradient has the strides of the weight, so that autograd accumulates it without a copy.
    d_weight = torch.empty_like(weight)
    unused_experts = set(range(len(weight)))
    for expert, start, stop in routing.experts():
        unused_experts.remove(expert)
        d_rows, rows, out = d_output[start:stop], x[start:stop], d_weight[expert]
        if out.is_contiguous():
            sum_of_products([(d_rows.t(), rows.t())], out=out)
        else:
            sum_of_products([(rows.t(), d_rows.t())], out=out.t())
    for expert in unused_experts:
        d_weight[expert].zero_()
    return d_weight


def scale_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Return the rows of `x` times `scale`, in the dtype of `x`."""
    return (x * scale[:, None]).to(x.dtype)


def scale_grads(d_scaled: Tensor, x: Tensor, scale: Tensor | None, needs_grad: Any) -> dict[str, Tensor]:
    """Return the gradients of `scale * x` by name, for "x" and "scale" if `needs_grad` requests them."""
    grads = {"x": d_scaled if scale is None else scale_rows(d_scaled, scale)} if needs_grad.x else {}
    if needs_grad.scale and scale is not None:
        grads["scale"] = (d_scaled * x).sum(1, dtype=torch.promote_types(scale.dtype, torch.float32)).to(scale.dtype)
    return grads


def _supports_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    if x.is_cpu:
        return False
    sizes: Sequence[int] = (x.shape[-1], *weight.shape[1:])
    is_aligned = all(size * x.element_size() % _ALIGNMENT_BYTES == 0 for size in sizes)
    return is_aligned and x.data_ptr() % _ALIGNMENT_BYTES == 0 and weight.data_ptr() % _ALIGNMENT_BYTES == 0
