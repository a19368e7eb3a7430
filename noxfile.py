"""Run the core tests on the supported versions of Python and torch: `make test-matrix`; `ARGS=--list` lists them.

Each combination has its own virtual environment in build/nox, of 5 GB, as PyPI's torch for Linux includes CUDA.
A Python that is not installed is skipped with a message; pyenv provides several with
PYENV_VERSION=3.10.13:3.12.1:3.13.0.
"""

from __future__ import annotations

import nox

nox.options.envdir = "build/nox"
nox.options.reuse_existing_virtualenvs = True

# (Python, torch): the oldest of both, the versions in GPU images of 2026, the pinned ones, and the newest.
COMBINATIONS = [("3.10", "2.10.0"), ("3.12", "2.11.0"), ("3.11", "2.13.0"), ("3.13", "2.15.0")]
# The interpreter of Triton 3.6, which torch 2.10 and 2.11 install, supports numpy before 2.4 only.
NUMPY = {"2.10.0": "numpy<2.4", "2.11.0": "numpy<2.4"}
CORE = [
    *(
        f"tests/unit/test_{name}.py"
        for name in ("custom_ops", "imports", "cache_keys", "selftest", "attention_kernels")
    ),
    *(
        f"tests/distributed/test_{name}.py"
        for name in ("tp_ops", "ring_attention", "layers_linear", "explain", "training", "single_device_writes")
    ),
    *(f"tests/kernels/test_{name}.py" for name in ("sums", "signals")),
    "tests/integrations/test_parallelize_plain.py",
]


@nox.session
@nox.parametrize(("python", "torch"), COMBINATIONS)
def core(session: nox.Session, torch: str) -> None:
    """Build the package and run the core tests."""
    session.install("setuptools>=77", "wheel", "pybind11", "ninja")
    session.install(
        f"torch=={torch}", NUMPY.get(torch, "numpy"), "triton", "pytest>=9", "hypothesis", "psutil", "pydantic"
    )
    session.install("--no-build-isolation", "--no-deps", "-e", ".", env={"FUSED_TP_REQUIRE_NATIVE": "1"})
    session.run("python", "-m", "pytest", "-q", *(session.posargs or CORE))
