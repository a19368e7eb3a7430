"""torchtitan's Trainer over fused layers: tensor parallel ranks, FSDP2, and its checkpoints.

    torchrun --nproc-per-node 4 -m examples.torchtitan_llama --tp 2 --dp 2
    torchrun --nproc-per-node 4 -m examples.torchtitan_llama --tp 2 --dp 2 --stock

Runs on GPUs and on CPU ranks. `--stock` disables the overrides: losses and gradient norms are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from fused_tp.integrations.torchtitan_cpu import on_cpu

if not torch.accelerator.is_available():
    on_cpu()

from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 calls it, and torch 2.13 has it under another name
    cast(Any, dist).set_timeout = dist.distributed_c10d._set_pg_timeout
OVERRIDES = ["fused_tp.integrations.torchtitan.attention", "fused_tp.integrations.torchtitan.feed_forward"]
VOCAB = 256  # bytes


class ByteTokenizer(BaseTokenizer):
    """Tokenizer with a token per byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return VOCAB


class CountingRows(IterableDataset[Any]):
    """Rows in which each byte is the previous one plus the row's increment."""

    def __init__(self, seq: int, first_row: int, stride: int) -> None:
        self.seq, self.first_row, self.stride = seq, first_row, stride

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        row = self.first_row
        while True:
            tokens = (torch.arange(self.seq + 1) * (row % 7 + 1) + row) % VOCAB
            yield {"input": tokens[:-1], "positions": torch.arange(self.seq)}, tokens[1:]
            row += self.stride


class CountingLoader(ParallelAwareDataloader):
    """Loads rows r, r + R, ... on data parallel rank r of R."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        rows = CountingRows(seq_len, dp_rank, dp_world_size)
        super().__init__(rows, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=1, help="data parallel ranks, by FSDP2")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--stock", action="store_true", help="without the overrides")
    parser.add_argument("--out", default="out/torchtitan")
    parsed = parser.parse_args(arguments)
    init_logger()
    config = llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # FlexAttention has no backward on CPUs
    config.dump_folder = parsed.out
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = CountingLoader.Config()
    config.training = TrainingConfig(
        local_batch_size=8 // parsed.dp, seq_len=64, steps=parsed.steps, mixed_precision_param="float32"
    )
    config.training.disable_cuda_graphs = True
    config.parallelism = ParallelismConfig(
        data_parallel_shard_degree=parsed.dp,
        tensor_parallel_degree=parsed.tp,
        # The default, spmd_types, needs a newer FSDP2 than that of torch 2.13.
        spmd_backend="partial_dtensor",
    )
    config.validator.enable = False
    config.debug.seed = 0
    config.metrics.disable_color_printing = True
    config.override = OverrideConfig(imports=[] if parsed.stock else OVERRIDES)
    trainer = Trainer(config)
    try:
        trainer.train()
    finally:
        trainer.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
