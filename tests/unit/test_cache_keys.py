"""Triton's disk cache is shared by processes, whatever each of them launches first."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.workers import REPOSITORY

# Import the modules and hash their functions in another order: a process hashes first the function it launches first.
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


@pytest.mark.parametrize("seeds", [(0, 1), pytest.param((0, 2, 3, 4), marks=pytest.mark.full)])
def test_keys_do_not_depend_on_what_a_process_launches_first(seeds: tuple[int, ...]) -> None:
    commands = [[sys.executable, "-c", _KEYS, str(seed)] for seed in seeds]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
        for command in commands
    ]
    found = []
    for process in running:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        found.append(out.splitlines())
    assert len(found[0]) > 100
    assert all(keys == found[0] for keys in found)


def test_every_module_of_kernels_fixes_its_keys() -> None:
    sources = [file for folder in ("triton_kernels", "benchmarks") for file in (REPOSITORY / folder).rglob("*.py")]
    kernels = [file for file in sources if "@triton.jit" in (text := file.read_text()) and "import triton\n" in text]
    assert len(kernels) > 10
    assert [file.name for file in kernels if not file.read_text().endswith("\nfix_cache_keys(__name__)\n")] == []
