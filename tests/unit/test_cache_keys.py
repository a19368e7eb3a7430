"""Triton's disk cache is shared by processes, whatever each of them launches first."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.workers import REPOSITORY

# Import the modules and hash their functions in another order: what a process launches first is hashed first.
_KEYS = """
import importlib, pkgutil, random, sys
import triton.language.standard
import fused_tp.triton_kernels as root
from triton.runtime.jit import JITFunction

def functions(module):
    return [f for f in vars(module).values() if isinstance(f, JITFunction) and f.__module__ == module.__name__]

draw = random.Random(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(root.__path__, root.__name__ + ".")] + ["benchmarks.gpu_sum"]
draw.shuffle(names)
found = functions(triton.language.standard) if draw.random() < 0.5 else []
draw.shuffle(found)
for function in found:
    function.cache_key
found = [f for name in names for f in functions(importlib.import_module(name))]
draw.shuffle(found)
keys = {f"{f.__module__}.{f.__name__}": f.cache_key for f in found}
values = {}
for function in found:
    for (name, _), (value, _) in function.used_global_vals.items():
        values.setdefault((function.__module__, function.__name__, name), set()).add(str(value))
differing = {name: of for name, of in values.items() if len(of) > 1}  # sorted by address
assert not differing, differing
print(*(f"{name} {keys[name]}" for name in sorted(keys)), sep="\\n")
"""


def test_keys_do_not_depend_on_what_a_process_launches_first() -> None:
    def keys(seed: int) -> list[str]:
        command = [sys.executable, "-c", _KEYS, str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first = keys(0)
    assert len(first) > 100
    for seed in range(1, 4):
        assert keys(seed) == first


def test_every_module_of_kernels_fixes_its_keys() -> None:
    sources = [file for folder in ("triton_kernels", "benchmarks") for file in (REPOSITORY / folder).rglob("*.py")]
    kernels = [file for file in sources if "@triton.jit" in (text := file.read_text()) and "import triton\n" in text]
    assert len(kernels) > 15
    assert [file.name for file in kernels if not file.read_text().endswith("\nfix_cache_keys(__name__)\n")] == []
