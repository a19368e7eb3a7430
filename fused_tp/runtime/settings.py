"""Settings, read from the environment at every call so that a program can change them while it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

DEFAULT_TIMEOUT_SECONDS = 600.0
_LONGEST_SECONDS = 3e9  # a century; three times that still fits 64 bits of nanoseconds

# The dict behind `os.environ`, where there is one. After a matmul has swept the caches every Python frame costs
# microseconds, and `os.environ.get` runs through several: what every op call asks is looked up here.
RAW = getattr(os.environ, "_data", os.environ)
_SCHEDULE, _SHM, _TABLE, _TIMEOUT, _SM_MARGIN, _ATTENTION = (
    getattr(os.environ, "encodekey", str)(f"FUSED_TP_{name}")
    for name in ("SCHEDULE", "SHM", "TABLE", "TIMEOUT", "SM_MARGIN", "ATTENTION")
)
ROUTING = _SCHEDULE, _SHM, _TABLE  # whatever decides between schedules, as `RAW` names it

_ON = frozenset({"1", "true", "on", "yes"})
_OFF = frozenset({"0", "false", "off", "no", ""})


def switch(name: str, default: bool) -> bool:
    """Whether an environment variable is on; `default` where it is not set."""
    text = os.environ.get(name)
    if text is None:
        return default
    lowered = text.strip().lower()
    if lowered in _ON:
        return True
    if lowered in _OFF:
        return False
    raise ValueError(f"{name} is {text!r}; set it to 1 or 0.")


def timeout_seconds() -> float:
    """Longest time any wait for a peer may take, in seconds (`FUSED_TP_TIMEOUT`, default 600)."""
    return _timeout(RAW.get(_TIMEOUT))


@lru_cache(maxsize=1)  # every op call asks; `raw` is what RAW has, by which the value is parsed once
def _timeout(raw: object) -> float:
    text = os.environ.get("FUSED_TP_TIMEOUT")
    if text is None:
        return DEFAULT_TIMEOUT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ValueError(f"FUSED_TP_TIMEOUT is {text!r}; set it to a positive number of seconds.")
    return min(seconds, _LONGEST_SECONDS)


def check_ranks() -> bool:
    """Whether ranks compare op, shapes and dtypes before every op on torch.distributed (`FUSED_TP_CHECK=1`)."""
    return switch("FUSED_TP_CHECK", default=False)


def shared_memory_allowed() -> bool:
    """Whether ranks on one host may use the CPU shared-memory transport (`FUSED_TP_SHM=0` turns it off)."""
    return switch("FUSED_TP_SHM", default=True)


def forced_schedule() -> str | None:
    """The schedule that every op must use (`FUSED_TP_SCHEDULE`), or None to let the dispatch table choose."""
    return os.environ.get("FUSED_TP_SCHEDULE") or None


def forced_attention() -> str | None:
    """The provider that must compute the steps of attention (`FUSED_TP_ATTENTION`), or None for the best there is."""
    raw = RAW.get(_ATTENTION)
    return None if raw is None else os.environ.get("FUSED_TP_ATTENTION") or None


def narrow_gradients() -> bool:
    """Whether a ring's gradients of keys and values travel in the dtype of these (`FUSED_TP_RING_GRADIENTS=input`), and
    not in float32 (`wide`, the default)."""
    text = os.environ.get("FUSED_TP_RING_GRADIENTS") or "wide"
    if text not in ("wide", "input"):
        raise ValueError(
            f"FUSED_TP_RING_GRADIENTS is {text!r}; set it to 'wide' (float32, float64 for float64) or 'input' (the "
            "dtype of the keys)."
        )
    return text == "input"


def sm_margin() -> int:
    """Multiprocessors that fused kernels leave to other kernels (`FUSED_TP_SM_MARGIN`, default 0).

    The same on all ranks: programs of the ranks' kernels wait for each other one by one.
    """
    return _margin(RAW.get(_SM_MARGIN))


@lru_cache(maxsize=1)
def _margin(raw: object) -> int:
    text = os.environ.get("FUSED_TP_SM_MARGIN") or "0"
    if not text.strip().isdecimal():
        raise ValueError(f"FUSED_TP_SM_MARGIN is {text!r}; set it to a number of multiprocessors, 0 or more.")
    return int(text)


def host_name() -> str | None:
    """A name for this host (`FUSED_TP_HOST`), where the ranks of one machine do not share memory or GPUs; or None."""
    return os.environ.get("FUSED_TP_HOST") or None


def routing() -> tuple[object, object, object]:
    """Whatever decides between schedules, unread: equal values mean equal choices. Every op call asks."""
    return RAW.get(_SCHEDULE), RAW.get(_SHM), RAW.get(_TABLE)


def table_path() -> str | None:
    """A dispatch table to use in place of the shipped one (`FUSED_TP_TABLE`), as `fused-tp bench --tune` writes.

    The variable is looked at in every call, the file it names only once: see `runtime.dispatch`.
    """
    return os.environ.get("FUSED_TP_TABLE") or None


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Scope in which these variables are set, and behind which they are as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:  # these alone: mock.patch.dict empties the environment for a moment, which other threads read
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- all of them, for `fused-tp doctor` and the documentation ---------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """An environment variable.

    Attributes:
        name: of the variable.
        default: what holds where it is not set, in words.
        meaning: what it does.
        check: raises ValueError, with a sentence, where the variable has a value that cannot be.
        installing: it is read while fused_tp is installed, and not later.
    """

    name: str
    default: str
    meaning: str
    check: Callable[[], object] = lambda: None
    installing: bool = False


def _is_switch(name: str) -> Callable[[], object]:
    return lambda: switch(name, True)


def _matches(name: str, pattern: str, wanted: str) -> Callable[[], object]:
    def check() -> None:
        if not re.fullmatch(pattern, os.environ.get(name, "").lower()):
            raise ValueError(f"Set it to {wanted}.")

    return check


_ARCHS = r"|[;,\s]*((sm_)?\d+\.?\d[af]?(\+ptx)?([;,\s]+|$))+"

SETTINGS = (
    Setting("FUSED_TP_TIMEOUT", "600", "longest wait for a peer, in seconds", timeout_seconds),
    Setting(
        "FUSED_TP_CHECK", "0", "1: ranks compare op, shapes and dtypes before every op on gloo and NCCL", check_ranks
    ),
    Setting("FUSED_TP_SCHEDULE", "the dispatch table", "the schedule of every op that it has an implementation for"),
    Setting(
        "FUSED_TP_ATTENTION",
        "the best there is",
        "what computes the steps of attention: native-cpu, triton, torch-cpu, torch-cuda or torch-blocks",
    ),
    Setting(
        "FUSED_TP_RING_GRADIENTS",
        "wide",
        "input: over messages, gradients of keys and values travel in their own dtype, half the bytes in bfloat16, "
        "with a rounding for each rank; wide: in float32",
        narrow_gradients,
    ),
    Setting(
        "FUSED_TP_TABLE",
        "the shipped one",
        "a dispatch table, as fused-tp bench --tune writes; a process reads it once",
    ),
    Setting(
        "FUSED_TP_SM_MARGIN",
        "0",
        "multiprocessors that fused kernels leave to what runs beside them; the same on all ranks",
        sm_margin,
    ),
    Setting(
        "FUSED_TP_HOST", "the boot id", "names this host, where ranks of one machine share neither memory nor GPUs"
    ),
    Setting("FUSED_TP_NVTX", "while a tool listens", "1: NVTX ranges always; 0: never", _is_switch("FUSED_TP_NVTX")),
    Setting("FUSED_TP_SHM", "1", "0: no CPU shared memory", shared_memory_allowed),
    Setting(
        "FUSED_TP_SHM_RESERVE",
        "32 GiB",
        "address space (not memory) that each rank reserves for a group's shared memory, in bytes",
        _matches("FUSED_TP_SHM_RESERVE", r"0*[1-9]\d*", "a positive number of bytes"),
    ),
    Setting(
        "FUSED_TP_ISA",
        "the best this CPU has",
        "plain, avx2 or avx512: the most that the kernels of the CPU core may use",
        _matches("FUSED_TP_ISA", "(plain|avx2|avx512)?", "plain, avx2 or avx512"),
    ),
    Setting(
        "FUSED_TP_REQUIRE_NATIVE",
        "0",
        "1: a CPU core that cannot be built is an error",
        _is_switch("FUSED_TP_REQUIRE_NATIVE"),
        installing=True,
    ),
    Setting(
        "FUSED_TP_CUDA",
        "for the visible GPU",
        "0: build no device kernels; 1: build them for all GPUs, and fail where that cannot be",
        _is_switch("FUSED_TP_CUDA"),
        installing=True,
    ),
    Setting(
        "FUSED_TP_CUDA_ARCHS",
        "the visible GPU",
        "GPUs to build device kernels for, such as 80;90a;100a+PTX",
        _matches(
            "FUSED_TP_CUDA_ARCHS",
            _ARCHS,
            "architectures like 80;90a;100a+PTX, +PTX at those that later GPUs shall be able to use",
        ),
        installing=True,
    ),
)
