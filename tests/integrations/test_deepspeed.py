"""DeepSpeed's ZeRO over parallel models with plain parameters, and its AutoTP, compared with one process."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fused_tp
from fused_tp.nn import gather_state_dict
from fused_tp.nn.linear import column_matmul, row_matmul
from tests.integrations.models import make, make_tokens
from tests.workers import error_of, on_ranks, run_fresh

if find_spec("deepspeed") is None:  # importing it takes seconds
    pytest.skip("DeepSpeed is not installed; pip install deepspeed", allow_module_level=True)
pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

SIZES: dict[str, dict[str, int]] = {
    "dp2_tp2": {"dp_shard": 2, "tp": 2},
    "cp2_tp2": {"cp": 2, "tp": 2},
    "dp2_cp2": {"dp_shard": 2, "cp": 2},
}
CLIP = 0.5


def prepare() -> None:
    """Set a launcher's variables; disable the C++ collectives that DeepSpeed would compile."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def config(stage: int, batch: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        **more,
    }


def engine_of(layout: str, stage: int, family: str = "llama", keywords: Any = None, **more: Any) -> tuple[Any, Any]:
    import deepspeed

    from fused_tp.integrations.deepspeed import MeshMPU

    mesh = fused_tp.make_mesh("cpu", **SIZES[layout])
    model = make(family)
    fused_tp.parallelize(model, mesh, parameters="plain", grad_sync=False, **(keywords or {}))
    mpu = MeshMPU(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wanted = config(stage, 4 // mpu.get_data_parallel_world_size(), **more)
    return deepspeed.initialize(model=model, optimizer=optimizer, mpu=mpu, config=wanted)[0], mpu


def step(engine: Any, tokens: Tensor, mpu: Any) -> tuple[float, float | None]:
    own = tokens.chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
    loss = engine(input_ids=own, labels=own).loss
    engine.backward(loss)
    engine.step()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    norm = engine.get_global_grad_norm()
    return float(loss) / dist.get_world_size(), None if norm is None else float(norm)


def one_process(family: str, batches: list[Tensor], dtype: torch.dtype = torch.float32) -> list[tuple[float, float]]:
    model = make(family).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss), float(norm)))
    return found


def assert_like(found: list[tuple[float, float | None]], wanted: list[tuple[float, float]], what: Any) -> None:
    for (loss, norm), (known_loss, known_norm) in zip(found, wanted, strict=True):
        assert abs(loss - known_loss) < 1e-5 * known_loss, (what, found, wanted)
        assert norm is None or abs(norm - known_norm) < 1e-4 * known_norm, (what, found, wanted)


def zero(group: dist.ProcessGroup, cases: list[tuple[str, int, str, dict[str, Any]]]) -> None:
    prepare()
    batches = [make_tokens(4, 16) for _ in range(3)]
    for layout, stage, family, keywords in cases:
        engine, mpu = engine_of(layout, stage, family, keywords)
        found = [step(engine, tokens, mpu) for tokens in batches]
        assert_like(found, one_process(family, batches), (layout, stage, family))
        assert stage == 0 or found[0][1] is not None


@pytest.mark.full
def test_losses_and_norms_of_one_process() -> None:
    cases = [("dp2_tp2", 1, "llama", {"sequence_parallel": True}), ("cp2_tp2", 3, "llama", {"loss_parallel": True})]
    run_fresh(4, zero, cases)


def more(group: dist.ProcessGroup, made: str) -> None:
    zero(
        group,
        [
            ("dp2_tp2", 0, "llama", {}),
            ("dp2_tp2", 2, "qwen3_moe", {"sequence_parallel": True}),
            ("dp2_tp2", 3, "gpt_oss", {"sequence_parallel": True}),
            ("cp2_tp2", 2, "gpt_oss", {}),
            ("dp2_cp2", 1, "llama", {"ulysses_size": 2}),
            ("dp2_cp2", 2, "llama", {}),
            ("dp2_cp2", 3, "mixtral", {}),
        ],
    )
    half(group)
    a_step_that_overflows(group)
    memory(group)
    for stage in (1, 2, 3):
        checkpoints(group, stage, made)
    autotp(group)


@pytest.mark.long
def test_more_of_zero_and_autotp(tmp_path: Path) -> None:
    run_fresh(4, more, str(tmp_path), timeout=300)


def half(group: dist.ProcessGroup) -> None:
    """Train in bf16: losses and norms of one process in fp32, within the rounding of bf16."""
    batches = [make_tokens(4, 16) for _ in range(3)]
    wanted = one_process("llama", batches)
    for stage in (1, 3):
        engine, mpu = engine_of("dp2_tp2", stage, bf16={"enabled": True})
        for tokens, (loss, norm) in zip(batches, wanted, strict=True):
            found, found_norm = step(engine, tokens, mpu)
            assert abs(found - loss) < 0.01 * loss and found_norm is not None and abs(found_norm - norm) < 0.02 * norm


