"""The core under ThreadSanitizer: ranks are threads of one process, so that it sees both sides of every access."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.workers import REPOSITORY

HERE = Path(__file__).parent / "native"
CORE = [f"csrc/shm/{name}.cpp" for name in ("collectives", "group", "heap", "kernels", "kernels_plain")]
FLAGS = ["-std=c++17", "-O1", "-g", "-pthread", "-Icsrc", "-fsanitize=thread"]


def build(folder: Path) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}\n")
    made = subprocess.run([compiler, *FLAGS, str(empty), "-o", str(folder / "empty")], cwd=REPOSITORY)
    if made.returncode or subprocess.run([folder / "empty"]).returncode:
        pytest.skip(f"{compiler} has no ThreadSanitizer that works here")
    sources = [str(HERE / "threads_stress.cpp"), str(HERE / "segment_threads.cpp"), *CORE]
    subprocess.run([compiler, *FLAGS, *sources, "-o", str(folder / "stress")], cwd=REPOSITORY, check=True)
    return folder / "stress"


def test_no_races(tmp_path: Path) -> None:
    ran = subprocess.run([build(tmp_path), "80"], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0 and ran.stdout.strip() == "no race", ran.stderr[-5000:]
