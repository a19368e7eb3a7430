"""The ranks of the demo: train without parallelism, then with plain collectives and with fused_tp step by step in turn.

Rank 0 trains the unsharded model alone while the others follow its losses, so a rank 0 that dies is noticed within one
deadline. The two parallel runs then share the ranks and alternate, step for step and in changing order: whatever else
the machine does affects both equally, and the ratio of their times can be trusted where the times themselves cannot.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it when they step: the process that ranks are forked from has it already
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fused_tp.cli import shipped_module
from fused_tp.cli.demo import DemoSettings
from fused_tp.cli.demo_report import FUSED, PLAIN, SINGLE, THREADED, DemoResult, Run, Sample, report
from fused_tp.integrations.parallelize import parallelize
from fused_tp.runtime import tracing
from fused_tp.runtime.settings import environment

WARMUP_STEPS = 5  # of the learning rate
GRAD_NORM = 1.0
# Tables and underlined titles. A row of dashes is no English, and what a young model makes of a hundred equal tokens
# amplifies the last bit of every sum (tried: two runs then part by 1e-4 for that batch, else by 1e-6).
TABLE_STARTS = ("|", "+", "---", "===", "***", "~~~", "^^^")
TYPED_QUOTES = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}
THREADED_STEPS = 6  # enough for a median; their losses are not shown
THREADED_SECONDS = 6.0  # enough of them where threads that share busy cores crawl
Advance = Callable[[Run, int], None]  # notes that a run has done one more of so many steps

# ---- ranks ----


@dataclass
class Demo:
    """What all runs need. `tokens` are those of the whole text, `mesh` has the dims cp and tp."""

    settings: DemoSettings
    tokens: Tensor
    mesh: DeviceMesh

    def trainer(self, model: Any = None, *, parallel: bool) -> tuple[Trainer, int]:
        """A model (default: a new one) with its optimizer, and the steps that --resume says it has been trained."""
        settings = self.settings
        model = build_model(settings) if model is None else model
        if parallel:
            model = parallelize(
                model, self.mesh, sequence_parallel=settings.sequence_parallel, loss_parallel=settings.loss_parallel
            )
        trainer = Trainer(model, lr=settings.lr, dtype=settings.dtype, device=settings.device)
        return trainer, 0 if settings.resume is None else trainer.load(settings.resume, alone=not parallel)

    def batch(self, step: int) -> Tensor:
        settings = self.settings
        batch = make_batch(self.tokens, batch=settings.batch, seq=settings.seq, seed=settings.seed, step=step)
        return batch.to(settings.device)


def rank_main(settings: DemoSettings) -> None:
    """The whole demo, as run by every rank; rank 0 reports."""
    mesh = init_device_mesh(settings.device, (settings.cp, settings.tp), mesh_dim_names=("cp", "tp"))
    model = build_model(settings)
    parameters, vocab_size = sum(parameter.numel() for parameter in model.parameters()), model.config.vocab_size
    tokenizer = make_tokenizer(settings.hf)
    tokens = make_tokens(tokenizer, settings.data, seq=settings.seq, vocab_size=vocab_size)
    demo = Demo(settings, tokens, mesh)
    first = dist.get_rank() == 0
    with progress_bars(shown=first) as advance:
        if first:
            single, threaded = train_single(demo, model, advance)
        else:  # follow its losses
            single, threaded = Run(SINGLE, 1, 0, [from_rank_0(0.0) for _ in range(settings.steps)]), None
        del model
        plain, fused, trainer, steps_in_all = train_parallel(demo, advance)
    sample = generate_sample(trainer.model, tokenizer, settings)
    if first:
        report(DemoResult(settings, parameters, tokenizer.name, steps_in_all, single, threaded, plain, fused, sample))
    if settings.save is not None:  # last: a full disk loses no report
        trainer.save(settings.save, steps=steps_in_all)
    dist.barrier()  # no rank destroys the group before all have ended the last collective


def train_single(demo: Demo, model: Any, advance: Advance) -> tuple[Run, Run | None]:
    """Train the unsharded model with the threads of one rank; then, to compare speed fairly, time a few steps with the
    threads of all ranks."""
    settings = demo.settings
    run = Run(SINGLE, ranks=1, threads=settings.threads)
    trainer, start = demo.trainer(model, parallel=False)
    for step in range(start, start + settings.steps):
        trainer.timed_step(demo.batch(step), step, run)
        from_rank_0(run.losses[-1])
        advance(run, settings.steps)
    if settings.device != "cpu" or settings.ranks == 1:
        return run, None
    # More threads than there are cores only slow each other down.
    threads = min(settings.threads * settings.ranks, os.cpu_count() or 1)
    threaded = Run(THREADED, ranks=1, threads=threads)
    torch.set_num_threads(threads)
    for step in range(THREADED_STEPS):
        trainer.timed_step(demo.batch(step), start + settings.steps, threaded)
        advance(threaded, THREADED_STEPS)
        if sum(threaded.seconds) > THREADED_SECONDS:
            break
    torch.set_num_threads(settings.threads)
    return run, threaded


def from_rank_0(value: float) -> float:
    """Rank 0's `value`, on all ranks."""
    shared = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(shared, 0)
    return shared.item()


