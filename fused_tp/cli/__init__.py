"""The `fused-tp` command: one module per subcommand, imported only when it runs."""

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


def import_shipped_module(folder: str, name: str) -> ModuleType:
    """Import module `name` of a folder next to this package, such as benchmarks.

    An installation contains the folder as `fused_tp.benchmarks`, because a top-level package `benchmarks` could clash
    with another project's. In a checkout the folder is imported from the root of the checkout.

    Raises:
        FileNotFoundError: the module is neither installed nor in a checkout around this package.
    """
    if find_spec(f"fused_tp.{folder}") is not None:
        return importlib.import_module(f"fused_tp.{folder}.{name}")
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / folder / f"{name}.py").exists():
        raise FileNotFoundError(
            f"this installation does not contain the {folder}; run this from a checkout of fused_tp"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))  # precedes other packages named `benchmarks` or `examples`
    return importlib.import_module(f"{folder}.{name}")


def cpu_name() -> str:
    """Return the name of the processor from /proc/cpuinfo (Linux), or else from the `platform` module."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def make_folder(option: str, path: Path) -> None:
    """Create folder `path` for the results of a command, and check that it is writable before minutes of work.

    Raises:
        ValueError: `path` cannot be created or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"{option}: the folder {path} cannot be created or written to ({error.strerror}); use another folder."
        ) from None


def make_parent_folder(option: str, path: Path) -> None:
    """Create the parent folder of `path`, a file that a command will write.

    Raises:
        ValueError: the folder cannot be created or written to, or `path` is a folder.
    """
    if path.is_dir():
        raise ValueError(f"{option} must be a file, got the folder {path}.")
    make_folder(option, path.parent)


def at_least(minimum: float, parse: Callable[[str], float] = int) -> Callable[[str], float]:
    """Argparse type: a number of at least `minimum`."""

    def parse_number(text: str) -> float:
        value = parse(text)
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return parse_number


def positive_number(text: str) -> float:
    """Argparse type: a finite number above 0."""
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {value}")
    return value
