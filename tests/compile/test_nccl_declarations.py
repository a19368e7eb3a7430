"""The declarations of csrc/nccl/api.h and csrc/driver/api.h match the real nccl.h and cuda.h."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native_build import compiler
from tests.workers import REPOSITORY

pytestmark = pytest.mark.full

SOURCE = Path("tests", "compile", "declarations.cpp")


def cuda_headers() -> Path:
    """Find the folder of cuda.h and cuda_runtime.h."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        homes.append(Path(nvcc).resolve().parent.parent)
    homes.append(Path("/usr/local/cuda"))
    for home in homes:
        if (home / "include" / "cuda_runtime.h").exists() and (home / "include" / "cuda.h").exists():
            return home / "include"
    pytest.skip("needs CUDA's headers (cuda.h, cuda_runtime.h): none beside nvcc or in /usr/local/cuda")


def nccl_headers() -> Path:
    """Find the folder of nccl.h, from PyPI's nvidia-nccl-cu13 or nvidia-nccl-cu12."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if Path(folder, "include", "nccl.h").exists():
            return Path(folder, "include")
    pytest.skip("needs nccl.h (the extra `nccl`)")


def assert_compiles(*flags: str) -> None:
    command = [compiler(), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Icsrc", "-fsyntax-only", *flags, str(SOURCE)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_driver_declarations_are_those_of_cuda_h() -> None:
    assert_compiles("-DWITH_CUDA", "-isystem", str(cuda_headers()))


def test_nccl_declarations_are_those_of_nccl_h() -> None:
    nccl = nccl_headers()
    assert_compiles("-DWITH_NCCL", "-isystem", str(nccl), "-isystem", str(cuda_headers()))
