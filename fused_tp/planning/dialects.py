"""Config keys of other libraries and their `ParallelConfig` fields: one table per library, used in both directions.

| library       | from                                                                                            |
|---------------|-------------------------------------------------------------------------------------------------|
| Megatron-Core | `ModelParallelConfig`, `TransformerConfig` and arguments of its training script; ms-swift       |
| accelerate    | `ParallelismConfig`                                                                             |
| torchtitan    | `ParallelismConfig`                                                                             |
| DeepSpeed     | its JSON configuration                                                                          |

Keys unrelated to parallelism (a learning rate) raise as unknown: pass only the parallelism part of such a config.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_tp.planning.config import ParallelConfig

WORLD_SIZE = "world_size"  # a key allowed with every library


@dataclass(frozen=True)
class Dialect:
    """Translation between `ParallelConfig` and the keys of one library.

    Attributes:
        words: maps each key that has a field of equal value to that field.
        other_keys: further keys, which `read` interprets.
        read: returns the fields for `other_keys`, given all keys and the fields found through `words`.
        write: returns a config in the library's keys.
    """

    name: str
    words: Mapping[str, str]
    other_keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]]
    write: Callable[[ParallelConfig], dict[str, Any]]


def translate(given: Mapping[str, Any], config: type[ParallelConfig]) -> dict[str, Any]:
    """Translate a mapping with the keys of ParallelConfig or of one library into fields of `config`, that class.

    Raises:
        ValueError: an unknown key, named with the nearest known one; or keys of two libraries.
    """
    field_names = tuple(field.name for field in fields(config))
    keys = [key for key in given if key != WORLD_SIZE]
    if all(key in field_names for key in keys):
        values = {key: given[key] for key in keys}
    else:
        dialect = _find_dialect(keys, field_names)
        values = {dialect.words[key]: value for key, value in given.items() if key in dialect.words}
        values = {field: value for field, value in values.items() if value is not None}
        values |= dialect.read(given, values)
    return _fill_dp_shard(values, given.get(WORLD_SIZE), config)


def _find_dialect(keys: list[str], field_names: tuple[str, ...]) -> Dialect:
    for dialect in DIALECTS.values():
        if all(key in dialect.words or key in dialect.other_keys for key in keys):
            return dialect
    owners = {key: [d.name for d in DIALECTS.values() if key in d.words or key in d.other_keys] for key in keys}
    for key in keys:
        if key in field_names:
            owners[key].append("ParallelConfig")
    for key, names in owners.items():
        if not names:
            known_keys = [*field_names, *(word for d in DIALECTS.values() for word in (*d.words, *d.other_keys))]
            similar = difflib.get_close_matches(key, known_keys, 1)
            raise ValueError(
                f"{key!r} is not a key of ParallelConfig or of {', '.join(DIALECTS)}."
                + (f" Did you mean {similar[0]!r}?" if similar else "")
            )
    first, second = keys[0], next(key for key in keys if not set(owners[key]) & set(owners[keys[0]]))
    raise ValueError(
        f"{first!r} is a key of {owners[first][0]}, {second!r} a key of {owners[second][0]}; use the keys of one "
        "library."
    )


def _fill_dp_shard(values: dict[str, Any], world_size: int | None, config: type[ParallelConfig]) -> dict[str, Any]:
    """Add `dp_shard` so that the config has `world_size` ranks in all."""
    if world_size is None:
        return values
    partial = config(**values)
    if "dp_shard" in values or "dp_replicate" in values:
        if partial.world_size != world_size:
            raise ValueError(f"{partial.shown()} needs {partial.world_size} ranks, got world_size={world_size}.")
        return values
    return values | {"dp_shard": partial.at_world_size(world_size).dp_shard}


# -- Megatron-Core, ms-swift ------------------------------------------------------------------------------------------

_MEGATRON_FIELDS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "virtual_stages",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "sequence_parallel": "sequence_parallel",
}
_MEGATRON_OTHER_KEYS = (
    "micro_batch_size",
    "global_batch_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "use_distributed_optimizer",
    "data_parallel_size",
)


def _read_megatron(given: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if found.get("pp", 1) > 1 and (found.get("virtual_stages") or 1) > 1:
        fields["schedule"] = "Interleaved1F1B"
    elif found.pop("virtual_stages", None) is not None and found.get("pp", 1) == 1:
        raise ValueError("virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1, got 1. Omit it.")
    granularity = given.get("recompute_granularity")
    if granularity == "selective":
        # Megatron's "selective" recomputes attention scores; fused_tp's kernels never keep them.
        fields["recompute"] = "none"
    elif granularity not in (None, "full"):
        raise ValueError(f"recompute_granularity must be 'full', 'selective' or None, got {granularity!r}.")
    elif granularity == "full":
        if given.get("recompute_method", "uniform") != "uniform" or given.get("recompute_num_layers", 1) != 1:
            raise ValueError(
                "recompute_method and recompute_num_layers must be 'uniform' and 1, because recompute='full' "
                "keeps the input of each layer."
            )
        fields["recompute"] = "full"
    ep = found.get("ep", 1)
    world_size = given.get(WORLD_SIZE)
    model_ranks = found.get("tp", 1) * found.get("pp", 1) * found.get("cp", 1)
    dp = given.get("data_parallel_size") or (
        world_size // model_ranks if world_size and world_size % model_ranks == 0 else ep
    )
    if dp % ep:
        raise ValueError(f"expert_model_parallel_size={ep} does not divide the {dp} data parallel ranks.")
    # Megatron's distributed optimizer replicates parameters and shards its state; FSDP2 shards both. It defaults to on,
    # as in ms-swift: results are the same, and replicas need more memory.
    dp_field = "dp_shard" if given.get("use_distributed_optimizer", True) else "dp_replicate"
    fields[dp_field] = dp // ep
    if ("micro_batch_size" in given) != ("global_batch_size" in given):
        raise ValueError("Pass both micro_batch_size and global_batch_size, or neither: they determine microbatches.")
    if "micro_batch_size" in given:
        rows = given["micro_batch_size"] * dp
        if given["global_batch_size"] % rows:
            raise ValueError(
                f"global_batch_size={given['global_batch_size']} must be a multiple of micro_batch_size="
                f"{given['micro_batch_size']} on {dp} data parallel ranks."
            )
        fields["microbatches"] = given["global_batch_size"] // rows
    return fields


def _write_megatron(config: ParallelConfig) -> dict[str, Any]:
    _require_values(config, "Megatron-Core", ulysses_size=1)
    if config.pp > 1 and config.schedule not in ("1F1B", "Interleaved1F1B"):
        raise ValueError(
            f"Megatron-Core does not support schedule={config.schedule!r}; use '1F1B' or 'Interleaved1F1B'."
        )
    written: dict[str, Any] = {key: getattr(config, field) for key, field in _MEGATRON_FIELDS.items()}
    if config.schedule != "Interleaved1F1B" or config.pp == 1:
        written["virtual_pipeline_model_parallel_size"] = None
    if config.recompute == "full":
        written |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if config.data_parallel > config.ep:
        written["use_distributed_optimizer"] = config.dp_shard > 1
    return written


# -- accelerate -------------------------------------------------------------------------------------------------------

_ACCELERATE_FIELDS = {
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
    "tp_size": "tp",
    "cp_size": "cp",
}


def _read_accelerate(given: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    size = given.get("sp_size") or 1
    if size == 1:
        return {}
    if found.get("cp", 1) > 1:
        raise ValueError(f"sp_size={size} and cp_size={found['cp']} cannot be combined in accelerate; set one to 1.")
    return {"cp": size, "ulysses_size": size}  # its sequence parallelism is Ulysses: it shards attention by heads


def _write_accelerate(config: ParallelConfig) -> dict[str, Any]:
    _require_values(config, "accelerate's ParallelismConfig", pp=1, ep=1)
    written = {key: getattr(config, field) for key, field in _ACCELERATE_FIELDS.items()}
    if config.ulysses_size > 1:
        _require_values(config, "accelerate's ParallelismConfig", ulysses_size=config.cp)
        written |= {"cp_size": 1, "sp_size": config.cp}
    return written


# -- torchtitan -------------------------------------------------------------------------------------------------------

_TORCHTITAN_FIELDS = {
    "pipeline_parallel_degree": "pp",
    "data_parallel_replicate_degree": "dp_replicate",
    "tensor_parallel_degree": "tp",
    "context_parallel_degree": "cp",
    "expert_parallel_degree": "ep",
    "pipeline_parallel_schedule": "schedule",
    "enable_sequence_parallel": "sequence_parallel",
}
_TORCHTITAN_OTHER_KEYS = ("data_parallel_shard_degree", "local_batch_size", "pipeline_parallel_microbatch_size")


def _read_torchtitan(given: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if found.get("tp", 1) == 1:
        found.pop("sequence_parallel", None)
    if found.get("pp", 1) == 1:
        found.pop("schedule", None)
    shard_ranks, ep = given.get("data_parallel_shard_degree", -1), found.get("ep", 1)
    if shard_ranks != -1:
        if shard_ranks % ep:
            raise ValueError(f"expert_parallel_degree={ep} does not divide data_parallel_shard_degree={shard_ranks}.")
        fields["dp_shard"] = shard_ranks // ep  # torchtitan's degree includes the expert parallel ranks
    rows, microbatch_rows = given.get("local_batch_size"), given.get("pipeline_parallel_microbatch_size", 1)
    if rows is not None and found.get("pp", 1) > 1:
        if rows % microbatch_rows:
            raise ValueError(
                f"pipeline_parallel_microbatch_size={microbatch_rows} does not divide local_batch_size={rows}."
            )
        fields["microbatches"] = rows // microbatch_rows
    return fields


def _write_torchtitan(config: ParallelConfig) -> dict[str, Any]:
    _require_values(config, "torchtitan", ulysses_size=1)
    written = {key: getattr(config, field) for key, field in _TORCHTITAN_FIELDS.items()}
    return written | {"data_parallel_shard_degree": config.dp_shard * config.ep}


# -- DeepSpeed --------------------------------------------------------------------------------------------------------

_DEEPSPEED_FIELDS = {"sequence_parallel_size": "cp", "gradient_accumulation_steps": "microbatches"}
_DEEPSPEED_OTHER_KEYS = ("tensor_parallel", "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")


def _read_deepspeed(given: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if tp := dict(given.get("tensor_parallel") or {}).get("autotp_size"):
        fields["tp"] = tp
    if found.get("cp", 1) > 1:
        fields["ulysses_size"] = found["cp"]  # its sequence parallelism is Ulysses
    stage = dict(given.get("zero_optimization") or {}).get("stage", 0)
    world_size = given.get(WORLD_SIZE)
    model_ranks = fields.get("tp", 1) * found.get("cp", 1)
    rows, microbatch_rows = given.get("train_batch_size"), given.get("train_micro_batch_size_per_gpu")
    steps = found.get("microbatches", 1)
    dp = 1
    if world_size:
        if world_size % model_ranks:
            raise ValueError(
                f"world_size={world_size} must be a multiple of the {model_ranks} ranks that share a batch."
            )
        dp = world_size // model_ranks
    elif rows and microbatch_rows:
        if rows % (microbatch_rows * steps):
            raise ValueError(
                f"train_batch_size={rows} must be a multiple of train_micro_batch_size_per_gpu={microbatch_rows} x "
                f"gradient_accumulation_steps={steps}."
            )
        dp = rows // (microbatch_rows * steps)
    fields["dp_shard" if stage == 3 else "dp_replicate"] = dp
    return fields


def _write_deepspeed(config: ParallelConfig) -> dict[str, Any]:
    _require_values(config, "a DeepSpeed configuration", pp=1, ep=1)
    if config.cp > 1:
        _require_values(config, "a DeepSpeed configuration", ulysses_size=config.cp)
    if config.dp_shard > 1 and config.dp_replicate > 1:
        raise ValueError(
            "DeepSpeed does not support dp_replicate > 1 with dp_shard > 1: ZeRO shards over all dp ranks."
        )
    written: dict[str, Any] = {"zero_optimization": {"stage": 3 if config.dp_shard > 1 else 0}}
    written["gradient_accumulation_steps"] = config.microbatches
    if config.tp > 1:
        written["tensor_parallel"] = {"autotp_size": config.tp}
    if config.cp > 1:
        written["sequence_parallel_size"] = config.cp
    return written


def _require_values(config: ParallelConfig, library: str, **values: int) -> None:
    for field, value in values.items():
        if getattr(config, field) != value:
            raise ValueError(f"{library} does not support {field}={getattr(config, field)}; it needs {field}={value}.")


DIALECTS = {
    one.name: one
    for one in (
        Dialect("megatron", _MEGATRON_FIELDS, _MEGATRON_OTHER_KEYS, _read_megatron, _write_megatron),
        Dialect("accelerate", _ACCELERATE_FIELDS, ("sp_size",), _read_accelerate, _write_accelerate),
        Dialect("torchtitan", _TORCHTITAN_FIELDS, _TORCHTITAN_OTHER_KEYS, _read_torchtitan, _write_torchtitan),
        Dialect("deepspeed", _DEEPSPEED_FIELDS, _DEEPSPEED_OTHER_KEYS, _read_deepspeed, _write_deepspeed),
    )
}
