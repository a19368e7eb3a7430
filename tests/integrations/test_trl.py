"""TRL's DPOTrainer, with a reference model, over parallel ranks: losses, rewards and norms equal one process.

For SFTTrainer see examples/sft_packed.py, which tests/integrations/test_examples.py runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fused_tp
from tests.workers import fresh_ranks

pytest.importorskip("trl", reason="TRL is not installed; pip install trl")
pytestmark = pytest.mark.full

LAYOUTS: list[dict[str, int]] = [{"cp": 2, "tp": 2}, {"cp": 4, "tp": 1}, {"cp": 1, "tp": 4}]


def train_dpo(group: dist.ProcessGroup, folder: str, layouts: list[dict[str, int]]) -> list[list[float]]:
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    if ranks != "1":
        os.environ |= {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate.state import AcceleratorState, PartialState
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from examples.sft_packed import make_model, make_texts
    from fused_tp.integrations.trainer import parallel_trainer

    texts, tokenizer = make_texts()
    words = texts["text"]
    pairs = {"prompt": words[:32], "chosen": words[32:64], "rejected": words[64:96]}
    found = []
    for sizes in layouts:
        PartialState._reset_state()
        AcceleratorState._reset_state()
        policy, reference = make_model(), make_model()
        with torch.no_grad():
            for p in reference.parameters():
                p *= 1.1
        if sizes:
            mesh = fused_tp.make_mesh("cpu", **sizes)
            for model in (policy, reference):
                fused_tp.parallelize(model, mesh, sequence_parallel=sizes["tp"] > 1, loss_parallel=False)
        args = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=3,
            max_length=64,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        kind: Any = parallel_trainer(DPOTrainer) if sizes else DPOTrainer
        trainer = kind(
            model=policy,
            ref_model=reference,
            args=args,
            train_dataset=Dataset.from_dict(pairs),
            processing_class=tokenizer,
        )
        trainer.train()
        names = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "logps/chosen")
        found.append([entry[name] for entry in trainer.state.log_history for name in names if name in entry])
    return found


@pytest.mark.long
def test_dpo(tmp_path: Path) -> None:
    (one,) = fresh_ranks(1, train_dpo, str(tmp_path), [{}], timeout=200)
    (wanted,) = one.unwrap()
    assert len(wanted) == 15
    for rank in fresh_ranks(4, train_dpo, str(tmp_path), LAYOUTS, timeout=200):
        for sizes, found in zip(LAYOUTS, rank.unwrap(), strict=True):
            assert found == pytest.approx(wanted, rel=1e-4), sizes
