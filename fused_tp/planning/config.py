"""`ParallelConfig`: mesh sizes, pipeline schedule and recomputation, checked before any rank starts.

| field          | kind of parallelism                                       | each rank holds                    |
|----------------|-----------------------------------------------------------|------------------------------------|
| `pp`           | pipeline (Narayanan et al., arXiv:2104.04473)             | some of the layers                 |
| `dp_replicate` | data parallel, parameters replicated                      | a different batch                  |
| `dp_shard`     | data parallel, parameters sharded (FSDP2, ZeRO)           | a different batch                  |
| `ep`           | data parallel, experts distributed                        | a different batch, some experts    |
| `cp`           | context parallel (ring attention, arXiv:2310.01889)       | a shard of each sequence           |
| `tp`           | tensor parallel (Megatron-LM, arXiv:1909.08053)           | a shard of each layer              |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from fused_tp.core.errors import join_words
from fused_tp.ops.arguments import check_bool, check_int
from fused_tp.pipelining.schedules import find_schedule, schedule_kind
from fused_tp.planning.dialects import translate
from fused_tp.planning.model_shape import ModelShape

SIZE_FIELDS = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")  # order of make_mesh, from outermost to innermost
RECOMPUTE_MODES = ("none", "full")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism of a model over `world_size` ranks.

    Attributes:
        pp, dp_replicate, dp_shard, ep, cp, tp: ranks along each dim of the mesh; see the table above.
        ulysses_size: number of consecutive `cp` ranks that shard attention by heads (arXiv:2309.14509).
        sequence_parallel: the `tp` ranks also shard the tokens between layers (arXiv:2205.05198). None: True if tp > 1.
        loss_parallel: logits stay sharded by vocabulary over the `tp` ranks. None: True if tp > 1.
        schedule: name of the pipeline schedule; see `fused_tp.pipeline`.
        virtual_stages: stages per pipeline rank, for interleaved schedules; None: the schedule's default.
        microbatches: number of equal parts of a rank's batch, pipelined or accumulated one after the other.
        recompute: "full" saves only the input of each layer and recomputes the rest in backward (gradient
            checkpointing, arXiv:1604.06174); "none" saves all activations.

    Raises:
        TypeError, ValueError: a field is invalid, or fields contradict each other.

    Example:
        >>> ParallelConfig(pp=2, dp_shard=2, tp=4, microbatches=8).world_size
        16
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    ulysses_size: int = 1
    sequence_parallel: bool | None = None
    loss_parallel: bool | None = None
    schedule: str = "1F1B"
    virtual_stages: int | None = None
    microbatches: int = 1
    recompute: str = "none"

    def __post_init__(self) -> None:
        for name in (*SIZE_FIELDS, "ulysses_size", "microbatches"):
            check_int(name, getattr(self, name), 1)
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.tp > 1)
            check_bool(**{name: getattr(self, name)})
            if getattr(self, name) and self.tp == 1:
                raise ValueError(f"{name}=True needs tp > 1, got tp=1; omit it.")
        if self.recompute not in RECOMPUTE_MODES:
            raise ValueError(
                f"recompute must be one of {', '.join(map(repr, RECOMPUTE_MODES))}, got {self.recompute!r}."
            )
        if self.cp % self.ulysses_size:
            raise ValueError(f"ulysses_size={self.ulysses_size} must divide cp={self.cp}.")
        schedule_kind(self.schedule)  # raises for an unknown schedule, even if pp is 1 and the schedule is not used
        if self.pp > 1:
            kind, stages_per_rank = find_schedule(self.schedule, self.pp, self.microbatches, self.virtual_stages)
            object.__setattr__(self, "schedule", kind.name)
            object.__setattr__(self, "virtual_stages", stages_per_rank)
            if self.ep > 1:
                raise ValueError(
                    f"ep={self.ep} with pp={self.pp} is not supported: a pipeline distributes experts over its tp or "
                    "cp ranks only. Omit ep."
                )
        elif self.ep > 1 and self.cp > 1:
            raise ValueError(f"ep={self.ep} with cp={self.cp} is not supported. Set ep or cp to 1.")
        elif self.virtual_stages is not None:
            raise ValueError(f"virtual_stages={self.virtual_stages} needs pp > 1, got pp=1; omit it.")

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return prod(getattr(self, name) for name in SIZE_FIELDS)

    @property
    def data_parallel(self) -> int:
        """Number of ranks with different batches."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Keywords of `make_mesh`: all dims, including those of size 1, but `ep` only if it is above 1."""
        return {name: getattr(self, name) for name in SIZE_FIELDS if name != "ep" or self.ep > 1}

    def at_world_size(self, ranks: int) -> ParallelConfig:
        """Return a copy of this config for `ranks` ranks in total, with `dp_shard` adapted.

        Raises:
            ValueError: the other sizes do not divide `ranks`.
        """
        num_other_ranks = self.world_size // self.dp_shard
        if ranks % num_other_ranks:
            raise ValueError(
                f"the number of ranks must be a multiple of {num_other_ranks} for {self.shown(without='dp_shard')}, "
                f"got {ranks}; use {ranks - ranks % num_other_ranks or num_other_ranks}."
            )
        return replace(self, dp_shard=ranks // num_other_ranks)

    def shown(self, without: str = "") -> str:
        """Format the sizes above 1 for messages, such as "pp2 x tp4"; "one rank" if all are 1."""
        sizes = [f"{name}{getattr(self, name)}" for name in SIZE_FIELDS if getattr(self, name) > 1 and name != without]
        return " x ".join(sizes) or "one rank"

    # -- files and keys of other libraries ----------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ParallelConfig:
        """Read fields by name, or keys of Megatron-Core and ms-swift, accelerate, torchtitan or DeepSpeed.

        All keys must belong to one library; `fused_tp.planning.dialects` holds the tables. Some libraries derive a size
        from the number of ranks (Megatron's data parallel size). The key `world_size`, allowed with every library,
        specifies that number; without it the derived size is 1.

        Raises:
            ValueError: a key is unknown, or keys belong to two libraries.

        Example:
            >>> ParallelConfig.from_dict({"tensor_model_parallel_size": 2, "context_parallel_size": 2}).shown()
            'cp2 x tp2'
        """
        return cls(**translate(given, cls))

    @classmethod
    def from_file(cls, path: str | Path) -> ParallelConfig:
        """Read a YAML or JSON file with the keys of `from_dict`.

        Raises:
            ValueError: the file does not hold a mapping, or `from_dict` rejects the mapping.
        """
        return cls.from_dict(read_mapping(Path(path)))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, in the form that `from_dict` reads."""
        default_config = ParallelConfig()
        non_default_fields = {
            name: value for name, value in asdict(self).items() if value != getattr(default_config, name)
        }
        if self.sequence_parallel == self.loss_parallel == (self.tp > 1):
            non_default_fields = {
                name: value for name, value in non_default_fields.items() if not name.endswith("_parallel")
            }
        if self.pp > 1 and find_schedule(self.schedule, self.pp, self.microbatches, None)[1] == self.virtual_stages:
            non_default_fields.pop("virtual_stages", None)
        return non_default_fields

    # -- a model ------------------------------------------------------------------------------------------------------

    def check(self, shape: ModelShape, *, seq: int | None = None, global_batch: int | None = None) -> None:
        """Raise ValueError if a model of `shape` cannot run in this config; the message names sizes that fit.

        `parallelize` and `pipeline` repeat these checks. This method needs no ranks, so it can run before they start.

        Args:
            seq: tokens of a row.
            global_batch: rows of all ranks together.
        """
        problems = []
        for attention in shape.attention:
            if attention.is_sharded and attention.num_heads and self.tp > attention.num_heads:
                problems.append(f"tp={self.tp} is more than the {attention.num_heads} attention heads")
                continue
            if attention.num_heads % (attention.num_kv_heads or 1):
                problems.append(
                    f"the {attention.num_kv_heads} key/value heads do not divide the {attention.num_heads} attention "
                    "heads"
                )
            if (self.ulysses_size > 1 and attention.num_heads % (self.tp * self.ulysses_size)) or max(
                1, attention.num_kv_heads // self.tp
            ) % self.ulysses_size:
                problems.append(f"ulysses_size={self.ulysses_size} does not divide the heads of a tensor parallel rank")
        if self.ep > 1 and not shape.experts:
            problems.append(f"ep={self.ep} needs experts, but the model has none")
        for num_experts in shape.experts:
            if num_experts % self.ep:
                problems.append(f"ep={self.ep} does not divide the {num_experts} experts; {_divisors(num_experts)} do")
        num_stages = self.pp * (self.virtual_stages or 1)
        if num_stages > shape.layers:
            problems.append(
                f"pp={self.pp} needs {num_stages} layers for {num_stages} stages, got {shape.layers} layers"
            )
        if seq is not None and self.cp > 1 and self.pp > 1 and seq % (2 * self.cp):
            problems.append(f"seq={seq} must be a multiple of {2 * self.cp} for cp={self.cp} in a pipeline")
        if global_batch is not None and global_batch % (self.data_parallel * self.microbatches):
            problems.append(
                f"a global batch of {global_batch} rows cannot be split into {self.microbatches} microbatches on each "
                f"of {self.data_parallel} data parallel ranks"
            )
        if problems:
            raise ValueError(f"{shape.name} cannot run at {self.shown()}: {join_words(dict.fromkeys(problems))}.")
        if shape.check is not None:
            shape.check(self)

    @property
    def parallelize_keywords(self) -> dict[str, Any]:
        """Keyword arguments for `parallelize` and `pipeline`."""
        keywords = {name: getattr(self, name) for name in ("sequence_parallel", "loss_parallel", "ulysses_size")}
        # FSDP2 also averages gradients over context parallel ranks, so grad_sync would average them twice.
        return keywords | {"grad_sync": not self.is_sharded, "ep_dim": "ep" if self.ep > 1 else None}

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 wraps the model and averages gradients."""
        return self.dp_replicate * self.dp_shard > 1

    @property
    def loads_by_shards(self) -> bool:
        """True if `build` can read a checkpoint into each rank's shards."""
        return self.tp > 1 and self.pp == 1


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML or JSON file.

    Raises:
        ValueError: the file cannot be read, or does not hold a mapping.
    """
    try:
        text = path.read_text()
        mapping = json.loads(text, object_pairs_hook=_unique_dict) if path.suffix == ".json" else _read_yaml(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # yaml.YAMLError, of a library that may be missing
        if type(error).__module__.startswith("yaml"):
            raise ValueError(f"{path} is not valid YAML: {error}") from error
        raise
    if not isinstance(mapping, dict):
        raise ValueError(f"{path} must hold a mapping from names to values, got a {type(mapping).__name__}.")
    return mapping


def _read_yaml(text: str) -> Any:
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            _check_keys([key.value for key, _ in node.value])
            return node

    return yaml.load(text, UniqueKeyLoader)


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_keys([key for key, _ in pairs])
    return dict(pairs)


def _check_keys(keys: list[Any]) -> None:
    if duplicates := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"the key {duplicates[0]!r} appears twice, but only one would be used; remove one.")


def field_names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(ParallelConfig))


def _divisors(number: int) -> str:
    return join_words([str(n) for n in range(1, min(number, 64) + 1) if number % n == 0])
