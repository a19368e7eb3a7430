"""`check_model`: compare a parallel model with the unsharded model, on CPU ranks of one machine.

Each rank also runs the unsharded model, so that it can compare its shards without communication. Both models take the
same steps on the same batches.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_tp.core.settings import override_environment
from fused_tp.ops.arguments import check_int
from fused_tp.ops.op import OPS
from fused_tp.parallelizing.checks.batch_check import suspend_checks
from fused_tp.parallelizing.checks.module_outputs import (
    ModuleOutputs,
    OutputComparison,
    RankShards,
    enclosing_names,
    first_difference,
    record_outputs,
    relative_error,
)
from fused_tp.parallelizing.hf.hf_model import is_transformers_model
from fused_tp.parallelizing.mesh import make_mesh
from fused_tp.pipelining.pipeline import Pipeline, count_targets
from fused_tp.planning import build as planning
from fused_tp.planning.config import ParallelConfig
from fused_tp.training.batches import data_parallel_rank_and_size
from fused_tp.training.check_report import CheckReport

Batch = Mapping[str, Any]
MakeBatch = Callable[[nn.Module, ParallelConfig], Batch]
Build = Callable[[nn.Module, ParallelConfig, DeviceMesh], "nn.Module | Pipeline"]
# Rounding in fp32 changes a model of a few layers by about 1e-5, an error by about 1e-2. Models in fp64 still compute
# norms and rotary angles in fp32.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-5}
_GRADIENT_NOISE = 1e-4  # rounding error of a gradient that should be 0, relative to the largest gradient
_COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
_NON_SENDING_OPS = {"wait_tensor", "barrier", "recv"}
_DROPOUT_CLASSES = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)


def check_model(
    make_model: Callable[[], nn.Module],
    config: ParallelConfig,
    *,
    batch: MakeBatch | None = None,
    build: Build = planning.build,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    steps: int = 1,
    lr: float = 0.1,
) -> CheckReport:
    """Compare a model over the ranks of `config` with the same model on one process, and locate differences.

    A collective call of `config.world_size` CPU ranks, which all return the same report. Compared are the losses of all
    steps, and the gradients and module outputs of the first step. If a module's output differs but the output of an
    enclosing module is right, the inner module is reported as not comparable (for example, it returns partial sums).

    Args:
        make_model: creates the model, equal on all ranks; called after torch.manual_seed(0). Its forward accepts the
            entries of the batch by name, and returns an object with a `loss`.
        config: sizes of the parallel dims.
        batch: batch(model, config) -> keyword arguments of forward for all ranks and microbatches together: tensors
            [rows, ...], the first of them [rows, seq, ...]; None: `random_batch`.
        build: build(model, config, mesh) -> the parallel model, or a `Pipeline`. Pass your own to check a modified
            parallelization, or one that does not use fused_tp.
        dtype: dtype of the model's parameters.
        tolerance: relative errors up to `tolerance` count as rounding; None: 1e-3 in fp32, 1e-5 in fp64.
        steps: number of steps of plain gradient descent.
        lr: learning rate.

    Raises:
        TypeError, ValueError: an argument is invalid, or `build` does not support the model.

    Example:
        >>> report = check_model(make_model, ParallelConfig(cp=2, tp=2))
        >>> assert report.right, report
    """
    check_int("steps", steps, 1)
    torch.manual_seed(0)
    unsharded_model = make_model().to(dtype)
    full_batch = (batch or random_batch)(unsharded_model, config)
    microbatches = _split_batch(full_batch, config.data_parallel * config.microbatches)
    mesh = make_mesh("cpu", **config.mesh_sizes)
    dp_rank, _ = data_parallel_rank_and_size(mesh)
    own_microbatches = range(dp_rank * config.microbatches, (dp_rank + 1) * config.microbatches)
    # Suspend the checks inside `parallelize` and the batch check: they would raise at the first difference.
    with suspend_checks(), override_environment({"FUSED_TP_CHECK_BATCH": "0"}):
        parallel = build(copy.deepcopy(unsharded_model), config, mesh)
        optimizers = [
            torch.optim.SGD(list(compared_model.parameters()), lr, foreach=False)
            for compared_model in (unsharded_model, parallel)
        ]
        losses = []
        for step in range(steps):
            if step:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            with record_outputs(unsharded_model) as recording:
                expected_losses = _step_unsharded(unsharded_model, microbatches, own_microbatches, recording.outputs)
            comparison = OutputComparison(recording, RankShards(mesh["tp"], mesh["cp"], *_document_bounds(full_batch)))
            with comparison.recording_outputs(_list_models(parallel)), _CommunicationCounter() as communication_counter:
                loss = _step_parallel(parallel, microbatches, own_microbatches)
            losses.append(
                (
                    sum(expected_losses) / len(microbatches),
                    loss,
                    sum(expected_losses[i] for i in own_microbatches) / len(own_microbatches),
                )
            )
            if not step:
                first_step = (
                    comparison,
                    _compute_gradient_errors(parallel, unsharded_model),
                    communication_counter.counts,
                )
    return _make_report(
        config, unsharded_model, recording.outputs, losses, *first_step, tolerance=tolerance or TOLERANCE[dtype]
    )


def random_batch(
    model: nn.Module, config: ParallelConfig, *, rows: int | None = None, seq_len: int = 24, packed: bool = False
) -> dict[str, Any]:
    """Return random tokens [rows, seq] and labels for `model`, under the names of its forward's parameters.

    Args:
        rows: number of rows over all ranks and microbatches; None: two per microbatch of each data parallel rank.
        packed: mark two documents in each row by position_ids.

    Raises:
        ValueError: forward has no parameter `labels`, or with `packed` no parameter `position_ids`.
    """
    parameters = inspect.signature(model.forward).parameters
    is_hf = is_transformers_model(model)
    for name in ("labels", *(["position_ids"] if packed else [])):
        if name not in parameters:
            raise ValueError(f"{type(model).__name__}.forward has no parameter {name}; pass a batch of its parameters.")
    model_config: Any = getattr(model, "config", None)
    embeddings = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    vocab_size = model_config.get_text_config().vocab_size if is_hf else max(embeddings, default=0)
    if not vocab_size:
        raise ValueError(f"{type(model).__name__} has no nn.Embedding, so its tokens are unknown; pass a batch.")
    rows = 2 * config.data_parallel * config.microbatches if rows is None else rows
    tokens = torch.randint(vocab_size, (rows, seq_len), generator=torch.Generator().manual_seed(1), device="cpu")
    batch: dict[str, Any] = {"input_ids" if is_hf else next(iter(parameters)): tokens, "labels": tokens}
    if is_hf:
        batch["use_cache"] = False
    if packed:
        first_length = seq_len // 3
        document_positions = [torch.arange(length, device="cpu") for length in (first_length, seq_len - first_length)]
        batch["position_ids"] = torch.cat(document_positions).expand(rows, seq_len)
    return batch


def _split_batch(batch: Batch, num_microbatches: int) -> list[dict[str, Any]]:
    """Split the batch into `num_microbatches` equal microbatches, those of all data parallel ranks in rank order."""
    num_rows = len(_find_tokens(batch))
    if num_rows % num_microbatches:
        raise ValueError(
            f"The batch has {num_rows} rows; use a multiple of {num_microbatches}, the microbatches of all ranks."
        )
    microbatch_rows = num_rows // num_microbatches

    def slice_rows(value: Any, index: int) -> Any:
        has_rows = isinstance(value, Tensor) and value.ndim and len(value) == num_rows
        return value[index * microbatch_rows :][:microbatch_rows] if has_rows else value

    microbatches = [
        {name: slice_rows(value, index) for name, value in batch.items()} for index in range(num_microbatches)
    ]
    if (
        isinstance(batch.get("labels"), Tensor)
        and len({int(count_targets(microbatch)) for microbatch in microbatches}) > 1
    ):
        raise ValueError(
            "The microbatches have different numbers of targets, so the mean of their losses is not the loss of the "
            "batch. Pass microbatches with equal numbers of labels that are -100."
        )
    return microbatches


def _find_tokens(batch: Batch) -> Tensor:
    for value in batch.values():
        if isinstance(value, Tensor) and value.ndim > 1:
            return value
    raise ValueError(f"The batch must contain a tensor [rows, seq, ...], got only {[*batch]}.")


def _document_bounds(batch: Batch) -> tuple[int, tuple[int, ...]]:
    """Return the number of tokens per row, and the document bounds in each row; () for one document."""
    seq_len, positions = _find_tokens(batch).shape[1], batch.get("position_ids")
    document_starts = [] if positions is None else (positions[0] == 0).nonzero().flatten().tolist()
    return seq_len, (*document_starts, seq_len) if len(document_starts) > 1 else ()


def _list_models(parallel: nn.Module | Pipeline) -> list[nn.Module]:
    return [stage.model for stage in parallel.stages.values()] if isinstance(parallel, Pipeline) else [parallel]


def _step_unsharded(
    model: nn.Module, microbatches: list[dict[str, Any]], own_microbatches: range, outputs: ModuleOutputs
) -> list[float]:
    """Run all microbatches on the unsharded model and return their losses.

    Gradients of the mean loss accumulate in the model. `outputs` keeps module outputs for the microbatches
    `own_microbatches`.
    """
    losses: list[float] = []
    own_outputs: ModuleOutputs = {}
    for index, microbatch in enumerate(microbatches):
        outputs.clear()
        try:
            losses.append(_forward_backward(model, microbatch, index, len(microbatches)))
        except Exception as error:
            raise ValueError(
                f"The unsharded model raised {type(error).__name__}: {error}. Pass a batch and dtype that it supports."
            ) from error
        if index in own_microbatches:
            for name, calls in outputs.items():
                own_outputs.setdefault(name, []).extend(calls)
    outputs.clear()
    outputs.update(own_outputs)
    return losses


def _step_parallel(model: nn.Module | Pipeline, microbatches: list[dict[str, Any]], own_microbatches: range) -> float:
    """Run `own_microbatches` on the parallel model and return their mean loss."""
    if isinstance(model, Pipeline):
        rank_microbatches = [microbatches[i] for i in own_microbatches]
        num_rows = len(_find_tokens(rank_microbatches[0]))

        def join_rows(name: str) -> Any:
            value = rank_microbatches[0][name]
            has_rows = isinstance(value, Tensor) and value.ndim and len(value) == num_rows
            return torch.cat([microbatch[name] for microbatch in rank_microbatches]) if has_rows else value

        return float(model.step({name: join_rows(name) for name in rank_microbatches[0]}))
    return sum(_forward_backward(model, microbatches[i], i, len(own_microbatches)) for i in own_microbatches) / len(
        own_microbatches
    )


def _forward_backward(model: nn.Module, microbatch: dict[str, Any], seed: int, num_microbatches: int) -> float:
    torch.manual_seed(seed)  # dropout of replicated tensors must be equal on all ranks
    loss = model(**microbatch).loss
    (loss / num_microbatches).backward()
    return float(loss.detach())


class _CommunicationCounter(TorchDispatchMode):
    """Count communication between ranks, by op.

    Rejected: CommDebugMode. It does not count the messages of pipelines, and its hooks on all modules change the code
    that runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor then calls this mode again, with ops on local shards
        namespace, _, qualified_name = func.name().partition("::")
        name = qualified_name.partition(".")[0].strip("_")
        is_fused_op = namespace == "fused_tp" and name in OPS and OPS[name].key is not None
        if is_fused_op or (namespace in _COLLECTIVE_NAMESPACES and name not in _NON_SENDING_OPS):
            self.counts[name] += 1
        return func(*args, **kwargs or {})


