"""Sum gradients over the context parallel ranks, each of which holds the derivative through its own tokens.

A hook sums each gradient as soon as autograd produces it: hooks registered before the first forward see this rank's
share, and all later readers see the sum. Rejected: buckets that are reduced during backward, as in DDP. Readers of a
gradient in the middle of backward (a hook, an optimizer that runs in backward, DDP itself) would see this rank's share.
Also, ranks that do not run the same layers would start a full bucket at different points of their ring attention.

A parameter that only some ranks use (an expert that none of a rank's tokens was routed to) is summed at the end of
backward, because ranks that do not use it never run its hook. When backward ends, the ranks compare the parameters that
they summed, in order: a sum of two different parameters of one shape would not fail.
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
from fused_tp.ops.main_grad import is_captured
from fused_tp.parallelizing.graph import REENTRANT, leaves, nodes_of
from fused_tp.parallelizing.marks import MARK

_HOOKED = "_fused_tp_gradient_summed"
GRADIENT_SYNCS = "_fused_tp_gradient_syncs"  # attribute of a model: the objects that sum its gradients


class GradientSync:
    """Makes backward sum the gradients of a model's parameters over `mesh`.

    The hook runs before AccumulateGrad, so it sums only the gradients of one backward, never earlier ones: gradients
    may be accumulated over several backwards. All ranks of `mesh` must compute gradients of the same parameters, except
    for those that `note_use` has found: their gradients are zeros until backward ends.

    Args:
        mean: take the mean of the ranks' gradients instead of their sum.

    Example:
        >>> sync = GradientSync(mesh["cp"])
        >>> sync.watch(model)                   # before each forward
        >>> model(tokens).sum().backward()
    """

    def __init__(self, mesh: DeviceMesh, *, mean: bool = False) -> None:
        self.mesh, self.mean = mesh, mean
        self._partly_used: dict[int, nn.Parameter] = {}  # by id, in the same order on all ranks
        self._held: dict[int, Tensor] = {}  # gradients of these, until backward ends
        self._summed: list[str] = []  # names of the other parameters that this backward has reached
        self._only_asked = False  # backward hands gradients to torch.autograd.grad, and adds them to no parameter
        self._watched: dict[int, nn.Parameter] = {}  # by id, in the same order on all ranks
        # True if gradients stay on this rank for now; the ones that stayed; True if the next backward sums them.
        self.deferring, self._deferred, self._owes = False, set[int](), False
        self.is_off = False
        # Weak reference to the callback at the end of backward, which autograd holds: a backward that raises drops it.
        self._queued: Callable[[], Callable[[], None] | None] = _nothing

    def __reduce__(self) -> Any:
        return partial(GradientSync, mean=self.mean), (self.mesh,)

    def watch(self, model: nn.Module) -> None:
        """Hook every trainable parameter of `model` that has no hook yet.

        Raises:
            ValueError: FSDP2 manages a part of the model and removes gradients before any hook sees them; gradients go
                to `main_grad`; or a parameter was computed from other tensors.
        """
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        of_its_own = [name for name, p in named if getattr(p, "main_grad", None) is not None]
        if of_its_own:
            raise ValueError(
                f"the gradient of {of_its_own[0]!r} goes to its main_grad, which grad_sync=True does not sum over the "
                "context parallel ranks. Pass grad_sync=False to parallelize, and let what reduces main_grad take the "
                "mean over these ranks too; or remove main_grad."
            )
        computed = [name for name, p in named if not p.is_leaf]
        if computed:
            raise ValueError(
                f"{computed[0]!r} was computed from other tensors (torch.func.functional_call and "
                "FullyShardedDataParallel put such parameters in place), whose gradients grad_sync=True might sum a "
                "second time. Give parameters that are leaves (detach().requires_grad_()), or pass grad_sync=False to "
                "parallelize and take the mean over the context parallel ranks."
            )
        missing = [(name, p) for name, p in named if not self._has_hook(p)]
        if missing and any(isinstance(module, FSDPModule) for module in model.modules()):
            raise ValueError(
                "fully_shard was applied to a model that was parallelized with grad_sync=True. Pass grad_sync=False to "
                f"parallelize and a mesh that includes {', '.join(self.mesh.mesh_dim_names or ())!r} to fully_shard, "
                "which then reduces the gradients. (Experts that are distributed over that dim are sharded by "
                "themselves before, over the other dims, or are given in ignored_params.)"
            )
        for name, parameter in missing:
            hooks = parameter._backward_hooks
            if hooks is not None:
                # module.to() may have replaced the tensor; the new one lists the hooks but does not run them.
                for key in [
                    k for k, hook in hooks.items() if getattr(hook, "func", None) in (self._sum, self._take_shares)
                ]:
                    del hooks[key]
                parameter._backward_hooks = hooks
            # Bound by id, not by weak reference: module.to() does not swap tensors that have weak references.
            hook = self._take_shares if is_distributed(parameter, self.mesh) else self._sum
            parameter.register_hook(partial(hook, name, id(parameter)))
            if hook == self._sum:
                self._watched[id(parameter)] = parameter
            setattr(parameter, _HOOKED, id(parameter))

    def _take_shares(self, name: str, key: int, grad: Tensor) -> Tensor:
        """Rescale the gradient of distributed experts. It covers all ranks' tokens, but arrives divided by the number
        of ranks, as a share would. (Terms that a caller adds to the loss are such shares, too.)"""
        return grad if self.mean else grad * self.mesh.size()

    def _has_hook(self, parameter: nn.Parameter) -> bool:
        """True if `parameter` runs our hook. Copies and pickles keep attributes but no hooks, and may reuse the id; a
        tensor that module.to() has put in the parameter's place lists its hooks but does not run them."""
        hooks = (parameter._backward_hooks or {}).values()
        ours = any(getattr(hook, "func", None) in (self._sum, self._take_shares) for hook in hooks)
        return ours and getattr(parameter, _HOOKED, None) == id(parameter)

    @property
    def partly(self) -> bool:
        """True if only some ranks have used some parameters: then every forward needs `note_use`."""
        return bool(self._partly_used)

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Context manager in which each rank keeps its share of the gradients, times the number of ranks. Added to
        earlier sums, the mean over ranks is the total. The next backward outside, or `settle`, takes this mean."""
        outer, self.deferring, self._owes = self.deferring, True, True
        try:
            yield
        finally:
            self.deferring = outer

    @property
    def defers(self) -> bool:
        """True if backward leaves gradients to `settle`, which itself finds out which ranks have them."""
        return self._owes

    @torch.no_grad()
    def settle(self) -> None:
        """Reduce the deferred gradients over the ranks. A collective call."""
        if not self._owes:
            return
        used = [key in self._deferred for key in self._watched]
        self._deferred, self._owes = set(), False
        take_mean(self.mesh, list(self._watched.values()), used)

    def note_use(self, model: nn.Module, outputs: Sequence[Tensor], *, routed: bool) -> None:
        """Find out which parameters only some ranks used for `outputs`. A collective call.

        From then on they are summed at the end of every backward, in one order, because their use changes with the
        batch.

        Args:
            routed: True if the model has experts.

        Raises:
            ValueError: there are such parameters, and hooks or DDP read their gradients in the middle of backward; or a
                reentrant checkpoint in a model with experts hides the used parameters.
        """
        parameters = [p for p in model.parameters() if p.requires_grad and not is_distributed(p, self.mesh)]
        nodes = [node for t in outputs for node in nodes_of(t)]
        used = {id(leaf) for leaf in leaves(nodes)}
        hidden = routed and any(node.name() == REENTRANT for node in nodes)
        here = torch.tensor([*(id(p) in used for p in parameters), hidden], dtype=torch.float32, device="cpu")
        *counts, hidden = all_reduce(here.to(self.mesh.device_type), group=self.mesh).tolist()
        if hidden:
            raise ValueError(
                "a reentrant checkpoint hides which experts a context parallel rank has used; checkpoint with "
                "use_reentrant=False."
            )
        self._partly_used |= {id(p): p for p, n in zip(parameters, counts, strict=True) if 0 < n < self.mesh.size()}
        if self._partly_used:
            self._refuse_onlookers()
            for t in outputs:
                t.register_hook(self._queue)

    def _refuse_onlookers(self) -> None:
        in_ddp = DistributedDataParallel._get_active_ddp_module() is not None
        held = self._partly_used.values()
        if in_ddp or any(len(p._backward_hooks or ()) > 1 or p._post_accumulate_grad_hooks for p in held):
            what = "DistributedDataParallel looks" if in_ddp else "a hook on them looks"
            raise ValueError(
                "only some of the context parallel ranks have used some parameters, whose gradients are summed when "
                f"backward has ended, and {what} at them before. Pass grad_sync=False to parallelize, and reduce the "
                "gradients over a mesh that includes the context parallel ranks, by fully_shard or by "
                "DistributedDataParallel with find_unused_parameters=True."
            )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context manager in which each rank keeps its share of the gradients, except those of distributed experts."""
        self.is_off = True
        try:
            yield
        finally:
            self.is_off = False

    def _sum(self, name: str, key: int, grad: Tensor) -> Tensor:
        if self.is_off:
            return grad
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward was called with create_graph=True; gradients that are summed over context parallel ranks "
                "cannot be differentiated again. Leave create_graph out."
            )
        if not self.deferring:
            self._queue(grad)
        if self._owes:
            self._deferred.add(key)
            return grad if self.mean else grad * self.mesh.size()
        if key not in self._partly_used:
            self._summed.append(name)
            return self._over_ranks(grad)
        self._only_asked |= is_captured(get_gradient_edge(self._partly_used[key]).node)
        # The nested backward of a reentrant checkpoint also runs this hook, so add.
        self._held[key] = self._held[key] + grad if key in self._held else grad
        return torch.zeros_like(grad)

    def _over_ranks(self, grad: Tensor) -> Tensor:
        total = _sum_over(self.mesh, grad)
        return total / self.mesh.size() if self.mean else total

    def _queue(self, grad: Tensor) -> None:
        if self._queued() is None:
            end = partial(self._end)
            self._queued = weakref.ref(end)
            self._held, self._summed, self._only_asked = {}, [], False
            Variable._execution_engine.queue_callback(end)

    @torch.no_grad()
    def _end(self) -> None:
        held, summed, asked = self._held, self._summed, self._only_asked
        self._held, self._queued = {}, _nothing
        if self._owes:
            self.settle()
            return
        self._compare(summed)
        if self._partly_used:
            self._sum_held(held, asked)

    def _compare(self, summed: list[str]) -> None:
        """Compare the summed parameters over the ranks.

        Raises:
            RankMismatchError: on all ranks, if gradients of different parameters were added to each other.
        """
        if is_capturing():
            return
        number = torch.tensor([checksum("\n".join(summed).encode())], dtype=torch.float64, device="cpu")
        numbers = all_gather(number.to(self.mesh.device_type), 0, group=self.mesh).tolist()
        if len(set(numbers)) == 1:
            return
        lists = exchange(resolve_group(self.mesh), "parameters whose gradients were summed", summed)
        other = next(i for i, theirs in enumerate(lists) if theirs != lists[0])
        first, second = next(pair for pair in zip_longest(lists[0], lists[other]) if pair[0] != pair[1])
        raise RankMismatchError(
            f"in one backward the context parallel ranks came to gradients of different parameters (rank 0 to {first!r}"
            f" where rank {other} came to {second!r}), so their sums are mixed up: do not take an optimizer step. "
            "Which parameters this model uses depends on a rank's tokens. Set FUSED_TP_CHECK_BATCH=1, and the ranks "
            "ask each other at every forward pass which they use, as they do for models with 'expert' in a module's "
            "name; use_reentrant=False in checkpoints lets them see it."
        )

    def _sum_held(self, held: dict[int, Tensor], asked: bool) -> None:
        here = [*(key in held for key in self._partly_used), asked]
        *counts, asked = all_reduce(
            torch.tensor(here, dtype=torch.float32, device=self.mesh.device_type), group=self.mesh
        )
        if asked:
            raise ValueError(
                "torch.autograd.grad asked for gradients of parameters that only some of the context parallel ranks "
                "have used. Their sums are known when backward() has ended, in the parameters' grad."
            )
        for (key, parameter), count in zip(self._partly_used.items(), counts, strict=True):
            if not count:
                continue
            total = self._over_ranks(held[key] if key in held else torch.zeros_like(parameter))
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)


