"""Train a small Llama with Lightning on data, context and tensor parallel ranks.

    torchrun --nproc-per-node 4 -m examples.lightning_llama --dp 1 --cp 2 --tp 2
    torchrun --nproc-per-node 4 -m examples.lightning_llama --dp 2 --cp 1 --tp 2

Runs on CPUs and GPUs. The losses equal those of one process, `python -m examples.lightning_llama`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import fused_tp
from examples.llama import Llama, LlamaConfig
from fused_tp.integrations.lightning import parallel_strategy

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4)
BATCH = 4


class LitLlama(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # all ranks create the same model
        self.model = Llama(CONFIG)
        self.texts = torch.randint(CONFIG.vocab_size, (16, 32), generator=torch.Generator().manual_seed(0))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is None or fused_tp.is_parallelized(self.model):  # called again by validate and test
            return
        # FSDP2 averages gradients over context parallel ranks, too.
        fsdp = self.device_mesh["dp_shard"].size() > 1
        fused_tp.parallelize(self.model, self.device_mesh, grad_sync=not fsdp, sequence_parallel=True)
        if fsdp:
            for module in (*self.model.model.layers, self.model):
                fully_shard(module, mesh=fused_tp.fsdp_mesh(self.device_mesh))

    def training_step(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, labels=tokens).loss
        # Ranks along cp and tp compute the same loss, so the mean over all ranks is that over data parallel ranks.
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Tensor]:
        # Lightning's own sampler (use_distributed_sampler=True) would shuffle; this one keeps one process's batches.
        texts: Any = self.texts  # a tensor, whose rows are the samples
        sampler: Any = None
        if self.device_mesh is not None:
            sampler_options = self.trainer.strategy.distributed_sampler_kwargs
            sampler = DistributedSampler(texts, shuffle=False, **sampler_options)
        batch = BATCH // (1 if sampler is None else sampler.num_replicas)
        return DataLoader(texts, batch_size=batch, sampler=sampler)


def main(arguments: list[str] | None = None, **options: Any) -> list[float]:
    """Train and return the loss of each step. `options` are further keywords of Trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=1, help="data parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="context parallel ranks")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the checkpoint goes at the end")
    parser.add_argument("--resume", type=Path, help="a checkpoint, of any sizes, to start from")
    parsed = parser.parse_args(arguments)
    ranks = parsed.dp * parsed.cp * parsed.tp
    if ranks > 1:
        options["strategy"] = parallel_strategy(ModelParallelStrategy)(dp_shard=parsed.dp, cp=parsed.cp, tp=parsed.tp)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=ranks,
        max_steps=parsed.steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = LitLlama()
    trainer.fit(model, ckpt_path=parsed.resume)
    if parsed.folder:
        trainer.save_checkpoint(parsed.folder)
    if trainer.is_global_zero:
        print("losses:", *(f"{loss:.6f}" for loss in model.losses))
    return model.losses


if __name__ == "__main__":
    main()
