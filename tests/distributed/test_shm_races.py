"""The core under sanitizers: ranks are threads of one process, so that a sanitizer sees both sides of every access."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.native_build import build_program, prebuild, require_sanitizer

pytestmark = pytest.mark.full

HERE = Path("tests", "distributed", "native")
CORE = [f"csrc/shm/{name}.cpp" for name in ("collectives", "group", "heap", "kernels", "kernels_plain")]


def stress_program(sanitizer: str) -> Path:
    flags = ["-Icsrc", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    sources: list[str | Path] = [HERE / "threads_stress.cpp", HERE / "segment_threads.cpp", *CORE]
    return build_program(f"shm_stress_{re.sub(',', '_', sanitizer)}", sources, flags)


SANITIZERS = ("thread", "address,undefined")
prebuild(lambda: [stress_program(sanitizer) for sanitizer in SANITIZERS])


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_races_and_no_stray_access(sanitizer: str) -> None:
    require_sanitizer(sanitizer)
    ran = subprocess.run([stress_program(sanitizer), "80"], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0 and ran.stdout.strip() == "no race", ran.stderr[-5000:]
