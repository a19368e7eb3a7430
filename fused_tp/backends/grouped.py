"""Matmuls of experts: rows sorted by expert are multiplied by their expert's weight and summed by token.

    y[s]   = x[s] @ w[e]^T               for the rows s of expert e: offsets[e - 1] <= s < offsets[e]
    out[t] = sum of scale[s] * y[s]      over the rows s of token t: tokens[s] = t

On CPU the experts are multiplied one by one, each by the fastest library for its rows (`gemm`); elsewhere by torch's
grouped_mm, which does not need the end of each expert's rows on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, grouped_mm

from fused_tp.backends.gemm import as_rows, sum_of_products

try:
    import fused_tp._core as _core

    _BUILT = True
except ImportError:  # a pure Python installation
    _BUILT = False

_NATIVE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/dtype.h
_ALIGNMENT = 16  # bytes: grouped_mm requires it of rows and addresses


class Routing(NamedTuple):
    """Assignment of rows to experts and tokens.

    Attributes:
        tokens: int64 [S], the token index of each row.
        offsets: int32 [experts], the end of each expert's rows.
    """

    tokens: Tensor
    offsets: Tensor

    def check(self, num_tokens: int) -> None:
        """Raise ValueError if the numbers are inconsistent. Not checked on a GPU, as reading them would wait for it."""
        if not self.tokens.is_cpu:
            return
        ends = self.offsets.tolist()
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] != len(self.tokens):
            raise ValueError(
                f"offsets are {ends if len(ends) <= 8 else f'{ends[:8]} and so on'}; they must grow up to the number "
                f"of rows, {len(self.tokens)}: each is where the rows of one expert end."
            )
        if len(self.tokens) and not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < num_tokens:
            raise ValueError(
                f"tokens are from {int(self.tokens.min())} to {int(self.tokens.max())}; there are {num_tokens} tokens, "
                "counted from 0."
            )

    def experts(self) -> Iterator[tuple[int, int, int]]:
        """(expert, first row, end of its rows) of each expert that has rows."""
        start = 0
        for expert, stop in enumerate(self.offsets.tolist()):
            if stop > start:
                yield expert, start, stop
                start = stop

    def rows_of(self, x: Tensor) -> Tensor:
        """[S, n]: for each routed row, the row of `x` [..., n] of its token."""
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
        """The product for columns `start` to `stop` of the output."""
        return self._replace(weight=self.weight[:, start:stop])

    def in_order(self, places: Tensor) -> GroupedProduct:
        """The product with tokens reordered: `places` [num_tokens] is the new index of each token."""
        return self._replace(routing=self.routing._replace(tokens=places[self.routing.tokens]))

    def sum(self, out: Tensor | None = None, *, rows: Tensor | None = None) -> Tensor:
        """Sum in float32 (float64 for float64) in the order of the rows, rounded once; into `out` where given.

        `rows`: memory [S, N] for the products. (New memory for large tensors costs as much as the summation.)
        """
        y = grouped_linear(self.x, self.weight, self.routing, out=rows)
        order = self.routing.tokens.argsort(stable=True)
        numbers = torch.arange(self.num_tokens + 1, device=order.device)
        starts = torch.searchsorted(self.routing.tokens[order], numbers)
        scale = None if self.scale is None else self.scale[order]
        if _BUILT and y.is_cpu and y.dtype in _NATIVE_DTYPES and y.is_contiguous():
            return _sum_rows(y, order, starts, scale, y.new_empty(self.shape) if out is None else out)
        if scale is not None and scale.dtype != y.dtype:  # routing weights often have more precision than activations
            dtype = torch.promote_types(scale.dtype, y.dtype)
            y, scale = y.to(dtype), scale.to(dtype)
        total = embedding_bag(order, y, starts, mode="sum", include_last_offset=True, per_sample_weights=scale)
        return total.to(self.x.dtype) if out is None else out.copy_(total)


def _sum_rows(y: Tensor, order: Tensor, starts: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    """Sum rows by the native core, which takes float32 factors with rows of any dtype; torch would convert the rows."""
    scale = None if scale is None else scale.float()
    _core.sum_rows(
        _NATIVE_DTYPES[y.dtype],
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
    x: Tensor, weight: Tensor, routing: Routing, *, by_token: bool = False, out: Tensor | None = None
) -> Tensor:
    """[S, N]: each row of `x` [S, K] times its expert's weight in `weight` [experts, N, K]; into `out` where given.

    `by_token`: `x` [..., K] has one row per token instead, which is used for each of the token's routed rows.
    """
    if _takes_grouped_mm(x, weight):
        rows = routing.rows_of(x) if by_token else x.contiguous()  # grouped_mm does not accept expanded gradients
        found = grouped_mm(rows, weight.transpose(1, 2), offs=routing.offsets)
        return found if out is None else out.copy_(found)
    x = as_rows(x)
    out = x.new_empty((len(routing.tokens), weight.shape[1])) if out is None else out
    for expert, start, stop in routing.experts():
        # Indexing expert by expert keeps the rows in the cache for the matmul, and needs no copy of all rows.
        rows = x.index_select(0, routing.tokens[start:stop]) if by_token else x[start:stop]
        sum_of_products([(rows, weight[expert])], out=out[start:stop])
    return out


def grouped_weight_grad(d_output: Tensor, x: Tensor, weight: Tensor, routing: Routing) -> Tensor:
    """dW like `weight` [experts, N, K]: dY^T @ X over the rows of each expert; zeros for an expert without rows."""
    if _takes_grouped_mm(x, weight) and _takes_grouped_mm(d_output, weight):
        return grouped_mm(d_output.contiguous().t(), x.contiguous(), offs=routing.offsets)
        # Same strides as the weight: a transposed weight has a transposed gradient, which accumulates without a copy.
    d_weight = torch.empty_like(weight)
    unused = set(range(len(weight)))
    for expert, start, stop in routing.experts():
        unused.remove(expert)
        d, rows, out = d_output[start:stop], x[start:stop], d_weight[expert]
        if out.is_contiguous():
            sum_of_products([(d.t(), rows.t())], out=out)
        else:
            sum_of_products([(rows.t(), d.t())], out=out.t())
    for expert in unused:
        d_weight[expert].zero_()
    return d_weight


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Rows of `x` times `scale`, in the dtype of `x`."""
    return (x * scale[:, None]).to(x.dtype)


def scaled_grads(d_scaled: Tensor, x: Tensor, scale: Tensor | None, needs: Any) -> dict[str, Tensor]:
    """Gradients of `scale * x` for those of "x" and "scale" that need one."""
    found = {"x": d_scaled if scale is None else scaled(d_scaled, scale)} if needs.x else {}
    if needs.scale and scale is not None:
        found["scale"] = (d_scaled * x).sum(1, dtype=torch.promote_types(scale.dtype, torch.float32)).to(scale.dtype)
    return found


def _takes_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    if x.is_cpu:
        return False
    sizes: Sequence[int] = (x.shape[-1], *weight.shape[1:])
    aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in sizes)
    return aligned and x.data_ptr() % _ALIGNMENT == 0 and weight.data_ptr() % _ALIGNMENT == 0
