"""Dims of the mesh that `parallelize` shards over: found by name, checked, and split for Ulysses attention."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.backends.hierarchical.two_level import split
from fused_tp.core.availability import Availability
from fused_tp.core.group import check_mesh_order, resolve_group
from fused_tp.ops.arguments import check_int
from fused_tp.parallelizing.shard_plan import head_counts, is_of_keys

_HEADS_OF_LAYERS = "num_attention_heads_per_layer"  # in configs whose layers have different numbers of heads


def find_dims(
    mesh: DeviceMesh, tp_dim: str, cp_dim: str, ep_dim: str | None
) -> tuple[DeviceMesh | None, DeviceMesh | None, DeviceMesh | None]:
    """1-D meshes of these dims; None for a dim that is missing or has one rank. The mesh of `ep_dim` is one of the
    others if it names the same dim."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh, not {type(mesh).__name__}; see torch.distributed.init_device_mesh."
        )
    names = mesh.mesh_dim_names or ()
    if tp_dim == cp_dim:
        raise ValueError(f"tp_dim and cp_dim are both {tp_dim!r}; they must be different dims of the mesh.")
    if ep_dim is not None and ep_dim not in names:
        raise ValueError(f"ep_dim is {ep_dim!r}, and mesh has the dims {names or 'without names'}; name one of them.")
    if tp_dim not in names and cp_dim not in names and ep_dim is None:
        raise ValueError(
            f"mesh has the dims {names or 'without names'}, and neither {tp_dim!r} nor {cp_dim!r} is one of them; make "
            f"it with init_device_mesh(device_type, sizes, mesh_dim_names=({cp_dim!r}, {tp_dim!r})) or pass tp_dim= "
            "and cp_dim=."
        )
    if mesh.get_coordinate() is None:
        raise ValueError("mesh does not contain this rank; only its members can hold a part of the model.")
    dims = dict.fromkeys(dim for dim in (ep_dim, cp_dim, tp_dim) if dim in names)
    check_mesh_order(mesh, tuple(names.index(dim) for dim in dims if dim is not None))
    meshes = {dim: mesh[dim] for dim in dims if dim is not None and mesh[dim].size() > 1}
    if ep_dim in meshes and ep_dim not in (cp_dim, tp_dim) and cp_dim in meshes:
        raise ValueError(
            f"ep_dim={ep_dim!r} next to context parallel ranks is not served; distribute experts over these, "
            f"ep_dim={cp_dim!r}, or over the tensor parallel ones."
        )
    return meshes.get(tp_dim), meshes.get(cp_dim), None if ep_dim is None else meshes.get(ep_dim)


def check_ulysses(model: nn.Module, size: int, cp_size: int, tp_size: int) -> None:
    """Refuse an `ulysses_size` that divides neither the ranks nor the heads, and name the sizes that work."""
    check_int("ulysses_size", size, 1)
    if cp_size % size:
        sizes = [n for n in range(1, cp_size + 1) if cp_size % n == 0]
        raise ValueError(
            f"ulysses_size is {size}, which does not divide the {cp_size} context parallel ranks. Sizes that work: "
            f"{', '.join(map(str, sizes))}."
        )
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    counts = [(name, heads) for name, heads in head_counts(config).items() if not is_of_keys(name)]
    counts += [(_HEADS_OF_LAYERS, heads) for heads in sorted({*(getattr(text, _HEADS_OF_LAYERS, None) or ())})]
    uneven = next((f"{name}={heads}" for name, heads in counts if heads % (size * tp_size)), None)
    if size > 1 and uneven is not None:
        shares = (n for n in range(2, cp_size + 1) if cp_size % n == 0)
        shared = [n for n in shares if all(heads % (n * tp_size) == 0 for _, heads in counts)]
        sizes = [1, *shared]  # a ring takes any number of heads
        raise ValueError(
            f"{type(model).__name__} has {uneven}, which {tp_size} tensor parallel ranks times ulysses_size={size} "
            f"cannot share evenly. Values of ulysses_size that work: {', '.join(map(str, sizes))}."
        )


def split_for_ulysses(mesh: DeviceMesh, ulysses_size: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Split a 1-D mesh: return this rank's group of `ulysses_size` consecutive ranks, and the ring of ranks at the same
    place in each group, None for one group. These are meshes, which can be copied with the model."""
    if ulysses_size == mesh.size():
        return mesh, None
    groups = split(resolve_group(mesh), ulysses_size)
    if isinstance(groups, Availability):
        raise ValueError(
            f"ulysses_size={ulysses_size} needs parts of the group of {mesh.size()} context parallel ranks, and "
            f"{groups.reason}. Pass ulysses_size={mesh.size()} or 1."
        )
    inner, ring = (
        DeviceMesh.from_group(group.process_group, mesh.device_type, mesh_dim_names=(name,))
        for name, group in zip(("ulysses", "ring"), groups, strict=True)
        if group.process_group is not None
    )
    return inner, ring


def mesh_of_both(mesh: DeviceMesh, ep_dim: str, tp_mesh: DeviceMesh) -> DeviceMesh:
    """2-D mesh of the expert parallel and the tensor parallel ranks."""
    names, (tp_dim,) = mesh.mesh_dim_names or (), tp_mesh.mesh_dim_names or ("",)
    if names.index(ep_dim) > names.index(tp_dim):
        raise ValueError(
            f"mesh has the dims {names}; put {ep_dim!r} before {tp_dim!r}, whose ranks hold parts of the same experts."
        )
    return mesh[ep_dim, tp_dim]
