"""Lightning over parallel models: losses equal one process over all kinds of meshes; checkpoints between meshes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import fused_tp
from fused_tp.integrations.lightning import parallel_strategy
from tests.integrations.models import make, make_tokens
from tests.workers import error_of, fresh_ranks

lightning = pytest.importorskip("lightning", reason="lightning is not installed; pip install lightning")

EPOCH = 4  # steps
SIZES: dict[str, dict[str, int]] = {
    "one": {},
    "cp2_tp2": {"cp": 2, "tp": 2},
    "dp2_tp2": {"dp_shard": 2, "tp": 2},
    "dp2_cp2": {"dp_replicate": 1, "dp_shard": 2, "cp": 2},
    "cp4": {"cp": 4},
}


class Lit(lightning.LightningModule):
    """Module that parallelizes a test model over the mesh of its strategy."""

    def __init__(self, family: str, parallel: bool = True) -> None:
        super().__init__()
        self.model, self.parallel, self.losses, self.configured = make(family), parallel, [], 0
        self.texts = make_tokens(16, 12)

    def configure_model(self) -> None:
        self.configured += 1
        mesh = self.device_mesh
        if mesh is None or fused_tp.is_parallelized(self.model) or not self.parallel:
            return
        if mesh.mesh_dim_names == ("data_parallel", "tensor_parallel"):
            fused_tp.parallelize(self.model, mesh, tp_dim="tensor_parallel", sequence_parallel=True)
            over = mesh["data_parallel"]
        else:
            sharded = "dp_shard" in mesh.mesh_dim_names
            fused_tp.parallelize(self.model, mesh, grad_sync=not sharded)
            over = fused_tp.fsdp_mesh(mesh) if sharded else None
        for module in (*self.model.model.layers, self.model) if over is not None and over.size() > 1 else ():
            fully_shard(module, mesh=over)

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = self.model(tokens, labels=tokens).loss
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")))
        return loss

    def validation_step(self, tokens: Tensor) -> None:
        self.losses.append(float(self.model(tokens, labels=tokens).loss))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        where = {"num_replicas": 1, "rank": 0}
        if self.device_mesh is not None:
            where = self.trainer.strategy.distributed_sampler_kwargs
        sampler = DistributedSampler(self.texts, shuffle=False, **where)
        return DataLoader(self.texts, batch_size=4 // where["num_replicas"], sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.texts, batch_size=16)


def strategy_of(layout: str) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    if layout == "plain":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    return parallel_strategy(ModelParallelStrategy)(**SIZES[layout]) if SIZES[layout] else "auto"


def fit(
    model: Lit, layout: str, steps: int, resume: str | None = None, save: str | None = None, **options: Any
) -> list[float]:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if layout == "one" else dist.get_world_size(),
        strategy=strategy_of(layout),
        max_steps=steps,
        limit_val_batches=0,
        **dict.fromkeys(quiet, False),
        **options,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.load.*weights_only")
        trainer.fit(model, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save, weights_only=False)
    trainer.limit_val_batches = 1
    trainer.validate(model, verbose=False)
    assert model.configured >= 2  # so configure_model must ask is_parallelized
    assert layout == "one" or fused_tp.is_parallelized(model)
    return model.losses


CLIPPED = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
# (layout, family, steps, checkpoint to resume from, name of the saved one, keywords of Trainer)
RUNS: list[tuple[str, str, int, str | None, str | None, dict[str, Any]]] = [
    ("cp2_tp2", "plain", 6, None, None, {}),
    ("plain", "plain", 6, None, None, {}),
    ("dp2_cp2", "plain", 6, None, None, {}),
    ("cp2_tp2", "plain", 3, None, None, CLIPPED),
    ("dp2_tp2", "plain", 3, None, None, CLIPPED),
    ("cp4", "plain", EPOCH, None, "of_cp4", {}),
    ("dp2_tp2", "plain", 6, "of_cp4", None, {}),
    ("cp2_tp2", "qwen3_moe", EPOCH, None, "of_moe", {}),
    ("dp2_cp2", "qwen3_moe", 6, "of_moe", None, {}),
]


def fit_all(group: dist.ProcessGroup, folder: str, runs: list[Any]) -> list[list[float]]:
    """Run all in the same processes, one after the other, with the variables of torchrun."""
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "TORCHELASTIC_RUN_ID": "test"}
    found = []
    for layout, family, steps, resume, save, options in runs:
        paths = {"resume": resume, "save": save}
        places = {name: str(Path(folder, path)) for name, path in paths.items() if path is not None}
        found.append(fit(Lit(family), layout, steps, **places, **options))
    return found


@pytest.mark.full
def test_losses_of_one_process_and_checkpoints_at_other_sizes(tmp_path: Path) -> None:
    whole = [("one", *run[1:]) for run in RUNS]
    (one,) = fresh_ranks(1, fit_all, str(tmp_path / "one"), whole, timeout=300)
    for rank in fresh_ranks(4, fit_all, str(tmp_path / "four"), RUNS, timeout=300):
        for run, found, wanted in zip(RUNS, rank.unwrap(), one.unwrap(), strict=True):
            assert len(found) == len(wanted) >= 3
            assert found == pytest.approx(wanted, rel=1e-5), run


def refusals(group: dist.ProcessGroup) -> list[str]:
    from lightning.pytorch.strategies import ModelParallelStrategy

    fit_all(group, "", [])
    kind = parallel_strategy(ModelParallelStrategy)
    assert kind is parallel_strategy(ModelParallelStrategy) and issubclass(kind, ModelParallelStrategy)
    errors = [error_of(kind, pp=2), error_of(kind, dp=2)]
    SIZES["replicas"] = {"dp_shard": 2, "tp": 1}
    SIZES["three"] = {"cp": 3}
    SIZES["tp2"] = {"tp": 2}
    for layout, parallel in (("tp2", False), ("replicas", False), ("three", True)):
        errors.append(error_of(fit, Lit("plain", parallel), layout, 1))
    return [str(error) for error in errors]


@pytest.mark.full
def test_what_would_go_wrong_is_refused() -> None:
    for rank in fresh_ranks(2, refusals):
        pipeline, unknown, unsharded, replicas, sizes = rank.unwrap()
        assert "pp is not supported" in pipeline
        assert "'dp'" in unknown and "dp_shard" in unknown
        assert "has tp, but configure_model did not shard" in unsharded
        assert "2 groups of ranks with different batches" in replicas
        assert "cp=3 is 3, but there are 2 ranks" in sizes
