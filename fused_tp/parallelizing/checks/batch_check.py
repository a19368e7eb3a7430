"""Check that all ranks that share a model receive the same batch, at the first calls and periodically afterwards.

Tensor and context parallel ranks compute one forward pass together. If they receive different tokens (usually because
the data loader distributes samples over them), they train on a mixture of samples, and no other error is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.core.checks import is_check_due
from fused_tp.core.errors import RankMismatchError, join_words
from fused_tp.core.group import resolve_group
from fused_tp.core.pending import checksum
from fused_tp.core.store import exchange

_suspended = threading.local()


@contextmanager
def suspended() -> Iterator[None]:
    """Disable all checks in this thread, both at forward passes and after sharding."""
    before = getattr(_suspended, "now", False)
    _suspended.now = True
    try:
        yield
    finally:
        _suspended.now = before


def is_suspended() -> bool:
    """True inside `suspended` and while torch.compile traces: checks then neither run nor count the call."""
    return torch.compiler.is_compiling() or getattr(_suspended, "now", False)


def of_all_ranks(meshes: Sequence[DeviceMesh], what: str, mine: Any) -> list[Any]:
    """Gather `mine` from every rank of the product of `meshes`, in the same order on all ranks. A collective call.

    Each mesh in turn exchanges the lists that the mesh before it gathered, so all ranks obtain the same list.
    """
    found = [mine]
    for mesh in meshes:
        found = [one for theirs in exchange(resolve_group(mesh), what, found) for one in theirs]
    return found


def _described(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, comparable description) for `value`, or for each tensor in it if it is a list or a dict."""
    if isinstance(value, Tensor):
        numbers = value.layout == torch.strided and not (value.is_nested or value.is_meta or value.is_quantized)
        if numbers and not (value.is_floating_point() or value.is_complex()):
            contents = checksum(value.detach().cpu().contiguous().numpy().tobytes())
            yield name, [list(value.shape), str(value.dtype), contents]
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _described(f"{name}[{key!r}]", one)
    elif isinstance(value, (list, tuple)):
        if any(isinstance(one, int) for one in value):
            yield name, checksum(repr(value).encode())
        else:
            for i, one in enumerate(value):
                yield from _described(f"{name}[{i}]", one)


class BatchCheck:
    """Forward pre-hook that compares the integer and boolean arguments of a call over the ranks of `meshes`.

    Tensors and lists are compared, also inside nested lists and dicts. Floating-point values (embeddings) are skipped,
    because ranks may compute them with different rounding. The check does not run under torch.compile or during CUDA
    graph capture, which it would break.

    Raises:
        RankMismatchError: raised on all ranks. It names the arguments that differ, and explains how to pass equal
            batches.
    """

    def __init__(self, meshes: Sequence[DeviceMesh]) -> None:
        self.meshes = tuple(meshes)
        # Counted per mode, so that the first calls in eval mode are checked too: there, ranks may sample tokens.
        self.calls = {True: 0, False: 0}

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_suspended():
            return
        call = self.calls[model.training] = self.calls[model.training] + 1
        if is_check_due(call):
            arguments = {**{f"argument {i}": t for i, t in enumerate(args)}, **kwargs}
            self._compare(sum(self.calls.values()), arguments, training=model.training)

    def _compare(self, call: int, arguments: dict[str, Any], *, training: bool) -> None:
        described = {name: one for key, value in sorted(arguments.items()) for name, one in _described(key, value)}
        found, modes = zip(*of_all_ranks(self.meshes, "the batch", (described, training)), strict=True)
        dims = join_words(repr((mesh.mesh_dim_names or ("?",))[0]) for mesh in self.meshes)
        if len(set(modes)) > 1:
            raise RankMismatchError(
                f"in call {call} of the model, not all {len(modes)} ranks of {dims} are in training mode: rank "
                f"{modes.index(True)} is, and rank {modes.index(False)} is not. These ranks compute one forward pass "
                "together. Call model.train() on all of them, or model.eval() on all of them."
            )
        differ = [i for i, theirs in enumerate(found) if theirs != found[0]]
        if not differ:
            return
        names = {*found[0], *found[differ[0]]}
        names = {name for name in names if found[0].get(name) != found[differ[0]].get(name)}
        raise RankMismatchError(
            f"the ranks of {dims} received different batches in call {call} of the model: {join_words(sorted(names))} "
            f"differ between the first rank and rank {differ[0]} of {len(found)}. These ranks compute one forward pass "
            "together, so each must receive the same batch. Shard the data over data parallel ranks only: "
            "DistributedSampler(dataset, num_replicas=mesh['dp'].size(), rank=mesh['dp'].get_local_rank()), or "
            "num_replicas=1, rank=0 without data parallelism, with the same seed. "
            "Ranks that sample tokens need equal random states (torch.manual_seed)."
        )
