"""`check_model`: compare a parallel model with the whole one, on ranks of one machine without GPUs.

Each rank also runs the whole model, so that it can compare its shards without communication. Both models take the same
steps on the same batches.
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

from fused_tp.core.settings import environment
from fused_tp.ops.arguments import check_int
from fused_tp.ops.op import OPS
from fused_tp.parallelizing.checks.batch_check import suspended
from fused_tp.parallelizing.checks.module_outputs import (
    OutputComparison,
    Outputs,
    RankPart,
    enclosing,
    first_difference,
    recorded,
    relative_error,
)
from fused_tp.parallelizing.hf.hf_model import is_transformers_model
from fused_tp.parallelizing.mesh import make_mesh
from fused_tp.pipelining.pipeline import Pipeline, count_targets
from fused_tp.planning import build as planning
from fused_tp.planning.config import ParallelConfig
from fused_tp.training.batches import data_parallel_place
from fused_tp.training.check_report import CheckReport

Batch = Mapping[str, Any]
MakeBatch = Callable[[nn.Module, ParallelConfig], Batch]
Build = Callable[[nn.Module, ParallelConfig, DeviceMesh], "nn.Module | Pipeline"]
# A model of a few layers in fp32 differs by 1e-5, a wrong one by 1e-2. Models in fp64 still compute norms and rotary
# angles in fp32.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-5}
_NOISE = 1e-4  # relative to the largest gradient: rounding error of a gradient that should be 0
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
_NOTHING_SENT = {"wait_tensor", "barrier", "recv"}
_DROPOUT = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)


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

    A collective call of `config.world_size` CPU ranks; all get the same report. Losses of all steps are compared, and
    gradients and module outputs of the first step. If a module's output differs, but that of an enclosing module is
    right (terms of a sum, other orders), the inner module counts as not comparable.

    Args:
        make_model: creates the model, equal on all ranks; called after torch.manual_seed(0). Its forward takes the
            entries of the batch by name, and returns an object with a `loss`.
        config: sizes of the parallel dims.
        batch: batch(model, config) -> keyword arguments of forward for all ranks and microbatches together: tensors
            [rows, ...], the first of them [rows, seq, ...]; None: `random_batch`.
        build: build(model, config, mesh) -> the parallel model, or a `Pipeline`; to check other parallelizations than
            fused_tp's, or modified ones.
        dtype: dtype of the model's parameters.
        tolerance: relative errors up to it count as rounding; None: 1e-3 in fp32, 1e-5 in fp64.
        steps: number of steps of plain gradient descent.
        lr: learning rate.

    Raises:
        TypeError, ValueError: an argument does not fit, or `build` refuses the model.

    Example:
        >>> report = check_model(make_model, ParallelConfig(cp=2, tp=2))
        >>> assert report.right, report
    """
    check_int("steps", steps, 1)
    torch.manual_seed(0)
    whole = make_model().to(dtype)
    given = (batch or random_batch)(whole, config)
    parts = _parts(given, config.data_parallel * config.microbatches)
    mesh = make_mesh("cpu", **config.mesh_sizes)
    place, _ = data_parallel_place(mesh)
    mine = range(place * config.microbatches, (place + 1) * config.microbatches)
    # Without this, ranks would raise at the first difference that they detect; here all are reported.
    with suspended(), environment({"FUSED_TP_CHECK_BATCH": "0"}):
        parallel = build(copy.deepcopy(whole), config, mesh)
        optimizers = [torch.optim.SGD(list(one.parameters()), lr, foreach=False) for one in (whole, parallel)]
        losses = []
        for step in range(steps):
            if step:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            with recorded(whole) as recording:
                expected = _step_whole(whole, parts, mine, recording.outputs)
            comparison = OutputComparison(recording, RankPart(mesh["tp"], mesh["cp"], *_rows_of(given)))
            with comparison.watching(_models(parallel)), _Communicated() as communicated:
                loss = _step_parallel(parallel, parts, mine)
            losses.append((sum(expected) / len(parts), loss, sum(expected[i] for i in mine) / len(mine)))
            if not step:
                first = comparison, _gradient_errors(parallel, whole), communicated.counts
    return _report(config, whole, recording.outputs, losses, *first, tolerance=tolerance or TOLERANCE[dtype])


