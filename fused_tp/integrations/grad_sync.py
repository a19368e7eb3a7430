"""Gradients over the context parallel ranks, each of which has only seen its own tokens.

Every rank holds the derivative of the global loss through its own tokens, so the gradient is the SUM over the ranks.
`GradientSync` adds them up in backward. FSDP2 and DDP over a mesh that includes the CP ranks take the MEAN instead;
for them `scale_gradient` makes every rank's share as many times larger as there are ranks.

Gradients move in buckets, as in DDP (Li et al. 2020, arXiv:2006.15704). Which parameters share a bucket follows from
the model alone, and buckets start in one order on all ranks, whichever order their gradients come in. Where the
transport is asynchronous a bucket starts to move when it is full, while backward goes on; shared memory, whose calls
block, gets one call for each bucket at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from fused_tp.ops.collectives import all_reduce
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules.collective import Collective
from fused_tp.schedules.select import select_schedule
from fused_tp.transport.base import Done, Pending

BUCKET_BYTES = 25 << 20  # DDP's: large enough for bandwidth, small enough that the last one does not wait for long
FIRST_BUCKET_BYTES = 1 << 20  # so that something moves early
_ALIGNED = 16  # elements; a gradient starts where vectorized optimizers can load it

_HOOKED = "_fused_tp_gradient_summed"


@dataclass(frozen=True)
class Slot:
    """Where the gradient of one parameter lies in its bucket."""

    parameter: nn.Parameter
    shape: torch.Size  # of this rank's part
    start: int

    def of(self, flat: Tensor) -> Tensor:
        return flat.narrow(0, self.start, prod(self.shape)).view(self.shape)


@dataclass
class Bucket:
    """Parameters of one dtype and device whose gradients move together.

    Behind them are as many flags, each nonzero where some rank has found a gradient.
    """

    dtype: torch.dtype
    device: torch.device
    slots: list[Slot] = field(default_factory=list)
    flags: int = 0  # where they start

    def add(self, parameter: nn.Parameter) -> None:
        shape = _local(parameter).shape
        self.slots.append(Slot(parameter, shape, self.flags))
        self.flags += -(-prod(shape) // _ALIGNED) * _ALIGNED

    @property
    def nbytes(self) -> int:
        return self.flags * self.dtype.itemsize

    def zeros(self) -> Tensor:
        return torch.zeros(self.flags + len(self.slots), dtype=self.dtype, device=self.device)


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """Buckets in the order in which backward will fill them: that of the parameters, reversed.

    Example:
        >>> [len(bucket.slots) for bucket in make_buckets([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))])]
        [2]
    """
    full: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for parameter in reversed(parameters):
        key = (getattr(parameter, "grad_dtype", None) or parameter.dtype, parameter.device)
        bucket = filling.setdefault(key, Bucket(*key))
        bucket.add(parameter)
        if bucket.nbytes >= (BUCKET_BYTES if full else FIRST_BUCKET_BYTES):
            full.append(filling.pop(key))
    return [*full, *filling.values()]


class Pass:
    """The gradients of one backward on their way."""

    def __init__(self, mesh: DeviceMesh, buckets: Sequence[Bucket]) -> None:
        self.mesh = mesh
        self.buckets = buckets
        self.flat: list[Tensor | None] = [None] * len(buckets)
        self.missing = [len(bucket.slots) for bucket in buckets]
        self.before: dict[int, Tensor | None] = {}  # by id of the parameter: the gradient it had
        self.layouts: dict[int, Layout] = {}  # ... and how the one that it gets is laid out
        self.again: dict[int, Tensor] = {}
        self.moving: list[Pending[Pending[Tensor]]] = []  # of the first buckets, in their order

    def take(self, index: int, number: int, grad: Tensor) -> Tensor:
        """Put `grad` in its place, slot `number` of bucket `index`.

        Returns what autograd is to go on with: the place, which will hold the sum.
        """
        slot = self.buckets[index].slots[number]
        parameter, key = slot.parameter, id(slot.parameter)
        grad = _fitting(grad, slot)
        # Autograd adds to what it finds in .grad. That is a sum over the ranks already, from an earlier backward, and
        # must not be mixed with what is this rank's.
        old, parameter.grad = parameter.grad, None
        if key in self.before:
            # Reentrant checkpointing runs a backward for each use of the parameter. By now its bucket may be under way,
            # on this rank or on another: later terms go by another one.
            known = self.again.get(key)
            self.again[key] = _local(grad).clone() if known is None else known.add_(_local(grad))
            return grad
        self.before[key] = old
        layout = self.layouts[key] = _layout_of(grad)
        flat, place = self._flat(index), slot.of(self._flat(index))
        place.copy_(_local(grad))
        flat[self.buckets[index].flags + number] = 1
        self.missing[index] -= 1
        while len(self.moving) < len(self.buckets) and self.missing[len(self.moving)] == 0:
            if not self._start(may_block=False):
                break
        return layout(place)

    def finish(self) -> None:
        """Move what has not moved, wait for all of it, and give every parameter its gradient."""
        while len(self.moving) < len(self.buckets):
            self._start(may_block=True)
        # No second step before all first ones have started: the ranks would start them in different orders.
        moving = [first.wait() for first in self.moving]
        for index, second in enumerate(moving):
            self._deliver(index, second.wait())
        if self.again:
            slots = [slot for bucket in self.buckets for slot in bucket.slots if id(slot.parameter) in self.again]
            rest = Pass(self.mesh, make_buckets([slot.parameter for slot in reversed(slots)]))
            for index, bucket in enumerate(rest.buckets):
                for number, slot in enumerate(bucket.slots):
                    key = id(slot.parameter)
                    slot.parameter.grad = rest.take(index, number, self.layouts[key](self.again[key]))
            rest.finish()

    def _flat(self, index: int) -> Tensor:
        flat = self.flat[index]
        if flat is None:
            flat = self.flat[index] = self.buckets[index].zeros()
        return flat

    def _start(self, *, may_block: bool) -> bool:
        flat = self._flat(len(self.moving))
        group = resolve_group(self.mesh)
        schedule = select_schedule("all_reduce", group, flat.dtype, flat.device, 1, None, flat.numel())
        if isinstance(schedule, Collective):
            schedule.transport.check("all_reduce", flat.shape, flat.dtype, flat.device)
            self.moving.append(schedule.transport.all_reduce_steps("all_reduce", flat))
        elif may_block:
            self.moving.append(Done(Done(schedule.all_reduce(flat))))
        else:
            return False
        return True

    def _deliver(self, index: int, total: Tensor) -> None:
        bucket = self.buckets[index]
        # Reading flags waits for the device; where this rank has found all gradients they say nothing new.
        flags = total[bucket.flags :].tolist() if self.missing[index] else []
        for number, slot in enumerate(bucket.slots):
            parameter, key = slot.parameter, id(slot.parameter)
            if key not in self.before:
                if flags[number]:  # other ranks have one: an expert that got none of this rank's tokens
                    _add_grad(parameter, parameter.grad, _layout_of(parameter)(slot.of(total)))
            elif parameter.grad is None:  # torch.autograd.grad has kept the place, and leaves .grad alone
                slot.of(self._flat(index)).copy_(slot.of(total))
                parameter.grad = self.before[key]
            else:
                _add_grad(parameter, self.before[key], self.layouts[key](slot.of(total)))


class _Finish:
    """What autograd calls at the end of a backward. It dies with that backward, also with one that raised."""

    def __init__(self, sync: GradientSync) -> None:
        self.sync = sync

    def __call__(self) -> None:
        self.sync._finish()


class GradientSync:
    """Makes backward sum the gradients of a model's parameters over `mesh`; they are complete when it returns.

    A gradient is taken before it is added to `.grad`, so what one backward finds is summed, and never what was there
    before: gradients may be accumulated over several backwards. All ranks move all buckets; a parameter that got no
    gradient on any rank keeps none. Hooks of others that look at gradients in the middle of backward
    (`register_post_accumulate_grad_hook`, DistributedDataParallel) find complete ones: for these parameters each
    gradient is summed at once.

    Example:
        >>> sync = GradientSync(mesh["cp"])
        >>> sync.watch(model)                   # before each forward
        >>> loss = model(tokens); sync.watch_output(loss)
        >>> loss.backward()
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._hooked: set[int] = set()
        self._bucketed: list[int] = []
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[int, int]] = {}  # by id of a parameter: bucket and number in it
        self._pass: Pass | None = None
        self._end: Callable[[], _Finish | None] = _no_end

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientSync, (self.mesh,)  # the parameters of a copy have no hooks yet

    def watch(self, model: nn.Module) -> None:
        """Hook every trainable parameter of `model` that has not been. To be called before each forward.

        Raises:
            ValueError: FSDP2 manages a part of the model; it takes gradients away before any hook sees them.
        """
        trainable = [p for p in model.parameters() if p.requires_grad]
        # The id tells a parameter from copies that carry its attributes but not its hooks.
        missing = [p for p in trainable if getattr(p, _HOOKED, None) != id(p)]
        if missing and any(isinstance(module, FSDPModule) for module in model.modules()):
            raise ValueError(
                "fully_shard was applied to a model that was parallelized with grad_sync=True. Pass grad_sync=False to "
                "parallelize and a mesh that includes the context parallel ranks to fully_shard: it then reduces the "
                "gradients."
            )
        for parameter in missing:
            parameter.register_hook(partial(self._collect, id(parameter)))
            setattr(parameter, _HOOKED, id(parameter))
            self._hooked.add(id(parameter))
        if self._end() is not None:
            return  # a forward inside of a backward that is filling buckets
        others_look = DistributedDataParallel._get_active_ddp_module() is not None
        bucketed = [
            p
            for p in trainable
            if id(p) in self._hooked and not (others_look or getattr(p, "_post_accumulate_grad_hooks", None))
        ]
        if [id(p) for p in bucketed] != self._bucketed:
            self._bucketed = [id(p) for p in bucketed]
            self._buckets = make_buckets(bucketed)
            self._places = {
                id(slot.parameter): (index, number)
                for index, bucket in enumerate(self._buckets)
                for number, slot in enumerate(bucket.slots)
            }

    def watch_output(self, output: Any) -> None:
        """Say which tensors backward will start from, of a forward that `watch` was called for.

        With reentrant checkpointing gradients first come in a backward inside the backward. What is known of the outer
        one lets them wait for its end; else they move once for each inner one.
        """
        for t in tree_leaves(output):
            if isinstance(t, Tensor) and t.requires_grad and not t.is_leaf:
                t.register_hook(self._begin)

    def _begin(self, grad: Tensor) -> None:
        if self._end() is None:
            self._pass = None  # of a backward that raised
            end = _Finish(self)
            self._end = weakref.ref(end)
            Variable._execution_engine.queue_callback(end)

    @torch.no_grad()
    def _collect(self, key: int, grad: Tensor) -> Tensor:
        place = self._places.get(key)
        if place is None:
            return _sum_over(self.mesh, grad)
        self._begin(grad)
        if self._pass is None:
            self._pass = Pass(self.mesh, self._buckets)
        return self._pass.take(*place, grad)

    @torch.no_grad()
    def _finish(self) -> None:
        finished, self._pass, self._end = self._pass, None, _no_end
        if finished is not None:
            finished.finish()


