"""Check that a loss is computed from the outputs of forward only, since tensors inside the model are shards.

| when             | action                                                                                       |
|------------------|----------------------------------------------------------------------------------------------|
| around forward   | store arguments and random states; register hooks on the outputs and on the parameters       |
| during backward  | store the gradients of the outputs                                                           |
| other calls      | a warning is logged if the loss depends on outputs that hold one rank's tokens               |
| end of backward  | the sharded model repeats forward, and backward from the stored gradients of the outputs     |
|                  | all ranks raise if their gradients of outputs differ                                         |
|                  | a warning is logged if a parameter's gradient differs from that of the repeated backward,    |
|                  | unless the repeated forward has other outputs, because it depends on state that it changes   |

The last difference is not an error, because a penalty on parameters, or a loss of which each rank computes its share,
may be intended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from fused_tp.parallelizing.checks.batch_check import are_checks_suspended, gather_over_meshes
from fused_tp.parallelizing.checks.gradient_check import as_plain_gradient, norm_and_projection
from fused_tp.parallelizing.checks.model_check import warn_once
from fused_tp.parallelizing.checks.module_outputs import output_tensors
from fused_tp.parallelizing.checks.step_check import (
    StepCheck,
    copy_arguments,
    gradient_errors,
    gradient_shards,
    gradients_of,
    has_reentrant_checkpoint,
    isolated_passes,
    run_on_copies,
    separate_grads,
    two_norm,
)
from fused_tp.parallelizing.checks.undisturbed import Mode, current_random_states
from fused_tp.parallelizing.deferred_logits import DeferredLogits
from fused_tp.parallelizing.grad_sync import find_gradient_syncs
from fused_tp.parallelizing.outputs import find_tensors, iterate_tensors
from fused_tp.parallelizing.sequence_sharding import Parallelism

# Bounds of relative errors. In 112 correct steps of 20 model types, in fp32 and bf16, gradients of parameters stayed
# below the bound, and gradients of outputs were bitwise equal.
_PARAMETER_BOUND = 0.02
_OUTPUT_BOUNDS = {1: 0.5, 2: 0.05, 4: 1e-3, 8: 1e-3, 16: 1e-3}  # by bytes per element
_MAX_OUTPUTS = 8  # calls with more outputs that require gradients are not checked


class LossCheck:
    """Hooks before and after forward that check the backward pass of each call that `step_check` has compared."""

    def __init__(self, step_check: StepCheck) -> None:
        self.step_check = step_check
        self._call: _WatchedCall | None = None
        self._awaits_backward = False  # True from a forward pass until the backward pass of its outputs
        self._shard_indices: frozenset[int] = frozenset()  # of outputs that hold one rank's tokens

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_call": None, "_awaits_backward": False}

    def end_last_call(self, model: nn.Module, args: object) -> None:
        """Stop watching the last call. This hook runs before `step_check`, whose backward is not the caller's."""
        if self._call is not None and torch.is_grad_enabled() and not are_checks_suspended():
            self._call.finish()  # the next backward pass may belong to both calls
            self._call = None

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if are_checks_suspended() or not torch.is_grad_enabled() or not self.step_check.is_compared:
            return
        has_other_gradients = self._awaits_backward or _has_other_gradients(model, (args, kwargs))
        if not any(gather_over_meshes(self.step_check.meshes, "gradients of outputs", has_other_gradients)):
            self._call = _WatchedCall(model, self.step_check, args, kwargs)

    def after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if are_checks_suspended() or not torch.is_grad_enabled():
            return None
        # A leaf, such as a parameter that forward returns, would keep the hook of each call.
        if (first := next((t for t in iterate_tensors(output) if t.grad_fn is not None), None)) is not None:
            self._awaits_backward = True
            first.register_hook(self._note_backward)
        for t in iterate_tensors(output):
            if isinstance(t, DeferredLogits) and not t.is_computed:
                t.watch(self._watch_logits)
        output = _replace_outputs(output, lambda t: t.logits() if _is_computed(t) else t)
        if self._call is None:
            return self._watch_shards(output)
        self._call.watch_outputs(output)
        replicated = self.step_check.replicated_indices
        tensors = enumerate(output_tensors(output))
        trained = (i for i, t in tensors if t.ndim and (t.requires_grad or isinstance(t, DeferredLogits)))
        self._shard_indices = frozenset(i for i in trained if i not in replicated)
        return output

    def _watch_logits(self, logits: Tensor) -> None:
        """Log a warning if `logits`, which the loss has not been computed from, get a gradient."""
        if logits.requires_grad:
            logits.register_hook(self._warn_of_shard)

    def _watch_shards(self, output: Any) -> Any:
        """Return `output` with views of the tensors that hold one rank's tokens, whose gradients log a warning."""
        tensors = output_tensors(output) if self._shard_indices else []
        shards = {id(tensors[i]) for i in self._shard_indices if i < len(tensors) and tensors[i].requires_grad}

        def watched(value: Any) -> Any:
            if id(value) not in shards:
                return value
            view = value.view_as(value)  # the loss that forward returns depends on `value` itself
            view.register_hook(self._warn_of_shard)
            return view

        return _replace_outputs(output, watched) if shards else output

    def _warn_of_shard(self, grad: Tensor) -> None:
        if bool(grad.any()):
            warn_of_shard(self.step_check, grad)

    def _note_backward(self, grad: Tensor) -> None:
        self._awaits_backward = False


