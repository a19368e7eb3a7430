"""Build the native parts of fused_tp; pyproject.toml defines everything else about the package.

There are two parts. `fused_tp._core`, the native core, needs a C++17 compiler and pybind11. `fused_tp/_cuda.so`, the
device kernels of csrc/cuda, needs nvcc. The device kernels are built only for a visible GPU, or if the environment
requests them. Neither part needs torch or NCCL. If a part cannot be built, the installation continues without it and
prints the reason and the consequence. Environment variables:

    FUSED_TP_REQUIRE_NATIVE=1   fail if the core cannot be built (the Makefile sets it)
    FUSED_TP_CUDA=0             build no device kernels
    FUSED_TP_CUDA=1             build device kernels also without a GPU, for those of 80;90a;100a+PTX that nvcc supports
                                (about three minutes on two cores); fail if they cannot be built
    FUSED_TP_CUDA_ARCHS         architectures to build for, such as 90a or 80;90a+PTX; fail if they cannot be built
    CUDA_HOME, CUDA_PATH        folder of the CUDA toolkit; if both are unset, nvcc of PATH or /usr/local/cuda is used
    CXX                         C++ compiler of the core, and host compiler of nvcc
    CXXFLAGS, LDFLAGS           additional flags for the core; nvcc reads NVCC_APPEND_FLAGS
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

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))

from native_build import (  # noqa: E402  # needs the sys.path entry above
    CoreBuild,
    CudaBuild,
    NotBuiltError,
    SettingError,
    core_folder,
    cuda_folder,
    parse_switch,
    visible_archs,
)

# Top-level folders that are installed as subpackages of fused_tp. The Triton project also ships a top-level package
# `triton_kernels`, and packages named `examples` or `benchmarks` could clash with those of other projects.
SUBPACKAGES = {f"fused_tp.{folder}": folder for folder in ("triton_kernels", "examples", "benchmarks")}

# optional=True: setuptools must not fail if a part was not built.
CORE = Extension("fused_tp._core", sources=[], language="c++", optional=True)
CUDA = Extension("fused_tp._cuda", sources=[], language="c++", optional=True)


class BuildNative(build_ext):
    """Build both parts. If one cannot be built, print a message; fail only if the environment requires it."""

    def run(self) -> None:
        try:
            self.core_required = parse_switch("FUSED_TP_REQUIRE_NATIVE")
            self.cuda_requested = parse_switch("FUSED_TP_CUDA")
            super().run()
        except SettingError as error:
            raise SystemExit(f"fused_tp: {error}") from None

    def build_extension(self, ext: Extension) -> None:
        is_core = ext.name == CORE.name
        output = Path(self.get_ext_fullpath(ext.name))
        output.unlink(missing_ok=True)  # if this build fails, the wheel must not contain an earlier output
        archs = os.environ.get("FUSED_TP_CUDA_ARCHS", "")
        required = self.core_required if is_core else self.cuda_requested or bool(archs)
        if not is_core and self.cuda_requested is False:
            print(f"fused_tp: the device kernels are not built: FUSED_TP_CUDA={os.environ['FUSED_TP_CUDA']}.")
            return
        if not is_core and not required:
            archs = visible_archs()
            if not archs:
                print("fused_tp: the device kernels are not built: no GPU is visible (FUSED_TP_CUDA=1 builds them).")
                return
        try:
            if sys.platform != "linux":
                raise NotBuiltError("fused_tp supports it on Linux only")
            if is_core:
                build_core(output)
            else:
                build_cuda(output, archs)
        except NotBuiltError as error:
            if required:
                raise
            print(f"fused_tp: {core_message(error) if is_core else cuda_message(error)}")

    def copy_extensions_to_source(self) -> None:
        """Copy the parts that were built for an editable install; remove those of an earlier build that were not."""
        super().copy_extensions_to_source()
        for built, in_place in super().get_output_mapping().items():
            if not Path(built).exists() and Path(in_place).exists():
                print(f"fused_tp: removed {in_place} of an earlier build.")
                Path(in_place).unlink()

    def get_output_mapping(self) -> dict[str, str]:
        return {built: in_place for built, in_place in super().get_output_mapping().items() if Path(built).exists()}

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file name of a part. The device kernels are no Python module: their name has no ABI tag."""
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
        if not error.missing_software and not Path(headers, "Python.h").exists():
            error.missing_software = "the Python headers (Debian, Ubuntu: apt-get install python3-dev)"
        raise


def build_cuda(output: Path, archs: str) -> None:
    build = CudaBuild(archs)
    build.run(output, cuda_folder(archs))
    print(f"fused_tp: device kernels were built for {build.built_for}.")


def core_message(error: NotBuiltError) -> str:
    consequence = "fused_tp runs without it, on torch.distributed alone."
    return f"the native core was not built: {error}. {consequence}{install_hint('CPU shared memory', error)}"


def cuda_message(error: NotBuiltError) -> str:
    consequence = "fused_tp runs without them, on GPUs with NCCL and Triton."
    return f"the device kernels were not built: {error}. {consequence}{install_hint('them', error)}"


def install_hint(feature: str, error: NotBuiltError) -> str:
    return f" For {feature} install {error.missing_software} and reinstall fused_tp." if error.missing_software else ""


def packages() -> list[str]:
    found = find_packages(str(ROOT), include=["fused_tp", "fused_tp.*"])
    for name, folder in SUBPACKAGES.items():
        found += [name, *(f"{name}.{inner}" for inner in find_packages(str(ROOT / folder)))]
    return found


setup(
    packages=packages(),
    package_dir={"fused_tp": "fused_tp", **SUBPACKAGES},
    ext_modules=[CORE, CUDA],
    cmdclass={"build_ext": BuildNative},
)
