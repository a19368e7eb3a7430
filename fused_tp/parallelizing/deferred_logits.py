"""Logits of a sharded output layer that are computed only when something reads them.

A model's forward passes its logits to its loss function, and returns them. With `loss_parallel`, the loss is computed
from the hidden states (`linear_cross_entropy`), and callers that train do not read the logits. So the output layer
returns `DeferredLogits`: a tensor without values, which knows the layer and its input. Factors and caps that models
apply to their logits (Gemma: `tanh(logits / cap) * cap`) are recorded. Any other function of torch gets the logits
themselves, computed once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from fused_tp.nn.linear import ColumnParallelLinear
from fused_tp.ops.arguments import autocast_dtype
from fused_tp.ops.collectives import all_gather, copy_to_group
from fused_tp.ops.linear_cross_entropy import LossArgs, gathered_linear_cross_entropy

# Properties and methods that need no values. `requires_grad` is False: only what is computed from the logits has one.
_PROPERTIES = "shape dtype device ndim layout itemsize nbytes requires_grad grad_fn grad is_leaf is_cpu is_cuda"
_PROPERTIES += " is_meta is_sparse is_nested is_quantized"
_METHODS = "size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_inference"
_METHODS += " is_conj is_neg __hash__ __len__"
_METADATA = frozenset(
    {getattr(Tensor, name).__get__ for name in _PROPERTIES.split()} | {getattr(Tensor, n) for n in _METHODS.split()}
)
_GRADIENT_HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad})


class _Factors(NamedTuple):
    """Function applied to the products z of the output layer: scale * z, or cap * tanh(scale * z)."""

    scale: float = 1.0
    cap: float | None = None

    def times(self, factor: float) -> _Factors:
        return _Factors(self.scale * factor) if self.cap is None else _Factors(self.scale, self.cap * factor)


class _Source(NamedTuple):
    """Operands from which an output layer computes its products.

    Attributes:
        hidden: [batch, seq, K], all tokens on all ranks; its gradient is this rank's term of a sum over ranks.
        weight_sample: about 1,000 elements of the weight. An optimizer's step changes them, but not the version of a
            DTensor's shard, nor, if it is of foreach or fused kernels, that of the DTensor.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    group: DeviceMesh
    weight_sample: Tensor

    @classmethod
    def from_head(cls, head: ColumnParallelLinear, x: Tensor, seq_len: int) -> _Source:
        weight, bias = head.local_parameters()
        # Gathered now, because all ranks are here; the logits may be read on one rank only.
        if head.sequence_parallel:
            hidden = all_gather(x, head.sequence_dim, group=head.mesh, gather_size=seq_len)
        else:
            hidden = copy_to_group(x, group=head.mesh)
        return cls(hidden, weight, bias, head.mesh, _sample(weight))


