"""Compare the first training steps of a parallel model with the unsharded model: outputs and gradients.

The comparison runs at the first 2 calls that require gradients and at the 10th, 100th, ..., because forward may depend
on the batch and change with time. It runs at the first call with other trainable parameters. It also runs at each call
that is due (`is_change_check_due`) if conditions (`conditions`), the mode, arguments or autocast differ from those of
all compared calls. Outputs of calls without gradients are compared on the same grounds, up to 16 times:

| model     | computes                                                                                             |
|-----------|------------------------------------------------------------------------------------------------------|
| sharded   | the outputs of the batch, to find the outputs that every rank has in full                            |
| unsharded | outputs, and gradients of a random weighted sum of the outputs just found, from gathered parameters  |
|           | (`unsharded`); each rank computes all of it alone, and keeps its shard of the gradients              |
| sharded   | the same outputs and gradients; the comparison itself sums gradients over context parallel ranks     |
| unsharded | if an error is large: outputs and gradients with rounding errors added, to measure their effect; all |
|           | ranks raise if the error is larger than that                                                         |

In the first of these comparisons both models have noise on constant parameters (`parameter_noise`).

Then the call itself runs, with random states, modes, buffers and gradients as before (`preserve_state`).

Unlike the comparison after sharding (`sharding_check`), this one uses the caller's batch, lengths, labels and mode,
runs backward, and includes later changes of the model. `loss_check` checks the backward pass of the call itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from fused_tp.core.checks import is_change_check_due, is_power_of_two, is_repetition_due
from fused_tp.core.errors import FusedTPError
from fused_tp.nn.checkpoint import gather_tensors
from fused_tp.nn.float8 import without_float8
from fused_tp.nn.sharding import as_dtensors, local_shard, shard_like
from fused_tp.ops.collectives import all_reduce
from fused_tp.parallelizing.checks.batch_check import are_checks_suspended, gather_over_meshes
from fused_tp.parallelizing.checks.conditions import ComparedConditions, find_conditions
from fused_tp.parallelizing.checks.float32 import has_16_bit_parameters, in_float32, widen_arguments
from fused_tp.parallelizing.checks.model_check import remember_code, warn_once
from fused_tp.parallelizing.checks.module_outputs import (
    CACHE_NAMES,
    OutputComparison,
    RankShards,
    first_difference,
    is_cache,
    output_tensors,
    record_outputs,
)
from fused_tp.parallelizing.checks.parameter_noise import noise_on_sharded_constants
from fused_tp.parallelizing.checks.read_values import RecordReads
from fused_tp.parallelizing.checks.sharding_check import (
    MAX_BOUND,
    OUTPUT_BOUNDS,
    ROUNDING_FACTOR,
    TooLongError,
    add_rounding_errors,
    advice,
    least_precise_dtype,
    token_errors,
)
from fused_tp.parallelizing.checks.undisturbed import LARGE_MODEL_PARAMETERS, Mode, VariableId, preserve_state
from fused_tp.parallelizing.checks.unsharded import UnshardedModel
from fused_tp.parallelizing.forward_shard import running_node_number
from fused_tp.parallelizing.grad_sync import find_gradient_syncs, has_distributed_experts
from fused_tp.parallelizing.graph import REENTRANT_NODE, is_leaf, leaf_tensors, reachable_nodes
from fused_tp.parallelizing.outputs import find_tensors, iterate_numbers
from fused_tp.parallelizing.sequence_sharding import Parallelism, SequenceSharding

TIME_LIMIT_SECONDS = 5.0  # time limit for the forward pass of the unsharded model
_MEMORY_SHARE = 0.25  # largest share of the free memory for full parameters and their gradients
# Gradient errors below these bounds are accepted without measuring the effect of rounding. An error is relative to the
# norm of the parameter's gradient, or to a share of the norm of all gradients if that is larger: rounding leaves
# a residue in a gradient that should be 0. In fp32 it is about 1e-7 of the norm of all; no correct step of 420 (model
# types under tp, sequence parallelism and cp) was refused with that share. float64 models compute norms in fp32.
_GRADIENT_BOUNDS = {torch.float64: 1e-4, torch.float32: 5e-3}
_GRADIENT_BOUND_16_BIT = 0.1
_TOTAL_NORM_SHARE_FP32 = 1e-4
_TOTAL_NORM_SHARE = 1e-3
_MAX_OUTSIDE_ERROR = 0.1  # of gradients of tensors outside of the model: above rounding in 16 bits
_MAX_EVALUATIONS = 16  # calls without gradients that are compared
_MAX_BUFFER_NUMEL = 1_000_000  # larger buffers are not compared
_OUT_OF_MEMORY = "a step of the unsharded model does not fit in the memory"


class StepCheck:
    """Forward pre-hook that compares training steps of a parallel model with the unsharded model.

    Args:
        sequence: object that shards the sequence of each forward pass.
        meshes: 1-D meshes whose ranks share the model.
        unsharded_model: state of the model before it is sharded.
        was_training: True if the comparison after sharding ran in training mode, so that eval mode is to be compared.

    Raises:
        ValueError: raised on all ranks if the models differ. It states the largest difference and likely causes.
    """

    def __init__(
        self,
        sequence: SequenceSharding,
        meshes: Sequence[DeviceMesh],
        unsharded_model: UnshardedModel,
        *,
        was_training: bool = False,
    ) -> None:
        self.sequence, self.parallelism, self.meshes, self.unsharded_model = (
            sequence,
            sequence.parallelism,
            tuple(meshes),
            unsharded_model,
        )
        self.calls = self.frozen_calls = 0
        self.evaluations = self.evaluations_since_training = 0  # calls without gradients
        self._evaluations_to_compare = _MAX_EVALUATIONS
        self.is_compared = False  # True if the running call has been compared
        # Indices of the running call's outputs that every rank has in full and that require gradients.
        self.replicated_indices: frozenset[int] = frozenset()
        self.output_shapes: dict[object, list[torch.Size]] = {}  # of the sharded model, by `_shapes_key`
        self._compared_keys: set[object] = set()  # `_call_key` of each call that has been compared
        # Without training mode, the comparison after sharding has covered the conditions of the first evaluation.
        self._compares_next_evaluation = was_training
        self._conditions = ComparedConditions()
        self._trainable: set[tuple[bool, ...]] = set()  # `requires_grad` of the parameters at the calls so far
        self._is_skip_reported = False  # True if the log says why steps are not compared

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if are_checks_suspended():
            return
        self.is_compared = False
        if not torch.is_grad_enabled():
            self.evaluations += 1
            self.evaluations_since_training += 1
            is_due = is_change_check_due(self.evaluations) or (
                is_power_of_two(self.evaluations_since_training) and is_repetition_due(1)
            )
            if self._evaluations_to_compare and is_due:
                with torch.inference_mode(mode=False), torch.no_grad():
                    self._compare_evaluation(model, args, kwargs)
            return
        if running_node_number() is not None:
            if not self.calls:
                self._report_skipped("it runs in an activation checkpoint with use_reentrant=True")
            return
        is_trained = any(p.requires_grad for p in model.parameters())
        if not (is_trained or any(t.requires_grad for t in find_tensors((args, kwargs)))):
            self._compare_frozen(model, args, kwargs)
            return
        self.calls += 1
        self.evaluations_since_training = 0
        trainable = tuple(p.requires_grad for p in model.parameters())
        is_repetition = is_repetition_due(self.calls) or (trainable not in self._trainable and is_repetition_due(1))
        self._trainable.add(trainable)
        if not (is_repetition or is_change_check_due(self.calls)):
            return
        arguments, conditions = self._named_arguments(args, kwargs), find_conditions(model)
        key, has_new_conditions = _call_key(model, arguments), self._conditions.has_new(conditions)
        needs_comparison = is_repetition or key not in self._compared_keys or has_new_conditions
        rank_reports = gather_over_meshes(
            self.meshes,
            "a training step",
            [needs_comparison, has_new_conditions, self._reason_not_comparable(model, arguments)],
        )
        if not any(is_needed for is_needed, *_ in rank_reports):
            return
        if any(has_new for _, has_new, _ in rank_reports):  # on all ranks, which then find the shapes together
            self.output_shapes.clear()
        self._compared_keys.add(key)
        self._conditions.add(conditions)
        comparison = _StepComparison(self, model, args, kwargs, arguments)
        reason = next((rank_reason for *_, rank_reason in rank_reports if rank_reason), "") or comparison.compare()
        if not reason and _is_small_16_bit(model):
            self._compare_in_float32(model, args, kwargs)
        if not reason:
            self.is_compared = True
            if model.training and comparison.mode is Mode.EVAL:
                self._report_eval_mode(type(model).__name__)
            else:
                remember_code(model)
            return
        self._report_skipped(reason)

    def _compare_frozen(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare a step of a model without trainable parameters if a hook uses trainable tensors outside of it."""
        self.frozen_calls += 1
        if not is_repetition_due(self.frozen_calls):
            return
        arguments = self._named_arguments(args, kwargs)
        reports = gather_over_meshes(
            self.meshes, "a step of a frozen model", self._reason_not_comparable(model, arguments)
        )
        if any(reports):
            return
        comparison = _StepComparison(self, model, args, kwargs, arguments)
        if any(gather_over_meshes(self.meshes, "outputs that require gradients", comparison.requires_gradients())):
            comparison.compare()

    def _compare_evaluation(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the outputs of a call without gradients, if its arguments or conditions are new."""
        arguments, conditions = self._named_arguments(args, kwargs), find_conditions(model)
        key = (_call_key(model, arguments), False)
        is_new = key not in self._compared_keys or self._conditions.has_new(conditions)
        reports = gather_over_meshes(
            self.meshes, "a call without gradients", [is_new, self._reason_not_comparable(model, arguments)]
        )
        if any(reason for _, reason in reports) or not any(rank_is_new for rank_is_new, _ in reports):
            return
        self._compared_keys.add(key)
        self._conditions.add(conditions)
        if not self._compares_next_evaluation:
            self._compares_next_evaluation = True
            return
        self._evaluations_to_compare -= 1
        self.output_shapes.clear()
        reason = _StepComparison(self, model, args, kwargs, arguments, with_gradients=False).compare()
        if not reason:
            remember_code(model)
            return
        self._evaluations_to_compare = 0  # each attempt takes time
        warn_once(
            self.meshes,
            f"eval mode: {reason}",
            "calls in eval mode are not compared with the unsharded model: %s.",
            reason,
        )

    def _compare_in_float32(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the step once more in fp32, in which no rounding hides errors, unless the model does not allow it."""
        device = next(model.parameters()).device.type
        replicated_indices = self.replicated_indices
        with in_float32([model]), torch.autocast(device, enabled=False):
            args, kwargs = widen_arguments((args, kwargs))
            arguments = self._named_arguments(args, kwargs)
            try:
                _StepComparison(self, model, args, kwargs, arguments).compare()
            except FusedTPError:
                raise
            except (RuntimeError, TypeError):
                pass  # the caller's code does not support fp32 on shards
        self.replicated_indices = replicated_indices

    def before_step(self, model: nn.Module) -> None:
        """Log that no step was compared, if an optimizer steps and these hooks have not run."""
        if self.calls > 0 or self._is_skip_reported or not is_repetition_due(1):
            return
        # Gradients of zeros come from code that initializes the optimizer's state, such as set_optimizer_state_dict.
        if any(bool(local_shard(p.grad).any()) for p in model.parameters() if p.grad is not None):
            self._report_skipped(
                f"its gradients come from compiled code, or from other modules or methods than {type(model).__name__}"
                ".forward"
            )

    def _report_eval_mode(self, class_name: str) -> None:
        warn_once(
            self.meshes,
            f"{class_name} draws random numbers",
            "training steps of the parallel %s were compared with the unsharded model in eval mode, because it draws "
            "random numbers in training mode, on each rank for its own tokens. Code that runs in training mode only "
            "was not compared; compare it once without the random numbers.",
            class_name,
        )

    def _report_skipped(self, reason: str) -> None:
        self._is_skip_reported = True
        warn_once(
            self.meshes,
            reason,
            "the first training step of the parallel model was not compared with the unsharded model: %s. Use "
            "`fused-tp check` to compare a smaller model of this kind on CPUs.",
            reason,
        )

    def _named_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; positional arguments by their index if nothing is sharded by name."""
        if self.parallelism.shards_sequence or self.parallelism.computes_loss:
            return self.sequence.arguments_by_name(args, kwargs)
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}

    def call_tokens(self, arguments: dict[str, Any]) -> Tensor | None:
        """Return the tokens [batch, seq, ...], or the first tensor of several dims if no sequence is sharded."""
        if self.parallelism.shards_sequence:
            return self.sequence.find_tokens(arguments)[1]
        return next((t for t in find_tensors(arguments) if t.ndim > 1), None)

    def _reason_not_comparable(self, model: nn.Module, arguments: dict[str, Any]) -> str:
        """Return the reason why this rank cannot compare, or ""."""
        parameters = [*model.parameters()]
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            return "fully_shard manages its parameters"
        if any(hasattr(p, "ds_status") for p in parameters):  # another forward pass would change its order of fetches
            return "DeepSpeed's ZeRO 3 manages its parameters"
        if not all(p.is_leaf for p in parameters):
            return "its parameters are computed from others"
        if any(is_cache(value) or (name in CACHE_NAMES and value is not None) for name, value in arguments.items()):
            return "its arguments include a cache"
        tokens = self.call_tokens(arguments)
        if tokens is not None and self.sequence.is_too_short(tokens.shape[1]):
            return "its sequence has fewer tokens than there are ranks"
        if reason := self.unsharded_model.reason_not_restorable(model):
            return reason
        try:
            as_dtensors(model)
        except ValueError:
            return "another library has replaced its parameters by shards of other shapes"
        num_ranks = 1
        for mesh in self.meshes:
            num_ranks *= mesh.size()
        needed_bytes = 2 * sum(p.numel() * p.element_size() for p in parameters)
        free_bytes = _free_memory(parameters[0].device, num_ranks)
        if needed_bytes > _MEMORY_SHARE * free_bytes:
            return (
                f"full parameters and gradients take {needed_bytes / 1e9:.3g} GB, more than {_MEMORY_SHARE:.0%} of the "
                f"{free_bytes / 1e9:.3g} GB of free memory"
            )
        return ""


def _call_key(model: nn.Module, arguments: dict[str, Any]) -> object:
    """Return a key that is equal for calls with similar arguments and the same modes and trainable parameters."""
    scalars = {
        name: value if isinstance(value, (bool, int, float, str)) else None
        for name, value in arguments.items()
        if value is not None
    }
    sizes = [t.numel().bit_length() for t in find_tensors(arguments)[:1]]
    device = next(model.parameters()).device.type
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    trainable = tuple(p.requires_grad for p in model.parameters())
    return model.training, frozenset(scalars.items()), *sizes, autocast_dtype, trainable


def _is_small_16_bit(model: nn.Module) -> bool:
    """True if `model` has 16-bit parameters, and is small enough for copies in fp32."""
    return has_16_bit_parameters(model) and sum(p.numel() for p in model.parameters()) <= LARGE_MODEL_PARAMETERS


def _free_memory(device: torch.device, num_ranks: int) -> float:
    """Return the free memory in bytes for each of `num_ranks`. CPU ranks share the memory of the machine."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return float(free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    with suppress(OSError):  # systems without /proc
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):  # includes file caches, which the kernel can drop
                return int(line.split()[1]) * 1024 / num_ranks
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / num_ranks