def random_batch(
    model: nn.Module, config: ParallelConfig, *, rows: int | None = None, seq: int = 24, packed: bool = False
) -> dict[str, Any]:
    """Random tokens [rows, seq] and labels for `model`, under the names of its forward's parameters.

    Args:
        rows: number of rows over all ranks and microbatches; None: two per microbatch of each data parallel rank.
        packed: put two documents into each row, by position_ids.

    Raises:
        ValueError: forward takes no labels, or with `packed` no position_ids.
    """
    parameters = inspect.signature(model.forward).parameters
    hf = is_transformers_model(model)
    for name in ("labels", *(["position_ids"] if packed else [])):
        if name not in parameters:
            raise ValueError(f"{type(model).__name__}.forward takes no {name}; give a batch of what it takes.")
    config_of: Any = getattr(model, "config", None)
    embeddings = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabulary = config_of.get_text_config().vocab_size if hf else max(embeddings, default=0)
    if not vocabulary:
        raise ValueError(f"{type(model).__name__} has no nn.Embedding to make tokens for; give a batch.")
    rows = 2 * config.data_parallel * config.microbatches if rows is None else rows
    tokens = torch.randint(vocabulary, (rows, seq), generator=torch.Generator().manual_seed(1), device="cpu")
    batch: dict[str, Any] = {"input_ids" if hf else next(iter(parameters)): tokens, "labels": tokens}
    if hf:
        batch["use_cache"] = False
    if packed:
        first = seq // 3
        counted = [torch.arange(length, device="cpu") for length in (first, seq - first)]
        batch["position_ids"] = torch.cat(counted).expand(rows, seq)
    return batch


def _parts(batch: Batch, count: int) -> list[dict[str, Any]]:
    """Split the batch into `count` equal parts, the microbatches of all data parallel ranks in rank order."""
    rows = len(_tokens(batch))
    if rows % count:
        raise ValueError(f"The batch has {rows} rows, which {count} microbatches of all ranks cannot share evenly.")
    share = rows // count

    def part(value: Any, index: int) -> Any:
        cut = isinstance(value, Tensor) and value.ndim and len(value) == rows
        return value[index * share :][:share] if cut else value

    parts = [{name: part(value, index) for name, value in batch.items()} for index in range(count)]
    if isinstance(batch.get("labels"), Tensor) and len({int(count_targets(one)) for one in parts}) > 1:
        raise ValueError(
            "The microbatches of the batch have different numbers of targets, of which the mean of their means is not "
            "the mean; give rows of which equally many labels are -100."
        )
    return parts


def _tokens(batch: Batch) -> Tensor:
    for value in batch.values():
        if isinstance(value, Tensor) and value.ndim > 1:
            return value
    raise ValueError(f"The batch has {[*batch]}, and nothing of them is a tensor [rows, seq, ...].")


def _rows_of(batch: Batch) -> tuple[int, tuple[int, ...]]:
    """Return the number of tokens per row, and the document bounds in each row; () for one document."""
    seq, positions = _tokens(batch).shape[1], batch.get("position_ids")
    begins = [] if positions is None else (positions[0] == 0).nonzero().flatten().tolist()
    return seq, (*begins, seq) if len(begins) > 1 else ()


def _models(parallel: nn.Module | Pipeline) -> list[nn.Module]:
    return [stage.model for stage in parallel.stages.values()] if isinstance(parallel, Pipeline) else [parallel]


def _step_whole(model: nn.Module, parts: list[dict[str, Any]], mine: range, outputs: Outputs) -> list[float]:
    """Run all parts; return their losses, accumulate the mean's gradients, keep this rank's parts in `outputs`."""
    losses: list[float] = []
    own: Outputs = {}
    for index, part in enumerate(parts):
        outputs.clear()
        try:
            losses.append(_forward_backward(model, part, index, len(parts)))
        except Exception as error:
            raise ValueError(
                f"The model by itself does not run ({type(error).__name__}: {error}); give it another batch or dtype."
            ) from error
        if index in mine:
            for name, calls in outputs.items():
                own.setdefault(name, []).extend(calls)
    outputs.clear()
    outputs.update(own)
    return losses


def _step_parallel(model: nn.Module | Pipeline, parts: list[dict[str, Any]], mine: range) -> float:
    """Run this rank's parts; return their mean loss."""
    if isinstance(model, Pipeline):
        own = [parts[i] for i in mine]
        rows = len(_tokens(own[0]))

        def joined(name: str) -> Any:
            value = own[0][name]
            cut = isinstance(value, Tensor) and value.ndim and len(value) == rows
            return torch.cat([part[name] for part in own]) if cut else value

        return float(model.step({name: joined(name) for name in own[0]}))
    return sum(_forward_backward(model, parts[i], i, len(mine)) for i in mine) / len(mine)


