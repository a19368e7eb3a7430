"""Check that the gradients of a step come from the outputs of forward: tensors inside of the model are shards.

| when             | action                                                                                       |
|------------------|----------------------------------------------------------------------------------------------|
| around forward   | store arguments and random states; watch the outputs                                         |
| backward runs    | store the gradients of outputs                                                               |
| backward ends    | the sharded model recomputes the outputs, and gradients of parameters from those of outputs  |
|                  | the ranks compare: different gradients of outputs raise, a different gradient of a parameter |
|                  | is logged                                                                                    |

The log line is not an error: a penalty on parameters, or a rank's share of a loss, may be intended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from fused_tp.parallelizing.checks.batch_check import is_suspended, of_all_ranks
from fused_tp.parallelizing.checks.gradient_check import sketch
from fused_tp.parallelizing.checks.model_check import warn_once
from fused_tp.parallelizing.checks.step_check import (
    StepCheck,
    as_sharded,
    copies_of,
    gradient_errors,
    norm_of,
    outputs_in,
    own_parts,
    run_on_copies,
)
from fused_tp.parallelizing.checks.undisturbed import Mode, random_states_now
from fused_tp.parallelizing.grad_sync import syncs_of
from fused_tp.parallelizing.graph import REENTRANT, nodes_of
from fused_tp.parallelizing.outputs import tensors_in
from fused_tp.parallelizing.sequence_sharding import Parallelism

# Bounds of relative errors. Both gradients sum the same terms, and outputs are equal on all ranks: in 112 correct steps
# of 20 model types, in fp32 and bf16, no error was larger, and gradients of outputs were bitwise equal.
_OF_PARAMETERS = 0.02
_OF_OUTPUTS = {1: 0.5, 2: 0.05, 4: 1e-3, 8: 1e-3, 16: 1e-3}  # by bytes per element
_MOST_OUTPUTS = 8


class LossCheck:
    """Hooks before and after forward that follow each call compared by `step` to the end of its backward."""

    def __init__(self, step: StepCheck) -> None:
        self.step = step
        self._call: _LossCall | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_call": None}

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_suspended() or not torch.is_grad_enabled():
            return
        if self._call is not None:
            self._call.ended = True  # the next backward may belong to both calls
            self._call = None
        if self.step.compared and not any(
            of_all_ranks(self.step.meshes, "gradients of outputs", _come_otherwise(model, (args, kwargs)))
        ):
            self._call = _LossCall(model, self.step, args, kwargs)

    def after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._call is not None and not is_suspended():
            self._call.watch(output)


def _come_otherwise(model: nn.Module, arguments: object) -> bool:
    """True if `grad` may hold other gradients than those of this call."""
    parameters = [*model.parameters()]
    return (
        any(t.requires_grad for t in tensors_in(arguments))
        or any(p.grad is not None or getattr(p, "main_grad", None) is not None for p in parameters)
        or any(p._post_accumulate_grad_hooks for p in parameters)  # these may clip or step
        or any(sync.partly or sync.defers or sync.deferring for sync in syncs_of(model))
        or DistributedDataParallel._get_active_ddp_module() is not None
    )


class _LossCall:
    """One call of `model`, until its backward has ended."""

    def __init__(self, model: nn.Module, step: StepCheck, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.model, self.parallelism, self.meshes = model, step.parallelism, step.meshes
        self.args, self.kwargs = copies_of((args, kwargs))  # the model may write into its arguments
        self.random_states = random_states_now()
        device = next(model.parameters()).device.type
        self.autocast = partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        self._whole = step.whole
        self.ended = False
        self._found: dict[int, Tensor] = {}  # gradients of outputs, by index
        self._queued = False

    def watch(self, output: object) -> None:
        """Watch the gradients of `output`, the result of the call."""
        outputs = {i: t for i, t in enumerate(outputs_in(output)) if t.requires_grad}
        self.ended = not 0 < len(outputs) <= _MOST_OUTPUTS
        for i, t in {}.items() if self.ended else outputs.items():
            t.register_hook(partial(self._note, i))

    def _note(self, place: int, grad: Tensor) -> None:
        if self.ended:
            return
        self._found[place] = grad.detach()
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._compare)

    def _compare(self) -> None:
        if self.ended:
            return
        self.ended = True
        found, self._found = self._found, {}
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if all(p.grad is None for p in named.values()):
            return  # torch.autograd.grad has run the backward
        with as_sharded(self.model, Mode.AS_IT_IS, self.random_states):
            with self.autocast():  # as in forward: backward runs outside of autocast
                outputs = run_on_copies(self.model, self.args, self.kwargs)
            if any(node.name() == REENTRANT for i in found for node in nodes_of(outputs[i])):
                return  # torch.autograd.grad refuses reentrant checkpoints
            gradients = _of_parameters(outputs, found, list(named.values()))
        expected = own_parts(self.model, self.parallelism, dict(zip(named, gradients, strict=True)), summed=False)
        there = own_parts(self.model, self.parallelism, {name: p.grad for name, p in named.items()}, summed=True)
        errors = gradient_errors(expected, {name: (t, norm_of(t)) for name, t in there.items()})
        name = max(errors, key=lambda name: errors[name], default="")
        whole = {i: grad for i, grad in found.items() if i in self._whole}
        sketches = {str(i): [*sketch(grad).tolist(), grad.element_size()] for i, grad in whole.items()}
        ranks = of_all_ranks(self.meshes, "gradients of outputs", [errors.get(name, 0.0), name, sketches])
        for place in {place: None for *_, theirs in ranks for place in theirs}:
            self._refuse_different([theirs.get(place, (0.0, 0.0, 8)) for *_, theirs in ranks])
        error, name = max((one[0], one[1]) for one in ranks)
        if _OF_PARAMETERS < error < inf:
            warn_once(
                self.meshes,
                name,
                "after backward %.2g of the gradient of %r does not come from what the model's forward returned: the "
                "loss takes parameters, or tensors from inside of the model, which hold %s. That is not compared with "
                "one process. Let forward return what the loss takes (hidden states by output_hidden_states=True), or "
                "see to it that each rank adds its share.",
                error,
                name,
                _held_by_a_rank(self.parallelism),
            )

    def _refuse_different(self, ranks: Sequence[tuple[float, float, int]]) -> None:
        """Raise ValueError if the ranks' sketches of the gradient of an output differ."""
        norms, projections, sizes = zip(*ranks, strict=True)
        if max(projections) - min(projections) > _OF_OUTPUTS[min(sizes)] * max(norms):
            raise ValueError(
                "in backward the ranks that share the model have different gradients of what its forward returned, "
                "which is the same on all of them: their losses differ. Each must compute the same loss: from what "
                "forward returned, and not from what is inside of the model, which is "
                f"{_held_by_a_rank(self.parallelism)}."
            )


def _held_by_a_rank(parallelism: Parallelism) -> str:
    tokens, features = parallelism.shards_sequence, parallelism.tp_mesh is not None
    return "a rank's " + " or ".join(["tokens"] * tokens + ["heads and features"] * features)


def _of_parameters(
    outputs: Sequence[Tensor], total: Mapping[int, Tensor], parameters: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients of `parameters`, from those of outputs. An output may depend on another one: a loss on logits.

    The gradient of logits in backward includes the contribution of the loss, which is subtracted here.
    """
    # Nodes are numbered in the order of creation: an output depends on those with smaller numbers only.
    nodes: dict[int, Any] = {i: outputs[i].grad_fn for i in total}
    order = sorted(total, key=lambda i: 0 if nodes[i] is None else -nodes[i]._sequence_nr())
    roots: list[Tensor] = []
    own: list[Tensor] = []
    for i in order:
        direct = total[i]
        if roots:
            (by_others,) = torch.autograd.grad(roots, [outputs[i]], own, retain_graph=True, allow_unused=True)
            direct = direct if by_others is None else direct - by_others
        roots.append(outputs[i])
        own.append(direct)
    return torch.autograd.grad(roots, list(parameters), own, allow_unused=True)