@dataclass
class _UnshardedStep:
    """A step of the unsharded model.

    Attributes:
        outputs: tensors that forward returns, detached.
        weights: weights of outputs, by index, of the sum that is differentiated.
        gradients: (this rank's shard, norm of the full gradient) by name of a parameter or argument; None if not
            computed.
        written_variables: tensors and numbers that forward and hooks have written to variables and small buffers,
            numbers that they read from tensors, and numbers that forward returns.
    """

    outputs: list[Tensor]
    weights: dict[int, Tensor]
    gradients: dict[str, tuple[Tensor, float]] | None
    written_variables: dict[VariableId, Any]


class _StepComparison:
    """One step of the unsharded and of the sharded model, on the arguments of one call.

    Args:
        args, kwargs: arguments of the call.
        arguments: the same arguments by name, from `StepCheck._named_arguments`.
        with_gradients: compare gradients, too.
    """

    def __init__(
        self,
        check: StepCheck,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: dict[str, Any],
        *,
        with_gradients: bool = True,
    ) -> None:
        self.with_gradients = with_gradients
        self.check, self.model, self.args, self.kwargs = check, model, args, kwargs
        self.tp, self.cp = check.parallelism.tp_mesh, check.parallelism.cp_mesh
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Arguments that require gradients, such as embeddings, by a name for messages; and their copies in each run.
        self.trained_inputs = {
            f"argument {name}": t
            for name, t in arguments.items()
            if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()
        }
        self.input_copies: dict[str, Tensor] = {}
        # Leaves that are neither parameters nor arguments, such as weights that a hook holds; and their gradients in
        # the unsharded model.
        self.outside_leaves: dict[str, Tensor] = {}
        self.outside_gradients: dict[str, Tensor | None] = {}
        self._returned_numbers: dict[VariableId, Any] = {}  # numbers that the last run has returned
        self.mode = Mode.AS_IT_IS
        self.dtype = least_precise_dtype(model)
        device = next(model.parameters()).device.type
        if torch.is_autocast_enabled(device):
            self.dtype = torch.get_autocast_dtype(device)
        self.norm_share = _TOTAL_NORM_SHARE_FP32 if self.dtype == torch.float32 else _TOTAL_NORM_SHARE
        self.is_routed = self.dtype.itemsize < 4 and any("expert" in name for name, _ in model.named_modules())
        # A weight with a `main_grad` would accumulate into it in backward, but it belongs to the caller.
        self.has_gradients = with_gradients and all(
            getattr(p, "main_grad", None) is None for p in self.trainable.values()
        )
        self.full_parameters: dict[str, Tensor] = {}
        self.buffers = self._small_buffers()
        self.tokens = check.call_tokens(arguments)
        self.rank_shards = RankShards(self.tp, self.cp, 1 if self.tokens is None else self.tokens.shape[1])
        # Over context parallel ranks a padding mask is dropped, because causal tokens do not see padding on their
        # right. Only the outputs at the padding itself then differ from the unsharded model, so they are not compared.
        mask = arguments.get("attention_mask")
        self.token_mask: Tensor | None = None
        if self.cp is not None and isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.bool().all()):
            self.token_mask = mask.bool()

    def requires_gradients(self) -> bool:
        """Run the sharded model; return True if an output requires gradients that the comparison can compute."""
        with isolated_passes(self.model, self.mode):
            outputs = [t for t in self._run() if t.requires_grad]
        return bool(outputs) and not has_reentrant_checkpoint(outputs)

    def compare(self) -> str:
        """Return the reason why the steps cannot be compared, or ""; raise ValueError if they differ."""
        known_shapes = self.check.output_shapes
        with without_float8([self.model]):  # the scales of shards differ from those of the whole
            if (key := self._shapes_key()) not in known_shapes:
                with isolated_passes(self.model, self.mode, with_gradients=self.with_gradients):
                    known_shapes[key] = [t.shape for t in self._run()]
            reason = self._gather_parameters()
            if self.check.calls > 1 or reason:
                return self._compare(key, reason)
            with noise_on_sharded_constants(self.model, self.full_parameters):
                return self._compare(key, reason)

    def _compare(self, key: object, reason: str) -> str:
        """Compare the gathered parameters; see `compare`.

        Args:
            key: `_shapes_key` of the call.
            reason: reason why this rank has no full parameters, or "".
        """
        meshes, known_shapes = self.check.meshes, self.check.output_shapes
        unsharded_step: _UnshardedStep | None = None
        if not reason:
            unsharded_step, reason = self._unsharded_step(known_shapes[key])
        self.full_parameters = {}  # free the memory before the sharded model runs
        if reasons := [
            rank_reason
            for rank_reason in gather_over_meshes(meshes, "a step of the unsharded model", reason)
            if rank_reason
        ]:
            return str(reasons[0])
        assert unsharded_step is not None
        expected, weights, expected_gradients = unsharded_step.outputs, unsharded_step.weights, unsharded_step.gradients
        self.check.replicated_indices = frozenset(weights)
        variables: dict[VariableId, Any] = {}
        passes = isolated_passes(self.model, self.mode, with_gradients=self.with_gradients, written_variables=variables)
        with passes, RecordReads() as reads:
            outputs = self._run()
            has_known_shapes = [t.shape for t in outputs] == known_shapes[key]
            variables |= self._buffer_values() | self._returned_numbers
            parameters = {**self.trainable, **self.input_copies, **self.outside_leaves}
            gradients = self._gradients(outputs, weights, parameters) if has_known_shapes else None
        variables |= reads.values
        if documents := self.check.sequence.documents:
            self.rank_shards = RankShards(self.tp, self.cp, documents[-1], documents)
        output_error = self._output_error(outputs, expected)
        del outputs
        if not all(gather_over_meshes(meshes, "shapes", has_known_shapes)):
            known_shapes.pop(key)
            return "its outputs have other shapes than in an equal call before"
        self._compare_variables(unsharded_step, variables)
        parameter_norm = sum(norm**2 for _, norm in (expected_gradients or {}).values() if norm < inf) ** 0.5
        self._compare_outside_gradients(gradients, parameter_norm)
        errors: dict[str, float] = {}
        gradient_error: float | None = None
        if expected_gradients is not None and gradients is not None:
            errors = gradient_errors(self._local_gradients(gradients), expected_gradients, share=self.norm_share)
            gradient_error = max(errors.values(), default=0.0)
        bound = OUTPUT_BOUNDS.get(self.dtype, OUTPUT_BOUNDS[torch.bfloat16])
        gradient_bound = inf if self.is_routed else accepted_gradient_error(self.dtype)
        rank_errors = gather_over_meshes(meshes, "errors of a training step", [output_error, gradient_error])
        if any(error is None for _, error in rank_errors):  # gradients are compared on all ranks or on none
            errors, expected_gradients = {}, None
        if (
            max(error for error, _ in rank_errors) <= bound
            and max(error or 0.0 for _, error in rank_errors) <= gradient_bound
        ):
            return ""
        self._gather_parameters()
        if any(gather_over_meshes(meshes, "packed documents", self._mixes_documents())):
            return "in the unsharded model, tokens attend to other packed documents"
        rounding, gradient_rounding = self._rounding_errors(expected, weights, expected_gradients)
        bound = max(bound, ROUNDING_FACTOR * rounding)
        excess = {
            name: error / max(gradient_bound, ROUNDING_FACTOR * gradient_rounding.get(name, 0.0))
            for name, error in errors.items()
        }
        return self._raise_if_wrong(output_error, bound, errors, excess)

    def _shapes_key(self) -> object:
        """Return a key of the call that is equal for calls whose outputs have equal shapes."""
        inputs = [tuple(t.shape) for t in find_tensors((self.args, self.kwargs))]
        return *inputs, _call_key(self.model, self.check._named_arguments(self.args, self.kwargs))

    def _raise_if_wrong(
        self, output_error: float, bound: float, errors: Mapping[str, float], excess: Mapping[str, float]
    ) -> str:
        """Raise ValueError if an error is larger than rounding; return the reason if that cannot be decided, or "".

        Args:
            output_error: largest error of an output.
            bound: error of outputs that rounding explains.
            errors: errors of gradients, by parameter name.
            excess: `errors` divided by their bounds.
        """
        name = max(excess, key=lambda name: excess[name], default="")
        local_report = [output_error / bound, output_error, excess.get(name, 0.0), name, errors.get(name, 0.0), bound]
        # Ranks may measure different effects of rounding: all use the largest excess of any rank, to decide alike.
        rank_reports = gather_over_meshes(self.check.meshes, "errors that rounding explains", local_report)
        class_name, bound = type(self.model).__name__, max(report[-1] for report in rank_reports)
        if bound > MAX_BOUND:
            return f"rounding alone changes its outputs by {bound / ROUNDING_FACTOR:.2g}"
        if max(report[0] for report in rank_reports) > 1:
            raise ValueError(
                f"the parallel {class_name} does not match the unsharded model: on the batch of this step its relative "
                f"output error is {max(report[1] for report in rank_reports):.2g}, above the rounding bound "
                f"{bound:.2g}. {self._describe_first_difference(bound)}{advice(self.tp, self.cp)} "
                "Pass verify=False to parallelize to skip this check."
            )
        if max(report[2] for report in rank_reports) > 1:
            _, _, _, name, error, _ = max(rank_reports, key=lambda report: report[2])
            raise ValueError(
                f"the gradient of {name!r} in the parallel {class_name} does not match the unsharded model: on the "
                f"batch of this step its relative error is {error:.2g}. {self._describe_first_difference(bound)}"
                f"{advice(self.tp, self.cp)} The same rules hold in backward: hooks on gradients see this rank's "
                "shards. Pass verify=False to parallelize to skip this check."
            )
        return ""

    def _run(self, replacements: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        """Return the outputs for the call's arguments; `replacements` replaces some of them, by id."""

        self.input_copies = {name: t.detach().clone().requires_grad_() for name, t in self.trained_inputs.items()}
        # Clones, because a model must not write into the leaves themselves.
        replacement_by_id = {id(self.trained_inputs[name]): copy.clone() for name, copy in self.input_copies.items()}
        replacement_by_id |= replacements or {}

        def copy_argument(value: Any) -> Any:
            if id(value) in replacement_by_id:
                return replacement_by_id[id(value)]
            return value.detach().clone() if isinstance(value, Tensor) else value

        args, kwargs = tree_map(copy_argument, (self.args, dict(self.kwargs)))
        output = self.model(*args, **kwargs)
        self._returned_numbers = {
            VariableId(0, f"number {index}", f"number {index} that it returns"): number
            for index, number in enumerate(iterate_numbers(output))
        }
        return output_tensors(output)

    def _gather_parameters(self) -> str:
        """Gather full parameters; return the reason if that fails, or "". A collective call."""
        named_parameters = dict(self.model.named_parameters(remove_duplicate=False))
        try:
            self.full_parameters = _hooked_parameters(
                named_parameters, gather_tensors(named_parameters, self.model, keep_result=True, device=None)
            )
        except FusedTPError:
            raise
        except Exception as error:
            return f"its parameters cannot be gathered: {type(error).__name__}: {error}"
        return ""

    # -- the two models ------------------------------------------------------------------------------------------------

    @contextmanager
    def _unsharded(self, written_variables: dict[VariableId, Any] | None = None) -> Iterator[Callable[[], bool]]:
        with (
            self.check.unsharded_model.restore(self.model, self.full_parameters),
            without_float8([self.model]),
            preserve_state(
                [self.model], self.mode, with_gradients=self.with_gradients, written_variables=written_variables
            ) as drew_random,
        ):
            yield drew_random

    def _unsharded_step(self, shapes: Sequence[torch.Size]) -> tuple[_UnshardedStep | None, str]:
        """Return (step of the unsharded model, ""), or (None, reason). `shapes`: those of the sharded outputs."""
        class_name = type(self.model).__name__
        parameters = {name: self.full_parameters[name] for name in self.trainable}
        for mode in Mode if self.model.training else (Mode.EVAL,):
            self.mode, description, variables = mode, "the unsharded", dict[VariableId, Any]()
            try:
                with self._unsharded(variables) as drew_random, RecordReads() as reads:
                    first_number = torch.autograd._get_sequence_nr()
                    with _time_limit(self.model, TIME_LIMIT_SECONDS):
                        outputs = self._run()
                    description = "backward of the unsharded"
                    variables |= self._buffer_values(written_only=True) | self._returned_numbers
                    weights = _output_weights(shapes, outputs, self.token_mask)
                    # Inside this context, which restores buffers on exit: backward may read them.
                    self.outside_leaves = self._find_outside_leaves(outputs, weights, first_number)
                    gradients = self._gradients(outputs, weights, parameters | self.input_copies | self.outside_leaves)
                variables |= reads.values
            except TooLongError:
                return None, f"the unsharded {class_name} takes longer than {TIME_LIMIT_SECONDS:g} s on this batch"
            except torch.OutOfMemoryError:
                return None, _OUT_OF_MEMORY
            except Exception as error:
                return None, f"{description} {class_name} fails: {type(error).__name__}: {error}"
            if not drew_random():
                break
        if not outputs:
            return None, f"{class_name}.forward returns no tensors"
        if any(bool(t.isnan().any()) for t in outputs):
            return None, f"the unsharded {class_name} returns NaN"
        outputs = [t.detach() for t in outputs]
        if gradients is not None:
            self.outside_gradients = {name: gradients.pop(name) for name in self.outside_leaves}
        return _UnshardedStep(outputs, weights, self._expected_gradients(gradients), variables), ""

    def _expected_gradients(
        self, gradients: Mapping[str, Tensor | None] | None
    ) -> dict[str, tuple[Tensor, float]] | None:
        """Return (this rank's shard, norm of the full gradient) of unsharded gradients, by name."""
        if gradients is None:
            return None
        dtensors = as_dtensors(self.model)
        shards = {}
        for name, p in {**self.trainable, **self.input_copies}.items():
            gradient = gradients[name]
            if gradient is None:
                gradient = torch.zeros_like(self.full_parameters.get(name, p))
            shards[name] = shard_like(gradient, dtensors.get(id(p), p)).clone(), two_norm(gradient)
        return shards

    def _local_gradients(self, gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """Return this rank's shards of the sharded model's gradients, by name. A collective call."""
        input_gradients = {name: gradients.pop(name) for name in self.input_copies}
        shards = gradient_shards(self.model, self.check.parallelism, gradients, is_summed=False)
        return shards | {
            name: torch.zeros_like(self.input_copies[name]) if grad is None else grad
            for name, grad in input_gradients.items()
        }

    def _gradients(
        self, outputs: Sequence[Tensor], weights: Mapping[int, Tensor], parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None] | None:
        """Return gradients of the weighted sum of outputs; None if a backward would change the caller's gradients."""
        if not (self.has_gradients and weights):
            return None
        total = torch.stack([(outputs[i].float() * weight).sum() for i, weight in weights.items()]).sum()
        if not (total.requires_grad and parameters):
            return dict.fromkeys(parameters)
        if DistributedDataParallel._get_active_ddp_module() is not None and (
            has_reentrant_checkpoint([total]) or has_multi_grad_hook(parameters.values())
        ):
            return None  # DDP would reduce the gradients of a backward pass
        return dict(zip(parameters, gradients_of([total], [*parameters.values()]), strict=True))

    def _find_outside_leaves(
        self, outputs: Sequence[Tensor], weights: Mapping[int, Tensor], first_number: int
    ) -> dict[str, Tensor]:
        """Return the leaves of the unsharded model's graph that are neither parameters nor arguments, by name.

        Without those that the caller's own graph reaches, the nodes before `first_number`: its backward can run only
        once. Without those with hooks, which may sum gradients over the ranks.
        """
        if not self.has_gradients or has_reentrant_checkpoint([outputs[i] for i in weights]):
            return {}
        nodes = {node for i in weights for node in reachable_nodes(outputs[i])}
        callers_nodes = {
            node
            for first in nodes
            if not is_leaf(first) and first._sequence_nr() < first_number
            for node in (first, *(successor for successor, _ in first.next_functions))
        }
        excluded_ids = {
            id(t) for t in (*self.full_parameters.values(), *self.input_copies.values(), *leaf_tensors(callers_nodes))
        }
        leaves = [
            t
            for t in leaf_tensors(nodes)
            if id(t) not in excluded_ids and type(t) in (Tensor, nn.Parameter) and not t._backward_hooks
        ]
        return {f"tensor {index} outside of the model": t for index, t in enumerate(leaves)}

    def _small_buffers(self) -> dict[str, Tensor]:
        """Return copies of the small buffers of the model, by name."""
        return {
            name: t.detach().clone()
            for name, t in self.model.named_buffers()
            if 0 < t.numel() <= _MAX_BUFFER_NUMEL and type(t) is Tensor and not t.is_complex()
        }

    def _buffer_values(self, *, written_only: bool = False) -> dict[VariableId, Any]:
        """Return the small buffers; with `written_only`, those with other values than before the comparison."""
        return {
            VariableId(0, f"buffer {name}", f"buffer {name!r}"): t
            for name, t in self._small_buffers().items()
            if name in self.buffers
            and not (written_only and t.shape == self.buffers[name].shape and torch.equal(t, self.buffers[name]))
        }

    # -- errors --------------------------------------------------------------------------------------------------------

    def _compare_variables(self, unsharded_step: _UnshardedStep, actual: Mapping[VariableId, Any]) -> None:
        """Log the first variable that has another value in `actual` than in `unsharded_step`. A collective call."""
        expected = unsharded_step.written_variables
        names = [variable.sentence for variable in self._different_variables(expected, actual)]
        if self.is_routed or not any(gather_over_meshes(self.check.meshes, "variables", names)):
            return
        self._gather_parameters()
        repeated_variables: dict[VariableId, Any] = {}
        parameters = {name: self.full_parameters[name] for name in self.trainable}
        with self._unsharded(repeated_variables), RecordReads() as reads:
            outputs = self._run()
            repeated_variables |= self._buffer_values() | self._returned_numbers
            self._gradients(outputs, unsharded_step.weights, parameters | self.input_copies)
        repeated_variables |= reads.values
        self.full_parameters = {}
        # Times, for example, differ from run to run.
        varying_variables = {
            *self._different_variables(expected, repeated_variables),
            *(expected.keys() - repeated_variables.keys()),
        }
        names = [v.sentence for v in self._different_variables(expected, actual) if v not in varying_variables]
        names = [
            name for rank_names in gather_over_meshes(self.check.meshes, "variables", names) for name in rank_names
        ]
        if names:
            warn_once(
                self.check.meshes,
                names[0],
                "forward or a hook %s than without sharding: it sees this rank's tokens or features only. Reduce this "
                "value over the ranks; else results that depend on it differ.",
                names[0],
            )

    def _compare_outside_gradients(self, gradients: dict[str, Tensor | None] | None, parameter_norm: float) -> None:
        """Log the shape of the first leaf outside of the model with another gradient than without sharding.

        A collective call. It removes these leaves from `gradients`. `parameter_norm`: norm of all gradients of
        parameters; a gradient far below it may be rounding.
        """
        different_shapes = []
        outside = {name: t for name, t in self.outside_gradients.items() if t is not None and not t.is_sparse}
        total_norm = sum(two_norm(t) ** 2 for t in outside.values()) ** 0.5
        for name, leaf in self.outside_leaves.items():
            expected, actual = outside.get(name), None if gradients is None else gradients.pop(name)
            if expected is None or gradients is None or self.is_routed:
                continue
            actual = torch.zeros_like(expected) if actual is None else actual
            norm = max(two_norm(expected), self.norm_share * max(total_norm, parameter_norm))
            if two_norm(actual - expected) > _MAX_OUTSIDE_ERROR * norm:
                different_shapes.append(list(leaf.shape))
        reports = gather_over_meshes(self.check.meshes, "gradients outside of the model", different_shapes)
        if any(reports):
            shape = next(shapes[0] for shapes in reports if shapes)
            warn_once(
                self.check.meshes,
                "gradients outside of the model",
                "forward or a hook uses a tensor of shape %s that is not a parameter of the model, and its gradient "
                "differs from that without sharding: it comes from this rank's tokens or features only. Sum such "
                "gradients over the ranks before the optimizer's step, or add the tensor to the model as a parameter "
                "before parallelize.",
                tuple(shape),
            )

    def _different_variables(
        self, expected: Mapping[VariableId, Any], actual: Mapping[VariableId, Any]
    ) -> list[VariableId]:
        bound = _GRADIENT_BOUNDS.get(self.dtype, _GRADIENT_BOUND_16_BIT)

        def differs(expected_value: Any, actual_value: Any) -> bool:
            expected_value, actual_value = (
                t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64, device="cpu")
                for t in (expected_value, actual_value)
            )
            if expected_value.shape != actual_value.shape:
                return True
            expected_value, actual_value = expected_value.double(), actual_value.double().to(expected_value.device)
            return two_norm(expected_value - actual_value) > bound * max(two_norm(expected_value), 1e-6)

        return [v for v, value in expected.items() if v in actual and differs(value, actual[v])]

    def _output_error(self, actual_outputs: Sequence[Tensor], expected_outputs: Sequence[Tensor]) -> float:
        """Return the largest error of a token's output. If there is a loss, other outputs may be this rank's shards."""
        # If the numbers of outputs differ, some are optional: compare the first only.
        num_compared = len(expected_outputs) if len(actual_outputs) == len(expected_outputs) else 1
        has_loss = any(not t.ndim for t in expected_outputs)
        max_error = 0.0
        for actual, expected in zip(actual_outputs[:num_compared], expected_outputs, strict=False):
            if actual.shape != expected.shape and not has_loss:
                return inf
            if actual.shape != expected.shape and self.token_mask is not None:
                continue  # some of this rank's tokens are padding
            actual, expected = _mask_tokens(actual, self.token_mask), _mask_tokens(expected, self.token_mask)
            max_error = max(
                max_error, self.rank_shards.error(actual.detach(), expected.detach(), self._token_error) or 0.0
            )
        return max_error

    def _token_error(self, actual: Tensor, expected: Tensor) -> float:
        """Return the largest error of a token, or the median error over tokens if `is_routed`."""
        errors = token_errors(actual, expected)
        return float(errors.median() if self.is_routed else errors.max()) if errors.numel() else 0.0

    def _mixes_documents(self) -> bool:
        """True if tokens of the first packed document change outputs of later documents in the unsharded model."""
        documents, tokens = self.check.sequence.documents, self.tokens
        if len(documents) < 3 or tokens is None:
            return False
        first_length, seq_len = documents[1], tokens.shape[1]

        def run_later_documents(changed: Tensor) -> list[Tensor]:
            with self._unsharded(), torch.no_grad():
                outputs = self._run({id(tokens): changed})
            return [t[:, first_length:] for t in outputs if t.ndim > 1 and t.shape[1] == seq_len]

        changed_tokens = tokens.detach().clone()
        changed_tokens[:, :first_length] = tokens[:, -1:].detach()
        pairs = zip(run_later_documents(tokens), run_later_documents(changed_tokens), strict=True)
        return any(not torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in pairs)

    def _rounding_errors(
        self, expected: list[Tensor], weights: Mapping[int, Tensor], expected_gradients: dict[str, Any] | None
    ) -> tuple[float, dict[str, float]]:
        """Return the errors that added rounding causes in the unsharded model: of outputs, and of gradients by name."""
        parameters = {name: self.full_parameters[name] for name in self.trainable}
        with self._unsharded(), add_rounding_errors(self.model, self.dtype):
            outputs = self._run()
            gradients = (
                self._gradients(outputs, weights, parameters | self.input_copies)
                if expected_gradients is not None
                else None
            )
        error = self._output_error(outputs, expected)
        rounded_gradients = self._expected_gradients(gradients)
        if expected_gradients is None or rounded_gradients is None:
            return error, {}
        shards = {name: shard for name, (shard, _) in rounded_gradients.items()}
        return error, gradient_errors(shards, expected_gradients, share=self.norm_share)

    def _describe_first_difference(self, bound: float) -> str:
        """Return a sentence that names the first module whose output differs. A collective call."""
        with self._unsharded(), torch.no_grad(), record_outputs(self.model) as recording:
            self._run()
        comparison = OutputComparison(recording, self.rank_shards)
        with isolated_passes(self.model, self.mode), comparison.recording_outputs([self.model]):  # with gradients
            self._run()
        first_name = first_difference(comparison.differences()[0], bound)[0]
        names = gather_over_meshes(self.check.meshes, "the first module that differs", first_name or "")
        name = next(filter(None, names), "")
        class_name = type(self.model.get_submodule(name)).__name__
        return f"The first module whose output differs is {name!r} ({class_name}). " if name else "All outputs agree. "


@contextmanager
def isolated_passes(
    model: nn.Module,
    mode: Mode,
    random_states: Sequence[Tensor] = (),
    *,
    with_gradients: bool = True,
    written_variables: dict[VariableId, Any] | None = None,
) -> Iterator[None]:
    """Context in which passes of the sharded model have no side effects, and do not sum gradients over ranks."""
    with ExitStack() as stack:
        for sync in find_gradient_syncs(model):
            stack.enter_context(sync.disable())
        stack.enter_context(
            preserve_state(
                [model],
                mode,
                with_gradients=with_gradients,
                random_states=random_states,
                written_variables=written_variables,
            )
        )
        yield


def run_on_copies(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Run `model` on copies of its arguments, into which it may write, and return its output tensors."""
    args, kwargs = copy_arguments((args, dict(kwargs)))
    return output_tensors(model(*args, **kwargs))


def copy_arguments(arguments: Any) -> Any:
    """Copy nested containers, with their tensors cloned and detached."""
    return tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, arguments)


@torch.no_grad()
def gradient_shards(
    model: nn.Module, parallelism: Parallelism, gradients: Mapping[str, Tensor | None], *, is_summed: bool
) -> dict[str, Tensor]:
    """Return this rank's shards of gradients, by parameter name. A collective call over context parallel ranks.

    Args:
        gradients: gradients by parameter name; None means 0.
        is_summed: True if backward has run with its gradient synchronization (`grad_sync`) enabled, so that gradients
            are summed over context parallel ranks already.
    """
    dtensors, cp, shards = as_dtensors(model), parallelism.cp_mesh, {}
    for name, p in model.named_parameters():
        if name not in gradients:
            continue
        sharded_parameter: Any = dtensors.get(id(p), p)
        shard: Any = gradients[name]
        if isinstance(shard, DTensor):  # with torch's own styles, it may be a partial sum
            shard = shard.redistribute(placements=sharded_parameter.placements).to_local()
        if shard is None:
            shard = torch.zeros_like(
                sharded_parameter.to_local() if isinstance(sharded_parameter, DTensor) else sharded_parameter
            )
        if (
            cp is not None
            and not has_distributed_experts(sharded_parameter, cp)
            and not (is_summed and parallelism.grad_sync)
        ):
            shard = all_reduce(shard.contiguous(), group=cp)
            shard = shard if parallelism.grad_sync else shard / cp.size()
        shards[name] = shard
    return shards


@contextmanager
def separate_grads(parameters: Sequence[Any]) -> Iterator[None]:
    """Context in which leaf `parameters` have no `grad` and no hooks on it; on exit both are as before."""
    saved_grads = [(p, p.grad, p._post_accumulate_grad_hooks) for p in parameters]
    try:
        for p in parameters:
            p.grad = p._post_accumulate_grad_hooks = None
        yield
    finally:
        for p, grad, hooks in saved_grads:
            p.grad, p._post_accumulate_grad_hooks = grad, hooks


def gradients_of(
    roots: Sequence[Tensor], parameters: Sequence[Any], root_gradients: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """Return the gradients of leaf `parameters`, and leave their `grad` unchanged.

    They include what a reentrant checkpoint, or another autograd function of the model, accumulates into `grad` by a
    backward pass of its own.
    """
    runs_backward = has_reentrant_checkpoint(roots) or has_multi_grad_hook(parameters)  # no torch.autograd.grad
    leaves = [t for root in roots for t in leaf_tensors(reachable_nodes(root))] if runs_backward else []
    with separate_grads([*{id(t): t for t in (*parameters, *leaves)}.values()]):
        if runs_backward:
            torch.autograd.backward(roots, root_gradients)
            return [p.grad for p in parameters]
        gradients = torch.autograd.grad(roots, parameters, root_gradients, allow_unused=True)
        return [
            gradient if p.grad is None else p.grad if gradient is None else gradient + p.grad
            for p, gradient in zip(parameters, gradients, strict=True)
        ]


def has_multi_grad_hook(parameters: Iterable[Tensor]) -> bool:
    """True if a tensor has a hook of torch.autograd.graph.register_multi_grad_hook."""
    hooks = (hook for p in parameters for hook in (p._backward_hooks or {}).values())
    return any("register_multi_grad_hook" in getattr(hook, "__qualname__", "") for hook in hooks)


def has_reentrant_checkpoint(roots: Sequence[Tensor]) -> bool:
    """True if the graph of a tensor of `roots` has an activation checkpoint with use_reentrant=True."""
    return any(node.name() == REENTRANT_NODE for root in roots for node in reachable_nodes(root))


def two_norm(t: Tensor) -> float:
    """Return the 2-norm of all elements of `t`, computed in fp32 or fp64."""
    return float(torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)))


def accepted_gradient_error(dtype: torch.dtype) -> float:
    """Return the error of a gradient that is accepted without measuring the effect of rounding."""
    return _GRADIENT_BOUNDS.get(dtype, _GRADIENT_BOUND_16_BIT)


def gradient_errors(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, tuple[Tensor, float]],
    total_norm: float | None = None,
    share: float = _TOTAL_NORM_SHARE,
) -> dict[str, float]:
    """Return the errors of this rank's gradient shards, relative to the norm of the full gradient, by name.

    Args:
        expected: (this rank's shard, norm of the full gradient) by name.
        total_norm: norm of all gradients of the model; by default, that of `expected`.
        share: errors are relative to at least this share of `total_norm`.
    """
    if total_norm is None:
        total_norm = sum(norm**2 for _, norm in expected.values() if norm < inf) ** 0.5
    min_norm = max(share * total_norm, 1e-30)
    errors = {}
    for name, (shard, norm) in expected.items():
        error = two_norm(actual[name].to(shard.device) - shard) / max(norm, min_norm)
        errors[name] = error if error == error else inf
    return errors


def _output_weights(
    shapes: Sequence[torch.Size], expected: Sequence[Tensor], token_mask: Tensor | None
) -> dict[int, Tensor]:
    """Return random weights, by index, of the outputs that every rank has in full and that require gradients.

    The weight of a loss is 1.

    Args:
        shapes: shapes of the sharded model's outputs.
        token_mask: mask [batch, seq] of the tokens to compare; None for all.
    """
    generator = torch.Generator().manual_seed(3)
    weights: dict[int, Tensor] = {}
    for i, (shape, t) in enumerate(zip(shapes, expected, strict=False)):
        if shape == t.shape and t.requires_grad and t.is_floating_point():
            weight = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            weight = _mask_tokens(weight, token_mask)
            weights[i] = (weight / max(t.numel(), 1) ** 0.5 if t.ndim else torch.ones_like(weight)).to(t.device)
    return weights


def _mask_tokens(t: Tensor, token_mask: Tensor | None) -> Tensor:
    """Return `t` [batch, seq, ...] with zeros for the tokens that `token_mask` excludes from the comparison."""
    if token_mask is None or t.shape[:2] != token_mask.shape:
        return t
    return t.masked_fill(~token_mask.to(t.device).view(*token_mask.shape, *[1] * (t.ndim - 2)), 0)


def _hooked_parameters(parameters: Mapping[str, Tensor], full_parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full parameters by name, with the callers' gradient hooks of the sharded parameters."""
    parameters_by_id: dict[int, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if id(parameter) not in parameters_by_id:
            full_parameter = nn.Parameter(full_parameters[name], requires_grad=parameter.requires_grad)
            parameters_by_id[id(parameter)] = full_parameter
            for hook in (parameter._backward_hooks or {}).values():
                if not getattr(getattr(hook, "func", hook), "__module__", "").startswith("fused_tp."):
                    full_parameter.register_hook(hook)
    return {name: parameters_by_id[id(parameter)] for name, parameter in parameters.items()}


@contextmanager
def _time_limit(model: nn.Module, seconds: float) -> Iterator[None]:
    """Context in which a forward pass of `model` raises `TooLongError` after `seconds`."""
    deadline = time.monotonic() + seconds

    def stop_in_time(module: nn.Module, args: object) -> None:
        if time.monotonic() > deadline:
            raise TooLongError

    handles = [module.register_forward_pre_hook(stop_in_time) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