def _forward_backward(model: nn.Module, part: dict[str, Any], seed: int, parts: int) -> float:
    torch.manual_seed(seed)  # equal dropout of tensors replicated over ranks
    loss = model(**part).loss
    (loss / parts).backward()
    return float(loss.detach())


class _Communicated(TorchDispatchMode):
    """Count communication between ranks, by op. Rejected: CommDebugMode, which misses the messages of pipelines, and
    whose hooks on all modules change the code that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor then calls ops on local shards, which arrive here
        namespace, _, rest = func.name().partition("::")
        name = rest.partition(".")[0].strip("_")
        fused = namespace == "fused_tp" and name in OPS and OPS[name].key is not None
        if fused or (namespace in _COLLECTIVES and name not in _NOTHING_SENT):
            self.counts[name] += 1
        return func(*args, **kwargs or {})


@torch.no_grad()
def _gradient_errors(parallel: nn.Module | Pipeline, whole: nn.Module) -> dict[str, float]:
    """Gradient errors of this rank's parameters, by name. A collective call of all ranks that share a parameter."""
    expected = {name: _gradient(p) for name, p in whole.named_parameters(remove_duplicate=False)}
    largest = max((float(gradient.abs().max()) for gradient in expected.values() if gradient.numel()), default=0.0)
    errors = {}
    for name, parameter in parallel.named_parameters():
        gradient = _gradient(parameter)
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        wanted = expected.get(name)
        if wanted is not None and wanted.numel() == full.numel():  # packed parameters have another shape
            errors[name] = relative_error(full.view_as(wanted), wanted, _NOISE * largest)
        else:
            errors[name] = float("inf")
    return errors


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _report(
    config: ParallelConfig,
    whole: nn.Module,
    outputs: Outputs,
    losses: list[tuple[float, float, float]],
    comparison: OutputComparison,
    gradients: dict[str, float],
    communicated: Mapping[Any, int],
    *,
    tolerance: float,
) -> CheckReport:
    """Gather the findings of all ranks into one report."""
    of_modules, not_compared = comparison.differences()
    mine = {"losses": losses, "errors": of_modules, "skipped": not_compared}
    ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, {**mine, "gradients": gradients, "counts": dict(communicated)})
    skipped: dict[str, str] = {}
    for rank in ranks:
        skipped |= rank["skipped"]
    errors = {
        name: {rank: found["errors"][name] for rank, found in enumerate(ranks) if name in found["errors"]}
        for name in outputs
        if any(name in found["errors"] for found in ranks)
    }
    for name in first_difference({name: max(of_ranks.values()) for name, of_ranks in errors.items()}, tolerance)[1]:
        around = next((one for one in enclosing(name) if one in errors), "")
        skipped[name] = f"it returns something else, and {around or 'the model'} around it the right thing"
        del errors[name]
    worst = _largest(rank["gradients"] for rank in ranks)
    missing = {name: float("inf") for name, _ in whole.named_parameters() if name not in worst}
    report = CheckReport(
        layout=f"{config.shown()}, {config.world_size} ranks",
        tolerance=tolerance,
        losses=[
            (of_step[0][0], sum(one[1] for one in of_step) / len(ranks))
            for of_step in zip(*(rank["losses"] for rank in ranks), strict=True)
        ],
        loss_error=max(
            abs(found - wanted) / max(abs(wanted), 1e-3) if found == found else float("inf")
            for rank in ranks
            for _, found, wanted in rank["losses"]
        ),
        outputs=errors,
        skipped=skipped,
        gradients=dict(sorted((worst | missing).items(), key=lambda one: -one[1])),
        communicated=_largest(rank["counts"] for rank in ranks),
    )
    if report.suspect is not None and isinstance(whole.get_submodule(report.suspect), _DROPOUT):
        return replace(report, advice=_ADVICE)
    return report


_ADVICE = (
    "Dropout of what all ranks hold must draw the same on them: give them equal seeds. Dropout of a rank's part draws "
    "other numbers than the whole model does; set its p to 0 to compare the rest."
)


def _largest(dicts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Largest value of each key."""
    found: dict[str, Any] = {}
    for one in dicts:
        for name, value in one.items():
            found[name] = max(value, found.get(name, value))
    return found
