"""Build the native parts of fused_tp; pyproject.toml defines everything else about the package.

`fused_tp._core`, in C++, needs a C++17 compiler and pybind11. `fused_tp/_cuda.so`, the device kernels of csrc/cuda,
needs nvcc; it is compiled if a GPU is visible, for that GPU alone, or if the environment requests it. Neither needs
torch or NCCL. A part that cannot be built is left out, with a message that gives the reason and the consequence.
Environment variables:

    FUSED_TP_REQUIRE_NATIVE=1   fail if the core cannot be built (the Makefile sets it)
    FUSED_TP_CUDA=0             build no device kernels
    FUSED_TP_CUDA=1             build device kernels for all of 80;90a;100a+PTX that nvcc supports, even without a GPU
                                (about three minutes on two cores); fail if they cannot be built
    FUSED_TP_CUDA_ARCHS         architectures to build for, such as 90a or 80;90a+PTX; fail if they cannot be built
    CUDA_HOME, CUDA_PATH        the only folder to search for nvcc; without them PATH and /usr/local/cuda are searched
    CXX, CXXFLAGS, LDFLAGS      as usual; CXXFLAGS and LDFLAGS apply to the core, NVCC_APPEND_FLAGS to nvcc
    MAX_JOBS                    number of files to compile in parallel (default: ninja's)

A variable that cannot be parsed always fails the build.
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

from native_build import (  # noqa: E402  # found only now
    CoreBuild,
    CudaBuild,
    NotBuiltError,
    SettingError,
    core_folder,
    cuda_folder,
    switch,
    visible_archs,
)

# Folders beside the package that are installed inside it: the triton project ships a top-level package
# `triton_kernels`, too, and top-level names `examples` and `benchmarks` could clash with others.
FOLDED_IN = {f"fused_tp.{folder}": folder for folder in ("triton_kernels", "examples", "benchmarks")}

# Optional, so that setuptools does not copy a part that was not built.
CORE = Extension("fused_tp._core", sources=[], language="c++", optional=True)
CUDA = Extension("fused_tp._cuda", sources=[], language="c++", optional=True)


class BuildNative(build_ext):
    """Build each part with its own builder; a part that cannot be built fails only if the environment requires it."""

    def run(self) -> None:
        try:
            self.core_required = switch("FUSED_TP_REQUIRE_NATIVE")
            self.cuda_wanted = switch("FUSED_TP_CUDA")
            super().run()
        except SettingError as error:
            raise SystemExit(f"fused_tp: {error}") from None

    def build_extension(self, ext: Extension) -> None:
        is_core = ext.name == CORE.name
        output = Path(self.get_ext_fullpath(ext.name))
        output.unlink(missing_ok=True)  # else the wheel would contain the output of an earlier build
        archs = os.environ.get("FUSED_TP_CUDA_ARCHS", "")
        required = self.core_required if is_core else self.cuda_wanted or bool(archs)
        if not is_core and self.cuda_wanted is False:
            print(f"fused_tp: the device kernels are not built: FUSED_TP_CUDA={os.environ['FUSED_TP_CUDA']}.")
            return
        if not is_core and not required:
            archs = visible_archs()
            if not archs:
                print("fused_tp: the device kernels are not built: no GPU is visible (FUSED_TP_CUDA=1 builds them).")
                return
        try:
            if sys.platform != "linux":
                raise NotBuiltError("it needs Linux")
            if is_core:
                build_core(output)
            else:
                build_cuda(output, archs)
        except NotBuiltError as error:
            if required:
                raise
            print(f"fused_tp: {without_core(error) if is_core else without_cuda(error)}")

    def copy_extensions_to_source(self) -> None:
        """Copy the parts for an editable installation, and remove those of an earlier build that were not built now."""
        super().copy_extensions_to_source()
        for built, in_place in super().get_output_mapping().items():
            if not Path(built).exists() and Path(in_place).exists():
                print(f"fused_tp: {in_place} is of an earlier build and is removed.")
                Path(in_place).unlink()

    def get_output_mapping(self) -> dict[str, str]:
        return {built: place for built, place in super().get_output_mapping().items() if Path(built).exists()}

    def get_ext_filename(self, fullname: str) -> str:
        """File name of a part; the device kernels are a plain library, without Python's version in their name."""
        if fullname.split(".")[-1] == "_cuda":
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def get_outputs(self) -> list[str]:
        return [output for output in super().get_outputs() if Path(output).exists()]


def build_core(output: Path) -> None:
    try:
        import pybind11
    except ImportError:
        raise NotBuiltError("pybind11 is not installed", "pybind11 (pip install pybind11)") from None
    headers = sysconfig.get_paths()["include"]
    try:
        CoreBuild([pybind11.get_include(), headers]).run(output, core_folder())
    except NotBuiltError as error:
        if not error.needs and not Path(headers, "Python.h").exists():
            error.needs = "the Python headers (Debian, Ubuntu: apt-get install python3-dev)"
        raise


def build_cuda(output: Path, archs: str) -> None:
    build = CudaBuild(archs)
    build.run(output, cuda_folder(archs))
    print(f"fused_tp: device kernels were built for {build.built_for}.")


def without_core(why: NotBuiltError) -> str:
    loss = "fused_tp runs without it, on torch.distributed alone."
    return f"the native core was not built: {why}. {loss}{what_to_do('CPU shared memory', why)}"


def without_cuda(why: NotBuiltError) -> str:
    loss = "fused_tp runs without them, on GPUs with NCCL and Triton."
    return f"the device kernels were not built: {why}. {loss}{what_to_do('them', why)}"


def what_to_do(wanted: str, why: NotBuiltError) -> str:
    return f" For {wanted} install {why.needs} and reinstall fused_tp." if why.needs else ""


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
