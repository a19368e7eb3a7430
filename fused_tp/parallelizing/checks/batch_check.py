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

_thread_state = threading.local()


@contextmanager
def suspend_checks() -> Iterator[None]:
    """Disable all checks in this thread, both at forward passes and after sharding."""
    was_suspended = getattr(_thread_state, "are_checks_suspended", False)
    _thread_state.are_checks_suspended = True
    try:
        yield
    finally:
        _thread_state.are_checks_suspended = was_suspended


def are_checks_suspended() -> bool:
    """True inside `suspend_checks` and while torch.compile traces: checks then neither run nor count the call."""
    return torch.compiler.is_compiling() or getattr(_thread_state, "are_checks_suspended", False)


def gather_over_meshes(meshes: Sequence[DeviceMesh], description: str, value: Any) -> list[Any]:
    """Gather `value` from every rank of the product of `meshes`, in the same order on all ranks. A collective call.

    Each mesh in turn exchanges the lists that the mesh before it gathered, so all ranks obtain the same list.
    """
    values = [value]
    for mesh in meshes:
        values = [
            gathered_value
            for rank_values in exchange(resolve_group(mesh), description, values)
            for gathered_value in rank_values
        ]
    return values


def _comparable_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, comparable description) for `value`, or for each tensor in it if it is a list or a dict."""
    if isinstance(value, Tensor):
        is_dense = value.layout == torch.strided and not (value.is_nested or value.is_meta or value.is_quantized)
        if is_dense and not (value.is_floating_point() or value.is_complex()):
            content_checksum = checksum(value.detach().cpu().contiguous().numpy().tobytes())
            yield name, [list(value.shape), str(value.dtype), content_checksum]
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _comparable_values(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        if any(isinstance(item, int) for item in value):
            yield name, checksum(repr(value).encode())
        else:
            for i, item in enumerate(value):
                yield from _comparable_values(f"{name}[{i}]", item)


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
        self.calls_by_mode = {True: 0, False: 0}

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if are_checks_suspended():
            return
        call = self.calls_by_mode[model.training] = self.calls_by_mode[model.training] + 1
        if is_check_due(call):
            arguments = {**{f"argument {i}": t for i, t in enumerate(args)}, **kwargs}
            self._compare(sum(self.calls_by_mode.values()), arguments, is_training=model.training)

    def _compare(self, call: int, arguments: dict[str, Any], *, is_training: bool) -> None:
        descriptions = {
            name: content
            for key, value in sorted(arguments.items())
            for name, content in _comparable_values(key, value)
        }
        rank_descriptions, training_flags = zip(
            *gather_over_meshes(self.meshes, "the batch", (descriptions, is_training)), strict=True
        )
        dim_names = join_words(repr((mesh.mesh_dim_names or ("?",))[0]) for mesh in self.meshes)
        if len(set(training_flags)) > 1:
            raise RankMismatchError(
                f"in call {call} of the model, not all {len(training_flags)} ranks of {dim_names} are in training "
                f"mode: rank {training_flags.index(True)} is, and rank {training_flags.index(False)} is not. These "
                "ranks compute one forward pass together. Call model.train() on all of them, or model.eval() on all of "
                "them."
            )
        different_ranks = [i for i, description in enumerate(rank_descriptions) if description != rank_descriptions[0]]
        if not different_ranks:
            return
        first, different = rank_descriptions[0], rank_descriptions[different_ranks[0]]
        all_names = {*first, *different}
        differing_names = {name for name in all_names if first.get(name) != different.get(name)}
        raise RankMismatchError(
            f"the ranks of {dim_names} received different batches in call {call} of the model: "
            f"{join_words(sorted(differing_names))} differ between the first rank and rank {different_ranks[0]} of "
            f"{len(rank_descriptions)}. These ranks compute one forward pass together, so each must receive the same "
            "batch. Shard the data over data parallel ranks only: DistributedSampler(dataset, "
            "num_replicas=mesh['dp'].size(), rank=mesh['dp'].get_local_rank()), or num_replicas=1, rank=0 without data "
            "parallelism, with the same seed. Ranks that sample tokens need equal random states (torch.manual_seed)."
        )
