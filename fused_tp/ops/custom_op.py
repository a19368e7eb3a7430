"""A differentiable op under both of torch's doors: `torch.library` for compilers, `autograd.Function` for eager code.

`torch.compile`, `make_fx` and dispatch modes (selective checkpointing, fake tensors, flop counters) must see one op
with a schema, a fake and an autograd formula: a `torch.library` op. In eager mode that door costs 17 us a call where
nothing needs a gradient and 52 us where something does (list arguments, torch 2.13, one x86 core), against 7 us for a
whole decode-sized `F.linear`. So plain tensors in eager mode go straight to the implementation, or through an
`autograd.Function` around the very same implementation and formula (12 us). `torch.library.custom_op` was measured too:
4 to 6 us more than `Library.define` + `impl` for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from fused_tp.ops.op import LIBRARY
from fused_tp.runtime.tracing import recording, span

_PLAIN = frozenset({Tensor, Parameter})


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class CustomOp:
    """One op `fused_tp::<name>`.

    `implementation`, `fake`, `setup_context` and `backward` are what `torch.library.register_*` ask for: arguments and
    results follow the schema, `setup_context(ctx, inputs, output)`, `backward(ctx, *grads)` gives one gradient per
    argument (a list for a list). An op without `backward` is itself (part of) a backward. `schedule`, of the arguments
    of `implementation`, is what that is going to select, for profilers; None where it selects nothing (the first time,
    ranks select together).

    Returned tensors must not share memory with arguments: the compiler counts on that.
    """

    def __init__(
        self,
        schema: str,
        implementation: Callable[..., Any],
        fake: Callable[..., Any],
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        schedule: Callable[..., _Named | None] | None = None,
    ) -> None:
        self.name = schema[: schema.index("(")]
        self.qualified_name = f"fused_tp::{self.name}"
        self.implementation = implementation
        self.setup_context = setup_context
        self.backward = backward
        self.schedule = schedule
        LIBRARY.define(schema)
        LIBRARY.impl(self.name, self._dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(self.qualified_name, fake, lib=LIBRARY)
        if backward is not None:
            torch.library.register_autograd(
                self.qualified_name, self.run_backward, setup_context=setup_context, lib=LIBRARY
            )
        self.returns_list = schema.endswith("[]")
        self.overload = getattr(torch.ops.fused_tp, self.name).default

    def __call__(self, *args: Any) -> Any:
        # `is_compiling` runs two more frames to ask for TorchScript and export; export traces under a dispatch mode.
        if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
            return self.overload(*args)
        needs_grad = False
        for arg in args:
            for t in arg if type(arg) is list else (arg,):
                if isinstance(t, Tensor):
                    if type(t) not in _PLAIN:
                        return self.overload(*args)
                    needs_grad = needs_grad or t.requires_grad
        if forward_ad._current_level >= 0:
            raise RuntimeError(
                f"{self.qualified_name} has no forward-mode derivative: its peers' tangents would be missing from it. "
                "Use backward, or call it outside of forward_ad.dual_level()."
            )
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"{self.qualified_name} cannot be transformed by torch.func (grad, vmap, ...): its peers are sent "
                "numbers, no traces. Call it with a batch, and differentiate by backward() or torch.autograd.grad."
            )
        differentiable = needs_grad and torch.is_grad_enabled()
        if differentiable and self.backward is None:
            raise RuntimeError(f"{self.qualified_name} has no derivative: the ops can be differentiated only once.")
        if recording():
            with _as_dispatched(self.qualified_name), self._range(args):
                return self._with_grad(args) if differentiable else self.implementation(*args)
        return self._with_grad(args) if differentiable else self.implementation(*args)

    def run_backward(self, ctx: Any, *grads: Any) -> Any:
        """`backward`, in a range of its own where nothing is being traced, which would trace the range too."""
        assert self.backward is not None
        if not recording() or torch._C._len_torch_dispatch_stack():
            return self.backward(ctx, *grads)
        with span(f"{self.name} backward", grads):
            return self.backward(ctx, *grads)

    def _dispatched(self, *args: Any) -> Any:
        if not recording():
            return self.implementation(*args)
        with self._range(args):
            return self.implementation(*args)

    def _range(self, args: Sequence[Any]) -> AbstractContextManager[object]:
        schedule = None if self.schedule is None else self.schedule(*args)
        return span(self.name, args, None if schedule is None else schedule.name)

    def _with_grad(self, args: Sequence[Any]) -> Any:
        flat: list[Any] = []
        lengths = []  # of the tensor lists; -1 for anything else
        for arg in args:
            if type(arg) is list and (not arg or isinstance(arg[0], Tensor)):
                lengths.append(len(arg))
                flat.extend(arg)
            else:
                lengths.append(-1)
                flat.append(arg)
        outputs = _Eager.apply(self, lengths, *flat)
        return list(outputs) if self.returns_list else outputs


def _as_dispatched(name: str) -> AbstractContextManager[object]:
    """The range in which torch's profiler shows an op that comes through torch's own door."""
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


class _Eager(torch.autograd.Function):
    """Autograd tracks tensors that are arguments themselves, not those in lists: lists travel flattened."""

    @staticmethod
    def forward(ctx: Any, op: CustomOp, lengths: list[int], *flat: Any) -> Any:
        args = _unflatten(flat, lengths)
        output = op.implementation(*args)
        assert op.setup_context is not None
        op.setup_context(ctx, args, output)
        ctx.op, ctx.lengths = op, lengths
        return tuple(output) if op.returns_list else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        op = ctx.op
        result = op.run_backward(ctx, list(grads)) if op.returns_list else op.run_backward(ctx, *grads)
        flat: list[Any] = [None, None]
        for value, length in zip(result, ctx.lengths, strict=True):
            if length < 0:
                flat.append(value)
            else:
                flat.extend(value)
        return tuple(flat)


def _unflatten(flat: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    args: list[Any] = []
    at = 0
    for length in lengths:
        if length < 0:
            args.append(flat[at])
            at += 1
        else:
            args.append(list(flat[at : at + length]))
            at += length
    return args
