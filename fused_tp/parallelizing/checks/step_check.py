"""Comparison of the first training steps with those of the whole model: outputs and gradients.

At a call with gradients that is due, and differs in kind from the calls before it:

| model   | computes                                                                                               |
|---------|--------------------------------------------------------------------------------------------------------|
| sharded | outputs of the batch, to find those that are whole on every rank                                       |
| whole   | outputs, and gradients of a random weighted sum of those, from gathered parameters (`unsharded`); on each  |
|         | rank alone, which keeps its shard of the gradients                                                     |
| sharded | the same outputs and gradients; only this comparison sums gradients over context parallel ranks        |
| whole   | if the ranks find a large error: outputs and gradients with rounding errors added. If these do not     |
|         | explain the error, all ranks raise                                                                     |

Then the call itself runs, with random states, modes, buffers and gradients as before (`undisturbed`).

Unlike the comparison after sharding (`sharding_check`) it uses the caller's batch, lengths, labels and mode, runs
backward, and includes later changes of the model. `loss_check` follows the call to the end of its backward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from fused_tp.core.checks import is_due
from fused_tp.core.errors import FusedTPError
from fused_tp.nn.checkpoint import gather_tensors
from fused_tp.nn.sharding import as_dtensors
from fused_tp.ops.collectives import all_reduce
from fused_tp.parallelizing.checks.batch_check import is_suspended, of_all_ranks
from fused_tp.parallelizing.checks.model_check import code_of, remember_code, warn_once
from fused_tp.parallelizing.checks.module_outputs import OutputComparison, RankPart, first_difference, recorded
from fused_tp.parallelizing.checks.sharding_check import (
    BOUNDS,
    LARGEST_BOUND,
    ROUNDING_FACTOR,
    TooLongError,
    advice,
    dtype_of,
    rounding_errors,
    token_errors,
)
from fused_tp.parallelizing.checks.undisturbed import Mode, undisturbed
from fused_tp.parallelizing.checks.unsharded import UnshardedModel
from fused_tp.parallelizing.forward_shard import running_node
from fused_tp.parallelizing.grad_sync import is_distributed, syncs_of
from fused_tp.parallelizing.graph import REENTRANT, nodes_of
from fused_tp.parallelizing.hf.hf_model import TransformersSequence
from fused_tp.parallelizing.outputs import tensors_in
from fused_tp.parallelizing.plain_model import CACHES as PLAIN_CACHES
from fused_tp.parallelizing.sequence_sharding import Parallelism, SequenceSharding

SECONDS = 5.0  # most for the whole model's forward pass
_SHARE = 0.25  # most of the free memory that whole parameters and their gradients may take
# Errors of gradients below which rounding is not measured, relative to the gradient of the parameter, or to
# SHARE_OF_ALL of the gradient of all parameters: rounding leaves a residue of a gradient that should be 0. In 361
# correct steps of 189 model types in fp32 the largest error was 3e-4; wrong ones were off by 5e-2 and more.
_GRADIENTS = {torch.float64: 1e-4, torch.float32: 5e-3}
_GRADIENTS_16_BIT = 0.1
SHARE_OF_ALL = 1e-3
CACHES = frozenset({*PLAIN_CACHES, *TransformersSequence.caches})  # names of arguments and outputs
_OUT_OF_MEMORY = "a step of the whole model takes more memory than there is"


class StepCheck:
    """Forward pre-hook that compares training steps of a parallel model with those of the whole one.

    Args:
        sequence: shards the sequence of each forward pass.
        meshes: 1-D meshes whose ranks share the model.
        unsharded: state of the model before it is sharded.

    Raises:
        ValueError: the models differ; raised on all ranks, with the largest difference and advice.
    """

    def __init__(self, sequence: SequenceSharding, meshes: Sequence[DeviceMesh], unsharded: UnshardedModel) -> None:
        self.sequence, self.parallelism, self.meshes, self.unsharded = (
            sequence,
            sequence.parallelism,
            tuple(meshes),
            unsharded,
        )
        self.calls = 0
        self.compared = False  # True if the running call has been compared
        self.whole: frozenset[int] = frozenset()  # indices of its outputs that are whole and have gradients
        self._seen: set[object] = set()  # kinds of calls that have been compared
        self._code: Any = None  # the callers' code in the model at the last of these

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_code": None}

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_suspended():
            return
        self.compared = False
        if not torch.is_grad_enabled() or running_node() is not None:
            return
        if not any(p.requires_grad for p in model.parameters()):
            return
        self.calls += 1
        if not is_due(self.calls):
            return
        code = {name: code_of(module) for name, module in model.named_modules()}
        arguments = self._by_name(args, kwargs)
        kind = _kind(model, arguments)
        wants = kind not in self._seen or code != self._code
        ranks = of_all_ranks(self.meshes, "a training step", [wants, self._obstacle(model, arguments)])
        if not any(wanted for wanted, _ in ranks):
            return
        self._seen.add(kind)
        self._code = code
        reason = next((why for _, why in ranks if why), "") or _Steps(self, model, args, kwargs, arguments).compare()
        if not reason:
            self.compared = True
            remember_code(model)
            return
        warn_once(
            self.meshes,
            reason,
            "the first training step of the parallel model is not compared with that of the whole model: %s. `fused-tp "
            "check` compares a smaller model of this kind on CPUs.",
            reason,
        )

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name; positional ones by position if nothing is sharded by name."""
        if self.parallelism.shards_sequence or self.parallelism.computes_loss:
            return self.sequence.by_name(args, kwargs)
        return {**{str(place): value for place, value in enumerate(args)}, **kwargs}

    def tokens_of(self, arguments: dict[str, Any]) -> Tensor | None:
        """Tokens [batch, seq, ...] among the arguments; if they are not sharded, the first tensor of several dims."""
        if self.parallelism.shards_sequence:
            return self.sequence.find_tokens(arguments)[1]
        return next((t for t in tensors_in(arguments) if t.ndim > 1), None)

    def _obstacle(self, model: nn.Module, arguments: dict[str, Any]) -> str:
        """Return the reason why this rank cannot compare, or ""."""
        parameters = [*model.parameters()]
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            return "fully_shard manages its parameters"
        if not all(p.is_leaf for p in parameters):
            return "its parameters are computed from others"
        if any(_is_cache(value) or (name in CACHES and value is not None) for name, value in arguments.items()):
            return "it is given a cache"
        tokens = self.tokens_of(arguments)
        if tokens is not None and self.sequence.is_too_short(tokens.shape[1]):
            return "it is given fewer tokens than there are ranks"
        if why := self.unsharded.obstacle(model):
            return why
        try:
            as_dtensors(model)
        except ValueError:
            return "what shards its parameters has taken them away"
        ranks = 1
        for mesh in self.meshes:
            ranks *= mesh.size()
        need = 2 * sum(p.numel() * p.element_size() for p in parameters)
        room = _free_memory(parameters[0].device, ranks)
        if need > _SHARE * room:
            return (
                f"whole parameters and gradients take {need / 1e9:.3g} GB, more than {_SHARE:.0%} of the "
                f"{room / 1e9:.3g} GB of free memory"
            )
        return ""