def _replace_outputs(output: Any, replace: Callable[[Any], Any]) -> Any:
    """Return `output` with its values replaced, if it is a tuple; those of a mapping are replaced in place."""
    if type(output) is tuple:
        return tuple(map(replace, output))
    if isinstance(output, MutableMapping):
        for name, value in [*output.items()]:
            if (new_value := replace(value)) is not value:
                output[name] = new_value
    return output


def _is_computed(value: object) -> bool:
    return isinstance(value, DeferredLogits) and value.is_computed


def _has_other_gradients(model: nn.Module, arguments: object) -> bool:
    """True if, after backward, `grad` may contain more than the gradients of this call."""
    parameters = [*model.parameters()]
    return (
        any(t.requires_grad for t in find_tensors(arguments))
        or any(p.grad is not None or getattr(p, "main_grad", None) is not None for p in parameters)
        or any(p._post_accumulate_grad_hooks for p in parameters)  # hooks may clip or step
        or any(
            sync.has_partly_used_parameters or sync.has_pending_reduction or sync.is_deferring
            for sync in find_gradient_syncs(model)
        )
        or DistributedDataParallel._get_active_ddp_module() is not None
    )


def warn_of_shard(check: StepCheck | _WatchedCall, output: Tensor) -> None:
    """Log that the loss is computed from an output with the shape of `output`, which holds one rank's tokens."""
    warn_once(
        check.meshes,
        "outputs that are shards",
        "the loss is computed also from an output of shape %s, which holds only %s. Its sums are summed over ranks in "
        "backward, but means and norms of it are not those of the full output. Call the model without labels to get "
        "full outputs, and compute the whole loss from them.",
        list(output.shape),
        _describe_rank_contents(check.parallelism),
    )


