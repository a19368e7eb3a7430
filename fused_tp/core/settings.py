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

_MAX_TIMEOUT_SECONDS = 3e9  # about a century; three times this duration in nanoseconds still fits a 64-bit integer

# The dict inside `os.environ`, if it has one. Every op call reads some settings, and `os.environ.get` runs several
# Python functions, each of which takes microseconds after a matmul has evicted the interpreter from the CPU caches.
RAW_ENVIRON: Any = getattr(os.environ, "_data", os.environ)
_decode_value: Callable[[Any], str] = getattr(os.environ, "decodevalue", str)

SETTINGS: list[Setting[Any]] = []  # all settings, for `fused-tp doctor` and the documentation


@dataclass(eq=False)
class Setting(Generic[T]):
    """An environment variable. Calling it returns its current value.

    Attributes:
        name: name of the variable.
        default: description of the value if the variable is not set.
        meaning: effect of the variable.
        unset_value: the value if the variable is not set.
        parse: converts the text to the value; raises ValueError or KeyError for invalid text.
        valid_values: description of the valid values, used in messages after "Set it to".
        is_install_time: True if only the installation of fused_tp reads the variable.
        must_match: True if all ranks of a group need the same value; they compare it in the group's first call.

    Raises:
        ValueError: the variable holds an invalid value; the message lists the valid ones.
    """

    name: str
    default: str
    meaning: str
    unset_value: T
    parse: Callable[[str], T]
    valid_values: str = ""
    is_install_time: bool = False
    must_match: bool = False

    def __post_init__(self) -> None:
        self.key: Any = getattr(os.environ, "encodekey", str)(self.name)  # the key in RAW_ENVIRON
        # The last raw text and its value; equal text is not parsed again.
        self._last_parsed: tuple[object, T] = (None, self.unset_value)
        SETTINGS.append(self)

    def __call__(self) -> T:
        raw_text = RAW_ENVIRON.get(self.key)
        last_raw_text, value = self._last_parsed
        if raw_text != last_raw_text:
            text = None if raw_text is None else _decode_value(raw_text)
            try:
                value = self.unset_value if text is None else self.parse(text)
            except (ValueError, KeyError):
                raise ValueError(f"{self.name} is {text!r}; set it to {self.valid_values}.") from None
            self._last_parsed = raw_text, value
        return value


def must_match_values() -> dict[str, str]:
    """Return the values, by name, of the settings that must be equal on all ranks; for an invalid value, its text."""
    values = {}
    for setting in SETTINGS:
        if setting.must_match:
            try:
                values[setting.name] = str(setting()) or "not set"
            except ValueError:
                values[setting.name] = os.environ[setting.name]
    return values


_SWITCH_VALUES = dict.fromkeys(("1", "true", "on", "yes"), True) | dict.fromkeys(("0", "false", "off", "no", ""), False)


def _switch_setting(name: str, default: str, meaning: str, unset_value: T, **fields: Any) -> Setting[bool | T]:
    return Setting(
        name, default, meaning, unset_value, lambda text: _SWITCH_VALUES[text.strip().lower()], "1 or 0", **fields
    )


def _text_setting(name: str, default: str, meaning: str, **fields: Any) -> Setting[str | None]:
    return Setting(name, default, meaning, None, lambda text: text or None, **fields)


def _parse_seconds(text: str) -> float:
    if not 0.0 < (seconds := float(text)) < float("inf"):
        raise ValueError
    return min(seconds, _MAX_TIMEOUT_SECONDS)


def _parse_count(text: str, minimum: int, maximum: int = 1 << 31) -> int:
    if not text.isdecimal() or not minimum <= int(text) <= maximum:
        raise ValueError
    return int(text)


