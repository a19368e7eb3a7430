"""Whether the gradients of a step come from what forward returned: what is inside of the model is a rank's part.

| when                   | what happens                                                                           |
|------------------------|----------------------------------------------------------------------------------------|
| forward has returned   | its outputs are watched, and what is needed to compute them again is kept              |
| backward is at outputs | their gradients are kept                                                               |
| backward ends          | the cut model computes the outputs again, and from these gradients those of parameters |
|                        | the ranks compare: where a parameter has another gradient, a log line says so          |

It cannot tell whether that is right: a penalty on parameters may be.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from fused_tp.integrations.batch_check import is_suspended, of_all_ranks
from fused_tp.integrations.grad_sync import syncs_of
from fused_tp.integrations.gradient_check import sketch
from fused_tp.integrations.graph import REENTRANT, nodes_of
from fused_tp.integrations.model_check import is_first_rank
from fused_tp.integrations.outputs import tensors_in
from fused_tp.integrations.sequence import Parallelism
from fused_tp.integrations.step_check import (
    OF_ALL,
    StepCheck,
    as_cut,
    copies_of,
    norm_of,
    outputs_in,
    own_parts,
    run_on_copies,
)
from fused_tp.integrations.undisturbed import Mode, random_states_now

_LOG = logging.getLogger("fused_tp")
_OTHER = 0.02  # of a gradient that is the sum of the same terms: more than another order of them explains in 16 bit
_OF_OUTPUTS = {2: 0.05, 4: 1e-3, 8: 1e-3}  # of the norm of an output's gradient, by size of its numbers
_MOST_OUTPUTS = 8
_logged: set[str] = set()


class LossCheck:
    """Hooks before and after forward that follow the calls that `step` has compared to the end of their backward."""

    def __init__(self, step: StepCheck) -> None:
        self.step = step
        self._call: _Call | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_call": None}

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_suspended() or not torch.is_grad_enabled():
            return
        if self._call is not None:
            self._call.ended = True  # the next backward may be of both calls
            self._call = None
        if self.step.compared and not any(
            of_all_ranks(self.step.meshes, "gradients of outputs", _come_otherwise(model, (args, kwargs)))
        ):
            self._call = _Call(model, self.step, args, kwargs)

    def after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._call is not None and not is_suspended():
            self._call.watch(output)


def _come_otherwise(model: nn.Module, arguments: object) -> bool:
    """Whether gradients may come by other ways, or have come before, so that there is nothing to say."""
    return (
        any(t.requires_grad for t in tensors_in(arguments))
        or any(p.grad is not None or getattr(p, "main_grad", None) is not None for p in model.parameters())
        or any(sync.partly or sync.defers or sync.deferring for sync in syncs_of(model))
        or DistributedDataParallel._get_active_ddp_module() is not None
    )


class _Call:
    """One call of `model`."""

    def __init__(self, model: nn.Module, step: StepCheck, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.model, self.parallelism, self.meshes = model, step.parallelism, step.meshes
        self.args, self.kwargs = copies_of((args, kwargs))  # into which the model may write
        self.random_states = random_states_now()
        self._whole = step.whole
        self.ended = False
        self._found: dict[int, Tensor] = {}  # gradients of outputs, by place
        self._queued = False

    def watch(self, output: object) -> None:
        """`output` is what the call has returned."""
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
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if any(p.grad is None for p in named.values()) and all(p.grad is None for p in named.values()):
            return  # torch.autograd.grad has asked, or an optimizer has stepped
        with as_cut(self.model, Mode.AS_IT_IS, self.random_states):
            outputs = run_on_copies(self.model, self.args, self.kwargs)
            if any(node.name() == REENTRANT for i in self._found for node in nodes_of(outputs[i])):
                return  # which cannot be asked for gradients here
            gradients = _of_parameters(outputs, self._found, list(named.values()))
        expected = own_parts(self.model, self.parallelism, dict(zip(named, gradients, strict=True)), summed=False)
        there = own_parts(self.model, self.parallelism, {name: p.grad for name, p in named.items()}, summed=True)
        norms = {name: norm_of(t) for name, t in there.items()}
        of_all = sum(norm**2 for norm in norms.values()) ** 0.5
        errors = {
            name: norm_of(there[name] - t) / max(norms[name], OF_ALL * of_all, 1e-30) for name, t in expected.items()
        }
        name = max(errors, key=lambda name: errors[name], default="")
        sketches = {str(i): sketch(grad).tolist() for i, grad in self._found.items() if i in self._whole}
        ranks = of_all_ranks(self.meshes, "gradients of outputs", [errors.get(name, 0.0), name, sketches])
        self._refuse_different([one[2] for one in ranks])
        error, name = max((one[0], one[1]) for one in ranks)
        if error > _OTHER and name not in _logged and is_first_rank(self.parallelism):
            _logged.add(name)
            _LOG.warning(
                "after backward %.2g of the gradient of %r does not come from what the model's forward returned: the "
                "loss takes parameters, or tensors from inside of the model, which hold %s. That is not compared with "
                "one process. Let forward return what the loss takes (hidden states by output_hidden_states=True), or "
                "see to it that each rank adds its share.",
                error,
                name,
                _what_ranks_hold(self.parallelism),
            )

    def _refuse_different(self, ranks: Sequence[Mapping[str, Sequence[float]]]) -> None:
        for place in ranks[0]:
            norms, projections = zip(*(theirs.get(place, (0.0, 0.0)) for theirs in ranks), strict=True)
            bound = _OF_OUTPUTS.get(self._found[int(place)].element_size(), 1.0)
            if max(projections) - min(projections) > bound * max(norms):
                raise ValueError(
                    "in backward the ranks that share the model have different gradients of what its forward returned, "
                    "which is the same on all of them: their losses differ. Each must compute the same loss: from what "
                    "forward returned, and not from what is inside of the model, which is "
                    f"{_what_ranks_hold(self.parallelism)}."
                )


def _what_ranks_hold(parallelism: Parallelism) -> str:
    tokens = parallelism.shards_sequence
    features = parallelism.tp_mesh is not None
    return "a rank's " + " or ".join(["tokens"] * tokens + ["heads and features"] * features)


def _of_parameters(
    outputs: Sequence[Tensor], total: Mapping[int, Tensor], parameters: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients of `parameters`, given those of outputs, of which some are computed from others: logits, and a loss."""
    # Nodes are numbered in the order of their making.
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
