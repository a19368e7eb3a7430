"""Models sharded by transformers' own loader run the ops of fused_tp; results equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fused_tp.integrations import loading
from tests.integrations.models import assert_near, make, make_tokens
from tests.workers import fresh_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")


def load(folder: str, sizes: dict[str, int]) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(**sizes)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)


def compare(group: dist.ProcessGroup, sizes: dict[str, int], families: list[str], made: str) -> None:
    tokens = make_tokens(2, 16)
    for family in families:
        whole, folder = make(family), f"{made}/{family}"
        if dist.get_rank() == 0:
            whole.save_pretrained(folder)
        dist.barrier()
        with (
            mock.patch.object(loading, "row_matmul", wraps=loading.row_matmul) as rows,
            mock.patch.object(loading, "column_matmul", wraps=loading.column_matmul) as columns,
        ):
            with loading.fused_styles():
                parallel = load(folder, sizes).train()
            other = load(folder, sizes)  # outside: transformers' own layers
            found, wanted = (m(input_ids=tokens, labels=tokens).loss for m in (parallel, whole.train()))
            counts = rows.call_count, columns.call_count
            other(input_ids=tokens)
            assert counts == (rows.call_count, columns.call_count) and min(counts) >= 2, counts
        assert_near(found, wanted, "loss")
        found.backward()
        wanted.backward()
        known = dict(whole.named_parameters())
        for name, p in parallel.named_parameters():
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            assert_near(grad, known[name].grad, name)
        with torch.no_grad():
            texts = [m.eval().generate(tokens[:, :4], max_new_tokens=5, do_sample=False) for m in (parallel, whole)]
        assert torch.equal(*texts), family


def test_tensor_parallel(tmp_path: Path) -> None:
    for rank in fresh_ranks(2, compare, {"tp_size": 2}, ["llama", "deepseek_v3"], str(tmp_path)):
        rank.unwrap()


@pytest.mark.full
def test_under_fsdp(tmp_path: Path) -> None:
    for rank in fresh_ranks(4, compare, {"tp_size": 2, "fsdp_size": 2}, ["gemma2", "qwen3_moe"], str(tmp_path)):
        rank.unwrap()
