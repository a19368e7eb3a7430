"""The core under sanitizers: ranks are threads of one process, so that they see both sides of every access."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.workers import REPOSITORY

HERE = Path(__file__).parent / "native"
CORE = [f"csrc/shm/{name}.cpp" for name in ("collectives", "group", "heap", "kernels", "kernels_plain")]
FLAGS = ["-std=c++17", "-O1", "-g", "-pthread", "-Icsrc"]


def build(folder: Path, sanitizer: str) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}\n")
    flags = [*FLAGS, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    made = subprocess.run([compiler, *flags, str(empty), "-o", str(folder / "empty")], cwd=REPOSITORY)
    if made.returncode or subprocess.run([folder / "empty"]).returncode:
        pytest.skip(f"{compiler} has no -fsanitize={sanitizer} that works here")
    sources = [str(HERE / "threads_stress.cpp"), str(HERE / "segment_threads.cpp"), *CORE]
    subprocess.run([compiler, *flags, *sources, "-o", str(folder / "stress")], cwd=REPOSITORY, check=True)
    return folder / "stress"


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_races_and_no_stray_access(sanitizer: str, tmp_path: Path) -> None:
    ran = subprocess.run([build(tmp_path, sanitizer), "80"], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0 and ran.stdout.strip() == "no race", ran.stderr[-5000:]
