"""The dispatch table: which schedule for which op, dtype, shape, group size, transport and architecture.

The shipped table is `dispatch.json` next to this file; `FUSED_TP_TABLE` names another one, as `fused-tp bench --tune`
writes. All ranks must read the same table, and the choice depends only on what all ranks know: a dim that is cut over
the ranks may differ by one between them, and takes no part. A process reads a table once, at the first call that needs
it: were a file that is rewritten read again, ranks would do that at different calls and choose apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_tp.runtime import settings

SHIPPED = Path(__file__).with_name("dispatch.json")
_LIMITS = frozenset({"max_m", "max_bytes", "dtypes", "world_sizes"})
_RULE_KEYS = _LIMITS | {"schedule", "chunks"}
CHUNKED = frozenset({"copy_engine", "nccl_pipeline"})  # schedules that a rule may give a number of chunks


class DispatchKey(NamedTuple):
    """What a schedule is chosen by, besides the group.

    Attributes:
        op: name of the op.
        dtype: of what moves.
        device: of the tensors; which one of its type matters to the schedule that is made, and not to the choice.
        m: rows (tokens) over all ranks.
        k: reduction dim; None where it is cut over the ranks (row-parallel ops).
        n: columns; None where they are cut over the ranks (column-parallel ops).
    """

    op: str
    dtype: torch.dtype
    device: torch.device
    m: int
    k: int | None
    n: int | None

    @staticmethod
    def of(op: str, x: Tensor, shape: Sequence[int], k: int | None, n: int | None) -> DispatchKey:
        """Of an op whose `x` has `shape` [..., features] over all ranks."""
        return DispatchKey(op, x.dtype, x.device, prod(shape[:-1]), k, n)


@dataclass(frozen=True)
class Choice:
    """A schedule's name and the rule of the table that chose it.

    Attributes:
        chunks: into how many parts the schedule cuts what moves; None leaves it to the schedule.
    """

    schedule: str
    rule: str
    chunks: int | None = None


@cache
def _arch_of_cuda(index: int | None) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def arch_of(device: torch.device) -> str:
    """`cpu`, or `sm_90` and the like. What a group goes by is `schedules.registry.group_arch`."""
    return _arch_of_cuda(device.index) if device.type == "cuda" else device.type


def choose(key: DispatchKey, world_size: int, transport: str, arch: str, without: tuple[str, ...] = ()) -> Choice:
    """The table's schedule for one call, on `transport` ("shm", or the torch.distributed backend) and `arch` (of
    `arch_of`). Rules that name a schedule of `without`, which cannot serve this call, are passed over."""
    return _choose(settings.table_path(), key, world_size, transport, arch, without)


@lru_cache(maxsize=4096)
def _choose(
    path: str | None, asked: DispatchKey, world_size: int, transport: str, arch: str, without: tuple[str, ...]
) -> Choice:
    op, dtype, _, m, k, n = asked
    columns = n if k is None else k  # of the tensor that is the same on all ranks
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
            return Choice(rule["schedule"], f"{'/'.join(keys)}: {limits}", rule.get("chunks"))
    raise ValueError(
        f"No rule of the dispatch table below {'/'.join(keys)} covers this call; end it with a rule without limits."
    )


@cache
def load_table(path: str | None = None) -> dict[str, Any]:
    """Read and check a table, once in a process; None is the shipped one.

    Raises:
        ValueError: the file is missing or not a dispatch table; says where.
    """
    file = SHIPPED if path is None else Path(path)
    try:
        content = json.loads(file.read_text())
        table = content["arch"]
        for transports in table.values():
            for ops in transports.values():
                for rules in ops.values():
                    for rule in rules:
                        unknown = set(rule) - _RULE_KEYS
                        if unknown or "schedule" not in rule:
                            raise ValueError(f"rule {rule} needs a schedule and may have {sorted(_RULE_KEYS)}")
                        chunks, chunked = rule.get("chunks", 1), rule["schedule"] in CHUNKED or "chunks" not in rule
                        if not chunked or type(chunks) is not int or chunks < 1:
                            raise ValueError(f"rule {rule}: chunks is a number from 1 on, for {sorted(CHUNKED)}")
        for rule in content.get("attention", []):
            if {*rule} - {"max_head_dim"} != {"kernel", "dtypes", "backward"}:
                raise ValueError(f"rule {rule} of attention needs kernel, dtypes, backward and may have max_head_dim")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} is not a dispatch table ({error}); see {SHIPPED.name} for the format.") from error
    return dict(table)


@cache
def attention_rules(path: str | None = None) -> list[dict[str, Any]]:
    """What a table has of attention: which kernel was measured as faster on the CPU. Raises as `load_table`."""
    load_table(path)
    return list(json.loads((SHIPPED if path is None else Path(path)).read_text()).get("attention", []))


def attention_kernel(dtype: torch.dtype, head_dim: int, backward: bool) -> str | None:
    """The kernel that the first such rule names for one direction of attention; None without one."""
    name = str(dtype).removeprefix("torch.")
    for rule in attention_rules(settings.table_path()):
        named = name in rule["dtypes"] and backward == rule["backward"]
        if named and head_dim <= rule.get("max_head_dim", head_dim):
            return str(rule["kernel"])
    return None
