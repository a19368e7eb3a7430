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
        field_of_key: maps each key that has a field of equal value to that field.
        other_keys: further keys, which `read` interprets.
        read: returns the fields for `other_keys`, given all keys and the fields found through `field_of_key`.
        write: returns a config in the library's keys.
    """

    name: str
    field_of_key: Mapping[str, str]
    other_keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]]
    write: Callable[[ParallelConfig], dict[str, Any]]


def translate(library_config: Mapping[str, Any], config_class: type[ParallelConfig]) -> dict[str, Any]:
    """Translate a mapping with the keys of one library, or of ParallelConfig, into fields of ParallelConfig.

    Raises:
        ValueError: a key is unknown (the message names the most similar known key), or keys belong to two libraries.
    """
    field_names = tuple(field.name for field in fields(config_class))
    keys = [key for key in library_config if key != WORLD_SIZE]
    if all(key in field_names for key in keys):
        values = {key: library_config[key] for key in keys}
    else:
        dialect = _find_dialect(keys, field_names)
        values = {
            dialect.field_of_key[key]: value for key, value in library_config.items() if key in dialect.field_of_key
        }
        values = {field: value for field, value in values.items() if value is not None}
        values |= dialect.read(library_config, values)
    return _fill_dp_shard(values, library_config.get(WORLD_SIZE), config_class)


def _find_dialect(keys: list[str], field_names: tuple[str, ...]) -> Dialect:
    for dialect in DIALECTS.values():
        if all(key in dialect.field_of_key or key in dialect.other_keys for key in keys):
            return dialect
    libraries_of_key = {
        key: [d.name for d in DIALECTS.values() if key in d.field_of_key or key in d.other_keys] for key in keys
    }
    for key in keys:
        if key in field_names:
            libraries_of_key[key].append("ParallelConfig")
    for key, names in libraries_of_key.items():
        if not names:
            known_keys = [
                *field_names,
                *(known_key for d in DIALECTS.values() for known_key in (*d.field_of_key, *d.other_keys)),
            ]
            similar_keys = difflib.get_close_matches(key, known_keys, 1)
            raise ValueError(
                f"{key!r} is not a key of ParallelConfig or of {', '.join(DIALECTS)}."
                + (f" Did you mean {similar_keys[0]!r}?" if similar_keys else "")
            )
    first_key = keys[0]
    second_key = next(key for key in keys if not set(libraries_of_key[key]) & set(libraries_of_key[first_key]))
    raise ValueError(
        f"{first_key!r} is a key of {libraries_of_key[first_key][0]}, {second_key!r} a key of "
        f"{libraries_of_key[second_key][0]}; use the keys of one library."
    )


def _fill_dp_shard(
    values: dict[str, Any], world_size: int | None, config_class: type[ParallelConfig]
) -> dict[str, Any]:
    """Add the `dp_shard` that makes `world_size` ranks in total, or check the data parallel sizes in `values`."""
    if world_size is None:
        return values
    partial_config = config_class(**values)
    if "dp_shard" in values or "dp_replicate" in values:
        if partial_config.world_size != world_size:
            raise ValueError(
                f"{partial_config.shown()} needs {partial_config.world_size} ranks, got world_size={world_size}. "
                "Change a size."
            )
        return values
    return values | {"dp_shard": partial_config.at_world_size(world_size).dp_shard}


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


def _read_megatron(library_config: Mapping[str, Any], equal_fields: dict[str, Any]) -> dict[str, Any]:
    other_fields: dict[str, Any] = {}
    if equal_fields.get("pp", 1) > 1 and (equal_fields.get("virtual_stages") or 1) > 1:
        other_fields["schedule"] = "Interleaved1F1B"
    elif equal_fields.pop("virtual_stages", None) is not None and equal_fields.get("pp", 1) == 1:
        raise ValueError("virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1, got 1. Omit it.")
    granularity = library_config.get("recompute_granularity")
    if granularity == "selective":
        # Megatron's "selective" recomputes attention scores; fused_tp's kernels never keep them.
        other_fields["recompute"] = "none"
    elif granularity not in (None, "full"):
        raise ValueError(f"recompute_granularity must be 'full', 'selective' or None, got {granularity!r}.")
    elif granularity == "full":
        if (
            library_config.get("recompute_method", "uniform") != "uniform"
            or library_config.get("recompute_num_layers", 1) != 1
        ):
            raise ValueError(
                "recompute_method and recompute_num_layers must be 'uniform' and 1, because recompute='full' keeps the "
                f"input of each layer, got {library_config.get('recompute_method', 'uniform')!r} and "
                f"{library_config.get('recompute_num_layers', 1)!r}."
            )
        other_fields["recompute"] = "full"
    ep = equal_fields.get("ep", 1)
    world_size = library_config.get(WORLD_SIZE)
    model_ranks = equal_fields.get("tp", 1) * equal_fields.get("pp", 1) * equal_fields.get("cp", 1)
    dp = library_config.get("data_parallel_size") or (
        world_size // model_ranks if world_size and world_size % model_ranks == 0 else ep
    )
    if dp % ep:
        raise ValueError(f"expert_model_parallel_size={ep} does not divide the {dp} data parallel ranks; change one.")
    # Megatron's distributed optimizer replicates parameters and shards its state; FSDP2 shards both. It defaults to on,
    # as in ms-swift: results are the same, and replicas need more memory.
    dp_field = "dp_shard" if library_config.get("use_distributed_optimizer", True) else "dp_replicate"
    other_fields[dp_field] = dp // ep
    if ("micro_batch_size" in library_config) != ("global_batch_size" in library_config):
        raise ValueError("Pass both micro_batch_size and global_batch_size, or neither: they determine microbatches.")
    if "micro_batch_size" in library_config:
        rows = library_config["micro_batch_size"] * dp
        if library_config["global_batch_size"] % rows:
            raise ValueError(
                f"global_batch_size={library_config['global_batch_size']} must be a multiple of micro_batch_size="
                f"{library_config['micro_batch_size']} on {dp} data parallel ranks."
            )
        other_fields["microbatches"] = library_config["global_batch_size"] // rows
    return other_fields


def _write_megatron(config: ParallelConfig) -> dict[str, Any]:
    _require_values(config, "Megatron-Core", ulysses_size=1)
    if config.pp > 1 and config.schedule not in ("1F1B", "Interleaved1F1B"):
        raise ValueError(
            f"Megatron-Core does not support schedule={config.schedule!r}; use '1F1B' or 'Interleaved1F1B'."
        )
    library_config: dict[str, Any] = {key: getattr(config, field) for key, field in _MEGATRON_FIELDS.items()}
    if config.schedule != "Interleaved1F1B" or config.pp == 1:
        library_config["virtual_pipeline_model_parallel_size"] = None
    if config.recompute == "full":
        library_config |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if config.data_parallel > config.ep:
        library_config["use_distributed_optimizer"] = config.dp_shard > 1
    return library_config


# -- accelerate -------------------------------------------------------------------------------------------------------

_ACCELERATE_FIELDS = {
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
    "tp_size": "tp",
    "cp_size": "cp",
}


def _read_accelerate(library_config: Mapping[str, Any], equal_fields: dict[str, Any]) -> dict[str, Any]:
    ulysses_size = library_config.get("sp_size") or 1
    if ulysses_size == 1:
        return {}
    if equal_fields.get("cp", 1) > 1:
        raise ValueError(
            f"sp_size={ulysses_size} and cp_size={equal_fields['cp']} cannot be combined in accelerate; set one to 1."
        )
    # accelerate's sequence parallelism is Ulysses: it shards attention by heads.
    return {"cp": ulysses_size, "ulysses_size": ulysses_size}


def _write_accelerate(config: ParallelConfig) -> dict[str, Any]:
    _require_values(config, "accelerate's ParallelismConfig", pp=1, ep=1)
    library_config = {key: getattr(config, field) for key, field in _ACCELERATE_FIELDS.items()}
    if config.ulysses_size > 1:
        _require_values(config, "accelerate's ParallelismConfig", ulysses_size=config.cp)
        library_config |= {"cp_size": 1, "sp_size": config.cp}
    return library_config


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


def _read_torchtitan(library_config: Mapping[str, Any], equal_fields: dict[str, Any]) -> dict[str, Any]:
    other_fields: dict[str, Any] = {}
    if equal_fields.get("tp", 1) == 1:
        equal_fields.pop("sequence_parallel", None)
    if equal_fields.get("pp", 1) == 1:
        equal_fields.pop("schedule", None)
    shard_ranks, ep = library_config.get("data_parallel_shard_degree", -1), equal_fields.get("ep", 1)
    if shard_ranks != -1:
        if shard_ranks % ep:
            raise ValueError(f"expert_parallel_degree={ep} does not divide data_parallel_shard_degree={shard_ranks}.")
        other_fields["dp_shard"] = shard_ranks // ep  # torchtitan's degree includes the expert parallel ranks
    rows, microbatch_rows = (
        library_config.get("local_batch_size"),
        library_config.get("pipeline_parallel_microbatch_size", 1),
    )
    if rows is not None and equal_fields.get("pp", 1) > 1:
        if rows % microbatch_rows:
            raise ValueError(
                f"pipeline_parallel_microbatch_size={microbatch_rows} does not divide local_batch_size={rows}."
            )
        other_fields["microbatches"] = rows // microbatch_rows
    return other_fields


def _write_torchtitan(config: ParallelConfig) -> dict[str, Any]:
    _require_values(config, "torchtitan", ulysses_size=1)
    library_config = {key: getattr(config, field) for key, field in _TORCHTITAN_FIELDS.items()}
    return library_config | {"data_parallel_shard_degree": config.dp_shard * config.ep}


# -- DeepSpeed --------------------------------------------------------------------------------------------------------

_DEEPSPEED_FIELDS = {"sequence_parallel_size": "cp", "gradient_accumulation_steps": "microbatches"}
_DEEPSPEED_OTHER_KEYS = ("tensor_parallel", "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")


def _read_deepspeed(library_config: Mapping[str, Any], equal_fields: dict[str, Any]) -> dict[str, Any]:
    other_fields: dict[str, Any] = {}
    if tp := dict(library_config.get("tensor_parallel") or {}).get("autotp_size"):
        other_fields["tp"] = tp
    if equal_fields.get("cp", 1) > 1:
        other_fields["ulysses_size"] = equal_fields["cp"]  # DeepSpeed's sequence parallelism is Ulysses
    zero_stage = dict(library_config.get("zero_optimization") or {}).get("stage", 0)
    world_size = library_config.get(WORLD_SIZE)
    model_ranks = other_fields.get("tp", 1) * equal_fields.get("cp", 1)
    rows, microbatch_rows = library_config.get("train_batch_size"), library_config.get("train_micro_batch_size_per_gpu")
    accumulation_steps = equal_fields.get("microbatches", 1)
    dp = 1
    if world_size:
        if world_size % model_ranks:
            raise ValueError(
                f"world_size={world_size} must be a multiple of the {model_ranks} ranks that share a batch."
            )
        dp = world_size // model_ranks
    elif rows and microbatch_rows:
        if rows % (microbatch_rows * accumulation_steps):
            raise ValueError(
                f"train_batch_size={rows} must be a multiple of train_micro_batch_size_per_gpu={microbatch_rows} x "
                f"gradient_accumulation_steps={accumulation_steps}."
            )
        dp = rows // (microbatch_rows * accumulation_steps)
    other_fields["dp_shard" if zero_stage == 3 else "dp_replicate"] = dp
    return other_fields


def _write_deepspeed(config: ParallelConfig) -> dict[str, Any]:
    _require_values(config, "a DeepSpeed configuration", pp=1, ep=1)
    if config.cp > 1:
        _require_values(config, "a DeepSpeed configuration", ulysses_size=config.cp)
    if config.dp_shard > 1 and config.dp_replicate > 1:
        raise ValueError(
            "DeepSpeed does not support dp_replicate > 1 with dp_shard > 1, because ZeRO shards over all dp ranks. "
            "Set one of them to 1."
        )
    library_config: dict[str, Any] = {"zero_optimization": {"stage": 3 if config.dp_shard > 1 else 0}}
    library_config["gradient_accumulation_steps"] = config.microbatches
    if config.tp > 1:
        library_config["tensor_parallel"] = {"autotp_size": config.tp}
    if config.cp > 1:
        library_config["sequence_parallel_size"] = config.cp
    return library_config


def _require_values(config: ParallelConfig, library: str, **values: int) -> None:
    for field, value in values.items():
        if getattr(config, field) != value:
            raise ValueError(f"{library} does not support {field}={getattr(config, field)}; set {field}={value}.")


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("megatron", _MEGATRON_FIELDS, _MEGATRON_OTHER_KEYS, _read_megatron, _write_megatron),
        Dialect("accelerate", _ACCELERATE_FIELDS, ("sp_size",), _read_accelerate, _write_accelerate),
        Dialect("torchtitan", _TORCHTITAN_FIELDS, _TORCHTITAN_OTHER_KEYS, _read_torchtitan, _write_torchtitan),
        Dialect("deepspeed", _DEEPSPEED_FIELDS, _DEEPSPEED_OTHER_KEYS, _read_deepspeed, _write_deepspeed),
    )
}
