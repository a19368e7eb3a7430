"""`build(model, config)`: apply a `ParallelConfig` to a model, by `parallelize`, `pipeline` and torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

from fused_tp.parallelizing.hf.hf_model import is_transformers_model
from fused_tp.parallelizing.hf.hf_pretrained import load_pretrained
from fused_tp.parallelizing.mesh import fsdp_mesh, make_mesh
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.parallelizing.shard_plan import EXPERT_STYLES, Style, resolve_plan
from fused_tp.pipelining.pipeline import LossFunction, Pipeline, pipeline
from fused_tp.pipelining.schedules import SCHEDULES
from fused_tp.pipelining.stages import find_container
from fused_tp.planning.config import ParallelConfig


def build(
    model: nn.Module,
    config: ParallelConfig,
    mesh: DeviceMesh | None = None,
    *,
    plan: str | Mapping[str, Style] = "auto",
    layers: str | None = None,
    loss_fn: LossFunction | None = None,
    pretrained: str | None = None,
) -> nn.Module | Pipeline:
    """Parallelize `model` over the ranks of `config`: in place, or with pp > 1 as a `Pipeline`.

    A collective call of all ranks. Backward computes gradients of the loss averaged over all data parallel ranks.
    Pass `parameters()` of the returned model to optimizers.

    Args:
        model: a transformers causal language model, or any nn.Module that `parallelize` accepts; equal on all ranks.
        config: its sizes multiply to the number of ranks.
        mesh: result of `make_mesh(None, **config.mesh_sizes)`; None: `build` creates it.
        plan: see `parallelize`.
        layers: name of the nn.ModuleList of layers, which pp, recompute and FSDP2 need; None: search for it.
        loss_fn: loss of a pipeline; see `pipeline`.
        pretrained: folder or name of a checkpoint, which is read shard by shard into `model`, a transformers model on
            the meta device; see `load_pretrained`. Needs pp = 1 and tp > 1.

    Raises:
        TypeError, ValueError: the arguments, model and mesh do not fit; see `parallelize` and `pipeline`.

    Example:
        >>> config = ParallelConfig(pp=2, dp_shard=2, tp=2, microbatches=4, recompute="full")
        >>> parallel = build(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B"), config)
        >>> loss = parallel.step({"input_ids": tokens, "labels": tokens})
    """
    if not isinstance(config, ParallelConfig):
        raise TypeError(f"config must be a ParallelConfig, got {type(config).__name__}.")
    sizes: Any = config.mesh_sizes
    mesh = make_mesh(**sizes) if mesh is None else mesh
    for name, size in config.mesh_sizes.items():
        if name not in (mesh.mesh_dim_names or ()) or mesh[name].size() != size:
            raise ValueError(f"config needs a mesh with {name}={size}, got {mesh}; use make_mesh(**config.mesh_sizes).")
    if pretrained is not None and not config.loads_by_shards:
        raise ValueError(
            f"pretrained needs pp=1 and tp > 1, got pp={config.pp} and tp={config.tp}. Load the model by "
            "from_pretrained, and pass it to build."
        )
    needs_layers = config.pp > 1 or config.recompute == "full" or config.is_sharded
    container = find_container(model, layers) if needs_layers else ""
    if config.recompute == "full":
        recompute_layers(model, container)
    experts = _find_distributed_experts(model, plan) if config.ep > 1 and config.is_sharded else []
    parallel_model: nn.Module | Pipeline = model
    if config.pp > 1:
        parallel_model = pipeline(
            model,
            mesh,
            microbatches=config.microbatches,
            schedule=config.schedule,
            virtual_stages=None if SCHEDULES[config.schedule].stages_per_rank else config.virtual_stages,
            layers=container,
            loss_fn=loss_fn,
            plan=plan,
            **config.parallelize_keywords,
        )
    elif max(config.cp, config.tp, config.ep) > 1:
        parallelize(model, mesh, plan=plan, **config.parallelize_keywords)
        if pretrained is not None:
            load_pretrained(model, pretrained)
    if config.is_sharded:
        # Without a pipeline, gathered parameters are freed between forward and backward, as in ZeRO 3. A pipeline
        # keeps them: it would have to gather them again for each microbatch.
        sharded_modules = (
            [stage.model for stage in parallel_model.stages.values()]
            if isinstance(parallel_model, Pipeline)
            else [model]
        )
        for module in sharded_modules:
            _apply_fsdp(module, container, experts, mesh, reshard_after_forward=config.pp == 1)
        if isinstance(parallel_model, Pipeline):
            # torch's schedules recognize FSDP only on the module that they call.
            for stage in parallel_model.stages.values():
                fully_shard(stage, mesh=fsdp_mesh(mesh), reshard_after_forward=False)
    elif config.world_size == 1:
        model.to(mesh.device_type)
    return parallel_model


def recompute_layers(model: nn.Module, container: str) -> None:
    """Make each layer of `container` save only its input and recompute its forward in backward."""
    if is_transformers_model(model):
        enable_checkpointing: Any = model.gradient_checkpointing_enable
        enable_checkpointing(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for layer in model.get_submodule(container).children():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _apply_fsdp(
    model: nn.Module, container: str, experts: Iterable[str], mesh: DeviceMesh, *, reshard_after_forward: bool
) -> None:
    fsdp_keywords: dict[str, Any] = {
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": _choose_placement,
    }
    if experts:  # experts are sharded over dp_shard only: ep ranks hold different experts
        shard_mesh = _add_replicas(mesh, mesh["dp_shard", "ep"]._flatten("dp_ep"))
        for name in experts:
            fully_shard(model.get_submodule(name), mesh=_add_replicas(mesh, mesh["dp_shard"]), **fsdp_keywords)
    else:
        shard_mesh = fsdp_mesh(mesh)
    for layer in model.get_submodule(container).children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=shard_mesh, **fsdp_keywords)
    fully_shard(model, mesh=shard_mesh, **fsdp_keywords)


def _add_replicas(mesh: DeviceMesh, shard_mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for FSDP2: parameters are sharded over `shard_mesh` and replicated along dp_replicate."""
    if mesh["dp_replicate"].size() == 1:
        return shard_mesh
    return DeviceMesh._concatenate([mesh["dp_replicate"], shard_mesh])


def _choose_placement(parameter: nn.Parameter) -> Placement | None:
    """Return the dim along which FSDP2 shards `parameter`; None: the first.

    Packed parameters [parts, out, in] are sharded by `out`, because there are fewer parts than ranks.
    """
    return Shard(1) if parameter.ndim == 3 and parameter.shape[0] <= 3 else None


def _find_distributed_experts(model: nn.Module, plan: str | Mapping[str, Style]) -> list[str]:
    """Return the names of the modules whose experts are distributed over the ranks of mesh dim "ep"."""
    resolved_plan = resolve_plan(model, plan)
    return [name for name, style in resolved_plan.modules.items() if style in EXPERT_STYLES]
