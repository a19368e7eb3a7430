"""Find and check the dims of the mesh that `parallelize` shards over, and split them for Ulysses attention."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.backends.hierarchical.two_level import split_by_host
from fused_tp.core.availability import Availability
from fused_tp.core.group import check_mesh_order, resolve_group
from fused_tp.ops.arguments import check_int
from fused_tp.parallelizing.shard_plan import head_counts, is_kv_count

_HEADS_PER_LAYER = "num_attention_heads_per_layer"  # config attribute of models whose layers differ in number of heads


def find_dim_meshes(
    mesh: DeviceMesh, tp_dim: str, cp_dim: str, ep_dim: str | None
) -> tuple[DeviceMesh | None, DeviceMesh | None, DeviceMesh | None]:
    """Return the 1-D meshes of `tp_dim`, `cp_dim` and `ep_dim`; None for a dim that is missing or has one rank.

    If `ep_dim` equals `tp_dim` or `cp_dim`, its mesh is the same object.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh, got {type(mesh).__name__}. Use torch.distributed.init_device_mesh."
        )
    names = mesh.mesh_dim_names or ()
    if tp_dim == cp_dim:
        raise ValueError(f"tp_dim and cp_dim must be different dims of the mesh, got {tp_dim!r} for both.")
    if ep_dim is not None and ep_dim not in names:
        raise ValueError(f"ep_dim must be a dim of the mesh, {names or 'which has no dim names'}, got {ep_dim!r}.")
    if tp_dim not in names and cp_dim not in names and ep_dim is None:
        raise ValueError(
            f"mesh must have a dim {tp_dim!r} or {cp_dim!r}, got {names or 'dims without names'}. Create it by "
            f"init_device_mesh(device_type, sizes, mesh_dim_names=({cp_dim!r}, {tp_dim!r})), or pass tp_dim= and "
            "cp_dim= with the names of its dims."
        )
    if mesh.get_coordinate() is None:
        raise ValueError("mesh does not contain this rank. Call parallelize on the ranks of the mesh only.")
    dims = dict.fromkeys(dim for dim in (ep_dim, cp_dim, tp_dim) if dim in names)
    check_mesh_order(mesh, tuple(names.index(dim) for dim in dims if dim is not None))
    meshes = {dim: mesh[dim] for dim in dims if dim is not None and mesh[dim].size() > 1}
    if ep_dim in meshes and ep_dim not in (cp_dim, tp_dim) and cp_dim in meshes:
        raise ValueError(
            f"ep_dim={ep_dim!r} is not supported with context parallel ranks. Use ep_dim={cp_dim!r} to distribute "
            f"experts over these, or ep_dim={tp_dim!r} to distribute them over tensor parallel ranks."
        )
    return meshes.get(tp_dim), meshes.get(cp_dim), None if ep_dim is None else meshes.get(ep_dim)


def check_ulysses(model: nn.Module, size: int, cp_size: int, tp_size: int) -> None:
    """Check that `size`, the `ulysses_size`, divides the context parallel ranks and each TP rank's heads.

    Raises:
        ValueError: `size` does not divide them; the message lists the supported sizes.
    """
    check_int("ulysses_size", size, 1)
    if cp_size % size:
        sizes = [n for n in range(1, cp_size + 1) if cp_size % n == 0]
        raise ValueError(
            f"ulysses_size must divide the {cp_size} context parallel ranks, got {size}. Use one of "
            f"{', '.join(map(str, sizes))}."
        )
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    counts = [(name, num_heads) for name, num_heads in head_counts(config).items() if not is_kv_count(name)]
    counts += [
        (_HEADS_PER_LAYER, num_heads) for num_heads in sorted({*(getattr(text_config, _HEADS_PER_LAYER, None) or ())})
    ]
    uneven_count = next((f"{name}={num_heads}" for name, num_heads in counts if num_heads % (size * tp_size)), None)
    if size > 1 and uneven_count is not None:
        divisors = (n for n in range(2, cp_size + 1) if cp_size % n == 0)
        usable_divisors = [n for n in divisors if all(num_heads % (n * tp_size) == 0 for _, num_heads in counts)]
        sizes = [1, *usable_divisors]  # a ring without Ulysses supports any number of heads
        raise ValueError(
            f"{type(model).__name__} has {uneven_count}, which is not a multiple of {tp_size} tensor parallel ranks "
            f"times ulysses_size={size}. Use one of these values of ulysses_size: {', '.join(map(str, sizes))}."
        )


def split_for_ulysses(mesh: DeviceMesh, ulysses_size: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Split a 1-D mesh into groups of `ulysses_size` consecutive ranks, and rings across these groups.

    Returns this rank's group, and the ring of ranks with the same index in each group (None for one group), as meshes:
    unlike process groups, meshes can be copied with the model.
    """
    if ulysses_size == mesh.size():
        return mesh, None
    groups = split_by_host(resolve_group(mesh), ulysses_size)
    if isinstance(groups, Availability):
        raise ValueError(
            f"ulysses_size={ulysses_size} needs subgroups of the {mesh.size()} context parallel ranks, but "
            f"{groups.reason}. Pass ulysses_size={mesh.size()} or 1."
        )
    inner, ring = (
        DeviceMesh.from_group(group.process_group, mesh.device_type, mesh_dim_names=(name,))
        for name, group in zip(("ulysses", "ring"), groups, strict=True)
        if group.process_group is not None
    )
    return inner, ring


def expert_tp_mesh(mesh: DeviceMesh, ep_dim: str, tp_mesh: DeviceMesh) -> DeviceMesh:
    """Return the 2-D mesh of the expert parallel and tensor parallel ranks."""
    names, (tp_dim,) = mesh.mesh_dim_names or (), tp_mesh.mesh_dim_names or ("",)
    if names.index(ep_dim) > names.index(tp_dim):
        raise ValueError(
            f"mesh must have {ep_dim!r} before {tp_dim!r}, got {names}: tensor parallel ranks hold shards of the same "
            "experts. Reorder the dims."
        )
    return mesh[ep_dim, tp_dim]
