"""Check that tensor parallel ranks have equal gradients of replicated parameters.

Every rank must hold the full gradient of a replicated parameter. If the parameter is applied to sharded features and
the plan does not sum its gradient over the ranks, each rank holds only one term of the gradient. If dropout differs
between ranks, each rank holds a mixture of several gradients. Neither mistake raises an error elsewhere, and training
would continue with wrong gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_tp.core.checks import is_check_due
from fused_tp.core.errors import join_words
from fused_tp.core.group import resolve_group
from fused_tp.core.store import exchange
from fused_tp.parallelizing.checks.batch_check import are_checks_suspended
from fused_tp.parallelizing.outputs import find_tensors

# `norm_and_projection` folds a gradient into rows of this length and adds the rows. It is prime, because 1024 would
# add up the columns of a weight of that width.
_SKETCH_WIDTH = 1021
# A difference between ranks is an error if it exceeds both bounds: the first relative to the norm of this gradient, the
# second relative to the norm of all gradients. Rounding alone stays below the first, except in a gradient that should
# be 0, where it stays below the second.
_PARAMETER_NORM_BOUND, _TOTAL_NORM_BOUND = 0.05, 1e-3


def as_plain_gradient(grad: Tensor) -> Tensor:
    """Convert the gradient of a loss to which the caller has added a DTensor, such as a norm of parameters."""
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


class GradientCheck:
    """Forward hook that lets the end of backward compare the gradients of replicated parameters over `mesh`.

    It runs at the first calls, also after other parameters have become trainable, and periodically afterwards, but not
    under torch.compile. It skips parameters that FSDP2 manages, because FSDP2 has already removed their gradients at
    the end of backward.

    Raises:
        ValueError: raised in backward, on all ranks. It names the parameters and the remedy.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.call_counts: Counter[tuple[bool, ...]] = Counter()  # by `requires_grad` of the parameters
        self._is_queued = False

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if are_checks_suspended() or not torch.is_grad_enabled():
            return
        outputs = [t for t in find_tensors(output) if t.requires_grad]
        for t in outputs:
            # Not a leaf, such as a parameter that forward returns: it would keep the hook of each call.
            if not (t.ndim or t.grad_fn is None or isinstance(t, DTensor)):
                t.register_hook(as_plain_gradient)
        if not outputs:
            return
        trainable = tuple(p.requires_grad for p in model.parameters())
        self.call_counts[trainable] += 1
        if is_check_due(self.call_counts[trainable]):
            self._is_queued = False  # an earlier backward pass that raised an error has left it True
            for t in outputs:
                t.register_hook(partial(self._queue_comparison, model))

    def _queue_comparison(self, model: nn.Module, grad: Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(partial(self._compare, model))

    @torch.no_grad()
    def _compare(self, model: nn.Module) -> None:
        self._is_queued = False
        sketches = {name: norm_and_projection(gradient) for name, gradient in self._replicated_gradients(model)}
        local_sketches = (
            dict(zip(sketches, torch.stack(list(sketches.values())).tolist(), strict=True)) if sketches else {}
        )
        sketches_by_rank = exchange(resolve_group(self.mesh), "gradients of replicated parameters", local_sketches)
        # All ranks compute this from the same values, so they take the same decision. A missing gradient counts as 0.
        total_norm = (
            max(
                sum(norm**2 for norm, _ in rank_sketches.values() if isfinite(norm))
                for rank_sketches in sketches_by_rank
            )
            ** 0.5
        )
        errors: dict[str, float] = {}
        for name in dict.fromkeys(name for rank_sketches in sketches_by_rank for name in rank_sketches):
            norms, projections = zip(
                *(rank_sketches.get(name, (0.0, 0.0)) for rank_sketches in sketches_by_rank), strict=True
            )
            if not all(map(isfinite, norms)):
                errors |= {name: inf} if any(map(isfinite, norms)) else {}
                continue
            difference = max(projections) - min(projections)
            if difference > max(_PARAMETER_NORM_BOUND * max(norms), _TOTAL_NORM_BOUND * total_norm):
                errors[name] = difference / max(norms)
        if errors:
            worst_names = sorted(errors, key=lambda name: -errors[name])[:4]
            more_text = f" and {len(errors) - len(worst_names)} more" if len(errors) > len(worst_names) else ""
            raise ValueError(
                f"after backward the ranks of {(self.mesh.mesh_dim_names or ('tp',))[0]!r} hold different gradients of "
                f"{join_words(map(repr, worst_names))}{more_text}, which are replicated on these ranks. Either the "
                "ranks drew different dropout masks: set equal random states (torch.manual_seed). Or the parameter is "
                "used between sharded layers, where each rank has only its own features and so only one term of the "
                "gradient: remove these layers from the plan, or give the parameter's module the style "
                "'replicated_with_grad_allreduce'."
            )

    def _replicated_gradients(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and getattr(parameter, "partition_dim", None) == -1:  # see `plain_parameters_`
                yield name, gradient
            if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                continue
            is_replicated = all(placement.is_replicate() for placement in (*parameter.placements, *gradient.placements))
            if is_replicated and parameter.device_mesh == self.mesh:
                yield name, gradient.to_local()


def norm_and_projection(gradient: Tensor) -> Tensor:
    """Return the tensor [norm, projection] of `gradient`.

    The projection is the dot product with a fixed random vector. The projections of two gradients differ by about the
    norm of their difference.
    """
    flat = gradient.flatten().float()
    full_rows_numel = flat.numel() // _SKETCH_WIDTH * _SKETCH_WIDTH
    folded = flat[:full_rows_numel].view(-1, _SKETCH_WIDTH).sum(0)
    folded[: flat.numel() - full_rows_numel] += flat[full_rows_numel:]
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(_SKETCH_WIDTH, generator=generator, dtype=flat.dtype, device="cpu").to(flat.device)
    return torch.stack([flat.norm(), folded @ weights])
