"""Training run of a transformers causal language model, on one process or any ranks of a `ParallelConfig`.

    loss = sum of the losses of all targets in a global batch / number of these targets

This holds for any number of ranks and microbatches: each microbatch divides by the number of all targets.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Subset

from fused_tp.core import tracing
from fused_tp.nn.grad_norm import clip_grad_norm_, scale_gradients_
from fused_tp.nn.sharding import packed_dims
from fused_tp.parallelizing.grad_sync import no_sync
from fused_tp.parallelizing.mesh import make_mesh
from fused_tp.pipelining.pipeline import Pipeline, count_targets, takes_target_count
from fused_tp.planning.build import build
from fused_tp.planning.model_count import count_config, count_model, make_meta_model
from fused_tp.training.batches import DistributedBatches
from fused_tp.training.checkpoints import CheckpointManager
from fused_tp.training.export import check_folder, write_model
from fused_tp.training.profile import StepProfiler
from fused_tp.training.settings import OptimizerSettings, TrainSettings
from fused_tp.training.text import Bytes, PackedText, load_text

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_TARGET_COUNT_KEY = "num_items_in_batch"


@dataclass(frozen=True)
class TrainingStep:
    """Statistics of one training step over all ranks.

    Attributes:
        number: number of the step, from 1; counting continues after a restart.
        seconds: time of the slowest rank.
        waited: time that a rank waited for peers, mean over ranks.
        skipped: True if gradients were not finite (fp16), so that the optimizer took no step.
        memory: peak memory in bytes, maximum over ranks.
    """

    number: int
    loss: float
    norm: float
    learning_rate: float
    tokens: int
    seconds: float
    waited: float
    skipped: bool
    memory: int


class LossScale:
    """Dynamic loss scale for fp16: halved if gradients overflow, doubled after 1000 steps without overflow.

    Overflow is detected by the norm of all gradients, which is equal on all ranks. Source: Micikevicius et al.,
    arXiv:1710.03740.
    """

    PATIENCE = 1000

    def __init__(self, state: dict[str, Any], is_used: bool) -> None:
        # `extra` of the checkpoint. The run that saved it may have had another precision.
        self._state, self._is_used = (state, is_used)
        if not is_used:
            for name in ("loss_scale", "good_steps"):
                state.pop(name, None)
        elif "loss_scale" not in state:
            state |= {"loss_scale": 2.0**16, "good_steps": 0}

    @property
    def value(self) -> float:
        return float(self._state["loss_scale"]) if self._is_used else 1.0

    @property
    def can_decrease(self) -> bool:
        """True if gradients may have overflowed because of the scale, so that a lower scale may help."""
        return self._is_used and self.value > 1

    def update(self, is_finite: bool) -> None:
        if not self._is_used:
            return
        good_steps = self._state["good_steps"] + 1 if is_finite else 0
        if not is_finite:
            self._state["loss_scale"] = max(1.0, self.value / 2)
        elif good_steps == self.PATIENCE:
            self._state["loss_scale"], good_steps = self.value * 2, 0
        self._state["good_steps"] = good_steps


class TrainingRun:
    """Training run on this rank: model, optimizer, data and checkpoints of `settings`.

    A collective call of all ranks, after the process group is initialized. The run resumes from the newest checkpoint,
    if there is one.

    Attributes:
        done_steps: number of steps taken.
        config: the ParallelConfig.
        shape: the ModelShape.
        has_dropout: True if the model has dropout.
        model: a module, or a Pipeline.

    Raises:
        ValueError: the settings contradict each other, or do not match the model, the text or the number of ranks.
        FloatingPointError: raised by `steps` on all ranks if gradients are not finite, except for overflow in fp16.

    Example:
        >>> with TrainingRun(TrainSettings.from_file("train.yaml")) as run:
        ...     for step in run.steps():
        ...         print(step.number, step.loss)
    """

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.config = config = settings.parallel_config(dist.get_world_size())
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        self._autocast_dtype = _DTYPES[settings.precision]
        check_folder(settings)
        self.tokenizer = _load_tokenizer(settings.data.tokenizer)
        pretrained = settings.model.pretrained if config.loads_by_shards else None
        model = make_model(settings, without_values=pretrained is not None)
        self.shape = count_config(model.config)
        config.check(self.shape, seq=settings.data.seq, global_batch=settings.global_batch)
        _check_positions(model, settings.data.seq)
        self.has_dropout = _has_dropout(model)
        self.rows, self.evaluation_rows = self._load_rows(model.config.get_text_config().vocab_size)
        self.mesh = make_mesh(self.device.type, **config.mesh_sizes)
        takes_count = takes_target_count(model, is_hf=True)
        if not takes_count and config.data_parallel * config.microbatches > 1:
            raise ValueError(
                f"{self.shape.name} does not accept num_items_in_batch, so its loss over {config.data_parallel} data "
                f"parallel ranks and {config.microbatches} microbatches would be a mean of means; use one data "
                "parallel rank and one microbatch."
            )
        with self._autocast():
            self.model: Any = build(model, config, self.mesh, pretrained=pretrained)
        self.model.train()
        self.optimizer = make_optimizer(self.model, settings.optimizer)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_share(settings.optimizer, step, settings.steps)
        )
        self.batches = DistributedBatches(
            self.rows, self.mesh, settings.global_batch, shuffle=True, seed=settings.seed, epochs=None
        )
        self._extra_state: dict[str, Any] = {"shape": self.shape.summary()}
        self.checkpoints: CheckpointManager | None = None
        self.done_steps = 0
        if settings.checkpoints is not None:
            self.checkpoints = CheckpointManager(
                settings.checkpoints.folder,
                self.model,
                self.optimizer,
                self.scheduler,
                self.batches,
                extra=self._extra_state,
                keep=settings.checkpoints.keep,
            )
            self._restore(self.checkpoints)
        self._loss_scale = LossScale(self._extra_state, settings.precision == "fp16")
        self._profiler: StepProfiler | None = None
        if settings.profile is not None:
            profiled_modules = self.model.stages.values() if isinstance(self.model, Pipeline) else [self.model]
            self._profiler = StepProfiler(settings, profiled_modules, self.mesh, done_steps=self.done_steps)

    def _restore(self, checkpoints: CheckpointManager) -> None:
        """Resume from the newest checkpoint; the current optimizer settings override the saved ones."""
        current_options = [
            {name: value for name, value in g.items() if name != "params"} for g in self.optimizer.param_groups
        ]
        own_shape = self._extra_state["shape"]
        self.done_steps = checkpoints.restore() or 0
        # restore() compares parameter shapes only, which are equal for other numbers of heads and for untied weights.
        for name, value in self._extra_state.setdefault("shape", own_shape).items():
            if name != "name" and value != own_shape.get(name, value):
                raise ValueError(
                    f"{checkpoints.folder} contains a model with {name}={value}, got {name}={own_shape[name]}. Train "
                    "the model that was saved, or use another folder for checkpoints."
                )
        self.scheduler.base_lrs = [group_options["initial_lr"] for group_options in current_options]
        rate_share = learning_rate_share(self.settings.optimizer, self.done_steps, self.settings.steps)
        for group, group_options in zip(self.optimizer.param_groups, current_options, strict=True):
            group.update(group_options, lr=group_options["initial_lr"] * rate_share)

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.checkpoints is not None:
            self.checkpoints.__exit__(*error)

    # -- training -----------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[TrainingStep]:
        """Train until `settings.steps` steps are done; yield each step after it ran and its checkpoint was started."""
        checkpoint_settings = self.settings.checkpoints
        if self.done_steps >= self.settings.steps:
            return
        for batch in self.batches:
            with nullcontext() if self._profiler is None else self._profiler.step(self.done_steps + 1):
                step = self._step(batch)
            if checkpoint_settings is not None and (
                step.number % checkpoint_settings.every == 0 or step.number == self.settings.steps
            ):
                assert self.checkpoints is not None
                self.checkpoints.save(step.number)
            yield step
            if self.done_steps >= self.settings.steps:
                return

    def _step(self, batch: dict[str, Tensor]) -> TrainingStep:
        waited_seconds, started = tracing.waited_seconds(), time.perf_counter()
        learning_rate = self.optimizer.param_groups[0]["lr"]
        loss = self._forward_backward(batch)
        norm = self._clip_gradients()
        is_skipped = not math.isfinite(norm)
        if is_skipped and not self._loss_scale.can_decrease:
            raise FloatingPointError(
                f"the gradients of step {self.done_steps + 1} are not finite (loss {loss}, norm {norm}), and fp16 "
                "overflow is not the cause; lower the learning rate, or check the rows of this step. The model was not "
                "changed."
            )
        if not is_skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self._loss_scale.update(not is_skipped)
        self.done_steps += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        waited_seconds = tracing.waited_seconds() - waited_seconds
        seconds, memory, mean_waited = self._reduce_statistics(
            time.perf_counter() - started, peak_memory_bytes(self.device), waited_seconds
        )
        tokens = self.settings.global_batch * self.settings.data.seq
        return TrainingStep(
            self.done_steps, loss, norm, learning_rate, tokens, seconds, mean_waited, is_skipped, int(memory)
        )

    def _forward_backward(self, batch: Mapping[str, Tensor]) -> float:
        """Run forward and backward, and return the loss. Gradients are reduced over ranks, times the loss scale."""
        batch = self._move_to_device(batch)
        target_count = self._count_targets(batch)
        # Data parallel ranks average gradients, so dividing by targets / ranks divides the sum by all targets.
        batch[_TARGET_COUNT_KEY] = target_count / self.config.data_parallel / self._loss_scale.value
        with self._autocast():
            total_loss = self.model.step(batch) if isinstance(self.model, Pipeline) else self._accumulate(batch)
        return self._mean_over_ranks(total_loss) / self._loss_scale.value

    def _accumulate(self, batch: dict[str, Tensor]) -> Tensor:
        target_count = batch.pop(_TARGET_COUNT_KEY)
        microbatches = [t.chunk(self.config.microbatches) for t in batch.values()]
        total_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        needs_no_sync = self.config.world_size == self.config.tp
        for index, values in enumerate(zip(*microbatches, strict=True), 1):
            is_last = index == self.config.microbatches
            with nullcontext() if is_last or needs_no_sync else no_sync(self.model):
                arguments = dict(zip(batch, values, strict=True))
                loss = self.model(**arguments, use_cache=False, num_items_in_batch=target_count).loss
                loss.backward()
            total_loss += loss.detach().double()
        return total_loss

    def _clip_gradients(self) -> float:
        """Divide gradients by the loss scale, clip them, and return their norm before clipping."""
        scale, clip = self._loss_scale.value, self.settings.optimizer.clip
        if isinstance(self.model, Pipeline):
            norm = self.model.clip_grad_norm_(clip * scale)
        else:
            norm = clip_grad_norm_(self.model, clip * scale)
        if scale != 1:
            scale_gradients_(self.model.parameters(), torch.tensor(1 / scale, dtype=torch.float32, device=self.device))
        return float(norm) / scale

    def export(self) -> None:
        """Write the model and its tokenizer to `settings.export`, if there is one. All ranks must call it."""
        if self.settings.export is not None:
            write_model(self.settings.export, self.model, self.tokenizer, self.settings, self.done_steps)

    # -- evaluation, samples ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Return the mean loss over all targets of the evaluation rows; None if there are no such rows.

        Rows of an incomplete last global batch are dropped.
        """
        if self.evaluation_rows is None:
            return None
        total_loss, total_targets = 0.0, 0
        for batch in DistributedBatches(self.evaluation_rows, self.mesh, self.settings.global_batch):
            arguments = self._move_to_device(batch)
            target_count = self._count_targets(arguments)
            arguments[_TARGET_COUNT_KEY] = target_count / self.config.data_parallel
            with self._autocast():
                if isinstance(self.model, Pipeline):
                    loss = self.model.eval(arguments)
                else:
                    self.model.eval()
                    loss = self.model(**arguments, use_cache=False).loss
                    self.model.train()
            total_loss, total_targets = (
                total_loss + self._mean_over_ranks(loss) * int(target_count),
                total_targets + int(target_count),
            )
        return total_loss / total_targets

    @torch.no_grad()
    def sample(self) -> str | None:
        """Return the prompt with the model's continuation, equal on all ranks; None without `settings.sample`."""
        sample_settings = self.settings.sample
        if sample_settings is None:
            return None
        generator = torch.Generator().manual_seed(self.settings.seed)
        tokens = list(self.tokenizer.encode(sample_settings.prompt))
        for _ in range(sample_settings.tokens):
            logits = self._compute_next_logits(tokens[-self.settings.data.seq :]).double().cpu()
            if sample_settings.temperature == 0:
                tokens.append(int(logits.argmax()))
            else:
                probabilities = (logits / sample_settings.temperature).softmax(0)
                tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return str(self.tokenizer.decode(tokens))

    def _compute_next_logits(self, tokens: list[int]) -> Tensor:
        """Return the logits [vocab] of the next token, equal on all ranks.

        Uses no KV cache, because pipelines do not support it.
        """
        position = len(tokens) - 1
        length_multiple = 2 * self.config.cp * self.config.tp
        padded_tokens = tokens + [0] * (-len(tokens) % length_multiple)
        num_rows = self.config.microbatches if self.config.pp > 1 else 1
        input_ids = torch.tensor(padded_tokens, dtype=torch.int64, device=self.device).expand(num_rows, -1)
        with self._autocast():
            if not isinstance(self.model, Pipeline):
                self.model.eval()
                logits = self.model(input_ids=input_ids, use_cache=False).logits[0, position].float()
                self.model.train()
                return logits
            stage_logits = self.model.eval({"input_ids": input_ids})
        vocab = self.shape.vocab
        logits = (
            torch.zeros(vocab, dtype=torch.float32, device=self.device)
            if stage_logits is None
            else stage_logits[0, position].float()
        )
        dist.all_reduce(logits, group=self.mesh["pp"].get_group())  # only one rank along pp has nonzero logits
        return logits

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _move_to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Move the batch to the device. With context parallelism, join the rows of each microbatch."""
        device_batch = {name: t.to(self.device) for name, t in batch.items()}
        if self.config.cp == 1:
            return device_batch
        return {name: t.reshape(self.config.microbatches, -1) for name, t in device_batch.items()}

    def _count_targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of targets over all data parallel ranks, an int64 scalar."""
        target_count = count_targets(batch)
        for name in ("dp_replicate", "dp_shard", "ep"):
            if name in self.config.mesh_sizes and self.mesh[name].size() > 1:
                dist.all_reduce(target_count, group=self.mesh[name].get_group())
        return target_count

    def _mean_over_ranks(self, loss: Tensor) -> float:
        """Return the mean loss over all ranks; ranks that share a batch have equal losses."""
        loss_sum = loss.detach().double().reshape(()).clone()
        dist.all_reduce(loss_sum)
        return float(loss_sum) / self.config.world_size

    def _reduce_statistics(self, seconds: float, memory: int, waited_seconds: float) -> tuple[float, float, float]:
        maxima = torch.tensor([seconds, float(memory)], dtype=torch.float64, device=self.device)
        waited_sum = torch.tensor(waited_seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        dist.all_reduce(waited_sum)
        return float(maxima[0]), float(maxima[1]), float(waited_sum) / self.config.world_size

    def _autocast(self) -> Any:
        dtype = self._autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _load_rows(self, vocab: int) -> tuple[Any, Any]:
        """Return rows for training and for evaluation."""
        data = self.settings.data
        rows: Any = load_text(data.path, self.tokenizer, data.seq)
        _check_vocabulary("data.path", rows, vocab)
        evaluation_rows: Any = None
        if data.evaluation is not None:
            evaluation_rows = load_text(data.evaluation, self.tokenizer, data.seq)
            _check_vocabulary("data.evaluation", evaluation_rows, vocab)
        elif data.evaluation_rows:
            training_rows = len(rows) - data.evaluation_rows
            if training_rows < self.settings.global_batch:
                raise ValueError(
                    f"{data.path} has {len(rows)} rows, and evaluation_rows={data.evaluation_rows} leaves "
                    f"{training_rows} for training; training needs at least global_batch="
                    f"{self.settings.global_batch}. Use more text, or reduce evaluation_rows."
                )
            rows, evaluation_rows = Subset(rows, range(training_rows)), Subset(rows, range(training_rows, len(rows)))
        if evaluation_rows is not None and len(evaluation_rows) < self.settings.global_batch:
            raise ValueError(
                f"evaluation needs at least global_batch={self.settings.global_batch} rows, got {len(evaluation_rows)}."
            )
        return rows, evaluation_rows


def make_config(settings: TrainSettings) -> Any:
    """Create transformers' configuration of the model.

    Raises:
        ValueError: transformers does not know the type, the folder holds no such model, or the type does not accept the
            keys or values.
    """
    from transformers import AutoConfig

    model_settings = settings.model
    with _raise_as_value_error("the configuration of the model", model_settings.config):
        if model_settings.pretrained is not None:
            return AutoConfig.from_pretrained(model_settings.pretrained, **model_settings.config)
        _check_config_keys(str(model_settings.type), model_settings.config)
        default_sizes = {"vocab_size": 256} if settings.data.tokenizer == "bytes" else {}
        return AutoConfig.for_model(str(model_settings.type), **default_sizes | model_settings.config)


def make_model(settings: TrainSettings, without_values: bool = False) -> Any:
    """Create the model of the settings in fp32, equal on every rank; on the meta device if `without_values`.

    Raises:
        ValueError: the model cannot be created.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(settings.seed)
    config, folder = make_config(settings), settings.model.pretrained
    with _raise_as_value_error("the model", settings.model.config):
        if without_values:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if folder is not None:
            return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@contextmanager
def _raise_as_value_error(description: str, settings: dict[str, Any]) -> Iterator[None]:
    """Re-raise errors of transformers as ValueError. The message names the type of an unexpected error."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{description} cannot be created: {error}") from error
    except (KeyError, ZeroDivisionError) as error:  # these errors do not name the config key: find it by its value
        bad_value = error.args[0] if isinstance(error, KeyError) else 0
        keys = [name for name, value in settings.items() if value == bad_value and not isinstance(value, bool)]
        reason = f"{' or '.join(keys)} cannot be {bad_value!r}" if keys else f"{type(error).__name__}: {error}"
        raise ValueError(f"{description} cannot be created: {reason}.") from error
    except Exception as error:
        raise ValueError(f"{description} cannot be created: {type(error).__name__}: {error}") from error