class _WatchedCall:
    """One call of `model`, from its forward to the end of its backward."""

    def __init__(
        self, model: nn.Module, step_check: StepCheck, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.model, self.parallelism, self.meshes = model, step_check.parallelism, step_check.meshes
        self.args, self.kwargs = copy_arguments((args, kwargs))  # the model may write into its arguments
        self.random_states = current_random_states()
        device = next(model.parameters()).device.type
        self.autocast = partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        self._replicated_indices = step_check.replicated_indices
        self.is_finished = False
        self._output_gradients: dict[int, Tensor] = {}  # by index of the output
        self._output_sketches: dict[int, Tensor] = {}  # norm and random projection of each output, by output index
        self._is_queued = self._has_parameter_gradient = self._is_compared = False
        self._handles: list[Any] = []  # of hooks on parameters

    def finish(self) -> None:
        """Ignore backward passes from now on."""
        self.is_finished = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch_outputs(self, output: object) -> None:
        """Register hooks that store the gradients of the tensors in `output`, the result of the call."""
        outputs = {i: t for i, t in enumerate(output_tensors(output)) if t.requires_grad}
        self.is_finished = not 0 < len(outputs) <= _MAX_OUTPUTS
        if self.is_finished:
            return
        for i, t in outputs.items():
            t.register_hook(partial(self._store_gradient, i))
            self._output_sketches[i] = norm_and_projection(t.detach())
        # Hooks of parameters notice a backward pass that does not start at the outputs, also by torch.autograd.grad.
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._handles = [p.register_hook(self._note_parameter_gradient) for p in parameters]

    def _store_gradient(self, index: int, grad: Tensor) -> None:
        if self._is_compared:
            self.finish()  # the same graph once more
        if not self.is_finished:
            self._output_gradients[index] = as_plain_gradient(grad).detach()
            self._queue_comparison()

    def _note_parameter_gradient(self, grad: Tensor) -> None:
        if self._is_compared:
            self.finish()
            warn_once(
                self.meshes,
                "another backward pass",
                "after that of the loss, a backward pass that does not start at the outputs of forward adds to "
                "gradients, which are summed over the context parallel ranks. Divide terms that do not depend on "
                "tokens, such as a penalty on parameters, by the context parallel size.",
            )
        self._has_parameter_gradient = True
        self._queue_comparison()

    def _queue_comparison(self) -> None:
        if not (self.is_finished or self._is_queued):
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._compare)

    def _compare(self) -> None:
        if self.is_finished:
            return
        try:
            self._compare_gradients()
        except BaseException:
            self.finish()
            raise
        self._is_compared = True
        if self.parallelism.cp_mesh is None or not self.parallelism.grad_sync:
            self.finish()  # nothing sums the gradients of other backward passes

    def _compare_gradients(self) -> None:
        output_gradients, self._output_gradients = self._output_gradients, {}
        trainable_parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not output_gradients:
            self._warn("gradients of parameters do", "*")
            return
        if all(p.grad is None for p in trainable_parameters.values()):  # torch.autograd.grad leaves `grad` unset
            if self._has_parameter_gradient:
                warn_once(
                    self.meshes,
                    "torch.autograd.grad",
                    "the loss is differentiated by torch.autograd.grad, so it is not checked whether it depends on "
                    "tensors inside the model, which hold only %s. Compute it from the outputs of forward.",
                    _describe_rank_contents(self.parallelism),
                )
            return
        with isolated_passes(self.model, Mode.AS_IT_IS, self.random_states):
            with self.autocast():  # the caller's modes at forward; this code runs in backward, outside autocast
                outputs = run_on_copies(self.model, self.args, self.kwargs)
            if has_reentrant_checkpoint([outputs[i] for i in output_gradients]):
                return  # torch.autograd.grad does not support reentrant checkpoints
            if any(self._differs(i, outputs[i]) for i in output_gradients):
                return  # forward depends on state that it changes, so it cannot be repeated
            gradients, direct_gradients = _parameter_gradients(
                outputs, output_gradients, list(trainable_parameters.values())
            )
        self._report_shards(direct_gradients, output_gradients)
        expected = gradient_shards(
            self.model, self.parallelism, dict(zip(trainable_parameters, gradients, strict=True)), is_summed=False
        )
        actual = gradient_shards(
            self.model, self.parallelism, {name: p.grad for name, p in trainable_parameters.items()}, is_summed=True
        )
        # backward(inputs=...) leaves the gradients of other parameters unset.
        actual = {name: t for name, t in actual.items() if trainable_parameters[name].grad is not None}
        errors = gradient_errors(expected, {name: (t, two_norm(t)) for name, t in actual.items()})
        name = max(errors, key=lambda name: errors[name], default="")
        replicated_gradients = {i: grad for i, grad in output_gradients.items() if i in self._replicated_indices}
        sketches = {
            str(i): [*norm_and_projection(grad).tolist(), grad.element_size()]
            for i, grad in replicated_gradients.items()
        }
        rank_reports = gather_over_meshes(self.meshes, "gradients of outputs", [errors.get(name, 0.0), name, sketches])
        for index in {index: None for *_, rank_sketches in rank_reports for index in rank_sketches}:
            self._raise_if_different([rank_sketches.get(index, (0.0, 0.0, 8)) for *_, rank_sketches in rank_reports])
        error, name = max((report[0], report[1]) for report in rank_reports)
        if _PARAMETER_BOUND < error < inf:
            self._warn(f"{error:.2g} of the gradient of {name!r} does", name)

    def _report_shards(self, direct_gradients: Mapping[int, Tensor], output_gradients: Mapping[int, Tensor]) -> None:
        """Log that the loss uses outputs that hold one rank's tokens, such as logits of a call with labels."""
        for i, direct in direct_gradients.items():
            is_shard = i not in self._replicated_indices
            if is_shard and two_norm(direct) > _PARAMETER_BOUND * two_norm(output_gradients[i]):
                warn_of_shard(self, direct)

    def _warn(self, gradients_do: str, key: str) -> None:
        warn_once(
            self.meshes,
            key,
            "after backward, %s not come from the outputs of the model's forward: the loss depends on parameters, or "
            "on tensors inside the model, which hold only %s. This dependence is not compared with a single process. "
            "Compute the loss from the outputs of forward, or make sure that each rank adds only its share.",
            gradients_do,
            _describe_rank_contents(self.parallelism),
        )

    @torch.no_grad()
    def _differs(self, index: int, output: Tensor) -> bool:
        norm, projection = norm_and_projection(output)
        _, first_projection = self._output_sketches[index]
        return bool((projection - first_projection).abs() > _OUTPUT_BOUNDS[output.element_size()] * norm)

    def _raise_if_different(self, rank_sketches: Sequence[tuple[float, float, int]]) -> None:
        """Raise ValueError if the ranks' sketches of the gradient of an output differ."""
        norms, projections, element_nbytes = zip(*rank_sketches, strict=True)
        if max(projections) - min(projections) > _OUTPUT_BOUNDS[min(element_nbytes)] * max(norms):
            raise ValueError(
                "in backward, ranks that share the model have different gradients of the outputs of its forward, which "
                "are equal on all of them: their losses differ. Each rank must compute the same loss, from the outputs "
                "of forward and not from tensors inside the model, which hold only "
                f"{_describe_rank_contents(self.parallelism)}."
            )


