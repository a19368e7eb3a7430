"""`check_model` and `fused-tp check`: correct models pass, and the report names the module of a wrong one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from examples.llama import Llama, LlamaConfig, RMSNorm
from fused_tp.cli.main import main
from fused_tp.nn.sharding import local_shard
from fused_tp.pipelining.pipeline import Pipeline
from fused_tp.planning.build import build
from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.small_config import small_config
from fused_tp.training.check import check_model, random_batch
from fused_tp.training.check_report import CheckReport
from tests.integrations.models import SIZES
from tests.workers import fresh_ranks, on_ranks, run_ranks

FORMER = "model.layers.0"
LATTER = "model.layers.1"


def make_llama() -> nn.Module:
    sizes: dict[str, Any] = SIZES
    return Llama(LlamaConfig(**sizes))


def make_nothing() -> nn.Module:
    raise TypeError("of its own")


class Rescaled(nn.Module):
    """A linear layer, a norm of the features that it returns, and dropout."""

    def __init__(self, linear: nn.Linear, norm: nn.Module, p: float = 0.0) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = linear, norm, nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.linear(x)))


class HeadNorm(RMSNorm):
    """Norm of each head separately, with one weight for all heads."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(-1, (-1, len(self.weight)))).flatten(-2)


class FeatureNorm(nn.Module):
    """Norm over all features, without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:])


def make_rescaled(projection: str, norm: Callable[[], nn.Module], p: float = 0.0) -> nn.Module:
    """A Llama with a norm and dropout after one projection of each layer."""
    model: Any = make_llama()
    plan = {}
    for name, style in Llama.tp_plan.items():
        plan[f"{name}.linear" if name.endswith(projection) else name] = style
    for layer in model.model.layers:
        setattr(layer.self_attn, projection, Rescaled(getattr(layer.self_attn, projection), norm(), p))
    model.tp_plan = {**plan, f"model.layers.*.self_attn.{projection}.norm": "replicate"}
    made: nn.Module = model
    return made


def make_head_norm() -> nn.Module:
    return make_rescaled("q_proj", lambda: HeadNorm(8, 1e-5))


def make_feature_norm() -> nn.Module:
    return make_rescaled("q_proj", FeatureNorm)


def make_dropout() -> nn.Module:
    return make_rescaled("o_proj", FeatureNorm, p=0.2)


def without_sum(model: Any, config: ParallelConfig, mesh: DeviceMesh) -> nn.Module | Pipeline:
    """The parallel model with a row-parallel layer that does not reduce: each rank keeps its partial sum."""
    parallel: Any = build(model, config, mesh)
    layer = parallel.get_submodule(f"{LATTER}.self_attn.o_proj")
    layer.forward = lambda x, **_: F.linear(x, local_shard(layer.weight))
    return parallel


def with_local_positions(model: Any, config: ParallelConfig, mesh: DeviceMesh) -> nn.Module | Pipeline:
    """The parallel model with rotary positions that start at 0 on each rank."""
    parallel: Any = build(model, config, mesh)
    rotary = parallel.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(position_ids.shape[-1]).expand(position_ids.shape))
    return parallel


def with_own_seeds(model: Any, config: ParallelConfig, mesh: DeviceMesh) -> nn.Module | Pipeline:
    """The parallel model with another dropout seed on each rank."""
    parallel: Any = build(model, config, mesh)
    parallel.register_forward_pre_hook(lambda *_: torch.manual_seed(7 + dist.get_rank()) and None)
    return parallel


def make_transformers_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return model


def make_mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model: nn.Module = transformers.MixtralForCausalLM(small_config(transformers.MixtralConfig))
    return model


@on_ranks(4)
def test_a_right_model_and_a_wrong_one(group: dist.ProcessGroup) -> None:
    config = ParallelConfig(cp=2, tp=2)
    report = check_model(make_llama, config)
    assert report.right and report.suspect is None, report
    assert len(report.outputs) == 29 and not report.skipped, report
    assert report.communicated["ring_attention"] == report.communicated["ring_attention_backward"] == 2, report
    config = ParallelConfig(cp=2, tp=2, sequence_parallel=False)
    report = check_model(make_llama, config, build=without_sum)
    assert not report.right and report.suspect == f"{LATTER}.self_attn.o_proj", report
    assert report.gradients[f"{LATTER}.self_attn.o_proj.weight"] > 0.01


def right_ones(group: dist.ProcessGroup) -> None:
    sizes: dict[str, dict[str, Any]] = {
        "tp2": {"tp": 2, "sequence_parallel": False},
        "tp2 with sequence parallelism": {"tp": 2},
        "cp2": {"cp": 2},
        "pp2": {"pp": 2, "microbatches": 2},
        "dp_shard2": {"dp_shard": 2, "microbatches": 2},
        "recompute": {"tp": 2, "recompute": "full"},
    }
    for make in (make_llama, make_transformers_llama):
        for name, config in sizes.items():
            report = check_model(make, ParallelConfig(**config), steps=2)
            assert report.right and len(report.losses) == 2 and len(report.outputs) >= 25, (
                f"{make.__name__}, {name}\n{report}"
            )
    packed = partial(random_batch, packed=True)
    report = check_model(make_transformers_llama, ParallelConfig(cp=2), batch=packed, dtype=torch.float64)
    assert report.right, report
    with pytest.raises(ValueError, match="has 3 rows; use a multiple of 2"):
        check_model(make_llama, ParallelConfig(dp_shard=2), batch=partial(random_batch, rows=3))


@pytest.mark.full
def test_right_models_are_right() -> None:
    for rank in fresh_ranks(2, right_ones, timeout=400):
        rank.unwrap()
    run_ranks(4, right_on_four)


def right_on_four(group: dist.ProcessGroup) -> None:
    for config in (ParallelConfig(cp=2, tp=2), ParallelConfig(pp=2, tp=2, microbatches=4)):
        report = check_model(make_transformers_llama, config)
        assert report.right, report
    # Experts are replicated along dp_replicate and distributed along ep.
    for config in (ParallelConfig(dp_replicate=2, ep=2), ParallelConfig(dp_shard=2, ep=2)):
        report = check_model(make_mixtral, config)
        assert report.right, report


def planted_errors(group: dist.ProcessGroup) -> None:
    tp, cp = ParallelConfig(tp=2, sequence_parallel=False), ParallelConfig(cp=2)

    report = check_model(make_head_norm, tp)  # its plan says that each rank sees all heads
    assert report.first_difference is None, report
    assert {*report.wrong_gradients} == {f"{layer}.self_attn.q_proj.norm.weight" for layer in (FORMER, LATTER)}, report
    assert report.suspect == f"{LATTER}.self_attn.q_proj.norm"

    report = check_model(make_feature_norm, tp)
    assert report.suspect == f"{FORMER}.self_attn.q_proj.norm", report

    report = check_model(make_transformers_llama, cp, build=with_local_positions)
    assert report.suspect == "model.rotary_emb", report

    report = check_model(make_llama, tp, build=without_sum)
    assert report.suspect == f"{LATTER}.self_attn.o_proj", report

    assert check_model(make_dropout, tp).right
    report = check_model(make_dropout, tp, build=with_own_seeds)
    assert report.suspect == f"{FORMER}.self_attn.o_proj.dropout", report
    assert "equal seeds" in str(report)


@pytest.mark.full
def test_the_module_of_a_planted_error_is_named() -> None:
    for rank in fresh_ranks(2, planted_errors, timeout=400):
        rank.unwrap()


def test_json_of_numbers_that_are_none() -> None:
    report = CheckReport(
        "tp2", 1e-3, [(1.0, math.nan)], math.inf, {"norm": {1: 0.5}}, {}, {"norm.weight": math.inf}, {}
    )
    written = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(written)["gradients"] == {"norm.weight": "Infinity"}


@pytest.mark.full
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert main(["check", "llama", "--tp", "2", "--layers", "1", "--set", "hidden_size=32", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["right"] and report["layout"] == "tp2, 2 ranks" and "RIGHT" in capsys.readouterr().out
    here = "tests.integrations.test_check"
    assert (
        main(["check", f"{here}:make_llama", "--tp", "2", "--no-sequence-parallel", "--build", f"{here}:without_sum"])
        == 1
    )
    assert f"WRONG: check {LATTER}.self_attn.o_proj first" in capsys.readouterr().out
    for line, said in {
        "llama --tp 3": "num_attention_heads=4",
        "no-such-model --tp 2": "MODEL must be a model type of transformers, a path, or module:function, got no",
        "json:no_such_function": "json:no_such_function cannot be imported",
        "json:dumps --tp 2": "json:dumps must be callable without arguments: missing",
        "os:getcwd": "os:getcwd must return an nn.Module, got str",
        "llama --sequence-parallel": "sequence_parallel=True needs tp > 1",
    }.items():
        assert main(["check", *line.split()]) == 2
        assert said in capsys.readouterr().err
    assert main(["check", f"{here}:make_nothing", "--tp", "2"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fused-tp check: A rank failed.") and "TypeError: of its own" in said
