"""Whether the ranks that are to share a model have made the same one, asked before it is cut; and whether it is still
the one that was cut."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fused_tp.integrations.batch_check import of_all_ranks
from fused_tp.runtime.checks import is_due
from fused_tp.runtime.errors import RankMismatchError, listed
from fused_tp.transport.base import checksum

# Numbers of a tensor that are compared: weights that were drawn apart differ in each. Some of every row: rows that were
# added to a vocabulary are few.
_SAMPLE, _MOST = 1021, 1 << 20


# Attributes of a parallel model: the Parallelism of each of its modules, and its own Sharding, None without TP ranks.
MARK, SHARDING = "_fused_tp_parallelism", "_fused_tp_sharding"


def is_parallelized(model: nn.Module) -> bool:
    """Whether `parallelize` has made `model`, or a module in it, parallel.

    Hooks such as Lightning's `configure_model` are called more than once, and `parallelize` takes a model once.

    Example:
        >>> if not fused_tp.is_parallelized(self.model):
        ...     fused_tp.parallelize(self.model, self.device_mesh, tp_dim="tensor_parallel")
    """
    return any(hasattr(module, MARK) for module in model.modules())


class ModuleCheck:
    """A forward pre-hook that refuses modules with parameters that were put into a tensor parallel model after it was
    cut, at its first calls and now and then: what they add is that of a rank's part, and nothing fails. Nor does an
    assignment to the `data` of a DTensor, which leaves its numbers as they were.

    Raises:
        ValueError: there is one.
    """

    def __init__(self, parallelism: object, model: nn.Module) -> None:
        self.parallelism = parallelism
        self.calls = 0
        # By id of a DTensor: the id of its part, and the storage that it claims to have, which alone an assignment to
        # `data` changes.
        self._storages: dict[int, tuple[int, int]] = {}
        self._check_data(model)

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.calls += 1
        if not is_due(self.calls):
            return
        self._check_data(model)
        for name, module in model.named_modules():
            own = any(parameter is not None for parameter in module._parameters.values())
            if own and getattr(module, MARK, None) is not self.parallelism:
                raise ValueError(
                    f"{name!r} ({type(module).__name__}) was put into the model after parallelize, so it is not "
                    "parallel. Put it in before; LoRA adapters also after, by "
                    "fused_tp.integrations.peft.parallel_config."
                )

    def _check_data(self, model: nn.Module) -> None:
        now: dict[int, tuple[int, int]] = {}
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                part, storage = now[id(parameter)] = id(parameter._local_tensor), parameter.untyped_storage()._cdata
                before = self._storages.get(id(parameter))
                if before is not None and before[0] == part and before[1] != storage:
                    raise ValueError(
                        f"the data of {name!r} was assigned to, which does not change the numbers of a DTensor. Write "
                        "into it instead: with torch.no_grad(): parameter.copy_(values), where values is a DTensor, or "
                        "parameter.to_local().copy_(part); load_full_state_dict takes full tensors. With "
                        "parameters='plain' data can be assigned to."
                    )
        self._storages = now

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleCheck:
        made = copy.copy(self)  # ids are those of other tensors there
        made.parallelism, made._storages = copy.deepcopy(self.parallelism, memo), {}
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_storages": {}}


def check_equal_models(model: nn.Module, meshes: Sequence[DeviceMesh]) -> None:
    """Compare parameters and persistent buffers over the ranks of `meshes`: names, shapes, dtypes, whether they require
    grad, and a sample of the numbers.

    What a rank holds on the meta device has no numbers to compare, nor has what is not dense.

    Raises:
        RankMismatchError: on all ranks; names what differs and how to make it equal.
    """
    named = chain(model.named_parameters(), _persistent_buffers(model))
    mine = {name: [list(t.shape), str(t.dtype), t.requires_grad, _sample(t)] for name, t in named if _is_plain(t)}
    sums = of_all_ranks(meshes, "a checksum of the model", checksum(repr(mine)))
    if len(set(sums)) == 1:
        return
    ranks = of_all_ranks(meshes, "the model", mine)
    first: dict[str, list[object]] = {}  # what some rank has numbers of, as the first such rank has it
    for theirs in ranks:
        first |= {name: one for name, one in theirs.items() if first.get(name, [None])[-1] is None}
    for i, theirs in enumerate(ranks):
        differ = [name for name in first if not _alike(first[name], theirs.get(name))]
        if differ:
            dims = listed(repr((mesh.mesh_dim_names or ("?",))[0]) for mesh in meshes)
            more = f" and {len(differ) - 4} more" if len(differ) > 4 else ""
            raise RankMismatchError(
                f"the ranks of {dims} have made different models: {listed(map(repr, differ[:4]))}{more} of rank {i} of "
                f"the {len(ranks)} differ from another rank's in shape, dtype, requires_grad or values. Each is to "
                "keep a part of one model. Give all ranks one random state before they make it (torch.manual_seed(0)), "
                "or load the same checkpoint on all of them."
            )


def _alike(one: list[object], other: list[object] | None) -> bool:
    return other is not None and one[:-1] == other[:-1] and (None in (one[-1], other[-1]) or one[-1] == other[-1])


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _is_plain(t: Tensor) -> bool:
    """Whether its numbers lie in its own memory: not those of a DTensor or of another class that dispatches."""
    if is_lazy(t) or type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return t.layout == torch.strided and not (t.is_nested or t.is_quantized)


def _sample(t: Tensor) -> int | None:
    """A checksum of some of the numbers of `t`; None on the meta device, and of numbers of less than a byte."""
    if t.is_meta:
        return None
    with torch._C.DisableTorchFunctionSubclass():  # of a class of parameters with a mind of its own
        t = t.detach()
        if t.ndim and t.numel():
            try:  # by index: flattening would copy all of a transposed tensor
                sample = t[torch.unravel_index(_places(t.shape).to(t.device), t.shape)]
            except NotImplementedError:  # torch does not index numbers of less than a byte
                return None
        else:
            sample = t
        return checksum(sample.resolve_conj().resolve_neg().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())


def _places(shape: torch.Size) -> Tensor:
    """Indices, as if flattened, of some numbers of each row, or of _MOST rows of more, each in other columns."""
    rows, columns = shape[0], shape[1:].numel()
    sampled = min(rows, _MOST)
    each = min(columns, -(-_SAMPLE // sampled))
    row = (torch.arange(sampled) * rows // sampled).unsqueeze(1)
    column = torch.arange(each) * columns // each + row * 7919 % (columns // each)
    return (row * columns + column).flatten()
