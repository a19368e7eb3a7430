"""transformers' Trainer, and subclasses such as TRL's SFTTrainer, for models that are parallel already.

Trainer gives tensor parallel ranks the same batch. To extend this to context parallel ranks, its tensor parallel size
is set to the product of both sizes; it then also divides losses and counts of targets correctly. Rejected: accelerate's
context parallelism, which does not support windows, packed documents and sinks.

Trainer does not resume sharded models; here torch.distributed.checkpoint does, also with another number of ranks.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from fused_tp.nn import clip_grad_norm_, original_shapes
from fused_tp.nn.optimizers import PLAIN_SHARDINGS
from fused_tp.nn.plain_data import PlainPlanner, PlainReader
from fused_tp.parallelizing.attribute_names import PARALLELISM_ATTRIBUTE
from fused_tp.parallelizing.sequence_sharding import Parallelism

T = TypeVar("T", bound=type)

FOLDER = "distributed"  # folder in Trainer's checkpoint, with weights and optimizer for torch.distributed.checkpoint
_SCHEDULER = "scheduler.pt"  # file name that transformers' Trainer uses


def parallel_trainer(kind: T) -> T:
    """Extend `kind`, transformers' Trainer or a subclass of it, to models that `parallelize` has sharded.

    Use the result like `kind`. Ranks along `tp` and `cp` get the same batch, ranks along other dims different ones.
    Losses, their scale, gradient norms and accumulation are the same as in one process. Checkpoints contain the files
    of the full model, as `save_pretrained` writes them, and weights and optimizer for torch.distributed.checkpoint.
    `resume_from_checkpoint` also works with another number of tensor, context or data parallel ranks.

    With data parallel ranks, first apply `fully_shard` to the model, over `fsdp_mesh(mesh)`.

    Args:
        kind: the class to extend, such as transformers.Trainer or trl.SFTTrainer.

    Returns:
        A subclass of `kind`. Its constructor raises ValueError if the model is not parallel, or parallel in a way that
        Trainer does not handle correctly.

    Example:
        >>> mesh = fused_tp.make_mesh(cp=2, tp=4)
        >>> model = fused_tp.parallelize(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B"), mesh)
        >>> trainer = parallel_trainer(transformers.Trainer)(model=model, args=args, train_dataset=dataset)
        >>> trainer.train(resume_from_checkpoint=True)
    """
    trainer_class: T = _make_parallel_class(kind)
    return trainer_class


@cache
def _make_parallel_class(base_class: Any) -> Any:
    return type(f"Parallel{base_class.__name__}", (_ParallelTrainer, base_class), {"__doc__": base_class.__doc__})


def mark_as_sharded(model: nn.Module) -> None:
    """Mark a parallel model like a model that transformers has sharded, so that Trainer neither moves nor wraps it.

    Raises:
        ValueError: `model` is not parallel, or parallel in a way that Trainer does not handle correctly.
    """
    base_model, parallelism = _base_model(model), _parallelism_of(model)
    meshes = [mesh for mesh in (parallelism.cp_mesh, parallelism.tp_mesh) if mesh is not None]
    num_batch_ranks, index = 1, 0  # of the ranks that share a batch
    for mesh in meshes:
        num_batch_ranks, index = num_batch_ranks * mesh.size(), index * mesh.size() + mesh.get_local_rank()
    if dist.get_rank() % num_batch_ranks != index:
        raise ValueError(
            f"the {num_batch_ranks} ranks that share a batch must have consecutive numbers, because Trainer gives the "
            f"same batch to {num_batch_ranks} consecutive ranks; rank {dist.get_rank()} has index {index} among them. "
            "Make 'cp' and 'tp' the last dims of the mesh, as make_mesh does."
        )
    replicas, is_fsdp = dist.get_world_size() // num_batch_ranks, isinstance(base_model, FSDPModule)
    if replicas > 1 and not is_fsdp:
        raise ValueError(
            f"there are {replicas} groups of ranks with different batches, whose gradients Trainer does not average "
            "for parallel models. Apply fully_shard over fused_tp.fsdp_mesh(mesh) to the model."
        )
    if is_fsdp and parallelism.grad_sync and parallelism.cp_mesh is not None:
        raise ValueError(
            "grad_sync=True is not supported with FSDP2, which averages gradients over the context parallel ranks. "
            "Pass grad_sync=False to parallelize."
        )
    if any(PLAIN_SHARDINGS in vars(module) for module in base_model.modules()):
        raise ValueError(
            "parameters='plain' is not supported: Trainer would treat each rank's shards as copies of one model. Omit "
            "parameters='plain' in the call of parallelize."
        )
    from transformers.distributed.configuration_utils import DistributedConfig

    base_model._is_distributed_loading_by_transformers, base_model._tp_size = True, num_batch_ranks
    base_model.config.distributed_config = DistributedConfig(tp_size=num_batch_ranks, tp_plan={}, fsdp_size=replicas)
    if is_fsdp:
        base_model._is_fsdp_managed_module = True


def _base_model(model: nn.Module) -> Any:
    get_base_model: Any = getattr(model, "get_base_model", None)  # a PeftModel
    return model if get_base_model is None else get_base_model()


def _parallelism_of(model: nn.Module) -> Parallelism:
    parallelism: Parallelism | None = getattr(_base_model(model), PARALLELISM_ATTRIBUTE, None)
    if parallelism is None:
        raise ValueError(f"{type(model).__name__} is not parallel. Call fused_tp.parallelize(model, mesh) first.")
    return parallelism


class _ParallelTrainer:
    """Mixin that `parallel_trainer` puts before a Trainer in the MRO."""

    model: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    accelerator: Any
    gather_function: Any
    get_tp_size: Any  # methods of Trainer
    _prepare_inputs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = kwargs.get("model", args[0] if args else None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                "model must be an nn.Module on which fused_tp.parallelize was called; a model name and model_init are "
                "not supported."
            )
        mark_as_sharded(model)
        settings = kwargs.get("args", args[1] if len(args) > 1 else None)
        parallelism = _parallelism_of(model)
        if settings is not None:
            _check_settings(settings, parallelism)
        if kwargs.get("peft_config") is not None and parallelism.tp_mesh is not None:  # an argument of TRL's trainers
            from fused_tp.parallelizing.peft import parallel_config

            kwargs["peft_config"] = parallel_config(model, kwargs["peft_config"])
        self._shards_logits = parallelism.cp_mesh is not None or parallelism.loss_parallel
        if settings is not None and settings.load_best_model_at_end and settings.save_only_model:
            raise ValueError(
                "load_best_model_at_end=True needs the distributed checkpoint, which save_only_model=True omits. Set "
                "one of the two to False."
            )
        with _allow_resuming(settings), _count_processes_as_devices():
            super().__init__(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        self.accelerator.unscale_gradients()  # Trainer skips this if DTensors are on several meshes
        return clip_grad_norm_(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> float:
        if grad_norm is None:
            self.accelerator.unscale_gradients()
            grad_norm = clip_grad_norm_(model, math.inf)
        return float(grad_norm)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = super()
        own_gather = self.gather_function
        self.gather_function = partial(_gather_without_copies, self.accelerator, self.get_tp_size(), own_gather)
        try:
            output = trainer.evaluation_loop(*args, **kwargs)  # resets gather_function at the end
        except BaseException:
            self.gather_function = own_gather
            raise
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an optimizer created now must get sharded parameters, not the temporary full ones
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        trainer: Any = super()
        loss, logits, labels = trainer.prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        if logits is not None and self._shards_logits and "labels" in inputs:
            # With a loss, the logits cover a shard of the tokens or of the vocabulary: get full ones without labels.
            unlabeled_inputs = {name: value for name, value in self._prepare_inputs(inputs).items() if name != "labels"}
            with torch.no_grad():
                logits = model(**unlabeled_inputs).logits.detach()
        return loss, logits, labels

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        dcp.save(self._distributed_state(), checkpoint_id=str(Path(output_dir, FOLDER)))
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _distributed_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self._plain_optimizer())
        return original_shapes(self.model, {"model": model, "optimizer": optimizer})

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)  # unwrap accelerate's optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        model, optimizer = get_state_dict(self.model, self._plain_optimizer())
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        _load_state(original_shapes(self.model, state), checkpoint)
        set_state_dict(
            self.model,
            self._plain_optimizer(),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        scheduler = Path(checkpoint, _SCHEDULER)
        if scheduler.exists():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        state = {"model": get_model_state_dict(self.model)}
        _load_state(original_shapes(self.model, state), resume_from_checkpoint)
        self.model.load_state_dict(state["model"])

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def _load_state(state: dict[str, Any], checkpoint: str) -> None:
    dcp.load(state, storage_reader=PlainReader(_distributed_folder(checkpoint)), planner=PlainPlanner())


def _distributed_folder(checkpoint: str) -> Path:
    folder = Path(checkpoint, FOLDER)
    if not folder.is_dir():
        raise ValueError(
            f"{checkpoint} has no folder {FOLDER!r}, which a Trainer of parallel_trainer writes unless "
            "save_only_model=True. To use only its weights, load them by from_pretrained before parallelize."
        )
    return folder


def _check_settings(settings: Any, parallelism: Parallelism) -> None:
    """Raise ValueError for settings that Trainer does not handle correctly over ranks that share batches."""
    if not settings.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=False is not supported: Trainer would divide the number of targets by the "
            "number of ranks that share a batch. Set it to True."
        )
    if settings.eval_use_gather_object:
        raise ValueError(
            "eval_use_gather_object=True is not supported: it would gather the objects of ranks that share a batch "
            "several times. Set it to False."
        )
    if settings.neftune_noise_alpha is not None and parallelism.shards_sequence:
        raise ValueError(
            "neftune_noise_alpha is not supported with a sharded sequence: the noise would depend on the sharding. "
            "Omit it, or use neither cp nor sequence_parallel."
        )


def _gather_without_copies(accelerator: Any, num_copies: int, gather_for_metrics: Any, tensors: Any) -> Any:
    """Gather `tensors` for metrics from one of every `num_copies` consecutive ranks, which have equal batches."""
    gather, world_size = accelerator.gather, accelerator.num_processes

    def gather_once(tensors: Any) -> Any:
        return tree_map(
            lambda t: t.unflatten(0, (-1, num_copies, len(t) // world_size))[:, 0].flatten(0, 1), gather(tensors)
        )

    with mock.patch.object(accelerator, "gather", gather_once):
        return gather_for_metrics(tensors)  # drops the padding of the last batch


def _allow_resuming(settings: Any) -> AbstractContextManager[Any]:
    """Context manager with save_only_model=True, without which Trainer raises for sharded models.

    Trainer could not save their optimizer; `_ParallelTrainer` can.
    """
    if settings is None or settings.save_only_model:
        return nullcontext()
    return mock.patch.object(settings, "save_only_model", True)


def _count_processes_as_devices() -> AbstractContextManager[Any]:
    """Context manager in which accelerate (1.15) counts CPU processes as devices.

    Otherwise it raises for tensor parallelism over CPU processes.
    """
    from accelerate import Accelerator

    if torch.accelerator.is_available():
        return nullcontext()
    return mock.patch.object(Accelerator, "multi_device", property(lambda self: self.use_distributed))
