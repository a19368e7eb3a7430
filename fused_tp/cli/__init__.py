"""The `fused-tp` command: one module per subcommand, imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def shipped_module(folder: str, name: str) -> ModuleType:
    """Module `name` of a folder next to this package, such as benchmarks.

    Installed, the folder is `fused_tp.benchmarks`, as a top-level package of that name would be anybody's; in a
    checkout it is found where it lies.

    Raises:
        FileNotFoundError: it is neither installed nor in a checkout around this package.
    """
    if find_spec(f"fused_tp.{folder}") is not None:
        return importlib.import_module(f"fused_tp.{folder}.{name}")
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / folder / f"{name}.py").exists():
        raise FileNotFoundError(f"the {folder} are not part of this installation; run this from a checkout of fused_tp")
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))  # before anybody else's `benchmarks` or `examples`
    return importlib.import_module(f"{folder}.{name}")


def cpu_name() -> str:
    """The processor as /proc/cpuinfo names it (Linux); elsewhere the platform's word."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def make_folder(option: str, path: Path) -> None:
    """Makes `path`, to which a command will write its results: asked before minutes of work, not behind them.

    Raises:
        ValueError: nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"{option}: the folder {path} cannot be made or written to ({error.strerror}); name another."
        ) from None


def make_place(option: str, path: Path) -> None:
    """Makes the folder of `path`, a file that a command will write.

    Raises:
        ValueError: nothing can be written there, or it is a folder.
    """
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder; name a file in it.")
    make_folder(option, path.parent)


def at_least(lowest: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """An argparse type: a number that is not below `lowest`."""

    def number(text: str) -> float:
        value = kind(text)
        if not value >= lowest:
            raise argparse.ArgumentTypeError(f"is {value}; it must be at least {lowest}")
        return value

    return number


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"is {value}; it must be positive and finite")
    return value
