"""The demo on one rank: train without parallelism, then with plain collectives and with fused_tp step by step in turn.

Rank 0 trains the unsharded model alone while the others follow its losses, so a rank 0 that dies is noticed within one
deadline. The two parallel runs then share the ranks and alternate, step for step and in changing order: whatever else
the machine does hits both alike, and the ratio of their times can be trusted where the times themselves cannot.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fused_tp.cli.demo_checkpoint import load_checkpoint, save_checkpoint
from fused_tp.cli.demo_data import make_batch, make_tokenizer, make_tokens
from fused_tp.cli.demo_model import build_model, parameter_count
from fused_tp.cli.demo_progress import Progress, rich_progress, silent_progress
from fused_tp.cli.demo_report import DemoResult, report
from fused_tp.cli.demo_sample import generate_sample
from fused_tp.cli.demo_settings import DemoSettings
from fused_tp.cli.demo_train import Run, Trainer, plain_collectives
from fused_tp.integrations.parallelize import parallelize

SINGLE, THREADED, PLAIN, FUSED = "single process", "single process, all threads", "plain collectives", "fused_tp"
THREADED_STEPS = 6  # enough for a median; their losses are not shown
THREADED_SECONDS = 6.0  # enough of them where threads that share busy cores crawl


@dataclass
class Demo:
    """What both trainings need. `tokens` are those of the whole text, `mesh` has the dims cp and tp."""

    settings: DemoSettings
    tokens: Tensor
    mesh: DeviceMesh

    def trainer(self, *, parallel: bool) -> Trainer:
        settings = self.settings
        model = build_model(settings)
        if parallel:
            model = parallelize(
                model,
                self.mesh,
                sequence_parallel=settings.sequence_parallel,
                loss_parallel=settings.loss_parallel,
            )
        return Trainer(model, lr=settings.lr, dtype=settings.dtype, device=settings.device)

    def batch(self, step: int) -> Tensor:
        settings = self.settings
        batch = make_batch(self.tokens, batch=settings.batch, seq=settings.seq, seed=settings.seed, step=step)
        return batch.to(settings.device)


def rank_main(settings: DemoSettings) -> None:
    """The whole demo, as run by every rank; rank 0 reports."""
    mesh = init_device_mesh(settings.device, (settings.cp, settings.tp), mesh_dim_names=("cp", "tp"))
    model = build_model(settings)
    parameters, vocab_size = parameter_count(model), model.config.vocab_size
    del model
    tokenizer = make_tokenizer(settings.hf)
    tokens = make_tokens(tokenizer, settings.data, seq=settings.seq, vocab_size=vocab_size)
    demo = Demo(settings, tokens, mesh)
    first = dist.get_rank() == 0
    with rich_progress() if first else silent_progress() as progress:
        single, threaded = train_single(demo, progress)
        plain, fused, trainer, steps_in_all = train_parallel(demo, progress)
    if settings.save is not None:
        save_checkpoint(settings.save, trainer.model, trainer.optimizer, steps=steps_in_all)
    sample = generate_sample(trainer.model, tokenizer, settings)
    if first:
        report(DemoResult(settings, parameters, tokenizer.name, steps_in_all, single, threaded, plain, fused, sample))
    dist.barrier()  # nobody takes the group down before all have been through the last collective


def train_single(demo: Demo, progress: Progress) -> tuple[Run, Run | None]:
    """Train the unsharded model on rank 0 with one rank's threads, then, to compare speed fairly, a few steps with the
    threads of all ranks. Every rank returns the losses, only rank 0 the times."""
    settings = demo.settings
    run = Run(SINGLE, ranks=1, threads=settings.threads)
    if dist.get_rank() != 0:
        for _ in range(settings.steps):
            run.losses.append(from_rank_0(0.0))
        return run, None
    trainer = demo.trainer(parallel=False)
    start = 0
    if settings.resume is not None:
        start = load_checkpoint(settings.resume, trainer.model, trainer.optimizer, alone=True)
    for step in range(start, start + settings.steps):
        trainer.timed_step(demo.batch(step), step, run)
        from_rank_0(run.losses[-1])
        progress.advance(run, settings.steps)
    if settings.device != "cpu" or settings.ranks == 1:
        return run, None
    threads = min(
        settings.threads * settings.ranks, os.cpu_count() or 1
    )  # more than there are cores only get in their way
    threaded = Run(THREADED, ranks=1, threads=threads)
    torch.set_num_threads(threaded.threads)
    for step in range(THREADED_STEPS):
        trainer.timed_step(demo.batch(step), start + settings.steps, threaded)
        progress.advance(threaded, THREADED_STEPS)
        if sum(threaded.seconds) > THREADED_SECONDS:
            break
    torch.set_num_threads(settings.threads)
    return run, threaded


def from_rank_0(value: float) -> float:
    """Rank 0's `value`, on all ranks."""
    shared = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(shared, 0)
    return shared.item()


def train_parallel(demo: Demo, progress: Progress) -> tuple[Run, Run, Trainer, int]:
    """Train with plain collectives and with fused_tp in turn: both runs, the fused trainer, and its steps in all."""
    settings = demo.settings
    with plain_collectives():
        plain_trainer = demo.trainer(parallel=True)
    fused_trainer = demo.trainer(parallel=True)
    start = 0
    if settings.resume is not None:
        for trainer in (plain_trainer, fused_trainer):
            start = load_checkpoint(settings.resume, trainer.model, trainer.optimizer)
    plain = Run(PLAIN, settings.ranks, settings.threads)
    fused = Run(FUSED, settings.ranks, settings.threads)

    def plain_step(step: int) -> None:
        with plain_collectives():
            plain_trainer.timed_step(demo.batch(step), step, plain)

    def fused_step(step: int) -> None:
        fused_trainer.timed_step(demo.batch(step), step, fused)

    for index in range(settings.steps):
        for one in (plain_step, fused_step) if index % 2 else (fused_step, plain_step):
            dist.barrier()  # a step starts on all ranks at once, so that none waits for what happened before
            one(start + index)
        progress.advance(plain, settings.steps)
        progress.advance(fused, settings.steps)
    for run in (plain, fused):
        combine_ranks(run)
    return plain, fused, fused_trainer, start + settings.steps


def combine_ranks(run: Run) -> None:
    """Of all ranks' times of a step: the slowest rank's wall time and the mean time waited."""
    seconds, waited = torch.tensor(run.seconds), torch.tensor(run.waited)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(waited, dist.ReduceOp.SUM)
    run.seconds = seconds.tolist()
    run.waited = (waited / dist.get_world_size()).tolist()