def _sample(weight: Tensor) -> Tensor:
    row_step, column_step = (max(1, size // 32) for size in weight.shape)
    return weight.detach()[::row_step, ::column_step].clone()


class DeferredLogits(Tensor):
    """Logits [batch, seq, v] that are computed when they are read.

    Attributes:
        factors: the function applied to the products of the output layer.
        is_computed: True if something has read the logits, and may have changed them.
    """

    factors: _Factors
    _source: _Source
    _compute: Callable[[], Tensor]
    _logits: Tensor | None
    _watchers: list[Callable[[Tensor], None]]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        source: _Source,
        compute: Callable[[], Tensor],
        factors: _Factors,
    ) -> DeferredLogits:
        device = source.hidden.device
        deferred: DeferredLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        deferred._source, deferred._compute, deferred.factors = source, compute, factors
        deferred._logits, deferred._watchers = None, []
        return deferred

    @classmethod
    def from_head(cls, head: ColumnParallelLinear, x: Tensor, seq_len: int) -> DeferredLogits:
        """Return the output of `head` for x [batch, seq, K], which has `seq_len` tokens over all ranks."""
        source = _Source.from_head(head, x, seq_len)
        cast_dtype = autocast_dtype(x)  # of now: logits may be read outside of autocast

        def compute() -> Tensor:
            # FSDP frees the weights of a pass after its backward.
            is_freed = source.weight.numel() > 0 and source.weight.untyped_storage().nbytes() == 0
            if is_freed or not torch.equal(_sample(source.weight), source.weight_sample):
                change, deadline = (
                    ("been freed by FSDP", "backward") if is_freed else ("changed", "the optimizer's step")
                )
                raise RuntimeError(
                    "The logits of a forward pass with labels are computed when they are read, and the output layer's "
                    f"weight has {change} since that pass. Read them before {deadline}."
                )
            with torch.autocast(x.device.type, dtype=cast_dtype, enabled=cast_dtype is not None):
                return F.linear(source.hidden, source.weight, source.bias)

        shape = (x.shape[0], seq_len, source.weight.shape[0])
        return cls(shape, cast_dtype or x.dtype, source, compute, _Factors())

    def cross_entropy(self, targets: Tensor, num_targets: Tensor, ignore_index: int, vocab_size: int) -> Tensor:
        """Return the sum of the targets' cross entropies / `num_targets`, without computing the logits."""
        (scale, cap), source = self.factors, self._source
        loss = LossArgs(vocab_size, 0.0, ignore_index, scale if cap is None else scale * cap, cap, 0.0)
        return gathered_linear_cross_entropy(
            source.hidden, source.weight, targets, source.bias, num_targets, "mean", loss, group=source.group
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, factors={self.factors})"

    @property
    def is_computed(self) -> bool:
        return self._logits is not None

    def watch(self, watcher: Callable[[Tensor], None]) -> None:
        """Call `watcher(logits)` when the logits are computed."""
        if self._logits is not None:
            watcher(self._logits)
        else:
            self._watchers.append(watcher)

    def logits(self) -> Tensor:
        """Return the logits, computed at the first call."""
        if self._logits is None:
            self._logits = self._compute()
            for watcher in self._watchers:
                watcher(self._logits)
            self._watchers.clear()
        return self._logits

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _GRADIENT_HOOKS and not any(isinstance(t, DeferredLogits) and t.is_computed for t in args):
            raise RuntimeError(
                "The model computed its loss without its logits (loss_parallel), so the loss has no gradient with "
                "respect to them. Call the model without labels, and compute the loss from its logits."
            )
        if (recorded := _record(func, args, kwargs)) is not None:
            return recorded
        args, kwargs = pytree.tree_map_only(DeferredLogits, DeferredLogits.logits, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Reached only by code that has disabled __torch_function__."""
        args, kwargs = pytree.tree_map_only(DeferredLogits, DeferredLogits.logits, (args, kwargs or {}))
        return func(*args, **kwargs)


_MULTIPLICATIONS = frozenset({torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, operator.mul})
_DIVISIONS = frozenset({torch.div, torch.true_divide, Tensor.div, Tensor.__truediv__, operator.truediv})
_TANHS = frozenset({torch.tanh, Tensor.tanh})


def _record(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> DeferredLogits | None:
    """Return logits to which `func` is applied when they are read; None if `func` is none that can be recorded."""
    first = args[0] if args else None
    if kwargs or not isinstance(first, DeferredLogits) or first.is_computed:
        return None
    dtype, factors = first.dtype, first.factors
    is_identity = func in (Tensor.float, Tensor.to) and dtype is torch.float32
    if (func is Tensor.float and len(args) == 1) or (func is Tensor.to and len(args) == 2 and args[1] is torch.float32):
        if is_identity:
            return first  # as torch does: what is written to one is written to both
        dtype = torch.float32
    elif func in _TANHS and len(args) == 1 and factors.cap is None:
        factors = _Factors(factors.scale, 1.0)
    elif func in _MULTIPLICATIONS and len(args) == 2 and _is_number(args[1]):
        factors = factors.times(args[1])
    elif func in _DIVISIONS and len(args) == 2 and _is_number(args[1]) and args[1]:
        factors = factors.times(1.0 / args[1])
    else:
        return None
    has_valid_cap = factors.cap is None or (factors.cap > 0 and isfinite(factors.cap))
    if not (isfinite(factors.scale) and has_valid_cap) or (dtype is torch.float32 and first.dtype is torch.float64):
        return None
    return DeferredLogits(first.shape, dtype, first._source, lambda: func(first.logits(), *args[1:]), factors)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
