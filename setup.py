"""Builds the native parts of fused_tp; everything else about the package is in pyproject.toml.

`fused_tp._core`, in C++, needs a C++17 compiler and pybind11; `fused_tp/_cuda.so`, the kernels of csrc/cuda, needs
nvcc; neither needs torch or NCCL. What cannot be built is left out, with a sentence that says why and what is lost.
From the environment:

    FUSED_TP_REQUIRE_NATIVE=1   a core that cannot be built is an error (our Makefile and CI set it)
    FUSED_TP_CUDA=0 or 1        0: build no device kernels; 1: device kernels that cannot be built are an error
    FUSED_TP_CUDA_ARCHS         GPUs to build for, such as 90a or 80;90a+PTX (80;90a;100a+PTX, what nvcc knows of these)
    CUDA_HOME, CUDA_PATH        where nvcc is; else it is looked for in PATH and /usr/local/cuda
    CXX, CXXFLAGS, LDFLAGS      as always; CXXFLAGS and LDFLAGS for the core, NVCC_APPEND_FLAGS for nvcc
    MAX_JOBS                    how many files compile at once (ninja chooses without it)
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "csrc"))

from native_build import CoreBuild, CudaBuild, NotBuiltError, core_folder, cuda_folder  # noqa: E402  # found only now

# These live beside the package and are installed inside it: the triton project ships a top-level `triton_kernels` of
# its own, and top-level `examples` and `benchmarks` would be anybody's.
FOLDED_IN = {f"fused_tp.{folder}": folder for folder in ("triton_kernels", "examples", "benchmarks")}

# Optional: what was not built is not copied either.
CORE = Extension("fused_tp._core", sources=[], language="c++", optional=True)
CUDA = Extension("fused_tp._cuda", sources=[], language="c++", optional=True)


class BuildNative(build_ext):
    """Each part by its own builder; a part that cannot be built is no error, unless the environment says so."""

    def build_extension(self, ext: Extension) -> None:
        is_core = ext.name == CORE.name
        output = Path(self.get_ext_fullpath(ext.name))
        output.unlink(missing_ok=True)  # of an earlier build, which the wheel would take
        try:
            if sys.platform != "linux":
                raise NotBuiltError("it needs Linux")
            if is_core:
                build_core(output)
            else:
                build_cuda(output)
        except NotBuiltError as error:
            if os.environ.get("FUSED_TP_REQUIRE_NATIVE" if is_core else "FUSED_TP_CUDA") == "1":
                raise
            print(f"fused_tp: {without_core(error) if is_core else without_cuda(error)}")

    def get_ext_filename(self, fullname: str) -> str:
        """The device kernels are a plain library that knows no Python, so that its name has no version of it."""
        if fullname.split(".")[-1] == "_cuda":
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def get_outputs(self) -> list[str]:
        return [output for output in super().get_outputs() if Path(output).exists()]


def build_core(output: Path) -> None:
    try:
        import pybind11
    except ImportError:
        raise NotBuiltError("pybind11 is not installed (pip install pybind11)") from None
    include_dirs = [pybind11.get_include(), sysconfig.get_paths()["include"]]
    CoreBuild(include_dirs).run(output, core_folder())


def build_cuda(output: Path) -> None:
    wanted = os.environ.get("FUSED_TP_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"FUSED_TP_CUDA is {wanted!r}; set it to 1 or 0.")
    if wanted == "0":
        print("fused_tp: the device kernels are not built: FUSED_TP_CUDA=0.")
        return
    build = CudaBuild(os.environ.get("FUSED_TP_CUDA_ARCHS", ""))
    build.run(output, cuda_folder())
    print(f"fused_tp: device kernels were built for {build.built_for}.")


def without_core(why: Exception) -> str:
    return (
        f"the native core was not built: {why}. fused_tp runs without it, on torch.distributed alone. For CPU shared "
        "memory install a C++17 compiler (Debian, Ubuntu: apt-get install g++) and the Python headers (python3-dev), "
        "and reinstall fused_tp."
    )


def without_cuda(why: Exception) -> str:
    return (
        f"the device kernels were not built: {why}. fused_tp runs without them, on GPUs with NCCL and Triton. For them "
        "install the CUDA toolkit (12.0 or later, nvcc) and reinstall fused_tp."
    )


def packages() -> list[str]:
    found = find_packages(str(HERE), include=["fused_tp", "fused_tp.*"])
    for name, folder in FOLDED_IN.items():
        found += [name, *(f"{name}.{inner}" for inner in find_packages(str(HERE / folder)))]
    return found


setup(
    packages=packages(),
    package_dir={"fused_tp": "fused_tp", **FOLDED_IN},
    ext_modules=[CORE, CUDA],
    cmdclass={"build_ext": BuildNative},
)