def train_parallel(demo: Demo, advance: Advance) -> tuple[Run, Run, Trainer, int]:
    """Train with plain collectives and with fused_tp in turn: both runs, the fused trainer, and its steps in all."""
    settings = demo.settings
    with plain_collectives():
        plain_trainer, start = demo.trainer(parallel=True)
    fused_trainer, _ = demo.trainer(parallel=True)
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
        advance(plain, settings.steps)
        advance(fused, settings.steps)
    for run in (plain, fused):  # the slowest rank's wall time and the mean time waited
        seconds, waited = torch.tensor(run.seconds), torch.tensor(run.waited)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        dist.all_reduce(waited, dist.ReduceOp.SUM)
        run.seconds, run.waited = seconds.tolist(), (waited / settings.ranks).tolist()
    return plain, fused, fused_trainer, start + settings.steps


def generate_sample(model: Any, tokenizer: Tokenizer, settings: DemoSettings) -> Sample | None:
    """What `model` continues settings.prompt with, through its KV cache; None where --sample-tokens is 0, or where
    training has diverged.

    Called by all ranks of a parallel model.
    """
    if settings.sample_tokens == 0:
        return None
    prompt = torch.tensor([tokenizer.encode(settings.prompt)], device=settings.device)
    with torch.no_grad():
        logits = model(prompt).logits
    if not bool(logits.isfinite().all()):
        return None
    torch.manual_seed(settings.seed)  # all ranks hold the same logits and must draw the same token from them
    started = time.perf_counter()
    if settings.hf is None:
        tokens = model.generate(prompt, settings.sample_tokens, temperature=settings.sample_temperature)
    else:
        draw: dict[str, Any] = {"do_sample": False}
        if settings.sample_temperature > 0:
            draw = {"do_sample": True, "temperature": settings.sample_temperature, "top_k": 0}
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=settings.sample_tokens,
            use_cache=True,
            pad_token_id=0,  # one row, so nothing is padded; without it every call warns
            **draw,
        )
    new = tokens[0, prompt.shape[1] :].tolist()
    return Sample(settings.prompt, tokenizer.decode(new), len(new), time.perf_counter() - started)