@torch.no_grad()
def _compute_gradient_errors(parallel: nn.Module | Pipeline, unsharded_model: nn.Module) -> dict[str, float]:
    """Return the gradient errors of this rank's parameters, by name; a collective call of ranks that share them."""
    expected_gradients = {
        name: _gradient_or_zeros(p) for name, p in unsharded_model.named_parameters(remove_duplicate=False)
    }
    largest_gradient = max(
        (float(gradient.abs().max()) for gradient in expected_gradients.values() if gradient.numel()), default=0.0
    )
    errors = {}
    for name, parameter in parallel.named_parameters():
        gradient = _gradient_or_zeros(parameter)
        full_gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        expected_gradient = expected_gradients.get(name)
        # Packed parameters have another shape.
        if expected_gradient is not None and expected_gradient.numel() == full_gradient.numel():
            errors[name] = relative_error(
                full_gradient.view_as(expected_gradient), expected_gradient, _GRADIENT_NOISE * largest_gradient
            )
        else:
            errors[name] = float("inf")
    return errors


def _gradient_or_zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _make_report(
    config: ParallelConfig,
    unsharded_model: nn.Module,
    outputs: ModuleOutputs,
    losses: list[tuple[float, float, float]],
    comparison: OutputComparison,
    gradients: dict[str, float],
    call_counts: Mapping[Any, int],
    *,
    tolerance: float,
) -> CheckReport:
    """Return a report on the findings of all ranks; a collective call."""
    module_errors, not_compared = comparison.differences()
    own_findings = {"losses": losses, "errors": module_errors, "skipped": not_compared}
    findings_of_ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(findings_of_ranks, {**own_findings, "gradients": gradients, "counts": dict(call_counts)})
    skip_reasons: dict[str, str] = {}
    for findings in findings_of_ranks:
        skip_reasons |= findings["skipped"]
    errors = {
        name: {
            rank: findings["errors"][name]
            for rank, findings in enumerate(findings_of_ranks)
            if name in findings["errors"]
        }
        for name in outputs
        if any(name in findings["errors"] for findings in findings_of_ranks)
    }
    for name in first_difference({name: max(rank_errors.values()) for name, rank_errors in errors.items()}, tolerance)[
        1
    ]:
        enclosing_module = next((enclosing for enclosing in enclosing_names(name) if enclosing in errors), "")
        skip_reasons[name] = (
            f"its output differs, but the output of {enclosing_module or 'the model'}, which contains it, is right"
        )
        del errors[name]
    worst_gradients = _max_by_key(findings["gradients"] for findings in findings_of_ranks)
    missing_gradients = {
        name: float("inf") for name, _ in unsharded_model.named_parameters() if name not in worst_gradients
    }
    report = CheckReport(
        layout=f"{config.shown()}, {config.world_size} ranks",
        tolerance=tolerance,
        losses=[
            (step_losses[0][0], sum(parallel_loss for _, parallel_loss, _ in step_losses) / len(findings_of_ranks))
            for step_losses in zip(*(findings["losses"] for findings in findings_of_ranks), strict=True)
        ],
        loss_error=max(
            abs(loss - expected_loss) / max(abs(expected_loss), 1e-3) if loss == loss else float("inf")
            for findings in findings_of_ranks
            for _, loss, expected_loss in findings["losses"]
        ),
        outputs=errors,
        skipped=skip_reasons,
        gradients=dict(sorted((worst_gradients | missing_gradients).items(), key=lambda item: -item[1])),
        communicated=_max_by_key(findings["counts"] for findings in findings_of_ranks),
    )
    if report.suspect is not None and isinstance(unsharded_model.get_submodule(report.suspect), _DROPOUT_CLASSES):
        return replace(report, advice=_DROPOUT_ADVICE)
    return report


_DROPOUT_ADVICE = (
    "Dropout of replicated tensors must be equal on all ranks: set equal seeds. Dropout of a shard draws different "
    "numbers than dropout of the full tensor; set its p to 0 to compare the rest of the model."
)


def _max_by_key(dicts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the largest value of each key."""
    maxima: dict[str, Any] = {}
    for values in dicts:
        for name, value in values.items():
            maxima[name] = max(value, maxima.get(name, value))
    return maxima