def _nothing() -> None:
    return None


def is_distributed(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    """True if `parameter` holds different experts on each rank of `mesh`."""
    if not isinstance(parameter, DTensor):
        return False
    placed = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
    return any(name in (mesh.mesh_dim_names or ()) and placement.is_shard() for name, placement in placed)


@torch.no_grad()
def take_mean(mesh: DeviceMesh, parameters: Sequence[nn.Parameter], used: Sequence[bool]) -> None:
    """Replace gradients that some ranks of `mesh` have by their mean over all its ranks. A collective call.

    Args:
        parameters: the same on all ranks, in the same order.
        used: for each parameter, True if this rank contributes to its gradient.
    """
    here = torch.tensor(used, dtype=torch.float32, device=mesh.device_type)
    counts = all_reduce(here, group=mesh).tolist() if parameters else []
    for parameter, count in zip(parameters, counts, strict=True):
        if count:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = _sum_over(mesh, grad) / mesh.size()


def syncs_of(model: nn.Module) -> list[GradientSync]:
    found = (sync for module in model.modules() for sync in getattr(module, GRADIENT_SYNCS, ()))
    return list({id(sync): sync for sync in found}.values())


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context manager in which backward communicates no gradients; the first backward after it sums all of them.

    Use it for all steps of a gradient accumulation but the last. It covers the context parallel ranks (and expert
    parallel ranks with their own dim) of a model that `parallelize` has made with grad_sync=True, and FSDP2. Until the
    sum, `grad` holds no valid gradient: clip and step after it. `model.no_sync()`, which accelerate and transformers'
    Trainer call, does the same.

    Raises:
        TypeError: `model` was made neither by `parallelize` nor by FSDP2's fully_shard.

    Example:
        >>> for i, batch in enumerate(batches):
        ...     with nullcontext() if i + 1 == len(batches) else fused_tp.no_sync(model):
        ...         model(**batch).loss.backward()
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded and not any(hasattr(module, MARK) for module in model.modules()):
        raise TypeError(f"{type(model).__name__} has not been made parallel by parallelize or fully_shard.")
    with ExitStack() as stack:
        for sync in syncs_of(model):
            stack.enter_context(sync.defer())
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)


