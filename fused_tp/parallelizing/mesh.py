"""Make meshes with a dim for each kind of parallelism, in the order that torchtitan, accelerate and Megatron use."""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fused_tp.ops.arguments import check_int

# Outermost dim first: the more a dim communicates, the nearer its ranks are, so tp is the innermost.
DIM_ORDER = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")


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
        pp, dp_replicate, dp_shard, ep, cp, tp: sizes. One of them may be -1: it is computed from the number of ranks. A
            dim of size 1 is kept, so that code can refer to it by name whatever its size.

    Raises:
        TypeError, ValueError: a size is not a positive int, or the product of the sizes is not the number of ranks.

    Example:
        >>> mesh = fused_tp.make_mesh(pp=2, dp_shard=-1, cp=2, tp=8)
    """
    requested_sizes = dict(zip(DIM_ORDER, (pp, dp_replicate, dp_shard, ep, cp, tp), strict=True))
    sizes = {name: size for name, size in requested_sizes.items() if size is not None}
    if not sizes:
        raise ValueError(f"make_mesh got no dims. Pass the size of at least one of {', '.join(DIM_ORDER)}.")
    for name, size in sizes.items():
        check_int(name, size)
        if size < 1 and size != -1:
            raise ValueError(f"{name} must be at least 1, or -1 to compute it from the number of ranks; got {size}.")
    if not dist.is_initialized():
        raise ValueError("make_mesh needs a process group. Call torch.distributed.init_process_group() first.")
    world_size, known_product = dist.get_world_size(), prod(size for size in sizes.values() if size > 0)
    inferred_dims = [name for name, size in sizes.items() if size == -1]
    if len(inferred_dims) > 1:
        raise ValueError(f"Only one dim can be -1, got {' and '.join(inferred_dims)}. Pass the sizes of the others.")
    if world_size % known_product if inferred_dims else world_size != known_product:
        product_text = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 0) or "1"
        raise ValueError(
            f"{product_text} is {known_product}, but there are {world_size} ranks"
            + (
                f", which is not a multiple, so {inferred_dims[0]}=-1 cannot be computed. Change the sizes."
                if inferred_dims
                else ". The product of the sizes must equal the number of ranks."
            )
        )
    for name in inferred_dims:
        sizes[name] = world_size // known_product
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device_type = "cpu" if accelerator is None else accelerator.type
    is_available = getattr(getattr(torch, device_type, None), "is_available", None)
    if is_available is None or not is_available():
        raise ValueError(
            f"device_type is {device_type!r}, but torch {torch.__version__} finds no such device on this machine. Pass "
            "'cpu', or omit device_type to use this machine's accelerator."
        )
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for `fully_shard` of a model over `mesh`: parameters are sharded over dp_shard and cp.

    Like data parallel ranks, context parallel ranks hold the same parameters and gradients of different tokens. With a
    dp_replicate dim the mesh is 2-D, for HSDP. Pass grad_sync=False to `parallelize`, so that FSDP2 takes the mean over
    these ranks.

    Args:
        mesh: a mesh from `make_mesh`, or another one with the same names of dims.

    Raises:
        ValueError: `mesh` has neither dp_shard nor cp; or it has expert parallel ranks, whose experts differ.

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
            "fsdp_mesh does not support a mesh with expert parallel ranks, which hold different experts. Call "
            "fully_shard on the experts over the data parallel dims alone, and on the rest of the model over the data "
            "parallel dims and 'ep'."
        )
    sharded_dims = tuple(name for name in ("dp_shard", "cp") if name in names)
    if not sharded_dims:
        raise ValueError(
            f"mesh must have a dim 'dp_shard' or 'cp' for fully_shard, got {names or 'dims without names'}."
        )
    shard_mesh = mesh[sharded_dims]._flatten("fsdp") if len(sharded_dims) > 1 else mesh[sharded_dims[0]]
    if "dp_replicate" not in names or mesh["dp_replicate"].size() == 1:
        return shard_mesh
    if len(sharded_dims) == 1:
        return mesh["dp_replicate", sharded_dims[0]]
    # Rejected: mesh["dp_replicate", "fsdp"]. torch warns about slicing by the name of a flattened dim.
    return DeviceMesh._concatenate([mesh["dp_replicate"], shard_mesh])