def _no_end() -> None:
    return None


def _fitting(grad: Tensor, slot: Slot) -> Tensor:
    """`grad` with a local part of the slot's shape; refuses one that is not dense."""
    if grad.layout != torch.strided:
        raise ValueError(
            f"backward found a gradient of layout {grad.layout} for a parameter of shape {tuple(slot.shape)}; "
            "grad_sync=True sums dense ones only. Make the embedding with sparse=False."
        )
    if isinstance(grad, DTensor) and grad.to_local().shape != slot.shape:
        return grad.redistribute(placements=slot.parameter.placements)  # type: ignore[attr-defined]  # a DTensor too
    return grad


def _add_grad(parameter: nn.Parameter, old: Tensor | None, new: Tensor) -> None:
    parameter.grad = new if old is None else old.add_(new)


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


Layout: TypeAlias = Callable[[Tensor], Tensor]


def _layout_of(t: Tensor) -> Layout:
    """What makes of a local tensor one like `t`, which is not kept."""
    if not isinstance(t, DTensor):
        return _as_it_is
    kinds: dict[str, Any] = {"run_check": False, "shape": t.shape, "stride": t.stride()}
    return partial(DTensor.from_local, device_mesh=t.device_mesh, placements=t.placements, **kinds)


def _as_it_is(t: Tensor) -> Tensor:
    return t


@torch.no_grad()
def _sum_over(mesh: DeviceMesh, grad: Tensor) -> Tensor:
    return _layout_of(grad)(all_reduce(_local(grad).contiguous(), group=mesh))


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]  # autograd contexts take any attribute
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None  # type: ignore[attr-defined]  # set in forward


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x itself; its gradient comes back times `factor`."""
    return x if factor == 1 else _ScaleGradient.apply(x, factor)
