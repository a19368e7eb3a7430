"""Check that tensor parallel ranks have equal gradients of replicated parameters, in the first backward passes and
periodically after.

Such a gradient is equal on all ranks, or backward sums it over the ranks. If a parameter meets only a rank's own
features and the plan does not say so, every rank holds one term of the gradient. If dropout differs between ranks, each
holds a mixture of several gradients. Nothing fails, and training continues with wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fused_tp.core.checks import is_due
from fused_tp.core.errors import listed
from fused_tp.core.group import resolve_group
from fused_tp.core.store import exchange
from fused_tp.parallelizing.checks.batch_check import is_suspended
from fused_tp.parallelizing.outputs import tensors_in

_WIDTH = 1021  # width of a sketch; prime, so that consecutive rows of a weight fold onto different positions
# Rounding alone stays below this share of the gradient itself, or of all gradients together for a gradient that should
# be 0. A difference above both shares is an error.
_OF_ITS_OWN, _OF_ALL = 0.05, 1e-3


class GradientCheck:
    """Forward hook that makes the end of backward compare gradients of whole parameters over the ranks of `mesh`.

    It does not run under torch.compile, and skips parameters that FSDP2 manages, whose gradients FSDP2 has removed by
    then.

    Raises:
        ValueError: in backward, on all ranks; names the parameters and the remedy.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.calls = 0
        self._queued = False

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if is_suspended() or not torch.is_grad_enabled():
            return
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        self.calls += bool(outputs)
        if outputs and is_due(self.calls):
            self._queued = False  # a backward that raised leaves it True
            for t in outputs:
                t.register_hook(partial(self._queue, model))

    def _queue(self, model: nn.Module, grad: Tensor) -> None:
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(partial(self._compare, model))

    @torch.no_grad()
    def _compare(self, model: nn.Module) -> None:
        self._queued = False
        found = {name: sketch(gradient) for name, gradient in self._whole(model)}
        mine = dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}
        ranks = exchange(resolve_group(self.mesh), "gradients of whole parameters", mine)
        # Computed from the values of all ranks, so all ranks decide alike. A missing gradient counts as zeros.
        of_all = max(sum(norm**2 for norm, _ in theirs.values() if isfinite(norm)) for theirs in ranks) ** 0.5
        worst: dict[str, float] = {}
        for name in dict.fromkeys(name for theirs in ranks for name in theirs):
            norms, projections = zip(*(theirs.get(name, (0.0, 0.0)) for theirs in ranks), strict=True)
            if not all(map(isfinite, norms)):
                worst |= {name: inf} if any(map(isfinite, norms)) else {}
                continue
            difference = max(projections) - min(projections)
            if difference > max(_OF_ITS_OWN * max(norms), _OF_ALL * of_all):
                worst[name] = difference / max(norms)
        if worst:
            first = sorted(worst, key=lambda name: -worst[name])[:4]
            more = f" and {len(worst) - len(first)} more" if len(worst) > len(first) else ""
            raise ValueError(
                f"after backward the ranks of {(self.mesh.mesh_dim_names or ('tp',))[0]!r} hold different gradients of "
                f"{listed(map(repr, first))}{more}, which each of them holds whole. Either they drew different "
                "dropout: give them equal random states (torch.manual_seed). Or the parameter is used between layers "
                "that are sharded, where a rank sees only its own features and has one term of the gradient: leave "
                "these layers out of the plan, or give the parameter's module the style "
                "'replicated_with_grad_allreduce'."
            )

    def _whole(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and getattr(parameter, "partition_dim", None) == -1:  # see `plain_parameters_`
                yield name, gradient
            if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                continue
            whole = all(placement.is_replicate() for placement in (*parameter.placements, *gradient.placements))
            if whole and parameter.device_mesh == self.mesh:
                yield name, gradient.to_local()


def sketch(gradient: Tensor) -> Tensor:
    """[norm, projection] of a gradient. The projection is its product with standard normal numbers: two gradients
    differ in it by about the norm of their difference."""
    flat = gradient.flatten().float()
    whole = flat.numel() // _WIDTH * _WIDTH
    folded = flat[:whole].view(-1, _WIDTH).sum(0)
    folded[: flat.numel() - whole] += flat[whole:]
    seeded = torch.Generator().manual_seed(0)
    weights = torch.randn(_WIDTH, generator=seeded, dtype=flat.dtype, device="cpu").to(flat.device)
    return torch.stack([flat.norm(), folded @ weights])
