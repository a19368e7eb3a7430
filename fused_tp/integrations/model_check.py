"""Whether the ranks that are to share a model have made the same one, asked before it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.integrations.batch_check import of_all_ranks
from fused_tp.runtime.errors import RankMismatchError, listed
from fused_tp.transport.base import checksum

_SAMPLE = 1021  # numbers of a tensor that are compared: weights that were drawn apart differ in each


def check_equal_models(model: nn.Module, meshes: Sequence[DeviceMesh]) -> None:
    """Compare parameters and buffers over the ranks of `meshes`: names, shapes, dtypes and a sample of the numbers.

    What a rank holds on the meta device has no numbers to compare.

    Raises:
        RankMismatchError: on all ranks; names what differs and how to make it equal.
    """
    named = chain(model.named_parameters(), model.named_buffers())
    mine = {name: [list(t.shape), str(t.dtype), _sample(t)] for name, t in named}
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
                f"the {len(ranks)} differ from another rank's in shape, dtype or values. Each is to keep a part of one "
                "model. Give all ranks one random state before they make it (torch.manual_seed(0)), or load the same "
                "checkpoint on all of them."
            )


def _alike(one: list[object], other: list[object] | None) -> bool:
    return other is not None and one[:2] == other[:2] and (None in (one[2], other[2]) or one[2] == other[2])


def _sample(t: Tensor) -> int | None:
    """A checksum of some of the numbers of `t`; None on the meta device."""
    if t.is_meta:
        return None
    flat = t.detach().reshape(-1)
    return checksum(flat[:: max(1, flat.numel() // _SAMPLE)].cpu().contiguous().view(torch.uint8).numpy().tobytes())
