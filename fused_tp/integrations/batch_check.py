"""Whether the ranks that share a model are given the same batch, asked at its first calls and now and then.

Tensor and context parallel ranks compute one forward pass together. Ranks that are given different tokens (by a data
loader that deals samples out to them, most often) train on a mixture of samples that nobody meant, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.runtime import settings
from fused_tp.runtime.errors import RankMismatchError, listed
from fused_tp.runtime.group import resolve_group
from fused_tp.transport.base import checksum
from fused_tp.transport.store import exchange

FIRST_CALLS = 3


class BatchCheck:
    """A forward pre-hook that compares the integer and boolean tensors among the arguments over the ranks of `meshes`.

    It compares over one mesh after the other, and the second time what the first has found: all ranks of the product
    come to the same answer. Embeddings and other numbers are left out, which ranks may compute with other last bits.
    Not under torch.compile and not while a CUDA graph is captured, which nothing may interrupt.

    Raises:
        RankMismatchError: on all ranks; names the arguments that differ and how to feed equal batches.
    """

    def __init__(self, meshes: Sequence[DeviceMesh]) -> None:
        self.meshes = tuple(meshes)
        self.calls = 0

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self.calls += 1
        every = settings.batch_check_every()
        if every and (self.calls <= FIRST_CALLS or self.calls % every == 0):
            self._compare({**{f"argument {i}": t for i, t in enumerate(args)}, **kwargs})

    def _compare(self, arguments: dict[str, Any]) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph, for which nothing can be read
        described = {
            name: [list(t.shape), str(t.dtype), checksum(t.detach().cpu().contiguous().numpy().tobytes())]
            for name, t in sorted(arguments.items())
            if isinstance(t, Tensor) and not (t.is_floating_point() or t.is_complex() or t.is_meta)
        }
        found: list[Any] = [described]
        for mesh in self.meshes:
            found = [one for theirs in exchange(resolve_group(mesh), "the batch", found) for one in theirs]
        differ = [i for i, theirs in enumerate(found) if theirs != found[0]]
        if not differ:
            return
        names = {*found[0], *found[differ[0]]}
        names = {name for name in names if found[0].get(name) != found[differ[0]].get(name)}
        dims = listed(repr((mesh.mesh_dim_names or ("?",))[0]) for mesh in self.meshes)
        raise RankMismatchError(
            f"the ranks of {dims} were given different batches in call {self.calls} of the model: "
            f"{listed(sorted(names))} of the first rank and of rank {differ[0]} of the {len(found)} differ. They "
            "compute one forward pass together, so each must be given the same batch. A data loader must deal samples "
            "out to the data parallel ranks only: DistributedSampler(dataset, num_replicas=mesh['dp'].size(), "
            "rank=mesh['dp'].get_local_rank()), or num_replicas=1, rank=0 where there are none, with the same seed."
        )
