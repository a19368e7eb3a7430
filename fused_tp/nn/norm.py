"""Modules with replicated parameters: norms, above all those that run on a part of the sequence.

Under sequence parallelism each rank sees only its tokens, so its gradient of a norm's weight is one term of a sum.
`reduce_grad` adds the terms inside the backward; the parameter's gradient is complete when `backward()` returns, as in
all layers of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils.stateless import _reparametrize_module

from fused_tp.core.group import GroupLike
from fused_tp.nn.optimizers import PLAIN_SHARDINGS
from fused_tp.nn.sharding import Memo, PartsShard, check_mesh, local, shard_parameter
from fused_tp.ops.collectives import copy_to_group

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def reduce_grad(parameter: Tensor, group: GroupLike) -> Tensor:
    """Return `parameter` (of a DTensor the local tensor); its gradient is summed over the ranks of `group`."""
    return copy_to_group(local(parameter), group=group)


def sequence_parallel_(module: ModuleT, mesh: DeviceMesh) -> ModuleT:
    """Prepare `module` in place to run on this rank's part of the sequence, and return it.

    For modules without submodules that process each token by itself. Parameters become replicated DTensors under the
    same names; their gradients are complete after a plain backward. The module's class becomes a subclass of its old
    class. Modules without parameters (nn.Dropout) do not change.

    Raises:
        TypeError: a parameter is a DTensor already.
        ValueError: `module` has submodules, or `mesh` is not 1-D.
    """
    check_mesh(mesh)
    if next(module.children(), None) is not None:
        raise ValueError(
            f"{type(module).__name__} has submodules; call sequence_parallel_ on those that hold parameters."
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise TypeError(f"{name} of this {type(module).__name__} is a DTensor already; give the whole module.")
    replicate_own(module, mesh, None, sums=_always)
    return module


def _always() -> bool:
    return True


def replicate_own(
    module: nn.Module,
    mesh: DeviceMesh,
    memo: Memo | None,
    *,
    sums: Callable[[], bool],
    shards: Mapping[str, PartsShard] | None = None,
    read: Mapping[str, Callable[[], bool]] | None = None,
    parameter_mesh: DeviceMesh | None = None,
) -> bool:
    """Convert the plain parameters of `module` itself to DTensors; its forward sees plain local tensors.

    Returns True if there were any. Each forward calls `sums` to ask whether the gradients of this pass are to be summed
    over `mesh`. `shards` names the module's own parameters that are sharded. `parameter_mesh` is a mesh whose last dim
    is `mesh`, and over whose first dim the parameters are sharded. `read` names parameters of submodules that this
    module's forward reads by itself, each with the `sums` of its owner. The module's class becomes a subclass of its
    old class. Rejected: wrapping the instance's forward and writing to its parameters there, which torch.compile cannot
    trace inside selective checkpointing.
    """
    plain = {name: p for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)}
    for name, parameter in plain.items():
        placement: Placement | PartsShard = (shards or {}).get(name, Replicate())
        module.register_parameter(name, shard_parameter(parameter, parameter_mesh or mesh, placement, memo))
    if plain or read:
        replicated = cast(Any, module)
        replicated._grad_mesh = mesh
        # Each `sums`, and the parameters that it is asked for.
        replicated._asks = [
            (sums, tuple(plain)),
            *((asks, (name,)) for name, asks in (read or {}).items()),
        ]
        replicated._parts_dims = {name: dim for name, (dim, parts) in (shards or {}).items() if parts > 1}
        # A forward set on the instance, as transformers sets kernels from the hub, would hide that of the class.
        replicated._own_forward = module.__dict__.pop("forward", None)
        replicated.__class__ = _replicated(replicated.__class__)
    return bool(plain)


@cache
def _replicated(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `kind` whose forward computes with plain local parameters."""

    @wraps(kind.forward)  # keeps the signature, which transformers reads
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Tensor] = {}
        for sums, names in self._asks:
            summed = bool(names) and sums()
            for name in names:
                owner, _, leaf = name.rpartition(".")
                holder = self.get_submodule(owner)
                parameter = holder._parameters[leaf]  # may be a plain tensor by now
                if isinstance(parameter, DTensor):
                    placement = parameter.placements[-1]
                elif isinstance(parameter, nn.Parameter) and leaf in getattr(holder, PLAIN_SHARDINGS, {}):
                    placement = getattr(holder, PLAIN_SHARDINGS)[leaf].placement
                else:
                    continue
                if summed and placement.is_replicate():
                    own[name] = reduce_grad(parameter, self._grad_mesh)
                elif isinstance(parameter, DTensor) or name in self._parts_dims:
                    own[name] = local(parameter)
        for name, dim in self._parts_dims.items():
            if name in own:
                own[name] = own[name].flatten(dim, dim + 1)
        # A nested call finds local tensors, which are not summed again. Nor are plain tensors that a caller has put in
        # place of the parameters: their gradients are this rank's terms.
        if not own:
            return kind.forward(self, *args, **kwargs)
        with _reparametrize_module(self, own):
            if self._own_forward is not None:
                return self._own_forward(*args, **kwargs)
            return kind.forward(self, *args, **kwargs)

    def reduce(self: nn.Module) -> Any:
        return _new_of, (kind,), self.__getstate__()

    # The class keeps its old name, by which libraries identify layers (wrapping policies, initial weights). Pickle
    # finds classes by name, so `__reduce__` says how to rebuild it.
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": reduce}
    return type(kind.__name__, (kind,), {"forward": forward, **named})


def _new_of(kind: Any) -> nn.Module:
    """A module without state, of the class that `replicate_own` derives from `kind`."""
    return object.__new__(_replicated(kind))