def _kind(model: nn.Module, arguments: dict[str, Any]) -> object:
    """Key of calls that compute alike: the mode, the names of arguments, and the power of two of the size."""
    given = frozenset(name for name, value in arguments.items() if value is not None)
    sizes = [t.numel().bit_length() for t in tensors_in(arguments)[:1]]
    return model.training, given, *sizes


def _is_cache(value: object) -> bool:
    return type(value).__name__.endswith("Cache")  # by name: transformers may not be installed


def _free_memory(device: torch.device, ranks: int) -> float:
    """Free memory in bytes for one of `ranks`. CPU ranks share the memory of the machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    with suppress(OSError):  # where there is no /proc
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):  # includes file caches, which the kernel can drop
                return int(line.split()[1]) * 1024 / ranks
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / ranks


class _Steps:
    """One step of the whole model and of the sharded one, on the arguments of one call.

    Args:
        args, kwargs: arguments of the call.
        arguments: the same by name, see `StepCheck`.
    """

    def __init__(
        self,
        check: StepCheck,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: dict[str, Any],
    ) -> None:
        self.check, self.model, self.args, self.kwargs = check, model, args, kwargs
        self.tp, self.cp = check.parallelism.tp_mesh, check.parallelism.cp_mesh
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.mode = Mode.AS_IT_IS
        self.dtype = dtype_of(model)
        device = next(model.parameters()).device.type
        if torch.is_autocast_enabled(device):
            self.dtype = torch.get_autocast_dtype(device)
        self.routed = self.dtype.itemsize < 4 and any("expert" in name for name, _ in model.named_modules())
        # Backward of a weight may accumulate into its `main_grad`, which belongs to the caller.
        self.with_gradients = all(getattr(p, "main_grad", None) is None for p in self.named.values())
        self.whole_parameters: dict[str, Tensor] = {}
        self.tokens = check.tokens_of(arguments)
        self.part = RankPart(self.tp, self.cp, 1 if self.tokens is None else self.tokens.shape[1])
        # Over context parallel ranks a padding mask is dropped, since causal tokens do not see padding on their right.
        # But outputs of padding itself differ from the whole model's, so they are not compared.
        mask = arguments.get("attention_mask")
        self.counts: Tensor | None = None
        if self.cp is not None and isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.bool().all()):
            self.counts = mask.bool()

    def compare(self) -> str:
        """Return the reason why the steps cannot be compared, or ""; raise ValueError if they differ."""
        meshes = self.check.meshes
        with as_sharded(self.model, self.mode):
            shapes = [t.shape for t in self._run()]
        expected, weights, wanted = list[Tensor](), dict[int, Tensor](), None
        reason = self._gather()
        if not reason:
            expected, reason = self._whole_outputs()
        if not reason:
            weights = _weights(shapes, expected, self.counts)
            self.with_gradients &= bool(weights)
            wanted, reason = self._whole_gradients(expected, weights)
        expected = [t.detach() for t in expected]
        self.whole_parameters = {}  # freed before the sharded model takes memory
        if reasons := [why for why in of_all_ranks(meshes, "a step of the whole model", reason) if why]:
            return str(reasons[0])
        self.check.whole = frozenset(weights)
        with as_sharded(self.model, self.mode):
            found = self._run()
        if documents := self.check.sequence.documents:
            self.part = RankPart(self.tp, self.cp, documents[-1], documents)
        output_error = self._output_error(found, expected)
        own = self._sharded_gradients(found, weights)
        del found
        errors = {} if wanted is None or own is None else gradient_errors(own, wanted)
        worst = None if wanted is None or own is None else max(errors.values(), default=0.0)
        bound = BOUNDS.get(self.dtype, BOUNDS[torch.bfloat16])
        most = inf if self.routed else _GRADIENTS.get(self.dtype, _GRADIENTS_16_BIT)
        ranks = of_all_ranks(meshes, "errors of a training step", [output_error, worst])
        if any(one is None for _, one in ranks):  # gradients are compared on all ranks or on none
            errors, wanted = {}, None
        if max(one for one, _ in ranks) <= bound and max(one or 0.0 for _, one in ranks) <= most:
            return ""
        self._gather()
        if any(of_all_ranks(meshes, "packed documents", self._joins_documents())):
            return "attention of the whole model does not keep the packed documents apart that it is given"
        rounding, of_gradients = self._rounding(expected, weights, wanted)
        bound = max(bound, ROUNDING_FACTOR * rounding)
        excess = {name: one / max(most, ROUNDING_FACTOR * of_gradients.get(name, 0.0)) for name, one in errors.items()}
        return self._raise_if_wrong(output_error, bound, errors, excess)

    def _raise_if_wrong(
        self, output_error: float, bound: float, errors: Mapping[str, float], excess: Mapping[str, float]
    ) -> str:
        """Raise ValueError if an error is larger than rounding; return the reason if that cannot be decided, or "".

        Args:
            output_error, errors: errors of outputs, and of gradients by name.
            bound: bound of `output_error` by rounding.
            excess: `errors` relative to their bounds.
        """
        name = max(excess, key=lambda name: excess[name], default="")
        mine = [output_error / bound, output_error, excess.get(name, 0.0), name, errors.get(name, 0.0), bound]
        # A rank may measure less rounding than the others: all ranks decide by the largest excess of any.
        ranks = of_all_ranks(self.check.meshes, "errors that rounding explains", mine)
        kind, bound = type(self.model).__name__, max(one[-1] for one in ranks)
        if bound > LARGEST_BOUND:
            return f"rounding alone changes its outputs by {bound / ROUNDING_FACTOR:.2g}"
        if max(one[0] for one in ranks) > 1:
            raise ValueError(
                f"the parallel {kind} does not compute what the whole one does: on the batch of this step its output "
                f"is off by {max(one[1] for one in ranks):.2g} of its size, of which rounding explains "
                f"{bound:.2g}. {self._first_module(bound)}{advice(self.tp, self.cp)} "
                "parallelize(verify=False) leaves this comparison out."
            )
        if max(one[2] for one in ranks) > 1:
            _, _, _, name, error, _ = max(ranks, key=lambda one: one[2])
            raise ValueError(
                f"the gradient of {name!r} in the parallel {kind} is not that of the whole model: for the batch of "
                f"this step it is off by {error:.2g} of its size. {self._first_module(bound)}"
                f"{advice(self.tp, self.cp)} The same holds in backward: hooks on gradients see a rank's part. "
                "parallelize(verify=False) leaves this comparison out."
            )
        return ""

    def _run(self, others: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        """Outputs for the arguments, some of which `others` replaces, by id."""

        def given(value: Any) -> Any:
            return (others or {}).get(id(value), value)

        args, kwargs = tree_map(given, (self.args, self.kwargs))
        return run_on_copies(self.model, args, kwargs)

    def _gather(self) -> str:
        """Gather whole parameters; return the reason if that fails, or "". A collective call."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        try:
            self.whole_parameters = _stand_ins(named, gather_tensors(named, self.model, keep=True, device=None))
        except FusedTPError:
            raise
        except Exception as error:
            return f"its parameters cannot be made whole: {type(error).__name__}: {error}"
        return ""

    # -- the two models ------------------------------------------------------------------------------------------------

    @contextmanager
    def _as_whole(self) -> Iterator[Callable[[], bool]]:
        with (
            self.check.unsharded.restored(self.model, self.whole_parameters),
            undisturbed([self.model], self.mode, gradients=True) as drew,
        ):
            yield drew

    def _whole_outputs(self) -> tuple[list[Tensor], str]:
        kind = type(self.model).__name__
        for mode in Mode if self.model.training else (Mode.EVAL,):
            self.mode = mode
            try:
                with self._as_whole() as drew, _stopped_after(self.model, SECONDS):
                    outputs = self._run()
            except TooLongError:
                return [], f"the whole {kind} takes longer than {SECONDS:g} s on this batch"
            except torch.OutOfMemoryError:
                return [], _OUT_OF_MEMORY
            except Exception as error:
                return [], f"the whole {kind} does not run: {type(error).__name__}: {error}"
            if not drew():
                break
        if not outputs:
            return [], f"{kind}.forward returns no tensors"
        if any(bool(t.isnan().any()) for t in outputs):
            return [], f"the whole {kind} returns NaN"
        return outputs, ""

    def _whole_gradients(
        self, outputs: list[Tensor], weights: Mapping[int, Tensor]
    ) -> tuple[dict[str, Any] | None, str]:
        """Return this rank's shards of gradients, with the norms of the whole ones, by parameter name; or the reason
        why nothing can be compared."""
        parameters = {name: self.whole_parameters[name] for name in self.named}
        try:
            with self._as_whole():
                gradients = self._gradients(outputs, weights, parameters)
        except torch.OutOfMemoryError:
            return None, _OUT_OF_MEMORY
        except Exception as error:
            return None, f"backward of the whole {type(self.model).__name__} fails: {type(error).__name__}: {error}"
        if gradients is None:
            return None, ""
        dtensors = as_dtensors(self.model)
        made = {}
        for name, p in self.named.items():
            gradient = gradients[name]
            if gradient is None:
                gradient = torch.zeros_like(parameters[name])
            sharded: Any = dtensors.get(id(p), p)
            norm = norm_of(gradient)
            part = gradient.reshape(sharded.shape)
            if isinstance(sharded, DTensor):
                part = distribute_tensor(part, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()
            made[name] = part.clone(), norm
        return made, ""

    def _sharded_gradients(self, outputs: list[Tensor], weights: Mapping[int, Tensor]) -> dict[str, Tensor] | None:
        """Return this rank's shards of gradients, by parameter name."""
        with as_sharded(self.model, self.mode):
            gradients = self._gradients(outputs, weights, self.named)
        return None if gradients is None else own_parts(self.model, self.check.parallelism, gradients, summed=False)

    def _gradients(
        self, outputs: Sequence[Tensor], weights: Mapping[int, Tensor], parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None] | None:
        """Gradients of the weighted sum of outputs; None where a backward would disturb the caller's."""
        if not self.with_gradients:
            return None
        total = torch.stack([(outputs[i].float() * weight).sum() for i, weight in weights.items()]).sum()
        if not total.requires_grad:
            return dict.fromkeys(parameters)
        if any(node.name() == REENTRANT for node in nodes_of(total)):
            if DistributedDataParallel._get_active_ddp_module() is not None:  # would reduce these gradients
                return None
            return dict(zip(parameters, _by_backward(total, [*parameters.values()]), strict=True))
        found = torch.autograd.grad(total, [*parameters.values()], allow_unused=True)
        return dict(zip(parameters, found, strict=True))

    # -- errors --------------------------------------------------------------------------------------------------------

    def _output_error(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        """Largest error of a token's output. Beside a loss, outputs may be this rank's shard."""
        count = len(expected) if len(found) == len(expected) else 1  # otherwise optional outputs follow the first
        has_loss = any(not t.ndim for t in expected)
        worst = 0.0
        for one, other in zip(found[:count], expected, strict=False):
            if one.shape != other.shape and not has_loss:
                return inf
            if one.shape != other.shape and self.counts is not None:
                continue  # some of this rank's tokens are padding
            one, other = _counted(one, self.counts), _counted(other, self.counts)
            worst = max(worst, self.part.error(one.detach(), other.detach(), self._error_of_tokens) or 0.0)
        return worst

    def _error_of_tokens(self, found: Tensor, expected: Tensor) -> float:
        """Error of the token that differs most; of the median token if tokens are `routed`."""
        errors = token_errors(found, expected)
        return float(errors.median() if self.routed else errors.max()) if errors.numel() else 0.0

    def _joins_documents(self) -> bool:
        """True if tokens of the first packed document change outputs of the others in the whole model."""
        documents, tokens = self.check.sequence.documents, self.tokens
        if len(documents) < 3 or tokens is None:
            return False
        first, seq = documents[1], tokens.shape[1]

        def behind_first(now: Tensor) -> list[Tensor]:
            with self._as_whole(), torch.no_grad():
                outputs = self._run({id(tokens): now})
            return [t[:, first:] for t in outputs if t.ndim > 1 and t.shape[1] == seq]

        other = tokens.detach().clone()
        other[:, :first] = tokens[:, -1:].detach()
        pairs = zip(behind_first(tokens), behind_first(other), strict=True)
        return any(not torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in pairs)

    def _rounding(
        self, expected: list[Tensor], weights: Mapping[int, Tensor], wanted: dict[str, Any] | None
    ) -> tuple[float, dict[str, float]]:
        """Errors of outputs, and of gradients by name, of the whole model with rounding errors added."""
        with self._as_whole(), rounding_errors(self.model, self.dtype):
            outputs = self._run()
        error = self._output_error(outputs, expected)
        gradients = None if wanted is None else self._whole_gradients(outputs, weights)[0]
        if wanted is None or gradients is None:
            return error, {}
        return error, gradient_errors({name: part for name, (part, _) in gradients.items()}, wanted)

    def _first_module(self, bound: float) -> str:
        """Sentence that names the first module with a different output, if there is one. A collective call."""
        with self._as_whole(), torch.no_grad(), recorded(self.model) as recording:
            self._run()
        comparison = OutputComparison(recording, self.part)
        with as_sharded(self.model, self.mode), comparison.watching([self.model]):  # with a graph, to recognise losses
            self._run()
        first = first_difference(comparison.differences()[0], bound)[0]
        names = of_all_ranks(self.check.meshes, "the first module that differs", first or "")
        name = next(filter(None, names), "")
        kind = type(self.model.get_submodule(name)).__name__
        return f"The first module whose output differs is {name!r} ({kind}). " if name else "All outputs agree. "


@contextmanager
def as_sharded(model: nn.Module, mode: Mode, random_states: Sequence[Tensor] = ()) -> Iterator[None]:
    """Context for passes of the sharded model without side effects; gradients are not summed over other ranks."""
    with ExitStack() as stack:
        for sync in syncs_of(model):
            stack.enter_context(sync.off())
        stack.enter_context(undisturbed([model], mode, gradients=True, random_states=random_states))
        yield


def run_on_copies(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Outputs of `model` on copies of its arguments, into which it may write."""
    args, kwargs = copies_of((args, dict(kwargs)))
    return outputs_in(model(*args, **kwargs))


def outputs_in(output: Any) -> list[Tensor]:
    """Tensors in the output of forward, except KV caches, which may be sharded."""
    if isinstance(output, Mapping):
        output = {name: value for name, value in dict(output).items() if name not in CACHES}
    elif isinstance(output, tuple):
        output = [value for value in output if not _is_cache(value)]
    return tensors_in(output)


def copies_of(arguments: Any) -> Any:
    """Copy nested containers, with their tensors cloned and detached."""
    return tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, arguments)


@torch.no_grad()
def own_parts(
    model: nn.Module, parallelism: Parallelism, gradients: Mapping[str, Tensor | None], *, summed: bool
) -> dict[str, Tensor]:
    """Return this rank's shards of gradients, by parameter name. A collective call over context parallel ranks.

    Args:
        gradients: gradients by parameter name; None means 0.
        summed: they are summed over these ranks already, if backward does that (grad_sync).
    """
    dtensors, cp, made = as_dtensors(model), parallelism.cp_mesh, {}
    for name, p in model.named_parameters():
        if name not in gradients:
            continue
        sharded: Any = dtensors.get(id(p), p)
        own: Any = gradients[name]
        if isinstance(own, DTensor):  # torch's own styles may leave terms of a sum
            own = own.redistribute(placements=sharded.placements).to_local()
        if own is None:
            own = torch.zeros_like(sharded.to_local() if isinstance(sharded, DTensor) else sharded)
        if cp is not None and not is_distributed(sharded, cp) and not (summed and parallelism.grad_sync):
            own = all_reduce(own.contiguous(), group=cp)
            own = own if parallelism.grad_sync else own / cp.size()
        made[name] = own
    return made


def _by_backward(total: Tensor, parameters: Sequence[Any]) -> list[Tensor | None]:
    """Gradients of leaves under reentrant checkpoints, which refuse torch.autograd.grad. `grad` stays as it was."""
    held = [(p, p.grad, p._post_accumulate_grad_hooks) for p in parameters]
    try:
        for p in parameters:
            p.grad = p._post_accumulate_grad_hooks = None
        total.backward()
        return [p.grad for p in parameters]
    finally:
        for p, grad, hooks in held:
            p.grad, p._post_accumulate_grad_hooks = grad, hooks


def norm_of(t: Tensor) -> float:
    """Norm of `t` over all elements, computed in fp32 at least."""
    return float(torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)))


def gradient_errors(found: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> dict[str, float]:
    """Errors of this rank's shards of gradients, by name, relative to the norm of the whole gradient."""
    of_all = sum(norm**2 for _, norm in wanted.values() if norm < inf) ** 0.5
    errors = {}
    for name, (part, norm) in wanted.items():
        error = norm_of(found[name].to(part.device) - part) / max(norm, SHARE_OF_ALL * of_all, 1e-30)
        errors[name] = error if error == error else inf
    return errors


def _weights(shapes: Sequence[torch.Size], expected: Sequence[Tensor], counts: Tensor | None) -> dict[int, Tensor]:
    """Random weights of outputs that the sharded model returns whole and that have gradients, by index; 1 for a loss.

    Args:
        shapes: shapes of the sharded model's outputs.
        counts: mask [batch, seq] of the tokens to compare; None: all.
    """
    generator = torch.Generator().manual_seed(3)
    made: dict[int, Tensor] = {}
    for i, (shape, t) in enumerate(zip(shapes, expected, strict=False)):
        if shape == t.shape and t.requires_grad and t.is_floating_point():
            weight = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            weight = _counted(weight, counts)
            made[i] = (weight / max(t.numel(), 1) ** 0.5 if t.ndim else torch.ones_like(weight)).to(t.device)
    return made


def _counted(t: Tensor, counts: Tensor | None) -> Tensor:
    """Return `t` [batch, seq, ...] with zeros for tokens that are not to be compared."""
    if counts is None or t.shape[:2] != counts.shape:
        return t
    return t.masked_fill(~counts.to(t.device).view(*counts.shape, *[1] * (t.ndim - 2)), 0)


def _stand_ins(parameters: Mapping[str, Tensor], full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole parameters, with the callers' gradient hooks of the sharded ones."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if id(parameter) not in made:
            whole = nn.Parameter(full[name], requires_grad=parameter.requires_grad)
            made[id(parameter)] = whole
            for hook in (parameter._backward_hooks or {}).values():
                if not getattr(getattr(hook, "func", hook), "__module__", "").startswith("fused_tp."):
                    whole.register_hook(hook)
    return {name: made[id(parameter)] for name, parameter in parameters.items()}


@contextmanager
def _stopped_after(model: nn.Module, seconds: float) -> Iterator[None]:
    """Context in which a forward pass of `model` raises `TooLongError` after that time."""
    end = time.monotonic() + seconds

    def stop_in_time(module: nn.Module, args: object) -> None:
        if time.monotonic() > end:
            raise TooLongError

    handles = [module.register_forward_pre_hook(stop_in_time) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
