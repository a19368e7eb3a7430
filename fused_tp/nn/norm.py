"""Modules that run on a part of the sequence with parameters that every rank has: norms under sequence parallelism.

Each rank sees only its tokens, so the gradient it finds for a norm's weight is one term of a sum. `reduce_grad` adds the
terms inside the backward; the gradient of the parameter is complete when `backward()` returns, as everywhere here.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils.stateless import _reparametrize_module

from fused_tp.nn.sharding import Memo, check_mesh, shard_parameter
from fused_tp.ops.collectives import copy_to_group
from fused_tp.runtime.group import GroupLike

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def reduce_grad(parameter: Tensor, group: GroupLike) -> Tensor:
    """`parameter` itself; its gradient is summed over the ranks of `group`.

    Takes a plain tensor or a DTensor (of which it returns the local part), any shape and floating point dtype. For what
    all ranks have but each uses on its own tokens or heads.

    Example:
        >>> y = F.rms_norm(x_shard_m, (hidden,), reduce_grad(norm.weight, group))
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return copy_to_group(local, group=group)


class _PartialGradModule(nn.Module):
    """Mixed into the class of a module whose own parameters get their gradients summed over `_grad_mesh`."""

    _grad_mesh: DeviceMesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = {
            name: reduce_grad(parameter, self._grad_mesh)
            for name, parameter in self._parameters.items()
            if parameter is not None
        }
        with _reparametrize_module(self, own):
            return super().forward(*args, **kwargs)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def sequence_parallel_(module: ModuleT, mesh: DeviceMesh, memo: Memo | None = None) -> ModuleT:
    """Prepares, in place, a module without submodules that will see only this rank's part of the sequence.

    For nn.LayerNorm, nn.RMSNorm and any module that treats tokens alike. Its parameters become replicated DTensors on
    `mesh`, under the same names; their gradients are complete after a plain backward. Returns `module`, whose class is
    now a subclass of what it was. Modules without parameters (nn.Dropout) are returned as they are.

    Raises:
        TypeError: a parameter is a DTensor already.
        ValueError: `module` has submodules, or `mesh` is not 1-D.

    Example:
        >>> block.norm = sequence_parallel_(nn.RMSNorm(512), mesh["tp"])
        >>> normed_shard_m = block.norm(x_shard_m)
    """
    check_mesh(mesh)
    if next(module.children(), None) is not None:
        raise ValueError(f"{type(module).__name__} has submodules; call sequence_parallel_ on those that hold parameters.")
    if not any(parameter is not None for parameter in module._parameters.values()):
        return module
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            module.register_parameter(name, shard_parameter(parameter, mesh, Replicate(), memo))
    kind = type(module)
    if kind not in _classes:
        _classes[kind] = type(f"SequenceParallel{kind.__name__}", (_PartialGradModule, kind), {})
    module._grad_mesh = mesh  # type: ignore[assignment]  # nn.Module declares attributes as Tensor | Module
    module.__class__ = _classes[kind]
    return module
