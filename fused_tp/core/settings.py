"""Settings, read from the environment at every call so that a program can change them while it runs.

Each setting is declared once, as a callable that returns its current value: `timeout_seconds()`. Two settings are read
once per process: `FUSED_TP_ISA`, which the CPU core reads, and `FUSED_TP_TABLE`, whose table `core.dispatch` caches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_LONGEST_SECONDS = 3e9  # about a century; three times this duration in nanoseconds still fits a 64-bit integer

# The dict inside `os.environ`, if it has one. Every op call reads some settings, and `os.environ.get` runs several
# Python functions, each of which takes microseconds after a matmul has evicted the interpreter from the CPU caches.
RAW: Any = getattr(os.environ, "_data", os.environ)
_DECODE: Callable[[Any], str] = getattr(os.environ, "decodevalue", str)

SETTINGS: list[Setting[Any]] = []  # all settings, for `fused-tp doctor` and the documentation


@dataclass(eq=False)
class Setting(Generic[T]):
    """An environment variable. Calling it returns its current value.

    Attributes:
        name: name of the variable.
        default: description of the value if the variable is not set.
        meaning: effect of the variable.
        unset: the value if the variable is not set.
        parse: converts the text to the value; raises ValueError or KeyError for invalid text.
        wanted: description of the valid values, used in messages after "Set it to".
        installing: True if only the installation of fused_tp reads the variable.
        equal: True if all ranks of a group need the same value; they compare it in the group's first call.

    Raises:
        ValueError: the variable holds an invalid value; the message lists the valid ones.
    """

    name: str
    default: str
    meaning: str
    unset: T
    parse: Callable[[str], T]
    wanted: str = ""
    installing: bool = False
    equal: bool = False

    def __post_init__(self) -> None:
        self.key: Any = getattr(os.environ, "encodekey", str)(self.name)  # the key in RAW
        self._last: tuple[object, T] = None, self.unset  # last text and its value; equal text is not parsed again
        SETTINGS.append(self)

    def __call__(self) -> T:
        raw = RAW.get(self.key)
        last_raw, value = self._last
        if raw != last_raw:
            text = None if raw is None else _DECODE(raw)
            try:
                value = self.unset if text is None else self.parse(text)
            except (ValueError, KeyError):
                raise ValueError(f"{self.name} is {text!r}; set it to {self.wanted}.") from None
            self._last = raw, value
        return value


def equal_settings() -> dict[str, str]:
    """Return the values of the settings that must be equal on all ranks, by name; of an invalid value, its text."""
    found = {}
    for one in SETTINGS:
        if one.equal:
            try:
                found[one.name] = str(one()) or "not set"
            except ValueError:
                found[one.name] = os.environ[one.name]
    return found


_SWITCH_VALUES = dict.fromkeys(("1", "true", "on", "yes"), True) | dict.fromkeys(("0", "false", "off", "no", ""), False)


def _switch(name: str, default: str, meaning: str, unset: T, **more: Any) -> Setting[bool | T]:
    return Setting(name, default, meaning, unset, lambda text: _SWITCH_VALUES[text.strip().lower()], "1 or 0", **more)


def _text(name: str, default: str, meaning: str, **more: Any) -> Setting[str | None]:
    return Setting(name, default, meaning, None, lambda text: text or None, **more)


def _seconds(text: str) -> float:
    if not 0.0 < (seconds := float(text)) < float("inf"):
        raise ValueError
    return min(seconds, _LONGEST_SECONDS)


def _count(text: str, least: int, most: int = 1 << 31) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ValueError
    return int(text)


def _one_of(pattern: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if re.fullmatch(pattern, text.lower()) is None:
            raise ValueError
        return text

    return parse


timeout_seconds = Setting(
    "FUSED_TP_TIMEOUT", "600", "longest wait for a peer, in seconds", 600.0, _seconds, "a positive number of seconds"
)
check_ranks = _switch(
    "FUSED_TP_CHECK", "0", "1: ranks compare op, shapes and dtypes before every op on gloo and NCCL", False, equal=True
)
batch_check_every = Setting(
    "FUSED_TP_CHECK_BATCH",
    "1000",
    "calls of a parallel model between two comparisons of its ranks' tokens, labels and masks, and of their gradients "
    "of replicated parameters; the first 3 calls are compared too; 0: no comparisons",
    1000,
    lambda text: _count(text.strip(), 0),
    "a number of calls, or 0 for no comparisons",
    equal=True,
)
forced_schedule = _text(
    "FUSED_TP_SCHEDULE", "the dispatch table", "name of the schedule to use for all ops that it implements", equal=True
)
forced_attention = _text(
    "FUSED_TP_ATTENTION",
    "the fastest available one",
    "implementation of attention steps: native-cpu, triton, torch-cpu, torch-cuda or torch-blocks",
)
narrow_gradients = Setting(
    "FUSED_TP_RING_GRADIENTS",
    "wide",
    "dtype in which ring attention sends gradients of keys and values over messages; wide: float32; input: the dtype "
    "of the keys, for bfloat16 half the bytes, but rounded once per rank",
    False,
    lambda text: {"wide": False, "": False, "input": True}[text],
    "'wide' (float32, float64 for float64) or 'input' (the dtype of the keys)",
    equal=True,
)
table_path = _text(
    "FUSED_TP_TABLE",
    "the shipped table",
    "path of a dispatch table, such as fused-tp bench --tune writes; a process reads it once",
)
ONLINE = ""  # value of `autotune` if the variable is not set
autotune: Setting[str | None] = Setting(
    "FUSED_TP_AUTOTUNE",
    "only between GPUs with NVLink, and only some schedules",
    "1: the first call of an op with new sizes checks and measures all schedules available to its group, and saves the "
    "choice in ~/.cache/fused_tp; a folder: the same, saved in that folder; 0: nothing is measured; not set: between "
    "GPUs that write into each other's memory, measures only plain, symm_mem and the schedules that fused-tp tune has "
    "verified; read when an op is called with new sizes",
    ONLINE,
    lambda text: (
        None
        if _SWITCH_VALUES.get(text.strip().lower()) is False
        else "1"
        if text.strip().lower() in _SWITCH_VALUES
        else text
    ),
    equal=True,
)
sm_margin = Setting(
    "FUSED_TP_SM_MARGIN",
    "0",
    "number of multiprocessors that fused kernels leave free for concurrent kernels; must be the same on all ranks",
    0,
    lambda text: _count((text or "0").strip(), 0),
    "a number of multiprocessors, 0 or more",
    equal=True,
)
host_name = _text(
    "FUSED_TP_HOST",
    "the boot id",
    "host name for grouping ranks; set a different one in each container if containers of one machine cannot share "
    "memory and GPUs",
)
nvtx = _switch("FUSED_TP_NVTX", "only under a tool that reads them", "1: always record NVTX ranges; 0: never", None)
shared_memory_allowed = _switch("FUSED_TP_SHM", "1", "0: do not use CPU shared memory", True, equal=True)
shared_memory_reserve = Setting(
    "FUSED_TP_SHM_RESERVE",
    "32 GiB",
    "bytes of address space (not memory) that each rank reserves for the shared memory of a group",
    32 << 30,
    lambda text: _count(text, 1, 1 << 56),  # kMaxReserveBytes in csrc/shm/control.h
    "a positive number of bytes, at most 2**56",
)
isa = Setting(
    "FUSED_TP_ISA",
    "the highest that this CPU supports",
    "highest instruction set of the CPU kernels: plain, avx2, avx512 or avx512_bf16; a process reads it once",
    "",
    _one_of("(plain|avx2|avx512(_bf16)?)?"),
    "plain, avx2, avx512 or avx512_bf16",
)
require_native = _switch(
    "FUSED_TP_REQUIRE_NATIVE", "0", "1: fail the installation if the CPU core cannot be built", False, installing=True
)
cuda = _switch(
    "FUSED_TP_CUDA",
    "for the visible GPU",
    "0: do not build device kernels; 1: build them for all GPUs, and fail the installation if that is not possible",
    None,
    installing=True,
)
cuda_archs = Setting(
    "FUSED_TP_CUDA_ARCHS",
    "the visible GPU",
    "architectures to build device kernels for, such as 80;90a;100a+PTX",
    "",
    _one_of(r"|[;,\s]*((sm_)?\d+\.?\d[af]?(\+ptx)?([;,\s]+|$))+"),
    "architectures such as 80;90a;100a+PTX, where +PTX adds code that later GPUs can run",
    installing=True,
)

# Keys in `RAW` of the settings that select a schedule.
ROUTING = forced_schedule.key, shared_memory_allowed.key, table_path.key


def routing() -> tuple[object, object, object]:
    """Return the unparsed values of the `ROUTING` settings. Every op call compares them to validate a cached choice."""
    schedule, shm, table = ROUTING
    return RAW.get(schedule), RAW.get(shm), RAW.get(table)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Context manager that sets the environment variables `values`, and restores the previous ones on exit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:  # not mock.patch.dict, which briefly empties the whole environment, while other threads may read it
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
