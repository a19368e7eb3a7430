"""Builds the native core `fused_tp._core`; everything else about the package is in pyproject.toml.

The core is free of torch headers, so building needs a C++17 compiler and pybind11, and no torch. Without a compiler the
package installs all the same and runs on torch.distributed alone. From the environment:

    FUSED_TP_REQUIRE_NATIVE=1   a core that cannot be built is an error (our Makefile and CI set it)
    CXX, CC, CXXFLAGS, LDFLAGS  as always
    MAX_JOBS                    how many files compile at once (ninja chooses without it)
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
CSRC = HERE / "csrc"
CORE_FOLDERS = ("bindings", "shm", "driver", "nccl", "copy_engine")

# -ffp-contract=off: a multiply and an add fuse only where the source says fma, so all instruction sets round alike.
COMPILE_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-g0", "-Wall", "-Wextra"]
X86_FLAGS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")] + ["-mavx2", "-mfma", "-mf16c"],
}


# These live beside the package and are installed inside it: the triton project ships a top-level `triton_kernels` of
# its own, and top-level `examples` and `benchmarks` would be anybody's.
FOLDED_IN = {f"fused_tp.{folder}": folder for folder in ("triton_kernels", "examples", "benchmarks")}


class NativeCoreError(Exception):
    """The core cannot be built here; the message says why and what to do."""


def find_compiler() -> list[str]:
    """The C++ compiler: $CXX, else c++, g++ or clang++; one that cannot compile a trivial file counts as none."""
    if os.environ.get("CXX"):
        candidates = [shlex.split(os.environ["CXX"])]
    else:
        candidates = [[name] for name in ("c++", "g++", "clang++")]
    for command in candidates:
        if shutil.which(command[0]) and compiles(command, []):
            return command
    tried = ", ".join(shlex.join(command) for command in candidates)
    raise NativeCoreError(f"no working C++17 compiler was found (tried {tried})")


def compiles(compiler: list[str], flags: list[str]) -> bool:
    """Whether the compiler takes these flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <cstddef>\nint main() { return 0; }\n")
        command = [*compiler, "-std=c++17", *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def target_is_x86_64(compiler: list[str]) -> bool:
    """Asks the compiler, not this machine: it may be a cross compiler."""
    answer = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=False)
    machine = answer.stdout.split("-")[0] if answer.returncode == 0 else platform.machine()
    return machine in ("x86_64", "amd64", "AMD64")


class CoreBuild:
    """The compile and link commands of the core."""

    def __init__(self, include_dirs: list[str]) -> None:
        self.compiler = find_compiler()
        extra = [flag for flags in X86_FLAGS.values() for flag in flags]
        self.x86 = target_is_x86_64(self.compiler) and compiles(self.compiler, extra)
        if target_is_x86_64(self.compiler) and not self.x86:
            print("fused_tp: this compiler lacks AVX-512 BF16 (GCC 10 and Clang 9 have it): building portable kernels.")
        user = shlex.split(os.environ.get("CXXFLAGS", ""))
        includes = [flag for path in include_dirs for flag in ("-isystem", path)]
        self.flags = [*COMPILE_FLAGS, f"-DFUSED_TP_X86={int(self.x86)}", f"-I{CSRC}", *includes, *user]
        self.link_flags = ["-shared", "-pthread", "-ldl", *shlex.split(os.environ.get("LDFLAGS", ""))]

    def sources(self) -> list[Path]:
        found = [source for folder in CORE_FOLDERS for source in sorted(CSRC.glob(f"{folder}/*.cpp"))]
        return [source for source in found if self.x86 or not isa_of(source)]

    def compile_command(self, source: Path) -> list[str]:
        return [*self.compiler, *self.flags, *X86_FLAGS.get(isa_of(source), [])]

    def run(self, output: Path, folder: Path) -> None:
        """Compiles what has changed into `folder` and links `output`."""
        folder.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        ninja = find_ninja()
        if ninja:
            self.run_ninja(ninja, output, folder)
        else:
            self.run_plain(output, folder)

    def run_ninja(self, ninja: list[str], output: Path, folder: Path) -> None:
        def escaped(path: Path) -> str:
            return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

        # The library is linked inside `folder` and copied, so that a process that has the old one mapped keeps it.
        library = folder / output.name
        lines = [
            "rule compile",
            "  command = $run -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]
        compiler, flags = (shlex.join(words).replace("$", "$$") for words in (self.compiler, self.link_flags))
        lines += ["rule link", f"  command = {compiler} $in {flags} -o $out"]
        objects = []
        for source in self.sources():
            objects.append(escaped(folder / object_name(source)))
            command = shlex.join(self.compile_command(source)).replace("$", "$$")
            lines += [f"build {objects[-1]}: compile {escaped(source)}", f"  run = {command}"]
        lines += [f"build {escaped(library)}: link {' '.join(objects)}", ""]
        (folder / "build.ninja").write_text("\n".join(lines))
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        check_run([*ninja, "-C", str(folder), *jobs])
        replace(library, output)

    def run_plain(self, output: Path, folder: Path) -> None:
        objects = []
        newest_header = max(header.stat().st_mtime for header in [*CSRC.rglob("*.h"), Path(__file__)])
        for source in self.sources():
            target = folder / object_name(source)
            if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime, newest_header):
                check_run([*self.compile_command(source), "-c", str(source), "-o", str(target)])
            objects.append(str(target))
        check_run([*self.compiler, *objects, *self.link_flags, "-o", str(folder / output.name)])
        replace(folder / output.name, output)


