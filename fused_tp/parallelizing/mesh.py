"""Meshes over all kinds of parallelism, with the order of dims that torchtitan, accelerate and Megatron use."""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fused_tp.ops.arguments import check_int

# From the outermost to the innermost: the dim that communicates most has the nearest ranks.
ORDER = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")


def make_mesh(
    device_type: str | None = None,
    *,
    pp: int | None = None,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    ep: int | None = None,
    cp: int | None = None,
    tp: int | None = None,
) -> DeviceMesh:
    """Make a DeviceMesh of all ranks with the given dims, in the order of the arguments, the outermost first.

    Ranks along pp hold different layers, ranks along dp_replicate, dp_shard and ep have different batches, and ranks
    along cp and tp share a batch. `fsdp_mesh(mesh)` returns the mesh for fully_shard.

    Args:
        device_type: "cpu", "cuda", ...; None: the type of this machine's accelerator, or "cpu".
        pp, dp_replicate, dp_shard, ep, cp, tp: sizes; -1 for one of them: as many as the ranks allow. A dim of size 1
            is kept, so that code for all sizes can name it.

    Raises:
        TypeError, ValueError: a size is not a positive int, or the product of the sizes is not the number of ranks.

    Example:
        >>> mesh = fused_tp.make_mesh(pp=2, dp_shard=-1, cp=2, tp=8)
    """
    given = dict(zip(ORDER, (pp, dp_replicate, dp_shard, ep, cp, tp), strict=True))
    sizes = {name: size for name, size in given.items() if size is not None}
    if not sizes:
        raise ValueError(f"make_mesh was given no dim; give sizes of some of {', '.join(ORDER)}.")
    for name, size in sizes.items():
        check_int(name, size)
        if size < 1 and size != -1:
            raise ValueError(f"{name}={size}; a size is at least 1, or -1 for as many as the ranks allow.")
    if not dist.is_initialized():
        raise ValueError("make_mesh needs a process group; call torch.distributed.init_process_group() before.")
    world, known = dist.get_world_size(), prod(size for size in sizes.values() if size > 0)
    open_dims = [name for name, size in sizes.items() if size == -1]
    if len(open_dims) > 1:
        raise ValueError(f"{' and '.join(open_dims)} are both -1; the number of ranks determines one of them only.")
    if world % known if open_dims else world != known:
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 0) or "1"
        raise ValueError(
            f"{shown} is {known}, and there are {world} ranks"
            + (f", which leaves no whole number for {open_dims[0]}." if open_dims else "; the product must be equal.")
        )
    for name in open_dims:
        sizes[name] = world // known
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device_type = "cpu" if accelerator is None else accelerator.type
    usable = getattr(getattr(torch, device_type, None), "is_available", None)
    if usable is None or not usable():
        raise ValueError(
            f"device_type is {device_type!r}, and torch {torch.__version__} finds no such device here. Pass 'cpu', or "
            "leave device_type out for the devices that this machine has."
        )
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for `fully_shard` of a model over `mesh`: parameters are sharded over dp_shard and cp.

    Like data parallel ranks, context parallel ranks hold the same parameters and gradients of different tokens. A
    dp_replicate dim in front makes it HSDP. Pass grad_sync=False to `parallelize`, which leaves the mean over these
    ranks to FSDP2.

    Args:
        mesh: a mesh of `make_mesh`, or one with dims of these names.

    Raises:
        ValueError: `mesh` has neither dp_shard nor cp; or expert parallel ranks, whose experts differ.

    Example:
        >>> mesh = fused_tp.make_mesh(dp_shard=-1, cp=2, tp=4)
        >>> fused_tp.parallelize(model, mesh, grad_sync=False)
        >>> for layer in model.model.layers:
        ...     fully_shard(layer, mesh=fused_tp.fsdp_mesh(mesh))
        >>> fully_shard(model, mesh=fused_tp.fsdp_mesh(mesh))
    """
    names = mesh.mesh_dim_names or ()
    if "ep" in names and mesh["ep"].size() > 1:
        raise ValueError(
            "mesh has expert parallel ranks, which hold other experts: shard these over the data parallel dims alone, "
            "and the rest of the model over all of them."
        )
    sharded = tuple(name for name in ("dp_shard", "cp") if name in names)
    if not sharded:
        raise ValueError(f"mesh has the dims {names or 'without names'}; fully_shard needs 'dp_shard' or 'cp'.")
    over = mesh[sharded]._flatten("fsdp") if len(sharded) > 1 else mesh[sharded[0]]
    if "dp_replicate" not in names or mesh["dp_replicate"].size() == 1:
        return over
    if len(sharded) == 1:
        return mesh["dp_replicate", sharded[0]]
    # Not mesh["dp_replicate", "fsdp"]: torch warns of slices by the name of a flattened dim.
    return DeviceMesh._concatenate([mesh["dp_replicate"], over])