def _check_config_keys(model_type: str, config: dict[str, Any]) -> None:
    """Raise ValueError for keys that a configuration of this type does not define; transformers accepts any key."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        similar_types = difflib.get_close_matches(model_type, CONFIG_MAPPING, 1)
        hint = (
            f"did you mean {similar_types[0]!r}?"
            if similar_types
            else "transformers.CONFIG_MAPPING lists all model types."
        )
        raise ValueError(f"model.type {model_type!r} is not a model type of transformers; {hint}")
    config_class = CONFIG_MAPPING[model_type]
    known_keys = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})}
    if unknown_keys := sorted(set(config) - known_keys):
        raise ValueError(
            f"model.config has {unknown_keys[0]!r}, which is not a key of the configuration of {model_type}."
        )


def _check_positions(model: Any, seq: int) -> None:
    """Raise ValueError if rows are longer than the model's table of positions; rotary embeddings have no limit."""
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    embedding_names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)]
    names = [name.rpartition(".")[2] for name in (*embedding_names, *dict(model.named_buffers()))]
    if max_positions is not None and seq > max_positions and any("position" in name or name == "wpe" for name in names):
        raise ValueError(
            f"data.seq must be at most {max_positions}, the number of positions of the model, got {seq}. Use shorter "
            "rows, or a model with more positions (max_position_embeddings or n_positions)."
        )


