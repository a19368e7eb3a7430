"""transformers' Trainer over parallel models: losses, norms and resumed checkpoints equal those of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import fused_tp
from tests.integrations.models import VOCAB, make
from tests.workers import error_of, fresh_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed; pip install accelerate")

SIZES: dict[str, dict[str, int]] = {
    "one": {},
    "cp2_tp2": {"cp": 2, "tp": 2},
    "dp2_tp2": {"dp_shard": 2, "tp": 2},
    "dp2_cp2": {"dp_shard": 2, "cp": 2},
}
STEPS, SAVED = 6, 3


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.rows = torch.randint(3, VOCAB, (64, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.rows[index].clone()
        labels[: index % 8] = -100  # batches have unequal numbers of targets
        return {"input_ids": self.rows[index], "labels": labels}


def parallel_model(sizes: dict[str, int], family: str, lora: bool) -> Any:
    model = make(family)
    replicas = sizes.get("dp_shard", 1)
    if lora:
        import peft

        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]))
    if sizes:
        mesh = fused_tp.make_mesh("cpu", **sizes)
        fused_tp.parallelize(model, mesh, grad_sync=replicas == 1, sequence_parallel="tp" in sizes)
    if replicas > 1:
        for layer in [*model.model.layers, model]:
            fully_shard(layer, mesh=fused_tp.fsdp_mesh(mesh))
    return model


def train(
    group: dist.ProcessGroup, folder: str, layout: str, resume: str | None, family: str, lora: bool, packed: bool
) -> list[float]:
    import transformers
    from accelerate.state import AcceleratorState, PartialState

    from fused_tp.integrations.trainer import parallel_trainer

    PartialState._reset_state()
    AcceleratorState._reset_state()
    sizes = SIZES[layout]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if sizes:  # the variables of torchrun
        rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    model = parallel_model(sizes, family, lora)
    model.config.use_cache = False
    args = transformers.TrainingArguments(
        output_dir=str(Path(folder, layout)),
        per_device_train_batch_size=4 // sizes.get("dp_shard", 1),
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        save_steps=SAVED,
        eval_steps=SAVED,
        eval_strategy="steps",
        load_best_model_at_end=resume is not None,  # loads the model in another way
        logging_steps=1,
        weight_decay=0.1,
        learning_rate=1e-3,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        seed=1,
    )
    kind = parallel_trainer(transformers.Trainer) if sizes else transformers.Trainer
    collator = transformers.DataCollatorWithFlattening() if packed else None
    few = torch.utils.data.Subset(Texts(), range(22))
    trainer = kind(model=model, args=args, train_dataset=Texts(), eval_dataset=Texts(), data_collator=collator)
    predicted = trainer.predict(few)  # not a whole number of batches
    checkpoint = None if resume is None else str(Path(folder, resume, f"checkpoint-{SAVED}"))
    trainer.train(resume_from_checkpoint=checkpoint)
    named = ("loss", "eval_loss", "grad_norm", "learning_rate")
    logged = [entry[key] for entry in trainer.state.log_history for key in named if key in entry]
    logits, loss = predicted.predictions, predicted.metrics["test_loss"]
    return [*logged, *logits.shape, float(abs(logits).mean()), loss]


# (layout, layout of the checkpoint to resume, family, LoRA, packed documents). A checkpoint holds the history of the
# run that wrote it.
RUNS: list[tuple[str, str | None, str, bool, bool]] = [
    ("cp2_tp2", None, "llama", False, False),
    ("dp2_tp2", None, "llama", False, False),
    ("dp2_cp2", None, "llama", False, False),
    ("dp2_cp2", "cp2_tp2", "llama", False, False),
    ("cp2_tp2", "dp2_tp2", "llama", False, False),
    ("cp2_tp2", None, "qwen3_moe", False, False),
    ("cp2_tp2", None, "llama", True, False),
    ("cp2_tp2", "cp2_tp2", "llama", True, False),
    ("cp2_tp2", None, "llama", False, True),
    ("cp2_tp2", "cp2_tp2", "llama", False, True),
]


def train_all(group: dist.ProcessGroup, folder: str, runs: list[Any]) -> list[list[float]]:
    """Run all in the same processes, one after the other, because a start takes seconds."""
    found = []
    for layout, resume, *how in runs:
        name = "-".join(map(str, how))
        found.append(train(group, str(Path(folder, name)), layout, resume, *how))
        dist.barrier()
    return found


@pytest.mark.full
def test_losses_norms_and_resuming_at_another_size(tmp_path: Path) -> None:
    references = list({tuple(how): None for _, _, *how in RUNS})
    (one,) = fresh_ranks(1, train_all, str(tmp_path), [("one", None, *how) for how in references], timeout=300)
    wanted = dict(zip(references, one.unwrap(), strict=True))
    ranks = [rank.unwrap() for rank in fresh_ranks(4, train_all, str(tmp_path), RUNS, timeout=300)]
    for found in ranks:
        for (layout, resume, *how), values in zip(RUNS, found, strict=True):
            assert len(values) == 3 * STEPS + 2 + 5
            # Data parallel ranks share the last predicted batch unevenly, so their loss differs.
            compared = slice(-1) if "dp" in layout else slice(None)
            assert values[compared] == pytest.approx(wanted[tuple(how)][compared], rel=2e-5), (layout, resume, how)
    import transformers

    folder = tmp_path / "llama-False-False"
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "dp2_cp2" / f"checkpoint-{STEPS}")
    other = transformers.AutoModelForCausalLM.from_pretrained(folder / "one" / f"checkpoint-{STEPS}")
    for (name, p), (_, q) in zip(saved.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def refusals(group: dist.ProcessGroup) -> list[str]:
    import transformers
    from torch.distributed.device_mesh import init_device_mesh

    from fused_tp.integrations.trainer import parallel_trainer

    kind = parallel_trainer(transformers.Trainer)
    assert kind is parallel_trainer(transformers.Trainer) and issubclass(kind, transformers.Trainer)
    errors = [error_of(kind, model=make("llama"))]
    errors.append(error_of(kind, model_init=lambda: make("llama")))
    half = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "cp"))
    model = make("llama")
    errors.append(error_of(kind, model=fused_tp.parallelize(model, half)))
    mesh = fused_tp.make_mesh("cpu", tp=2)
    errors.append(error_of(kind, model=fused_tp.parallelize(make("llama"), mesh, parameters="plain")))
    settings = {"output_dir": "unused", "use_cpu": True, "report_to": []}
    model = fused_tp.parallelize(make("llama"), mesh, sequence_parallel=True)
    for wrong in (
        {"average_tokens_across_devices": False},
        {"neftune_noise_alpha": 5.0},
        {"eval_use_gather_object": True},
    ):
        errors.append(error_of(kind, model=model, args=transformers.TrainingArguments(**settings, **wrong)))
    return [str(error) for error in errors]


@pytest.mark.full
def test_what_trainer_would_get_wrong_is_refused() -> None:
    for rank in fresh_ranks(2, refusals):
        first, second, third, plain, average, noise, objects = rank.unwrap()
        assert "parameters='plain' is not supported" in plain
        assert "average_tokens_across_devices=False" in average
        assert "neftune_noise_alpha is not supported" in noise
        assert "ranks that share a batch" in objects
        assert "is not parallel. Call fused_tp.parallelize" in first
        assert "model_init are not supported" in second
        assert "2 groups of ranks with different batches" in third
