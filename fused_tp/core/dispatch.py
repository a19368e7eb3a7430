"""Dispatch table: maps op, dtype, shape, group size, transport and architecture to a schedule.

The shipped table is `dispatch.json` next to this file; `FUSED_TP_TABLE` names another one, as `fused-tp bench --tune`
writes. All ranks must read the same table, and the choice depends only on values that all ranks know: a sharded dim may
differ by one between ranks and is ignored. A process reads a table once, at the first call that needs it. If a
rewritten file were read again, ranks would read it at different calls and choose different schedules.
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

SHIPPED = Path(__file__).with_name("dispatch.json")
_LIMITS = frozenset({"max_m", "max_bytes", "dtypes", "world_sizes"})
CHUNKED = frozenset({"copy_engine", "nccl_pipeline"})  # schedules for which a rule may set the number of chunks


class ScheduleKey(NamedTuple):
    """The properties of a call that select its schedule, besides the group.

    Attributes:
        op: name of the op.
        dtype: dtype of the tensor that is communicated.
        device: device of the tensors. The choice depends on its type only; the schedule is made for this device.
        m: rows (tokens) over all ranks.
        k: reduction dim; None where it is sharded (row-parallel ops).
        n: columns; None where they are sharded (column-parallel ops).
    """

    op: str
    dtype: torch.dtype
    device: torch.device
    m: int
    k: int | None
    n: int | None

    @staticmethod
    def of(op: str, x: Tensor, shape: Sequence[int], k: int | None, n: int | None) -> ScheduleKey:
        """The key of an op whose `x` has `shape` [..., features] over all ranks."""
        return ScheduleKey(op, x.dtype, x.device, prod(shape[:-1]), k, n)


@dataclass(frozen=True)
class Choice:
    """A schedule's name and the rule of the table that chose it.

    Attributes:
        chunks: number of chunks the schedule splits the transfer into; None leaves the number to the schedule.
    """

    schedule: str
    rule: str  # in words, with its source
    chunks: int | None = None


@cache
def _arch_of_cuda(index: int | None) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def arch_of(device: torch.device) -> str:
    """`cpu`, or `sm_90` and the like. The architecture of a whole group is `backends.registry.group_arch`."""
    return _arch_of_cuda(device.index) if device.type == "cuda" else device.type


def choose(key: ScheduleKey, world_size: int, transport: str, arch: str, without: tuple[str, ...] = ()) -> Choice:
    """The table's schedule for one call, on `transport` ("shm", "nvlink" or the torch.distributed backend) and `arch`
    (from `arch_of`). Skips rules that name a schedule in `without`, which cannot serve this call."""
    return _choose(settings.table_path(), key, world_size, transport, arch, without)


@lru_cache(maxsize=4096)
def _choose(
    path: str | None, asked: ScheduleKey, world_size: int, transport: str, arch: str, without: tuple[str, ...]
) -> Choice:
    op, dtype, _, m, k, n = asked
    columns = n if k is None else k  # of the gathered input or the summed output, which is the same on all ranks
    moved = m * (columns or 0) * dtype.itemsize
    keys: list[str] = []
    level: Any = load_table(path)
    for key in (arch, transport, op):
        key = key if key in level else "default"
        if key not in level:
            raise ValueError(f"The dispatch table has neither an entry nor a default below {'/'.join(keys) or 'arch'}.")
        keys.append(key)
        level = level[key]
    name = str(dtype).removeprefix("torch.")
    for rule in level:
        if (
            rule["schedule"] not in without
            and m <= rule.get("max_m", m)
            and moved <= rule.get("max_bytes", moved)
            and name in rule.get("dtypes", (name,))
            and world_size in rule.get("world_sizes", (world_size,))
        ):
            limits = ", ".join(f"{key} {value}" for key, value in rule.items() if key in _LIMITS) or "every size"
            source = rule.get("source", "by default" if path is None else "")
            words = f"{'/'.join(keys)}: {limits}" + (f" ({source})" if source else "")
            return Choice(rule["schedule"], words, rule.get("chunks"))
    raise ValueError(
        f"No rule of the dispatch table below {'/'.join(keys)} covers this call; end it with a rule without limits."
    )


def table_checksum() -> str:
    """Checksum of the text of the table in use, which ranks compare."""
    try:
        return f"{zlib.crc32(Path(settings.table_path() or SHIPPED).read_bytes()):08x}"
    except OSError as error:
        return str(error)


def load_table(path: str | None = None) -> dict[str, Any]:
    """The rules of a table for ops; None is the shipped table.

    Raises:
        ValueError: the file is missing or not a dispatch table; the message names the entry.
    """
    return _load(path)[0]


def attention_rules(path: str | None = None) -> list[dict[str, Any]]:
    """The rules of a table for attention: the kernel measured as faster on the CPU. Raises as `load_table`."""
    return _load(path)[1]


@cache
def _load(path: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    file = SHIPPED if path is None else Path(path)
    try:
        content = _entries(json.loads(file.read_text()), "the file")
        table = _entries(content.get("arch"), "arch")
        for arch, transports in table.items():
            for transport, ops in _entries(transports, arch).items():
                for op, rules in _entries(ops, f"{arch}/{transport}").items():
                    _check_rules(f"{arch}/{transport}/{op}", rules, ("schedule",), (*_LIMITS, "chunks", "source"))
        attention = content.get("attention", [])
        _check_rules("attention", attention, ("kernel", "dtypes", "backward"), ("max_head_dim",))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a dispatch table ({error}); see {SHIPPED.name} for the format.") from error
    return table, attention


def _entries(level: Any, where: str) -> dict[str, Any]:
    if not isinstance(level, dict):
        raise ValueError(f"{where} is {level!r}; it must be an object of named entries")
    return level


# For each key of a rule: the test of a value, and the description of a valid one.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schedule": (lambda value: isinstance(value, str), "the name of a schedule"),
    "kernel": (lambda value: isinstance(value, str), "the name of a kernel"),
    "source": (lambda value: isinstance(value, str), "where the rule comes from, in words"),
    "backward": (lambda value: isinstance(value, bool), "true or false"),
    "dtypes": (
        lambda value: (
            isinstance(value, list) and all(isinstance(getattr(torch, str(x), None), torch.dtype) for x in value)
        ),
        "a list of names of dtypes",
    ),
    "world_sizes": (
        lambda value: isinstance(value, list) and all(type(x) is int for x in value),
        "a list of numbers of ranks",
    ),
    "chunks": (lambda value: type(value) is int and value > 0, f"a number from 1 on, for {sorted(CHUNKED)}"),
    **dict.fromkeys(
        ("max_m", "max_bytes", "max_head_dim"),
        (lambda value: type(value) in (int, float) and value >= 0, "a number from 0 on"),
    ),
}


def _check_rules(where: str, rules: Any, needs: Sequence[str], may: Sequence[str]) -> None:
    if not isinstance(rules, list):
        raise ValueError(f"{where} is {rules!r}; it must be a list of rules")
    for number, rule in enumerate(rules):
        of = f"rule {number} of {where}, {rule!r}"
        if not isinstance(rule, dict) or set(rule) - {*needs, *may} or set(needs) - set(rule):
            raise ValueError(f"{of}: it needs {', '.join(needs)} and may have {', '.join(sorted(may))}")
        for key, value in rule.items():
            fits, what = _VALUES[key]
            if not fits(value) or (key == "chunks" and rule["schedule"] not in CHUNKED):
                raise ValueError(f"{of}: {key} is {what}")


def attention_kernel(dtype: torch.dtype, head_dim: int, backward: bool) -> str | None:
    """The kernel named by the first matching attention rule for one direction; None if no rule matches."""
    name = str(dtype).removeprefix("torch.")
    for rule in attention_rules(settings.table_path()):
        named = name in rule["dtypes"] and backward == rule["backward"]
        if named and head_dim <= rule.get("max_head_dim", head_dim):
            return str(rule["kernel"])
    return None
