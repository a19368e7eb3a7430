"""Train a small Llama over data and tensor parallel ranks, and resume automatically when ranks die.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 -m examples.train_resilient --folder checkpoints

Kill a process, or interrupt all and start again, also with another --nproc-per-node or --tp: training resumes from the
newest complete checkpoint, with the samples that follow it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import fused_tp

from .llama import Llama, LlamaConfig


class Sentences(Dataset[Tensor]):
    """Byte sequences that repeat a short pattern, generated from their index instead of read from a file."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        period = torch.randint(256, (4 + index % 5,), generator=generator)
        return period.repeat(16)[:32]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="of the checkpoints, on a file system that all ranks share")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--tp", type=int, default=2)
    parsed = parser.parse_args(arguments)

    dist.init_process_group()
    mesh = fused_tp.make_mesh(dp_shard=-1, tp=parsed.tp)
    torch.manual_seed(0)  # equal models on all ranks
    model = Llama(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4))
    fused_tp.parallelize(model, mesh, grad_sync=False)
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=fused_tp.fsdp_mesh(mesh))

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, parsed.steps)
    batches = fused_tp.DistributedBatches(Sentences(), mesh, parsed.global_batch_size, shuffle=True, epochs=None)
    with fused_tp.CheckpointManager(parsed.folder, model, optimizer, scheduler, batches) as checkpoints:
        done = checkpoints.restore() or 0
        for step, tokens in zip(range(done + 1, parsed.steps + 1), batches, strict=False):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            fused_tp.nn.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step % parsed.save_every == 0 or step == parsed.steps:
                checkpoints.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
