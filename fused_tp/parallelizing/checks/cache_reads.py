"""Layers of a key/value cache of a tensor parallel model, which log a warning when user code reads them.

Each rank's cache has the keys and values of the rank's heads. Code that computes from them what depends on all heads,
such as cache eviction by norms of keys, would decide differently on each rank, and no output shows it.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.parallelizing.checks.model_check import warn_once
from fused_tp.parallelizing.layers import shards_key_value_heads

# Packages that read layers as a part of the model or of generate(), or to copy them.
_LIBRARIES = ("transformers", "transformers_modules", "fused_tp", "torch", "peft", "copy", "copyreg", "pickle")


class ShardedCacheLayers(list[Any]):
    """The list `layers` of a transformers cache, which logs a warning when code outside of libraries reads it."""

    mesh: DeviceMesh

    def __getitem__(self, index: Any) -> Any:
        self._warn_user_code()
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self._warn_user_code()
        return super().__iter__()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return list, (list(super().__iter__()),)  # copies and files have a plain list, without the mesh

    def _warn_user_code(self) -> None:
        if torch.compiler.is_compiling():
            return
        frame = sys._getframe(2)
        while frame.f_code.co_name == "__iter__" and frame.f_back is not None:  # of DynamicCache
            frame = frame.f_back
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _LIBRARIES:
            warn_once(
                [self.mesh],
                f"cache layers {frame.f_code.co_filename}:{frame.f_lineno}",
                "%s:%d reads layers of the KV cache. They hold the heads of this rank alone, one of %d tensor parallel "
                "ranks: combine over these ranks what depends on the keys or values of all heads (norms, scores), or "
                "each rank changes its cache in another way.",
                frame.f_code.co_filename,
                frame.f_lineno,
                self.mesh.size(),
            )


def watch_cache_reads(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Make user code that reads the layers of a cache that `model` receives or returns log a warning."""
    if tp_mesh.size() > 1 and shards_key_value_heads(model):
        model.register_forward_pre_hook(partial(_mark_received_cache, tp_mesh), with_kwargs=True)
        model.register_forward_hook(partial(_mark_returned_cache, tp_mesh))


def _mark_received_cache(mesh: DeviceMesh, model: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
    _mark(mesh, keywords.get("past_key_values"))


def _mark_returned_cache(mesh: DeviceMesh, model: nn.Module, args: Any, output: Any) -> None:
    for value in output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),):
        _mark(mesh, value)


def _mark(mesh: DeviceMesh, cache: Any) -> None:
    parts: list[Any] = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    for part in (cache, *parts):
        # Not a static cache: compiled code reads it.
        if type(getattr(part, "layers", None)) is list and not getattr(part, "is_compileable", True):
            part.layers = ShardedCacheLayers(part.layers)
            part.layers.mesh = mesh
