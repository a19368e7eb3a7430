"""Sum gradients over the context parallel ranks, each of which holds the derivative through its own tokens.

A hook sums each gradient as soon as autograd produces it. Hooks that were registered before `parallelize` see the
gradient from this rank's tokens ("this rank's share"); hooks registered later, and optimizers, see the sum. Not done:
reducing in buckets during backward, as DDP does. With buckets, code that reads a gradient in the middle of backward (a
hook, an optimizer that runs in backward, DDP itself) would see this rank's share. Also, ranks that do not run the same
layers would start a full bucket at different points of their ring attention.

A parameter that only some ranks use (an expert that no token of a rank was routed to) is summed at the end of backward,
because ranks that do not use it never run its hook. At the end of backward the ranks also compare the names of the
parameters that they summed, in order: a sum of two different parameters of equal shape would not fail by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fused_tp.core.checks import is_capturing
from fused_tp.core.errors import RankMismatchError
from fused_tp.core.group import resolve_group
from fused_tp.core.pending import checksum
from fused_tp.core.store import exchange
from fused_tp.ops.collectives import all_gather, all_reduce
from fused_tp.ops.main_grad import is_grad_requested
from fused_tp.parallelizing.attribute_names import PARALLELISM_ATTRIBUTE
from fused_tp.parallelizing.graph import REENTRANT_NODE, leaf_tensors, reachable_nodes

_HOOK_ATTRIBUTE = "_fused_tp_gradient_summed"
GRADIENT_SYNCS_ATTRIBUTE = "_fused_tp_gradient_syncs"  # attribute of a model: the objects that sum its gradients


class GradientSync:
    """Makes backward sum the gradients of a model's parameters over `mesh`.

    The hook runs before AccumulateGrad, so it sums only the gradients of one backward, never earlier ones: gradients
    may be accumulated over several backwards. All ranks of `mesh` must compute gradients of the same parameters, except
    for the parameters that `find_partly_used_parameters` has found to be used by some ranks only. The gradients of the
    latter are zeros until backward ends.

    Args:
        takes_mean: take the mean of the ranks' gradients instead of their sum.

    Example:
        >>> sync = GradientSync(mesh["cp"])
        >>> sync.watch(model)                   # before each forward
        >>> model(tokens).sum().backward()
    """

    def __init__(self, mesh: DeviceMesh, *, takes_mean: bool = False) -> None:
        self.mesh, self.takes_mean = mesh, takes_mean
        self._partly_used_parameters: dict[int, nn.Parameter] = {}  # by id, in the same order on all ranks
        self._held_gradients: dict[int, Tensor] = {}  # gradients of the partly used parameters, until backward ends
        self._summed_names: list[str] = []  # names of the parameters whose gradients this backward has already summed
        self._in_autograd_grad = False  # torch.autograd.grad returns the gradients instead of accumulating them
        self._watched_parameters: dict[int, nn.Parameter] = {}  # by id, in the same order on all ranks
        self.is_deferring = False  # inside `defer`: backward leaves gradients unreduced
        self._deferred_ids = set[int]()  # ids of the parameters with an unreduced gradient
        # The next backward outside of `defer`, or `reduce_deferred`, must reduce the deferred gradients.
        self._is_reduction_pending = False
        self.is_disabled = False  # inside `disable`
        # Weak reference to the callback that runs at the end of backward. Autograd holds the only strong reference, so
        # a backward that raises drops the callback.
        self._queued_callback: Callable[[], Callable[[], None] | None] = _no_callback

    def __reduce__(self) -> Any:
        return partial(GradientSync, takes_mean=self.takes_mean), (self.mesh,)

    def watch(self, model: nn.Module) -> None:
        """Hook every trainable parameter of `model` that has no hook yet.

        Raises:
            ValueError: FSDP2 manages some modules of the model and removes gradients before any hook sees them; a
                parameter accumulates its gradient in `main_grad`; or a parameter was computed from other tensors.
        """
        trainable_parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        main_grad_names = [name for name, p in trainable_parameters if getattr(p, "main_grad", None) is not None]
        if main_grad_names:
            raise ValueError(
                f"{main_grad_names[0]!r} accumulates its gradient in main_grad, which grad_sync=True does not sum over "
                "the context parallel ranks. Pass grad_sync=False to parallelize, and average main_grad over these "
                "ranks in the wrapper that reduces it; or remove main_grad."
            )
        nonleaf_names = [name for name, p in trainable_parameters if not p.is_leaf]
        if nonleaf_names:
            raise ValueError(
                f"{nonleaf_names[0]!r} is not a leaf: it was computed from other tensors, as "
                "torch.func.functional_call and FullyShardedDataParallel do. grad_sync=True might sum the gradients of "
                "such tensors twice. Pass leaf parameters (detach().requires_grad_()), or pass grad_sync=False to "
                "parallelize and average the gradients over the context parallel ranks."
            )
        unhooked_parameters = [(name, p) for name, p in trainable_parameters if not self._has_hook(p)]
        if unhooked_parameters and any(isinstance(module, FSDPModule) for module in model.modules()):
            raise ValueError(
                "fully_shard was applied to a model that was parallelized with grad_sync=True. Pass grad_sync=False to "
                f"parallelize and a mesh that includes {', '.join(self.mesh.mesh_dim_names or ())!r} to fully_shard, "
                "which then reduces the gradients. (First call fully_shard on experts that are distributed over that "
                "dim, with a mesh without it, or pass them in ignored_params.)"
            )
        for name, parameter in unhooked_parameters:
            hooks = parameter._backward_hooks
            if hooks is not None:
                # module.to() may have replaced the tensor; the new one lists the hooks but does not run them.
                for key in [
                    k
                    for k, hook in hooks.items()
                    if getattr(hook, "func", None) in (self._sum_gradient, self._undo_division)
                ]:
                    del hooks[key]
                parameter._backward_hooks = hooks
            # Bound by id, not by weak reference: module.to() does not swap tensors that have weak references.
            hook = self._undo_division if has_distributed_experts(parameter, self.mesh) else self._sum_gradient
            parameter.register_hook(partial(hook, name, id(parameter)))
            if hook == self._sum_gradient:
                self._watched_parameters[id(parameter)] = parameter
            setattr(parameter, _HOOK_ATTRIBUTE, id(parameter))

    def _undo_division(self, name: str, key: int, grad: Tensor) -> Tensor:
        """Rescale the gradient of a parameter of distributed experts, which already covers all ranks' tokens.

        It was divided by the number of ranks, for wrappers that average gradients; this multiplies it back.
        """
        return grad if self.takes_mean else grad * self.mesh.size()

    def _has_hook(self, parameter: nn.Parameter) -> bool:
        """True if `parameter` runs our hook.

        The mark on the parameter is not enough: copies and pickles keep attributes but not hooks, and may reuse the id.
        The listed hooks are not enough either: a tensor that module.to() has swapped in lists them without running
        them.
        """
        hooks = (parameter._backward_hooks or {}).values()
        has_listed_hook = any(
            getattr(hook, "func", None) in (self._sum_gradient, self._undo_division) for hook in hooks
        )
        return has_listed_hook and getattr(parameter, _HOOK_ATTRIBUTE, None) == id(parameter)

    @property
    def has_partly_used_parameters(self) -> bool:
        """True if only some ranks used some parameters. Every forward then needs `find_partly_used_parameters`."""
        return bool(self._partly_used_parameters)

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Context manager in which gradients are not reduced over ranks.

        Each rank keeps its share of the gradients, times the number of ranks, and adds it to gradients that are already
        summed; the mean over ranks is then the total. The next backward outside, or `reduce_deferred`, takes this mean.
        """
        was_deferring, self.is_deferring, self._is_reduction_pending = self.is_deferring, True, True
        try:
            yield
        finally:
            self.is_deferring = was_deferring

    @property
    def has_pending_reduction(self) -> bool:
        """True if gradients wait for `reduce_deferred`, in which the ranks also exchange which parameters they used."""
        return self._is_reduction_pending

    @torch.no_grad()
    def reduce_deferred(self) -> None:
        """Reduce the deferred gradients over the ranks. A collective call."""
        if not self._is_reduction_pending:
            return
        is_used = [key in self._deferred_ids for key in self._watched_parameters]
        self._deferred_ids, self._is_reduction_pending = set(), False
        average_gradients(self.mesh, list(self._watched_parameters.values()), is_used)

    def find_partly_used_parameters(self, model: nn.Module, outputs: Sequence[Tensor], *, has_experts: bool) -> None:
        """Find the parameters that only some ranks used for `outputs`. A collective call.

        The gradients of these parameters are then summed at the end of every backward, in the same order on all ranks,
        because which ranks use them changes with the batch.

        Args:
            has_experts: True if the model has experts.

        Raises:
            ValueError: there are such parameters, and hooks or DDP read their gradients in the middle of backward; or a
                reentrant checkpoint in a model with experts hides which parameters were used.
        """
        parameters = [p for p in model.parameters() if p.requires_grad and not has_distributed_experts(p, self.mesh)]
        nodes = [node for t in outputs for node in reachable_nodes(t)]
        used_ids = {id(leaf) for leaf in leaf_tensors(nodes)}
        is_use_hidden = has_experts and any(node.name() == REENTRANT_NODE for node in nodes)
        local_use = torch.tensor(
            [*(id(p) in used_ids for p in parameters), is_use_hidden], dtype=torch.float32, device="cpu"
        )
        *counts, is_use_hidden = all_reduce(local_use.to(self.mesh.device_type), group=self.mesh).tolist()
        if is_use_hidden:
            raise ValueError(
                "a reentrant checkpoint hides which experts a context parallel rank has used. Pass "
                "use_reentrant=False to checkpoint."
            )
        self._partly_used_parameters |= {
            id(p): p for p, n in zip(parameters, counts, strict=True) if 0 < n < self.mesh.size()
        }
        if self._partly_used_parameters:
            self._check_no_early_readers()
            for t in outputs:
                t.register_hook(self._queue_callback)

    def _check_no_early_readers(self) -> None:
        in_ddp = DistributedDataParallel._get_active_ddp_module() is not None
        parameters = self._partly_used_parameters.values()
        if in_ddp or any(len(p._backward_hooks or ()) > 1 or p._post_accumulate_grad_hooks for p in parameters):
            reader = "DistributedDataParallel" if in_ddp else "a hook on them"
            raise ValueError(
                "some parameters were used by some of the context parallel ranks only. Their gradients are summed at "
                f"the end of backward, but {reader} reads them earlier. Pass grad_sync=False to parallelize, and "
                "reduce the gradients over a mesh that includes the context parallel ranks, by fully_shard or by "
                "DistributedDataParallel with find_unused_parameters=True."
            )

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Context manager in which each rank keeps its share of the gradients, except those of distributed experts."""
        self.is_disabled = True
        try:
            yield
        finally:
            self.is_disabled = False

    def _sum_gradient(self, name: str, key: int, grad: Tensor) -> Tensor:
        if self.is_disabled:
            return grad
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward was called with create_graph=True, which is not supported: gradients that are summed over "
                "context parallel ranks cannot be differentiated again. Omit create_graph."
            )
        if not self.is_deferring:
            self._queue_callback(grad)
        if self._is_reduction_pending:
            self._deferred_ids.add(key)
            return grad if self.takes_mean else grad * self.mesh.size()
        if key not in self._partly_used_parameters:
            self._summed_names.append(name)
            return self._reduce(grad)
        self._in_autograd_grad |= is_grad_requested(get_gradient_edge(self._partly_used_parameters[key]).node)
        # The nested backward of a reentrant checkpoint also runs this hook, so add.
        self._held_gradients[key] = self._held_gradients[key] + grad if key in self._held_gradients else grad
        return torch.zeros_like(grad)

    def _reduce(self, grad: Tensor) -> Tensor:
        total = _sum_over_ranks(self.mesh, grad)
        return total / self.mesh.size() if self.takes_mean else total

    def _queue_callback(self, grad: Tensor) -> None:
        if self._queued_callback() is None:
            callback = partial(self._finish_backward)
            self._queued_callback = weakref.ref(callback)
            self._held_gradients, self._summed_names, self._in_autograd_grad = {}, [], False
            Variable._execution_engine.queue_callback(callback)

    @torch.no_grad()
    def _finish_backward(self) -> None:
        held_gradients, summed_names, in_autograd_grad = (
            self._held_gradients,
            self._summed_names,
            self._in_autograd_grad,
        )
        self._held_gradients, self._queued_callback = {}, _no_callback
        if self._is_reduction_pending:
            self.reduce_deferred()
            return
        self._compare_names(summed_names)
        if self._partly_used_parameters:
            self._sum_held_gradients(held_gradients, in_autograd_grad)

    def _compare_names(self, summed_names: list[str]) -> None:
        """Compare the names of the summed parameters over the ranks.

        Raises:
            RankMismatchError: on all ranks, if gradients of different parameters were added to each other.
        """
        if is_capturing():
            return
        name_checksum = torch.tensor([checksum("\n".join(summed_names).encode())], dtype=torch.float64, device="cpu")
        checksums = all_gather(name_checksum.to(self.mesh.device_type), 0, group=self.mesh).tolist()
        if len(set(checksums)) == 1:
            return
        rank_names = exchange(resolve_group(self.mesh), "parameters whose gradients were summed", summed_names)
        other_rank = next(i for i, names in enumerate(rank_names) if names != rank_names[0])
        first, second = next(pair for pair in zip_longest(rank_names[0], rank_names[other_rank]) if pair[0] != pair[1])
        raise RankMismatchError(
            f"the context parallel ranks summed gradients of different parameters with each other (rank 0: {first!r}, "
            f"rank {other_rank}: {second!r}), so the gradients are wrong: do not take an optimizer step. In this "
            "model, which parameters are used depends on a rank's tokens. Set FUSED_TP_CHECK_BATCH=1: the ranks then "
            "compare the used parameters at every forward pass, as for models with 'expert' in a module's name. Pass "
            "use_reentrant=False to checkpoint, because reentrant checkpoints hide the used parameters."
        )

    def _sum_held_gradients(self, held_gradients: dict[int, Tensor], in_autograd_grad: bool) -> None:
        local_use = [*(key in held_gradients for key in self._partly_used_parameters), in_autograd_grad]
        *counts, in_autograd_grad = all_reduce(
            torch.tensor(local_use, dtype=torch.float32, device=self.mesh.device_type), group=self.mesh
        )
        if in_autograd_grad:
            raise ValueError(
                "torch.autograd.grad is not supported for parameters that only some of the context parallel ranks have "
                "used: their gradients are summed at the end of backward. Call backward() and read the parameters' "
                "grad."
            )
        for (key, parameter), num_users in zip(self._partly_used_parameters.items(), counts, strict=True):
            if not num_users:
                continue
            total = self._reduce(held_gradients[key] if key in held_gradients else torch.zeros_like(parameter))
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)


def _no_callback() -> None:
    return None


def has_distributed_experts(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    """True if `parameter` holds different experts on each rank of `mesh`."""
    if not isinstance(parameter, DTensor):
        return False
    named_placements = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
    return any(name in (mesh.mesh_dim_names or ()) and placement.is_shard() for name, placement in named_placements)


@torch.no_grad()
def average_gradients(mesh: DeviceMesh, parameters: Sequence[nn.Parameter], is_used: Sequence[bool]) -> None:
    """Replace each gradient that a rank of `mesh` contributes to by its mean over all ranks of `mesh`.

    A collective call. A gradient to which no rank contributes is not changed.

    Args:
        parameters: the same on all ranks, in the same order.
        is_used: for each parameter, True if this rank contributes to its gradient.
    """
    local_use = torch.tensor(is_used, dtype=torch.float32, device=mesh.device_type)
    counts = all_reduce(local_use, group=mesh).tolist() if parameters else []
    for parameter, num_users in zip(parameters, counts, strict=True):
        if num_users:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = _sum_over_ranks(mesh, grad) / mesh.size()


def find_gradient_syncs(model: nn.Module) -> list[GradientSync]:
    """Return the GradientSync objects of `model` and its submodules, each once."""
    syncs = (sync for module in model.modules() for sync in getattr(module, GRADIENT_SYNCS_ATTRIBUTE, ()))
    return list({id(sync): sync for sync in syncs}.values())


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context manager in which backward communicates no gradients; the first backward after it sums all of them.

    Use it for all steps of a gradient accumulation but the last. It covers FSDP2 and, for a model that was parallelized
    with grad_sync=True, context parallel ranks and the ranks of an expert parallel dim with different batches. Until
    the sum, `grad` is not a valid gradient: clip and step after it. `model.no_sync()`, which accelerate and
    transformers' Trainer call, does the same.

    Raises:
        TypeError: neither `parallelize` nor FSDP2's fully_shard was applied to `model`.

    Example:
        >>> for i, batch in enumerate(batches):
        ...     with nullcontext() if i + 1 == len(batches) else fused_tp.no_sync(model):
        ...         model(**batch).loss.backward()
    """
    fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not fsdp_modules and not any(hasattr(module, PARALLELISM_ATTRIBUTE) for module in model.modules()):
        raise TypeError(
            f"{type(model).__name__} is not parallel: call parallelize or fully_shard on the model before no_sync."
        )
    with ExitStack() as stack:
        for sync in find_gradient_syncs(model):
            stack.enter_context(sync.defer())
        for module in fsdp_modules:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in fsdp_modules:
                module.set_requires_gradient_sync(True, recurse=False)