def _pattern_parser(pattern: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if re.fullmatch(pattern, text.lower()) is None:
            raise ValueError
        return text

    return parse


timeout_seconds = Setting(
    "FUSED_TP_TIMEOUT",
    "600",
    "longest wait for a peer, in seconds",
    600.0,
    _parse_seconds,
    "a positive number of seconds",
)
check_ranks = _switch_setting(
    "FUSED_TP_CHECK",
    "0",
    "1: ranks compare op, shapes and dtypes before every op on gloo and NCCL",
    False,
    must_match=True,
)
batch_check_every = Setting(
    "FUSED_TP_CHECK_BATCH",
    "1000",
    "calls of a parallel model between two comparisons of its ranks' tokens, labels and masks, and of their gradients "
    "of replicated parameters; the first 3 calls are compared too; 0: no comparisons",
    1000,
    lambda text: _parse_count(text.strip(), 0),
    "a number of calls, or 0 for no comparisons",
    must_match=True,
)
forced_schedule = _text_setting(
    "FUSED_TP_SCHEDULE",
    "the dispatch table",
    "name of the schedule to use for all ops that it implements",
    must_match=True,
)
forced_attention = _text_setting(
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
    must_match=True,
)
table_path = _text_setting(
    "FUSED_TP_TABLE",
    "the shipped table",
    "path of a dispatch table, such as fused-tp bench --tune writes; a process reads it once",
)
AUTOTUNE_UNSET = ""  # value of `autotune` if the variable is not set
autotune: Setting[str | None] = Setting(
    "FUSED_TP_AUTOTUNE",
    "only between GPUs with NVLink, and only some schedules",
    "1: the first call of an op with new sizes checks and measures all schedules available to its group, and saves the "
    "choice in ~/.cache/fused_tp; a folder: the same, saved in that folder; 0: nothing is measured; not set: between "
    "GPUs that write into each other's memory, measures only plain, symm_mem and the schedules that fused-tp tune has "
    "verified; read when an op is called with new sizes",
    AUTOTUNE_UNSET,
    lambda text: (
        None
        if _SWITCH_VALUES.get(text.strip().lower()) is False
        else "1"
        if text.strip().lower() in _SWITCH_VALUES
        else text
    ),
    must_match=True,
)
sm_margin = Setting(
    "FUSED_TP_SM_MARGIN",
    "0",
    "number of multiprocessors that fused kernels leave free for concurrent kernels; must be the same on all ranks",
    0,
    lambda text: _parse_count((text or "0").strip(), 0),
    "a number of multiprocessors, 0 or more",
    must_match=True,
)
host_name = _text_setting(
    "FUSED_TP_HOST",
    "the boot id",
    "host name for grouping ranks; set a different one in each container if containers of one machine cannot share "
    "memory and GPUs",
)
nvtx = _switch_setting(
    "FUSED_TP_NVTX", "only under a tool that reads them", "1: always record NVTX ranges; 0: never", None
)
shared_memory_allowed = _switch_setting("FUSED_TP_SHM", "1", "0: do not use CPU shared memory", True, must_match=True)
shared_memory_reserve = Setting(
    "FUSED_TP_SHM_RESERVE",
    "32 GiB",
    "bytes of address space (not memory) that each rank reserves for the shared memory of a group",
    32 << 30,
    lambda text: _parse_count(text, 1, 1 << 56),  # kMaxReserveBytes in csrc/shm/control.h
    "a positive number of bytes, at most 2**56",
)
vllm_plugin_allowed = _switch_setting(
    "FUSED_TP_VLLM", "1 on CPUs, 0 on GPUs", "0: leave vLLM's layers and collectives as they are; 1: replace them", None
)
sglang_plugin_allowed = _switch_setting(
    "FUSED_TP_SGLANG", "1", "0: leave SGLang's layers and collectives as they are", True
)
isa = Setting(
    "FUSED_TP_ISA",
    "the highest that this CPU supports",
    "highest instruction set of the CPU kernels: plain, avx2, avx512 or avx512_bf16; a process reads it once",
    "",
    _pattern_parser("(plain|avx2|avx512(_bf16)?)?"),
    "plain, avx2, avx512 or avx512_bf16",
)
require_native = _switch_setting(
    "FUSED_TP_REQUIRE_NATIVE",
    "0",
    "1: fail the installation if the CPU core cannot be built",
    False,
    is_install_time=True,
)
cuda = _switch_setting(
    "FUSED_TP_CUDA",
    "for the visible GPU",
    "0: do not build device kernels; 1: build them for all GPUs, and fail the installation if that is not possible",
    None,
    is_install_time=True,
)
cuda_archs = Setting(
    "FUSED_TP_CUDA_ARCHS",
    "the visible GPU",
    "architectures to build device kernels for, such as 80;90a;100a+PTX",
    "",
    _pattern_parser(r"|[;,\s]*((sm_)?\d+\.?\d[af]?(\+ptx)?([;,\s]+|$))+"),
    "architectures such as 80;90a;100a+PTX, where +PTX adds code that later GPUs can run",
    is_install_time=True,
)

# Keys in `RAW_ENVIRON` of the settings that select a schedule.
ROUTING_KEYS = forced_schedule.key, shared_memory_allowed.key, table_path.key


def routing_values() -> tuple[object, object, object]:
    """Return the unparsed values of the settings `ROUTING_KEYS`. Every op call compares them to validate a plan."""
    schedule, shm, table = ROUTING_KEYS
    return RAW_ENVIRON.get(schedule), RAW_ENVIRON.get(shm), RAW_ENVIRON.get(table)


@contextmanager
def override_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Context manager that sets the environment variables `values`, and restores the previous ones on exit."""
    previous_values = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:  # not mock.patch.dict, which briefly empties the whole environment, while other threads may read it
        for name, value in previous_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
