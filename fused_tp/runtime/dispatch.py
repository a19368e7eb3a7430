"""The dispatch table: which schedule for which op, dtype, shape, group size, transport and architecture.

The shipped table is `dispatch.json` next to this file; `FUSED_TP_TABLE` names another one, as `fused-tp bench --tune`
writes. All ranks must read the same table, and the choice depends only on what all ranks know: a dim that is cut over
the ranks may differ by one between them, and takes no part. A process reads a table once, at the first call that needs
it: were a file that is rewritten read again, ranks would do that at different calls and choose apart.
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

from fused_tp.runtime import settings

SHIPPED = Path(__file__).with_name("dispatch.json")
_LIMITS = frozenset({"max_m", "max_bytes", "dtypes", "world_sizes"})
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
    rule: str  # with its source
    chunks: int | None = None


@cache
def _arch_of_cuda(index: int | None) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def arch_of(device: torch.device) -> str:
    """`cpu`, or `sm_90` and the like. What a group goes by is `schedules.registry.group_arch`."""
    return _arch_of_cuda(device.index) if device.type == "cuda" else device.type


def choose(key: DispatchKey, world_size: int, transport: str, arch: str, without: tuple[str, ...] = ()) -> Choice:
    """The table's schedule for one call, on `transport` ("shm", "nvlink" or the torch.distributed backend) and `arch`
    (of `arch_of`). Rules that name a schedule of `without`, which cannot serve this call, are passed over."""
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
            source = rule.get("source", "by default" if path is None else "")
            words = f"{'/'.join(keys)}: {limits}" + (f" ({source})" if source else "")
            return Choice(rule["schedule"], words, rule.get("chunks"))
    raise ValueError(
        f"No rule of the dispatch table below {'/'.join(keys)} covers this call; end it with a rule without limits."
    )


def table_checksum() -> str:
    """Of the text of the table that calls go by, to be compared between ranks."""
    try:
        return f"{zlib.crc32(Path(settings.table_path() or SHIPPED).read_bytes()):08x}"
    except OSError as error:
        return str(error)


def load_table(path: str | None = None) -> dict[str, Any]:
    """What a table has of the ops; None is the shipped one.

    Raises:
        ValueError: the file is missing or not a dispatch table; says where.
    """
    return _load(path)[0]


def attention_rules(path: str | None = None) -> list[dict[str, Any]]:
    """What a table has of attention: which kernel was measured as faster on the CPU. Raises as `load_table`."""
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


# By key of a rule: whether a value fits, and what it is.
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
    """The kernel that the first such rule names for one direction of attention; None without one."""
    name = str(dtype).removeprefix("torch.")
    for rule in attention_rules(settings.table_path()):
        named = name in rule["dtypes"] and backward == rule["backward"]
        if named and head_dim <= rule.get("max_head_dim", head_dim):
            return str(rule["kernel"])
    return None