def _describe_rank_contents(parallelism: Parallelism) -> str:
    has_token_shards, has_feature_shards = parallelism.shards_sequence, parallelism.tp_mesh is not None
    return "one rank's " + " or ".join(["tokens"] * has_token_shards + ["heads and features"] * has_feature_shards)


def _parameter_gradients(
    outputs: Sequence[Tensor], output_gradients: Mapping[int, Tensor], parameters: Sequence[Tensor]
) -> tuple[Sequence[Tensor | None], dict[int, Tensor]]:
    """Return the gradients of `parameters` that follow from `output_gradients`, the gradients of `outputs` by index.

    The second result is the part of each output's gradient that does not come from other outputs, by index.

    One output may depend on another: a loss is computed from logits. The gradient of the logits then includes the
    contribution of the loss, which is subtracted here so that it is not counted twice.
    """
    # Autograd numbers nodes in the order of creation, so an output depends only on nodes with smaller numbers.
    nodes: dict[int, Any] = {i: outputs[i].grad_fn for i in output_gradients}
    order = sorted(output_gradients, key=lambda i: 0 if nodes[i] is None else -nodes[i]._sequence_nr())
    roots: list[Tensor] = []
    root_gradients: list[Tensor] = []
    for i in order:
        direct_gradient = output_gradients[i]
        if roots:
            with separate_grads(parameters):
                (indirect_gradient,) = torch.autograd.grad(
                    roots, [outputs[i]], root_gradients, retain_graph=True, allow_unused=True
                )
            direct_gradient = direct_gradient if indirect_gradient is None else direct_gradient - indirect_gradient
        roots.append(outputs[i])
        root_gradients.append(direct_gradient)
    return gradients_of(roots, parameters, root_gradients), dict(zip(order, root_gradients, strict=True))
