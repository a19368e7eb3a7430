"""What the demo trains: its text, its model, a step of either, and checkpoints between any two layouts of the ranks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fused_tp.cli.demo import DemoSettings
from fused_tp.runtime import tracing

EXAMPLE = "fused_tp.examples.llama"
SINGLE, THREADED = "single process", "single process, all threads"
PLAIN, FUSED = "plain collectives", "fused_tp"  # names of runs
WARMUP_STEPS = 5  # of the learning rate
GRAD_NORM = 1.0
# Tables and underlined titles. A row of dashes is no English, and what a young model makes of a hundred equal tokens
# amplifies the last bit of every sum (tried: two runs then part by 1e-4 for that batch, else by 1e-6).
TABLE_STARTS = ("|", "+", "---", "===", "***", "~~~", "^^^")
TYPED_QUOTES = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}

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


def example_module() -> ModuleType:
    """examples/llama.py: installed as `fused_tp.examples`, read by its path in a checkout that is not installed."""
    try:
        return importlib.import_module(EXAMPLE)
    except ModuleNotFoundError:
        path = Path(__file__).parents[2] / "examples" / "llama.py"
        spec = importlib.util.spec_from_file_location(EXAMPLE, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[EXAMPLE] = module  # before it runs: dataclasses look their module up by name
        spec.loader.exec_module(module)
        return module


def build_model(settings: DemoSettings) -> Any:
    """The unsharded model in fp32: the example Llama with seeded weights, or the transformers checkpoint of --hf.

    Any: an `nn.Module` of one of two families, which share `model(tokens, labels=tokens).loss`,
    `model.generate(tokens, max_new_tokens=...)` and `model.config.vocab_size`. Weights are the same on every call.
    """
    if settings.hf is not None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(settings.hf, dtype=torch.float32, local_files_only=True)
    else:
        llama = example_module()
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


@dataclass
class Run:
    """What one way of training gave, a value for each step.

    Attributes:
        name: how the report calls it.
        ranks, threads: processes, and threads of each.
        losses: mean cross entropy in nats.
        seconds: wall time of the step on the slowest rank.
        waited: the part of it that a rank waited for its peers, in seconds, mean over the ranks.
    """

    name: str
    ranks: int
    threads: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


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
        """
        dcp.save(self._state(steps), checkpoint_id=path)

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


@contextmanager
def plain_collectives() -> Iterator[None]:
    """Run every fused op as matmul, then one torch.distributed collective, without shared memory: the baseline."""
    forced = {"FUSED_TP_SCHEDULE": "plain", "FUSED_TP_SHM": "0"}
    before = {name: os.environ.get(name) for name in forced}
    os.environ.update(forced)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