def _has_dropout(model: Any) -> bool:
    values = (item for module in model.modules() for item in vars(module).items())
    return any(isinstance(value, float) and value > 0 for name, value in values if name == "p" or "drop" in name)


def make_optimizer(model: Any, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Create AdamW over the parameters of a module or a Pipeline; 1-D parameters have no weight decay.

    The number of dims is that of the unsharded parameter: packed ones have one dim more.
    """
    modules = [stage.model for stage in model.stages.values()] if isinstance(model, Pipeline) else [model]
    packed_ids = {key for module in modules for key in packed_dims(module)}
    trainable_parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable_parameters if p.ndim - (id(p) in packed_ids) > 1]},
        {"params": [p for p in trainable_parameters if p.ndim - (id(p) in packed_ids) < 2], "weight_decay": 0.0},
    ]
    # One call for all parameters, instead of several operations of DTensors for each. It takes DTensors of one mesh.
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in trainable_parameters}
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True if len(meshes) == 1 else None,
    )


def learning_rate_share(settings: OptimizerSettings, step: int, num_steps: int) -> float:
    """Return the fraction of the learning rate for step `step` (from 0) of `num_steps`."""
    if step < settings.warmup:
        return (step + 1) / (settings.warmup + 1)
    if settings.decay == "constant":
        return 1.0
    progress = min(1.0, (step - settings.warmup) / max(1, num_steps - 1 - settings.warmup))
    decayed_share = 1 - progress if settings.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.final_share + (1 - settings.final_share) * decayed_share


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: of the GPU, or on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


def _load_tokenizer(name: str) -> Any:
    if name == "bytes":
        return Bytes()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.tokenizer: {name} cannot be loaded: {error}") from error


def _check_vocabulary(key: str, rows: PackedText, vocab: int) -> None:
    # A memory-mapped file may exceed memory, so only its first tokens are checked.
    tokens = rows.tokens[: 1 << 20] if isinstance(rows.tokens, np.memmap) else rows.tokens
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocab:
            raise ValueError(
                f"The text of {key} has token {token}, and the model's vocabulary is 0 to {vocab - 1}; "
                "use the model's tokenizer, or increase model.config.vocab_size."
            )


def check_sizes(settings: TrainSettings, num_ranks: int) -> None:
    """Check the parallel sizes against the model and the batch, and the folder of `export`, before ranks are started.

    Raises:
        ValueError: a size is not supported, or the folder of `export` is in use.
    """
    check_folder(settings)
    config = make_config(settings)
    with _raise_as_value_error("the model", settings.model.config):
        model = make_meta_model(config)
    model_shape = count_model(model)
    settings.parallel_config(num_ranks).check(model_shape, seq=settings.data.seq, global_batch=settings.global_batch)
