"""Modules with replicated parameters, such as norms that run on a shard of the sequence.

Under sequence parallelism each rank sees only its own tokens, so it has one term of the gradient of a norm's weight.
`with_reduced_grad` sums the terms during backward. So the gradient is complete when `backward()` returns, as in all
layers of this package.
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
from fused_tp.nn.feature_exchange import FeatureExchange
from fused_tp.nn.optimizers import PLAIN_SHARDINGS
from fused_tp.nn.sharding import Memo, PartsShard, check_mesh, local_shard, renamed_error, shard_parameter
from fused_tp.ops.collectives import copy_to_group

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def with_reduced_grad(parameter: Tensor, group: GroupLike) -> Tensor:
    """Return the local tensor of `parameter`. Backward sums its gradient over the ranks of `group`."""
    return copy_to_group(local_shard(parameter), group=group)


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
            f"{type(module).__name__} has submodules, which sequence_parallel_ does not support. Call "
            "sequence_parallel_ on each submodule that has parameters."
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise TypeError(f"{name} of {type(module).__name__} is a DTensor. Pass a module with plain parameters.")
    replicate_own_parameters(module, mesh, None, sums_gradients=_always_true)
    return module


def _always_true() -> bool:
    return True


def replicate_own_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    memo: Memo | None,
    *,
    sums_gradients: Callable[[], bool],
    shards: Mapping[str, PartsShard] | None = None,
    read_parameters: Mapping[str, Callable[[], bool]] | None = None,
    parameter_mesh: DeviceMesh | None = None,
    exchanges: Mapping[str, FeatureExchange] | None = None,
) -> bool:
    """Convert the plain parameters of `module`, without its submodules, to DTensors. Return True if it has any.

    The forward of `module` still sees plain local tensors: the module's class is replaced by a subclass that provides
    them. Rejected: a wrapper of the instance's forward that writes to its parameters, which torch.compile cannot trace
    inside selective checkpointing.

    Args:
        mesh: mesh over which gradients of replicated parameters are summed.
        memo: see `Memo`.
        sums_gradients: called at each forward; returns True if the gradients of this pass must be summed over `mesh`.
        shards: the module's parameters that are sharded, by name; all other parameters are replicated.
        read_parameters: parameters of submodules that this module's forward reads directly, by path, each with a
            function like `sums_gradients`.
        parameter_mesh: mesh of the DTensors, whose last dim is `mesh`, and whose other dims shard dim 0; default:
            `mesh`.
        exchanges: by name of a sharded parameter, the exchange after which forward sees the elements that it needs.
    """
    plain_parameters = {
        name: p for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)
    }
    for name, parameter in plain_parameters.items():
        placement: Placement | PartsShard = (shards or {}).get(name, Replicate())
        module.register_parameter(name, shard_parameter(parameter, parameter_mesh or mesh, placement, memo))
    if plain_parameters or read_parameters:
        replicated_module = cast(Any, module)
        replicated_module._grad_mesh = mesh
        # Pairs (function that returns True if gradients are summed, names of the parameters for which it decides).
        replicated_module._grad_sums = [
            (sums_gradients, tuple(plain_parameters)),
            *((sums_parameter, (name,)) for name, sums_parameter in (read_parameters or {}).items()),
        ]
        replicated_module._packed_parameter_dims = {
            name: dim for name, (dim, num_parts) in (shards or {}).items() if num_parts > 1
        }
        replicated_module._parameter_exchanges = dict(exchanges or {})
        # A forward on the instance (transformers sets kernels from the hub there) would hide the subclass's forward.
        replicated_module._instance_forward = module.__dict__.pop("forward", None)
        replicated_module.__class__ = _replicated_class(replicated_module.__class__)
    return bool(plain_parameters)


@cache
def _replicated_class(module_class: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `module_class` whose forward computes with plain local parameters."""

    @wraps(module_class.forward)  # keeps the signature, which transformers reads
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        local_parameters: dict[str, Tensor] = {}
        packed_dims: dict[str, int] = {}
        for sums_gradients, names in self._grad_sums:
            is_summed = bool(names) and sums_gradients()
            for name in names:
                owner_path, _, attribute = name.rpartition(".")
                owner_module = self.get_submodule(owner_path)
                # A plain tensor after plain_parameters_, or in a nested call. Not in `_parameters` after pruning, which
                # computes it from a parameter of another name before each forward.
                parameter = getattr(owner_module, attribute, None)
                if isinstance(parameter, DTensor):
                    placement = parameter.placements[-1]
                elif attribute not in (plain_shardings := getattr(owner_module, PLAIN_SHARDINGS, {})):
                    continue
                elif attribute not in owner_module._parameters:
                    raise renamed_error(owner_module, attribute)
                elif isinstance(parameter, nn.Parameter):
                    placement = plain_shardings[attribute].placement
                else:
                    continue
                packed_dim = getattr(owner_module, "_packed_parameter_dims", {}).get(attribute)
                if is_summed and placement.is_replicate():
                    local_parameters[name] = with_reduced_grad(parameter, self._grad_mesh)
                elif isinstance(parameter, DTensor) or packed_dim is not None or name in self._parameter_exchanges:
                    local_parameters[name] = local_shard(parameter)
                if packed_dim is not None:
                    packed_dims[name] = packed_dim
        for name, exchange in self._parameter_exchanges.items():
            if name in local_parameters:
                local_parameters[name] = exchange(local_parameters[name], self._grad_mesh)
        for name, dim in packed_dims.items():
            local_parameters[name] = local_parameters[name].flatten(dim, dim + 1)
        # `local_parameters` is empty in a nested call, which finds local tensors, so gradients are not summed twice. It
        # is also empty if a caller has replaced the parameters by plain tensors: their gradients are this rank's terms.
        if not local_parameters:
            return module_class.forward(self, *args, **kwargs)
        with _reparametrize_module(self, local_parameters):
            if self._instance_forward is not None:
                return self._instance_forward(*args, **kwargs)
            return module_class.forward(self, *args, **kwargs)

    def reduce(self: nn.Module) -> Any:
        return _new_replicated, (module_class,), self.__getstate__()

    # The class keeps its old name, by which libraries identify layers (wrapping policies, initialization). Pickle would
    # find the old class by that name, so `__reduce__` creates the subclass again.
    class_attributes = {
        "__module__": module_class.__module__,
        "__qualname__": module_class.__qualname__,
        "__reduce__": reduce,
    }
    return type(module_class.__name__, (module_class,), {"forward": forward, **class_attributes})


def _new_replicated(module_class: Any) -> nn.Module:
    """Return an empty instance of the subclass that `replicate_own_parameters` derives, for unpickling."""
    return object.__new__(_replicated_class(module_class))
