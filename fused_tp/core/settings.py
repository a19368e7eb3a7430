"""Settings, read from the environment at every call so that a program can change them while it runs.

Each setting is declared once and is its own reader: `timeout_seconds()`. Two are read once: the CPU core itself reads
`FUSED_TP_ISA`, and `core.dispatch` caches the tables it has read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_LONGEST_SECONDS = 3e9  # a century; three times that in nanoseconds still fits 64 bits

# The dict behind `os.environ`, if there is one. Settings that every op call reads are looked up here: after a matmul
# has swept the caches every Python frame costs microseconds, and `os.environ.get` runs through several.
RAW: Any = getattr(os.environ, "_data", os.environ)
_DECODE: Callable[[Any], str] = getattr(os.environ, "decodevalue", str)

SETTINGS: list[Setting[Any]] = []  # all of them, for `fused-tp doctor` and the documentation


@dataclass(eq=False)
class Setting(Generic[T]):
    """An environment variable. Calling it returns its current value.

    Attributes:
        name: name of the variable.
        default: the value while the variable is not set, in words.
        meaning: effect of the variable.
        unset: the value while the variable is not set.
        parse: converts the text; raises ValueError or KeyError for an invalid one.
        wanted: the valid values, as the end of "set it to".
        installing: True if only the installation of fused_tp reads it.
        equal: True if it must be the same on all ranks of a group, which compare it in the group's first call.

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
        self._known: tuple[object, T] = None, self.unset  # last text in RAW and its value, so that it is parsed once
        SETTINGS.append(self)

    def __call__(self) -> T:
        raw = RAW.get(self.key)
        known, value = self._known
        if raw != known:
            text = None if raw is None else _DECODE(raw)
            try:
                value = self.unset if text is None else self.parse(text)
            except (ValueError, KeyError):
                raise ValueError(f"{self.name} is {text!r}; set it to {self.wanted}.") from None
            self._known = raw, value
        return value


def equal_settings() -> dict[str, str]:
    """Values of the settings that must be the same on all ranks. An invalid one is included as its text, since its
    reader refuses it."""
    found = {}
    for one in SETTINGS:
        if one.equal:
            try:
                found[one.name] = str(one()) or "not set"
            except ValueError:
                found[one.name] = os.environ[one.name]
    return found


_WORDS = dict.fromkeys(("1", "true", "on", "yes"), True) | dict.fromkeys(("0", "false", "off", "no", ""), False)


def _switch(name: str, default: str, meaning: str, unset: T, **more: Any) -> Setting[bool | T]:
    return Setting(name, default, meaning, unset, lambda text: _WORDS[text.strip().lower()], "1 or 0", **more)


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
    "calls of a parallel model between comparisons of the tokens, labels and masks that its ranks were given, and of "
    "the gradients that they find of whole parameters; the first 3 calls are compared too; 0: none",
    1000,
    lambda text: _count(text.strip(), 0),
    "a number of calls, 0 for none",
    equal=True,
)
forced_schedule = _text(
    "FUSED_TP_SCHEDULE", "the dispatch table", "the schedule of every op that it has an implementation for", equal=True
)
forced_attention = _text(
    "FUSED_TP_ATTENTION",
    "the best there is",
    "what computes the steps of attention: native-cpu, triton, torch-cpu, torch-cuda or torch-blocks",
)
narrow_gradients = Setting(
    "FUSED_TP_RING_GRADIENTS",
    "wide",
    "input: over messages, gradients of keys and values travel in their own dtype, half the bytes in bfloat16, "
    "with a rounding for each rank; wide: in float32",
    False,
    lambda text: {"wide": False, "": False, "input": True}[text],
    "'wide' (float32, float64 for float64) or 'input' (the dtype of the keys)",
    equal=True,
)
table_path = _text(
    "FUSED_TP_TABLE", "the shipped one", "a dispatch table, as fused-tp bench --tune writes; a process reads it once"
)
ONLINE = ""  # value of `autotune` while it is not set
autotune: Setting[str | None] = Setting(
    "FUSED_TP_AUTOTUNE",
    "only between GPUs with NVLink, and not of all schedules",
    "1: the first call of an op with new sizes checks and measures all schedules that its group can have, and choices "
    "are kept in ~/.cache/fused_tp; a folder: the same, kept there; 0: nothing is measured; not set: between GPUs that "
    "write into each other's memory the same of plain, symm_mem and what fused-tp tune found right; read when an op "
    "sees sizes for the first time",
    ONLINE,
    lambda text: None if _WORDS.get(text.strip().lower()) is False else "1" if text.strip().lower() in _WORDS else text,
    equal=True,
)
sm_margin = Setting(
    "FUSED_TP_SM_MARGIN",
    "0",
    "multiprocessors that fused kernels leave to what runs beside them; the same on all ranks",
    0,
    lambda text: _count((text or "0").strip(), 0),
    "a number of multiprocessors, 0 or more",
    equal=True,
)
host_name = _text(
    "FUSED_TP_HOST", "the boot id", "names this host, where ranks of one machine share neither memory nor GPUs"
)
nvtx = _switch("FUSED_TP_NVTX", "while a tool listens", "1: NVTX ranges always; 0: never", None)
shared_memory_allowed = _switch("FUSED_TP_SHM", "1", "0: no CPU shared memory", True, equal=True)
shared_memory_reserve = Setting(
    "FUSED_TP_SHM_RESERVE",
    "32 GiB",
    "address space (not memory) that each rank reserves for a group's shared memory, in bytes",
    32 << 30,
    lambda text: _count(text, 1, 1 << 56),  # kMaxReserve in csrc/shm/control.h
    "a positive number of bytes, at most 2**56",
)
isa = Setting(
    "FUSED_TP_ISA",
    "the best this CPU has",
    "plain, avx2, avx512 or avx512_bf16: the most that the kernels of the CPU core may use; a process reads it once",
    "",
    _one_of("(plain|avx2|avx512(_bf16)?)?"),
    "plain, avx2, avx512 or avx512_bf16",
)
require_native = _switch(
    "FUSED_TP_REQUIRE_NATIVE", "0", "1: a CPU core that cannot be built is an error", False, installing=True
)
cuda = _switch(
    "FUSED_TP_CUDA",
    "for the visible GPU",
    "0: build no device kernels; 1: build them for all GPUs, and fail where that cannot be",
    None,
    installing=True,
)
cuda_archs = Setting(
    "FUSED_TP_CUDA_ARCHS",
    "the visible GPU",
    "GPUs to build device kernels for, such as 80;90a;100a+PTX",
    "",
    _one_of(r"|[;,\s]*((sm_)?\d+\.?\d[af]?(\+ptx)?([;,\s]+|$))+"),
    "architectures like 80;90a;100a+PTX, +PTX at those that later GPUs shall be able to use",
    installing=True,
)

# Keys in `RAW` of all settings that select a schedule.
ROUTING = forced_schedule.key, shared_memory_allowed.key, table_path.key


def routing() -> tuple[object, object, object]:
    """Unparsed texts of the `ROUTING` settings: equal texts mean equal choices. Read at every op call."""
    schedule, shm, table = ROUTING
    return RAW.get(schedule), RAW.get(shm), RAW.get(table)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Scope in which these variables are set; restores their previous values at its end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:  # only these: mock.patch.dict empties the environment for a moment, in which other threads may read it
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