@contextmanager
def progress_bars(*, shown: bool) -> Iterator[Advance]:
    """Bars by rich, one for each run, with its latest loss, which appear as the runs begin; nothing unless `shown`."""
    if not shown:
        yield lambda run, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    bars = Progress(
        TextColumn("{task.description:<27}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}

    def advance(run: Run, total: int) -> None:
        if run.name not in tasks:
            tasks[run.name] = bars.add_task(run.name, total=total, loss=run.losses[-1])
        bars.update(tasks[run.name], advance=1, loss=run.losses[-1])

    with bars:
        yield advance


# ---- text ----


@dataclass(frozen=True)
class Tokenizer:
    """What the demo needs of a tokenizer."""

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


# UTF-8: 256 tokens, nothing to download and nothing to train.
BYTES = Tokenizer(
    "bytes",
    encode=lambda text: list(text.encode("utf-8")),
    decode=lambda tokens: bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace"),
)


def make_tokenizer(hf: Path | None) -> Tokenizer:
    """That of the transformers checkpoint in `hf` where it has one, else bytes."""
    if hf is None or not any((hf / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return BYTES
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(hf, local_files_only=True)
    encode = partial(own.encode, add_special_tokens=False, verbose=False)
    return Tokenizer(f"the tokenizer of {hf.name}", encode, own.decode)


def read_text(data: Path | None) -> str:
    """The text of the file `data`; by default Python's language reference as `help()` shows it, 420 kB of English."""
    if data is not None:
        return data.read_text(encoding="utf-8", errors="replace")
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("This Python comes without pydoc_data, the demo's default text; pass --data FILE.") from None
    lines = "\n\n".join(topics.values()).splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith(TABLE_STARTS))
    return text.translate(TYPED_QUOTES)  # one byte each: a sample then seldom breaks off within a character


def make_tokens(tokenizer: Tokenizer, data: Path | None, *, seq: int, vocab_size: int) -> Tensor:
    """The whole text as int64 tokens [n].

    Raises:
        ValueError: fewer tokens than one row of a batch, or tokens that the model has no embedding for.
    """
    tokens = torch.tensor(tokenizer.encode(read_text(data)), dtype=torch.int64)
    if len(tokens) < seq:
        raise ValueError(
            f"--data has {len(tokens)} tokens, fewer than one row of {seq} (--seq): give more text or a smaller --seq."
        )
    if tokens.max() >= vocab_size:
        raise ValueError(
            f"The text has token {int(tokens.max())} ({tokenizer.name}), but the model's vocabulary ends at "
            f"{vocab_size - 1}."
        )
    return tokens


def make_batch(tokens: Tensor, *, batch: int, seq: int, seed: int, step: int) -> Tensor:
    """Batch number `step`, [batch, seq]: the same on every rank, in every run, and after a resume."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - seq + 1, (batch,), generator=generator)
    return torch.stack([tokens[start : start + seq] for start in starts.tolist()])


# ---- model ----


def build_model(settings: DemoSettings) -> Any:
    """The unsharded model in fp32: the example Llama with seeded weights, or the transformers checkpoint of --hf.

    Any: an `nn.Module` of one of two families, which share `model(tokens, labels=tokens).loss`,
    `model.generate(tokens, max_new_tokens=...)` and `model.config.vocab_size`. Weights are the same on every call.
    """
    if settings.hf is not None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(settings.hf, dtype=torch.float32, local_files_only=True)
    else:
        llama = shipped_module("examples", "llama")
        torch.manual_seed(settings.seed)
        model = llama.Llama(
            llama.LlamaConfig(
                vocab_size=256,
                hidden_size=settings.hidden,
                intermediate_size=settings.intermediate,
                num_hidden_layers=settings.layers,
                num_attention_heads=settings.heads,
                num_key_value_heads=settings.kv_heads,
            )
        )
    # Evaluation mode also while training: it turns dropout off, and runs that draw different noise cannot be compared.
    return model.to(settings.device).eval()


class Trainer:
    """A model and its AdamW; `step` takes the full batch, whether or not the model is parallel."""

    def __init__(self, model: Any, *, lr: float, dtype: str, device: str) -> None:
        self.model = model
        self.dtype = dtype
        self.device = device
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.base_lr = lr

    def step(self, tokens: Tensor, number: int) -> float:
        """The loss of training on `tokens` [batch, seq] as step `number`, counted over resumes."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.base_lr * min(1.0, (number + 1) / WARMUP_STEPS)
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.dtype == "bf16"):
            loss: Tensor = self.model(tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, GRAD_NORM)
        self.optimizer.step()
        return loss.item()

    def timed_step(self, tokens: Tensor, number: int, run: Run) -> None:
        """A step whose loss, wall time and time waited are appended to `run`, as this rank sees them."""
        waited, started = tracing.waited_seconds(), time.perf_counter()
        run.losses.append(self.step(tokens, number))
        if self.device == "cuda":
            torch.cuda.synchronize()
        run.seconds.append(time.perf_counter() - started)
        run.waited.append(tracing.waited_seconds() - waited)

    def save(self, path: Path, *, steps: int) -> None:
        """Write what `load` reads; called by all ranks. `steps` have been trained so far.

        Parameters are DTensors, so a checkpoint describes whole tensors however they are sharded: one saved at TP 2
        loads at TP 1 x CP 2, and into the unsharded model too.

        Raises:
            ValueError: it cannot be written.
        """
        try:
            dcp.save(self._state(steps), checkpoint_id=path)
        except CheckpointException as error:
            rank, (why, _) = next(iter(error.failures.items()))
            raise ValueError(f"--save to {path} failed on rank {rank}: {why}") from error

    def load(self, path: Path, *, alone: bool = False) -> int:
        """How many steps were trained when `path` was saved; fills model and optimizer from it.

        Called by all ranks, or by one for its own unsharded model (`alone`).

        Raises:
            ValueError: the checkpoint is of a model of other sizes.
        """
        state = self._state(0)
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        for name, tensor in state["model"].items():
            size = getattr(saved.get(f"model.{name}"), "size", None)
            if size != tensor.shape:
                found = f"{name} as {tuple(size)}" if size is not None else f"no {name}"
                raise ValueError(
                    f"--resume is {path}, which holds {found}; this model has it as {tuple(tensor.shape)}. "
                    "Give the model the sizes that it was saved with."
                )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what `alone` asks for
            dcp.load(state, checkpoint_id=path, no_dist=alone)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(state["steps"])

    def _state(self, steps: int) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "steps": steps}


def plain_collectives() -> AbstractContextManager[None]:
    """Run every fused op as matmul, then one torch.distributed collective, without shared memory: the baseline."""
    return environment({"FUSED_TP_SCHEDULE": "plain", "FUSED_TP_SHM": "0"})