def sync_gradients(model: nn.Module) -> None:
    """Sum the gradients of backwards inside `no_sync` over the ranks, when no later backward outside sums them.

    All ranks must call it. FSDP2 has no equivalent: with FSDP2 the last backward must be outside of `no_sync`.

    Example:
        >>> with fused_tp.no_sync(model):
        ...     for batch in batches:
        ...         model(**batch).loss.backward()
        >>> fused_tp.sync_gradients(model)
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("FSDP2 reduces gradients in backward only. Run the last backward outside of no_sync.")
    for sync in find_gradient_syncs(model):
        sync.reduce_deferred()


@torch.no_grad()
def _sum_over_ranks(mesh: DeviceMesh, grad: Tensor) -> Tensor:
    if grad.layout != torch.strided:
        raise ValueError(
            f"grad_sync=True supports dense gradients only, got layout {grad.layout} for a parameter of shape "
            f"{tuple(grad.shape)}. Create the embedding with sparse=False."
        )
    local_grad = grad.to_local() if isinstance(grad, DTensor) else grad
    local_grad = local_grad.contiguous()
    if local_grad.is_complex():
        total = torch.view_as_complex(all_reduce(torch.view_as_real(local_grad.resolve_conj()), group=mesh))
    else:
        total = all_reduce(local_grad, group=mesh)
    if not isinstance(grad, DTensor):
        return total
    return DTensor.from_local(
        total, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape, stride=grad.stride()
    )
