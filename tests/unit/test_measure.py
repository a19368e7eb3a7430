"""A measured machine: its numbers reproduce the seconds that they come from, and predict training steps."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

from benchmarks import planner
from fused_tp.cli.plan import measure_this_machine
from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.costs import CostModel
from fused_tp.planning.hardware import MACHINES, Machine
from fused_tp.planning.measure import LARGE_SIZES, LAYER_COUNT, SMALL_SIZES, LlamaSizes, machine_from_timings
from fused_tp.training.run import TrainingRun
from fused_tp.training.settings import TrainSettings
from tests.workers import run_fresh

# Plausible times of a CPU, for all layers.
SECONDS = {
    "copy": 8e-3,
    "linear": 25e-3,
    "fused linear": 20e-3,
    "attention": 20e-3,
    "ring": 25e-3,
    "few": 6e-3,
    "many": 0.7,
    "optimizer": 25e-3,
    "few optimizer": 2e-3,
    "few optimizer, FSDP2": 15e-3,
    "exchange": 1e-3,
    "few, tp": 20e-3,
    "many, tp": 0.5,
    "few, FSDP2": 30e-3,
    "short": 30e-3,
    "short, FSDP2": 110e-3,
}


def machine(ranks: int) -> Machine:
    like = replace(MACHINES["h100"], peak_flops={"fp32": 1.0}, matmul_flops={"fp32": 1.0}, overlaps=False)
    return machine_from_timings(SECONDS, LARGE_SIZES["cpu"], ranks, like)


def layers(machine: Machine, sizes: LlamaSizes, **spread: int) -> float:
    """Predicted seconds of all layers."""
    forward, backward = CostModel(
        shape=sizes.shape,
        config=ParallelConfig(**spread),
        machine=machine,
        seq=sizes.seq,
        global_batch=sizes.num_rows,
        precision="fp32",
    ).mean_layer_times
    return LAYER_COUNT * (forward + backward).total


def test_numbers_give_back_the_seconds() -> None:
    found = machine(2)
    assert layers(found, SMALL_SIZES) == pytest.approx(SECONDS["few"], rel=0.01)
    assert layers(found, LARGE_SIZES["cpu"]) == pytest.approx(SECONDS["many"], rel=0.01)
    assert layers(found, LARGE_SIZES["cpu"], tp=2) == pytest.approx(SECONDS["many, tp"], rel=0.01)
    assert found.constants.fused_matmul == 1.25 and found.constants.ring_attention == pytest.approx(0.4)
    assert found.message_latency == pytest.approx(2e-3)
    assert Machine(**vars(found)) == found  # in the bounds of all fields


def test_one_rank_has_no_links() -> None:
    alone = machine(1)
    assert alone.message_bandwidth is None and alone.constants.pointwise == machine(2).constants.pointwise


def fastest_step(group: dist.ProcessGroup, settings: dict[str, Any]) -> float:
    """CPU seconds of the fastest step, which other programs change little."""
    torch.set_num_threads(1)
    seconds = []
    with TrainingRun(TrainSettings.from_mapping(settings)) as run:
        started = time.process_time()
        for _ in run.steps():
            seconds.append(time.process_time() - started)
            started = time.process_time()
    return min(seconds)


@pytest.mark.long
def test_steps_are_predicted() -> None:
    here = measure_this_machine()
    model, *_ = planner.MODELS.values()
    for ranks, way in ((1, "one process"), (2, "tp2, sequence parallel")):
        settings = {**planner.train_settings(model, 6), "parallel": planner.CONFIGURATIONS[way]}
        found = max(run_fresh(ranks, fastest_step, settings, timeout=200))
        assert planner.make_cost_model(here, model, planner.CONFIGURATIONS[way]).time.total == pytest.approx(
            found, rel=0.4
        ), way
