"""Settings of `fused-tp train` in a YAML or JSON file; duplicate and unknown keys are rejected.

model: {type: llama, config: {hidden_size: 256, num_hidden_layers: 4}}
data: {path: texts/, seq: 512}
parallel: {tp: 2, dp_shard: 2}
steps: 1000
global_batch: 32
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fused_tp.planning.config import ParallelConfig, read_mapping
from fused_tp.planning.hardware import find_machine

NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]  # strict: rejects `true`, which would otherwise become 1
PositiveInt = Annotated[int, Field(ge=1, strict=True)]
FINITE = Field(allow_inf_nan=False)
BetaFloat = Annotated[float, Field(ge=0, lt=1)]


class _SettingsPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(_SettingsPart):
    """Transformers causal language model: a pretrained one, or a type with random weights determined by `seed`."""

    pretrained: str | None = None  # folder, or name that transformers resolves
    type: str | None = None  # transformers' model_type
    config: dict[str, Any] = {}  # overrides of the model's configuration

    @model_validator(mode="after")
    def _check_model_source(self) -> ModelSettings:
        if (self.pretrained is None) == (self.type is None):
            raise ValueError("model must have either 'pretrained' or 'type'")
        return self


class DataSettings(_SettingsPart):
    """Text in rows of `seq` tokens, packed from documents; attention does not cross document boundaries."""

    path: Path | None = None  # see `fused_tp.training.text.load_text`; None: Python's language reference, 420 kB
    seq: Annotated[int, Field(ge=2)] = 512  # at least 2: a token and the target after it
    tokenizer: str = "bytes"  # "bytes", or the folder or name of a transformers tokenizer
    evaluation: Path | None = None  # None: the last `evaluation_rows` of `path`
    evaluation_rows: NonNegativeInt = 0


class OptimizerSettings(_SettingsPart):
    """AdamW (arXiv:1711.05101), no weight decay of 1-D parameters; linear warmup over `warmup` steps, then decay."""

    learning_rate: Annotated[float, Field(gt=0), FINITE] = 3e-4
    warmup: NonNegativeInt = 0
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    final_share: Annotated[float, Field(ge=0, le=1)] = 0.1  # learning rate at the last step, over `learning_rate`
    betas: tuple[BetaFloat, BetaFloat] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0), FINITE] = 1e-8
    weight_decay: Annotated[float, Field(ge=0), FINITE] = 0.1
    clip: Annotated[float, Field(gt=0)] = 1.0  # maximum norm of all gradients


class CheckpointSettings(_SettingsPart):
    """Checkpoints, saved in the background; a run resumes from the newest, with any parallel sizes."""

    folder: Path
    every: PositiveInt = 100
    keep: PositiveInt = 3


class SampleSettings(_SettingsPart):
    """Text that the model generates after `prompt`, with every evaluation and at the end."""

    prompt: Annotated[str, Field(min_length=1)] = "The "
    tokens: PositiveInt = 100
    temperature: Annotated[float, Field(ge=0)] = 0.7  # 0: greedy


class ProfileSettings(_SettingsPart):
    """Steps that every rank records for `fused-tp report`: `steps` steps, the first of which is number `first`.

    Steps are counted from the start of the run, or from where it resumes.
    """

    first: PositiveInt = 3  # steps 1 and 2 are slower: they allocate memory, connect ranks and select kernels
    steps: PositiveInt = 3

    @property
    def last_step(self) -> int:
        return self.first + self.steps - 1


class TrainSettings(_SettingsPart):
    """Settings of a training run.

    Attributes:
        parallel: arguments of `ParallelConfig.from_dict`. If it omits dp, the remaining ranks become data parallel.
        steps: total number of steps, including those before a restart.
        global_batch: rows per step over all ranks and microbatches.
        precision: dtype of matmuls; weights, gradients and the optimizer are fp32. fp16 uses dynamic loss scaling
            (arXiv:1710.03740).
        evaluate_every: steps between evaluations; None: at the end only.
        log_every: number of steps between two printed lines.
        machine: a name of `fused_tp.planning.hardware.MACHINES`, or a file of `fused-tp plan --measure`, with the peak
            FLOP/s that MFU refers to. None: by the name of the GPU.
        export: folder to which the model is written after the last step, so that `from_pretrained` of transformers can
            load it without fused_tp; see `fused_tp.training.export`. None: no export.
        profile: steps to record for `fused-tp report`; None: no profile.
        out: folder of train.jsonl, report.png, the traces of `profile` and, with `tensorboard`, its event files.
    """

    model: ModelSettings
    data: DataSettings = DataSettings()
    parallel: dict[str, Any] = {}
    steps: PositiveInt
    global_batch: PositiveInt
    optimizer: OptimizerSettings = OptimizerSettings()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    checkpoints: CheckpointSettings | None = None
    evaluate_every: PositiveInt | None = None
    sample: SampleSettings | None = None
    log_every: PositiveInt = 1
    machine: str | None = None
    # Epochs are added to the seed, and the sum must be below 2**64.
    seed: Annotated[NonNegativeInt, Field(lt=2**63)] = 0
    profile: ProfileSettings | None = None
    export: Path | None = None
    out: Path = Path("out/train")
    tensorboard: bool = False

    @model_validator(mode="after")
    def _check_profiled_steps(self) -> TrainSettings:
        if self.profile is not None and self.profile.last_step > self.steps:
            raise ValueError(
                f"profile records steps {self.profile.first} to {self.profile.last_step}, but the run ends with step "
                f"{self.steps}; reduce profile.steps or profile.first"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> TrainSettings:
        if self.evaluate_every and not (self.data.evaluation or self.data.evaluation_rows or self.sample):
            raise ValueError(
                f"evaluate_every={self.evaluate_every} needs data.evaluation, data.evaluation_rows or sample; set one "
                "of them, or omit evaluate_every"
            )
        return self

    @field_validator("machine")
    @classmethod
    def _check_machine(cls, name: str | None) -> str | None:
        if name is not None:
            find_machine(name)
        return name

    @classmethod
    def from_file(cls, path: str | Path, changes: Sequence[str] = ()) -> TrainSettings:
        """Read settings from a YAML or JSON file and apply `changes` such as "optimizer.learning_rate=1e-4".

        Raises:
            ValueError: a key is unknown or a value is invalid; the message names it.
        """
        return cls.from_mapping(apply_changes(read_mapping(Path(path)), changes))

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> TrainSettings:
        """Create settings from a mapping. Raises ValueError for an unknown key or an invalid value."""
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            raise ValueError(
                "; ".join(_error_text(error_details).rstrip(".") for error_details in error.errors()) + "."
            ) from None

    def minimum_ranks(self) -> int:
        """Return the minimum number of ranks: the product of the sizes in `parallel`."""
        return _make_parallel_config(self.parallel).world_size

    def parallel_config(self, num_ranks: int) -> ParallelConfig:
        """Create the `ParallelConfig` for `num_ranks` ranks.

        Raises:
            ValueError: `parallel` does not support that number of ranks.
        """
        parallel_keys = dict(self.parallel)
        return _make_parallel_config({"world_size": num_ranks} | parallel_keys)


def _make_parallel_config(parallel_keys: dict[str, Any]) -> ParallelConfig:
    try:
        return ParallelConfig.from_dict(parallel_keys)
    except TypeError as error:
        raise ValueError(f"parallel: {error}") from error


def apply_changes(settings: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `settings` with changes such as "optimizer.learning_rate=1e-4" applied.

    Raises:
        ValueError: a change is malformed.
    """
    import yaml

    settings = copy.deepcopy(settings)
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} has no '='; write KEY=VALUE, such as optimizer.learning_rate=1e-4.")
        *parents, key = name.split(".")
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ValueError(f"{change!r} sets a key of {parent!r}, which is not a mapping; set {parent!r} itself.")
        try:
            section[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"The value of {change!r} is not valid YAML: {error}.") from None
    return settings


def _error_text(error: Any) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{name!r} is not a key of a training configuration"
    if error["type"] == "missing":
        return f"{name!r} is missing"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{name!r} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