def sync_gradients(model: nn.Module) -> None:
    """Sum the gradients of backwards inside `no_sync` over the ranks, if no later backward does.

    All ranks must call it. FSDP2 has no equivalent: its last backward must be outside of `no_sync`.

    Example:
        >>> with fused_tp.no_sync(model):
        ...     for batch in batches:
        ...         model(**batch).loss.backward()
        >>> fused_tp.sync_gradients(model)
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("FSDP2 reduces gradients in backward only; leave the last backward outside of no_sync.")
    for sync in syncs_of(model):
        sync.settle()


@torch.no_grad()
def _sum_over(mesh: DeviceMesh, grad: Tensor) -> Tensor:
    if grad.layout != torch.strided:
        raise ValueError(
            f"backward found a gradient of layout {grad.layout} for a parameter of shape {tuple(grad.shape)}; "
            "grad_sync=True sums dense ones only. Make the embedding with sparse=False."
        )
    own = grad.to_local() if isinstance(grad, DTensor) else grad
    own = own.contiguous()
    if own.is_complex():
        total = torch.view_as_complex(all_reduce(torch.view_as_real(own.resolve_conj()), group=mesh))
    else:
        total = all_reduce(own, group=mesh)
    if not isinstance(grad, DTensor):
        return total
    return DTensor.from_local(
        total, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape, stride=grad.stride()
    )
