"""Dispatch table: maps op, dtype, shape, group size, transport and architecture to a schedule.

The shipped table is `dispatch.json` next to this file. `FUSED_TP_TABLE` selects another one, such as the output of
`fused-tp bench --tune`. All ranks must read the same table. The choice depends only on values that are equal on all
ranks; sizes of sharded dims are ignored, because uneven shards differ between ranks. A process reads a table once, at
the first call that needs it. Reading a rewritten file again would let ranks choose different schedules for one call.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_tp.core import settings

SHIPPED_TABLE = Path(__file__).with_name("dispatch.json")
_RULE_LIMITS = frozenset({"max_m", "max_bytes", "dtypes", "world_sizes"})
# Schedules for which a rule may set the number of chunks.
CHUNKED_SCHEDULES = frozenset({"copy_engine", "nccl_pipeline"})


class ScheduleKey(NamedTuple):
    """Properties of a call that, together with the group, select its schedule.

    Attributes:
        op: name of the op.
        dtype: dtype of the communicated tensor.
        device: device of the tensors. The choice depends on its type only; the schedule runs on this device.
        m: rows (tokens) over all ranks.
        k: size of the reduction dim; None if it is sharded (row-parallel ops).
        n: number of columns; None if they are sharded (column-parallel ops).
    """

    op: str
    dtype: torch.dtype
    device: torch.device
    m: int
    k: int | None
    n: int | None

    @staticmethod
    def from_shard(op: str, x: Tensor, shape: Sequence[int], k: int | None, n: int | None) -> ScheduleKey:
        """Return the key of a call of `op`, where `shape` [..., features] is the global shape of the shard `x`."""
        return ScheduleKey(op, x.dtype, x.device, prod(shape[:-1]), k, n)


@dataclass(frozen=True)
class TableChoice:
    """A schedule's name and the table rule that selected it.

    Attributes:
        rule: description of the rule, with its source.
        num_chunks: number of chunks that the schedule splits the transfer into; None: the schedule computes the number.
    """

    schedule: str
    rule: str
    num_chunks: int | None = None


@cache
def _cuda_arch(index: int | None) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def device_arch(device: torch.device) -> str:
    """Return the architecture of `device`, such as `cpu` or `sm_90`. For groups use `backends.registry.group_arch`."""
    return _cuda_arch(device.index) if device.type == "cuda" else device.type


def choose_schedule(
    key: ScheduleKey, world_size: int, transport: str, arch: str, excluded: tuple[str, ...] = ()
) -> TableChoice:
    """Return the table's choice for one call.

    Args:
        transport: "shm", "nvlink" or the name of the torch.distributed backend.
        arch: architecture, as returned by `device_arch`.
        excluded: schedules that do not support this call; rules that name them are skipped.
    """
    return _choose_cached(settings.table_path(), key, world_size, transport, arch, excluded)


@lru_cache(maxsize=4096)
def _choose_cached(
    path: str | None, call_key: ScheduleKey, world_size: int, transport: str, arch: str, excluded: tuple[str, ...]
) -> TableChoice:
    op, dtype, _, m, k, n = call_key
    num_columns = n if k is None else k  # of the communicated tensor: the gathered input or the summed output
    transfer_bytes = m * (num_columns or 0) * dtype.itemsize
    keys: list[str] = []
    level: Any = load_table(path)
    for level_key in (arch, transport, op):
        key = level_key if level_key in level else "default"
        if key not in level:
            raise ValueError(
                f"The dispatch table has no entry for {key!r} below {'/'.join(keys) or 'arch'}, and no default there. "
                "Add one of them."
            )
        keys.append(key)
        level = level[key]
    name = str(dtype).removeprefix("torch.")
    for rule in level:
        if (
            rule["schedule"] not in excluded
            and m <= rule.get("max_m", m)
            and transfer_bytes <= rule.get("max_bytes", transfer_bytes)
            and name in rule.get("dtypes", (name,))
            and world_size in rule.get("world_sizes", (world_size,))
        ):
            limits = ", ".join(f"{key} {value}" for key, value in rule.items() if key in _RULE_LIMITS) or "every size"
            source = rule.get("source", "by default" if path is None else "")
            description = f"{'/'.join(keys)}: {limits}" + (f" ({source})" if source else "")
            return TableChoice(rule["schedule"], description, rule.get("chunks"))
    raise ValueError(
        f"No rule of the dispatch table below {'/'.join(keys)} covers this call; add a last rule without limits there."
    )


def table_checksum() -> str:
    """Return the checksum of the table in use, or the error if it cannot be read. Ranks compare the result."""
    try:
        return f"{zlib.crc32(Path(settings.table_path() or SHIPPED_TABLE).read_bytes()):08x}"
    except OSError as error:
        return str(error)


def load_table(path: str | None = None) -> dict[str, Any]:
    """Return the op rules of the table at `path`; None is the shipped table.

    Raises:
        ValueError: the file is missing or is not a dispatch table; the message names the invalid entry.
    """
    return _load_rules(path)[0]


def attention_rules(path: str | None = None) -> list[dict[str, Any]]:
    """Return the attention rules of the table at `path`, which select CPU kernels. Raises as `load_table` does."""
    return _load_rules(path)[1]


@cache
def _load_rules(path: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    file = SHIPPED_TABLE if path is None else Path(path)
    try:
        content = _require_object(json.loads(file.read_text()), "the file")
        table = _require_object(content.get("arch"), "arch")
        for arch, transports in table.items():
            for transport, ops in _require_object(transports, arch).items():
                for op, rules in _require_object(ops, f"{arch}/{transport}").items():
                    _check_rules(f"{arch}/{transport}/{op}", rules, ("schedule",), (*_RULE_LIMITS, "chunks", "source"))
        attention = content.get("attention", [])
        _check_rules("attention", attention, ("kernel", "dtypes", "backward"), ("max_head_dim",))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a dispatch table ({error}). {SHIPPED_TABLE} shows the format.") from error
    return table, attention


def _require_object(level: Any, location: str) -> dict[str, Any]:
    if not isinstance(level, dict):
        raise ValueError(f"{location} must be a JSON object, got {level!r}")
    return level


# For each key of a rule: a function that returns True for valid values, and a description of the valid values.
_RULE_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schedule": (lambda value: isinstance(value, str), "the name of a schedule"),
    "kernel": (lambda value: isinstance(value, str), "the name of a kernel"),
    "source": (lambda value: isinstance(value, str), "a string that describes the origin of the rule"),
    "backward": (lambda value: isinstance(value, bool), "true or false"),
    "dtypes": (
        lambda value: (
            isinstance(value, list) and all(isinstance(getattr(torch, str(x), None), torch.dtype) for x in value)
        ),
        "a list of dtype names",
    ),
    "world_sizes": (
        lambda value: isinstance(value, list) and all(type(x) is int for x in value),
        "a list of world sizes",
    ),
    "chunks": (
        lambda value: type(value) is int and value > 0,
        f"a positive integer, in rules for {sorted(CHUNKED_SCHEDULES)}",
    ),
    **dict.fromkeys(
        ("max_m", "max_bytes", "max_head_dim"),
        (lambda value: type(value) in (int, float) and value >= 0, "a number of at least 0"),
    ),
}


def _check_rules(location: str, rules: Any, required: Sequence[str], optional: Sequence[str]) -> None:
    if not isinstance(rules, list):
        raise ValueError(f"{location} must be a list of rules, got {rules!r}")
    for rule_index, rule in enumerate(rules):
        rule_text = f"rule {rule_index} of {location}, {rule!r}"
        if not isinstance(rule, dict) or set(rule) - {*required, *optional} or set(required) - set(rule):
            raise ValueError(
                f"{rule_text}: required are {', '.join(required)}, and optional are {', '.join(sorted(optional))}"
            )
        for key, value in rule.items():
            is_valid, valid_values = _RULE_FIELDS[key]
            if not is_valid(value) or (key == "chunks" and rule["schedule"] not in CHUNKED_SCHEDULES):
                raise ValueError(f"{rule_text}: {key} must be {valid_values}")


def choose_attention_kernel(dtype: torch.dtype, head_dim: int, is_backward: bool) -> str | None:
    """Return the kernel of the first attention rule that matches; None if no rule matches."""
    name = str(dtype).removeprefix("torch.")
    for rule in attention_rules(settings.table_path()):
        is_match = name in rule["dtypes"] and is_backward == rule["backward"]
        if is_match and head_dim <= rule.get("max_head_dim", head_dim):
            return str(rule["kernel"])
    return None
