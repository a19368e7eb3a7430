"""Modules with replicated parameters, such as norms that run on a shard of the sequence.

Under sequence parallelism each rank sees only its own tokens, so it has one term of the gradient of a norm's weight.
`reduce_grad` sums the terms during backward. So the gradient is complete when `backward()` returns, as in all layers of
this package.
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
    """Return `parameter` as a local tensor whose gradient backward sums over the ranks of `group`."""
    return copy_to_group(local(parameter), group=group)


def sequence_parallel_(module: ModuleT, mesh: DeviceMesh) -> ModuleT:
    """Prepare `module` in place to run on this rank's shard of the sequence, and return it.

    The module must process each token independently, and have no submodules. Its parameters become replicated DTensors
    under the same names, whose gradients are complete when backward returns. Its class is replaced by a subclass. A
    module without parameters (nn.Dropout) does not change.

    Raises:
        TypeError: a parameter is a DTensor already.
        ValueError: `module` has submodules, or `mesh` is not 1-D.
    """
    check_mesh(mesh)
    if next(module.children(), None) is not None:
        raise ValueError(
            f"{type(module).__name__} has submodules, which sequence_parallel_ does not support. Call it on each "
            "submodule that has parameters."
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise TypeError(f"{name} of {type(module).__name__} is a DTensor. Pass a module with plain parameters.")
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
    """Convert the plain parameters of `module`, without its submodules, to DTensors. Return True if it has any.

    The forward of `module` still sees plain local tensors: the module's class is replaced by a subclass that provides
    them. Rejected: a wrapper of the instance's forward that writes to its parameters, which torch.compile cannot trace
    inside selective checkpointing.

    Args:
        mesh: mesh over which gradients of replicated parameters are summed.
        memo: see `Memo`.
        sums: called at each forward; returns True if the gradients of this pass must be summed over `mesh`.
        shards: the module's parameters that are sharded, by name; all other parameters are replicated.
        read: parameters of submodules that this module's forward reads directly, by path, each with its own `sums`.
        parameter_mesh: mesh of the DTensors, whose last dim is `mesh`, and whose other dims shard dim 0; default:
            `mesh`.
    """
    plain = {name: p for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)}
    for name, parameter in plain.items():
        placement: Placement | PartsShard = (shards or {}).get(name, Replicate())
        module.register_parameter(name, shard_parameter(parameter, parameter_mesh or mesh, placement, memo))
    if plain or read:
        replicated = cast(Any, module)
        replicated._grad_mesh = mesh
        # Pairs (function that returns True if gradients are summed, names of the parameters for which it decides).
        replicated._grad_sums = [
            (sums, tuple(plain)),
            *((sums_one, (name,)) for name, sums_one in (read or {}).items()),
        ]
        replicated._parts_dims = {name: dim for name, (dim, parts) in (shards or {}).items() if parts > 1}
        # A forward on the instance (transformers sets kernels from the hub there) would hide the subclass's forward.
        replicated._own_forward = module.__dict__.pop("forward", None)
        replicated.__class__ = _replicated(replicated.__class__)
    return bool(plain)


@cache
def _replicated(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` whose forward computes with plain local parameters."""

    @wraps(kind.forward)  # keeps the signature, which transformers reads
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Tensor] = {}
        for sums, names in self._grad_sums:
            summed = bool(names) and sums()
            for name in names:
                owner, _, leaf = name.rpartition(".")
                holder = self.get_submodule(owner)
                parameter = holder._parameters[leaf]  # a plain tensor after plain_parameters_, or in a nested call
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
        # `own` is empty in a nested call, which finds local tensors, so gradients are not summed twice. It is empty too
        # if a caller has replaced the parameters by plain tensors: their gradients are this rank's terms.
        if not own:
            return kind.forward(self, *args, **kwargs)
        with _reparametrize_module(self, own):
            if self._own_forward is not None:
                return self._own_forward(*args, **kwargs)
            return kind.forward(self, *args, **kwargs)

    def reduce(self: nn.Module) -> Any:
        return _new_of, (kind,), self.__getstate__()

    # The class keeps its old name, by which libraries identify layers (wrapping policies, initialization). Pickle would
    # find the old class by that name, so `__reduce__` creates the subclass again.
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": reduce}
    return type(kind.__name__, (kind,), {"forward": forward, **named})


def _new_of(kind: Any) -> nn.Module:
    """Return an empty instance of the class that `replicate_own` derives from `kind`, for unpickling."""
    return object.__new__(_replicated(kind))