def a_step_that_overflows(group: dist.ProcessGroup) -> None:
    """All ranks skip a step and halve the scale when one tensor parallel rank has an infinite gradient."""
    from deepspeed.accelerator import get_accelerator

    tokens = make_tokens(4, 16)
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        for stage in (1, 2, 3):
            scale = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
            engine, mpu = engine_of("dp2_tp2", stage, fp16=scale)
            first, _ = step(engine, tokens, mpu)
            assert engine.skipped_steps == 0
            before = {name: t.clone() for name, t in whole_state(engine.module).items()}
            weight = engine.module.model.layers[0].mlp.up_proj.weight
            hook = weight.register_hook(lambda grad: grad * (float("inf") if dist.get_rank() == 1 else 1.0))
            step(engine, tokens, mpu)
            hook.remove()
            assert engine.skipped_steps == 1 and engine.optimizer.cur_scale == 2**7, (stage, engine.optimizer.cur_scale)
            for name, t in whole_state(engine.module).items():
                assert torch.equal(t, before[name]), (stage, name)
            second, _ = step(engine, tokens, mpu)
            assert engine.skipped_steps == 1 and second < first


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return gather_state_dict(model)


def memory(group: dist.ProcessGroup) -> None:
    """ZeRO 3 frees the parameters that it gathered: fused_tp keeps none of them alive until backward."""
    engine, _ = engine_of("dp2_tp2", 3)
    seen: dict[str, StorageWeakRef] = {}

    def note(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        seen[name] = StorageWeakRef(layer.weight.data.untyped_storage())

    for name, layer in engine.module.named_modules():
        if "proj" in name or name == "lm_head":
            layer.register_forward_hook(lambda *given, name=name: note(name, *given), prepend=True)
    tokens = make_tokens(2, 16)
    loss = engine(input_ids=tokens, labels=tokens).loss
    assert len(seen) == 15
    held = [name for name, storage in seen.items() if not storage.expired()]
    assert not held, held
    engine.backward(loss)
    shapes = str(error_of(gather_state_dict, engine.module))
    assert "GatheredParameters" in shapes, shapes


def checkpoints(group: dist.ProcessGroup, stage: int, made: str) -> None:
    batches = [make_tokens(4, 16) for _ in range(4)]
    wanted = one_process("llama", batches)
    for layout in ("dp2_tp2", "cp2_tp2"):
        folder = str(Path(made, str(stage), layout))
        engine, mpu = engine_of(layout, stage)
        assert_like([step(engine, tokens, mpu) for tokens in batches[:2]], wanted[:2], (layout, stage))
        engine.save_checkpoint(folder)
        other, mpu = engine_of(layout, stage)
        other.load_checkpoint(folder)
        assert_like([step(other, tokens, mpu) for tokens in batches[2:]], wanted[2:], (layout, stage))


def autotp(group: dist.ProcessGroup) -> None:
    """Losses equal those of DeepSpeed's own layers, and the ops of fused_tp run."""
    import deepspeed

    from fused_tp.integrations.deepspeed import use

    batches = [make_tokens(4, 16) for _ in range(3)]

    def train(family: str, stage: int) -> list[float]:
        model = make(family)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wanted = config(stage, 2, tensor_parallel={"autotp_size": 2})
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=wanted)[0]
        losses = []
        for tokens in batches:
            own = tokens.chunk(2)[dist.get_rank() // 2]
            loss = engine(input_ids=own, labels=own).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        return losses

    runs = [("llama", 1), ("qwen2", 2), ("llama", 3)]
    wanted = [train(*run) for run in runs]
    use()
    use()
    with (
        mock.patch("fused_tp.integrations.deepspeed.row_matmul", wraps=row_matmul) as rows,
        mock.patch("fused_tp.integrations.deepspeed.column_matmul", wraps=column_matmul) as columns,
    ):
        for run, losses in zip(runs, wanted, strict=True):
            rows.reset_mock(), columns.reset_mock()
            assert train(*run) == pytest.approx(losses, rel=1e-5), run
            assert rows.call_count >= 3 * 4 and columns.call_count >= 3 * 10, (rows.call_count, columns.call_count)


@on_ranks(4)
def test_meshes_that_are_refused(group: dist.ProcessGroup) -> None:
    from fused_tp.integrations.deepspeed import MeshMPU

    for dim, says in (("pp", "pipelines accept no mpu"), ("ep", "different experts")):
        assert says in str(error_of(MeshMPU, fused_tp.make_mesh("cpu", **{dim: 2, "dp_shard": 2})))
    mpu = MeshMPU(fused_tp.make_mesh("cpu", dp_replicate=2, dp_shard=1, cp=2))
    assert mpu.get_model_parallel_world_size() == 1 and mpu.get_data_parallel_world_size() == 2
    assert mpu.get_sequence_data_parallel_world_size() == 4
    assert mpu.get_data_parallel_rank() == dist.get_rank() // 2