def object_name(source: Path) -> str:
    return f"{source.parent.name}_{source.stem}.o"


def isa_of(source: Path) -> str:
    return next((isa for isa in X86_FLAGS if source.stem.endswith(isa)), "")


def find_ninja() -> list[str] | None:
    """The `ninja` program, or the PyPI package of that name, which an isolated build environment has."""
    try:
        from ninja import BIN_DIR
    except ImportError:
        found = shutil.which("ninja")
        return [found] if found else None
    return [str(Path(BIN_DIR, "ninja"))]


def check_run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode != 0:
        raise NativeCoreError(f"`{shlex.join(command)}` failed:\n{done.stdout[-4000:]}")


def replace(source: Path, destination: Path) -> None:
    temporary = destination.with_name(destination.name + ".new")
    shutil.copy2(source, temporary)
    temporary.replace(destination)


class BuildCore(build_ext):
    """Builds _core into build/native-*, where a later build finds the objects again, also an editable one."""

    def build_extension(self, ext: Extension) -> None:
        try:
            if sys.platform != "linux":
                raise NativeCoreError("it needs Linux")
            try:
                import pybind11
            except ImportError:
                raise NativeCoreError("pybind11 is not installed (pip install pybind11)") from None
            include_dirs = [pybind11.get_include(), sysconfig.get_paths()["include"]]
            folder = HERE / "build" / f"native-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
            CoreBuild(include_dirs).run(Path(self.get_ext_fullpath(ext.name)), folder)
        except NativeCoreError as error:
            if os.environ.get("FUSED_TP_REQUIRE_NATIVE") == "1":
                raise
            print(
                f"fused_tp: the native core was not built: {error}. fused_tp runs without it, on torch.distributed "
                "alone. For CPU shared memory install a C++17 compiler (Debian, Ubuntu: apt-get install g++) and "
                "the Python headers (python3-dev), and reinstall fused_tp."
            )

    def copy_extensions_to_source(self) -> None:
        """An editable install puts the core beside the sources; one that was not built is not there to put."""
        for ext in self.extensions:
            if Path(self.get_ext_fullpath(ext.name)).exists() or self.built(ext).exists():
                super().copy_extensions_to_source()

    def built(self, ext: Extension) -> Path:
        return Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(ext.name)))

    def get_outputs(self) -> list[str]:
        return [output for output in super().get_outputs() if Path(output).exists()]


def packages() -> list[str]:
    found = find_packages(str(HERE), include=["fused_tp", "fused_tp.*"])
    for name, folder in FOLDED_IN.items():
        found += [name, *(f"{name}.{inner}" for inner in find_packages(str(HERE / folder)))]
    return found


setup(
    packages=packages(),
    package_dir={"fused_tp": "fused_tp", **FOLDED_IN},
    ext_modules=[Extension("fused_tp._core", sources=["csrc/bindings/module.cpp"], language="c++")],
    cmdclass={"build_ext": BuildCore},
)
