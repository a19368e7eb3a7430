"""Compile csrc for setup.py: the native core with the C++ compiler, the device kernels with nvcc.

Each build is a list of commands. Ninja runs those whose inputs, headers or flags have changed; without ninja all of
them run. Commands run in their output folder and name our files relative to it, so that a copy of a tree with its build
folder recompiles nothing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent
CORE_FOLDERS = ("bindings", "attention", "matmul", "threads", "shm", "driver", "nccl", "copy_engine")

# -ffp-contract=off: a multiply and an add fuse only where the source says fma, so all instruction sets round alike.
COMPILE_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-g0", "-Wall", "-Wextra"]
# Bindings only copy arguments and call: more optimisation takes longer to compile and makes them no faster.
FOLDER_FLAGS = {"bindings": ["-O1"]}
X86_FLAGS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")] + ["-mavx2", "-mfma", "-mf16c"],
}

# -Xptxas -v: registers and spills go to the log beside each object, where tests and tables read them.
NVCC_FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v"]
NVCC_FLAGS += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
DEFAULT_ARCHS = "80;90a;100a+PTX"
TOOLKIT = "/usr/local/cuda"  # where NVIDIA's installers put it
OLDEST_TOOLKIT = 12

A_COMPILER = "a C++17 compiler (Debian, Ubuntu: apt-get install g++)"
A_TOOLKIT = "the CUDA toolkit (12.0 or later, nvcc)"
A_LATER_TOOLKIT = "a CUDA toolkit that does (or name other GPUs in FUSED_TP_CUDA_ARCHS)"


class NotBuiltError(Exception):
    """Raised if a build is not possible here, with the reason. `needs`: a package to install, if that would help."""

    def __init__(self, why: str, needs: str = "") -> None:
        super().__init__(why)
        self.needs = needs


class SettingError(ValueError):
    """Raised for an invalid environment variable. It always fails the build; nothing is left out instead."""


def switch(name: str) -> bool | None:
    """True or False if a variable is on or off, None if it is not set; the words are `fused_tp.core.settings`'."""
    text = os.environ.get(name, "")
    word = text.strip().lower()
    if word in ("1", "true", "on", "yes"):
        return True
    if word in ("0", "false", "off", "no"):
        return False
    if word:
        raise SettingError(f"{name} is {text!r}; set it to 1 or 0.")
    return None


def core_folder() -> Path:
    """Folder in which the core is compiled for this Python; later builds, also editable ones, reuse its objects."""
    return CSRC.parent / "build" / f"native-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def cuda_folder(archs: str = "") -> Path:
    """Folder in which the device kernels are compiled for `archs`; empty for the default ones."""
    return CSRC.parent / "build" / "-".join(["cuda", sysconfig.get_platform(), *re.findall(r"\w+", archs)])


@dataclass(frozen=True)
class Step:
    """One command of a build, which writes `output`. Paths are relative to the folder in which it runs."""

    output: str
    inputs: Sequence[str]
    command: Sequence[str]
    headers_too: bool = False  # the command writes the headers that it read to `output`.d
    log: str = ""  # file for its output, which is shown if it fails

    @property
    def shell(self) -> str:
        line = shlex.join(self.command)
        return f"{line} > {self.log} 2>&1 || {{ cat {self.log}; exit 1; }}" if self.log else line


def compile_step(output: str, source: str, command: Sequence[str], log: str = "") -> Step:
    files = ["-MMD", "-MF", f"{output}.d", "-c", source, "-o", output]
    return Step(output, [source], [*command, *files], headers_too=True, log=log)


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
        self.flags = [*COMPILE_FLAGS, f"-DFUSED_TP_X86={int(self.x86)}", *includes, *user]
        self.link_flags = ["-shared", "-pthread", "-ldl", *shlex.split(os.environ.get("LDFLAGS", ""))]

    def sources(self) -> list[Path]:
        found = [source for folder in CORE_FOLDERS for source in sorted(CSRC.glob(f"{folder}/*.cpp"))]
        return [source for source in found if self.x86 or not isa_of(source)]

    def run(self, output: Path, folder: Path) -> None:
        """Compile changed sources into `folder` and link `output`."""
        steps = []
        for source in self.sources():
            own = [*FOLDER_FLAGS.get(source.parent.name, []), *X86_FLAGS.get(isa_of(source), [])]
            command = [*self.compiler, f"-I{os.path.relpath(CSRC, folder)}", *self.flags, *own]
            name = f"{source.parent.name}_{source.stem}.o"
            steps.append(compile_step(name, os.path.relpath(source, folder), command))
        objects = [step.output for step in steps]
        command = [*self.compiler, *objects, *self.link_flags, "-o", output.name]
        run_steps([*steps, Step(output.name, objects, command)], folder)
        replace(folder / output.name, output)


@dataclass(frozen=True)
class Arch:
    """A GPU architecture by nvcc's name: 80, 90a. With `ptx`, later GPUs can use its code too."""

    name: str
    ptx: bool = False

    @property
    def number(self) -> int:
        return int(self.name.rstrip("af"))

    @property
    def flags(self) -> list[str]:
        real = f"arch=compute_{self.name},code=sm_{self.name}"
        if not self.ptx:
            return ["-gencode", real]
        # PTX of an architecture with a letter runs on no other one.
        return ["-gencode", real, "-gencode", f"arch=compute_{self.number},code=compute_{self.number}"]


class CudaBuild:
    """The compile and link commands of the library of device kernels.

    Args:
        archs: as in `FUSED_TP_CUDA_ARCHS`; empty for the default ones that this nvcc knows.

    Raises:
        NotBuiltError: sources or tools are missing, or nvcc does not know one of `archs`.
        SettingError: `archs` cannot be parsed.
    """

    def __init__(self, archs: str = "") -> None:
        named = parse_archs(archs) if archs else []
        self.sources = sorted(CSRC.glob("cuda/*.cu"))
        if not self.sources:
            raise NotBuiltError(f"there are no sources in {CSRC / 'cuda'}")
        self.nvcc = find_nvcc()
        self.compiler = find_compiler()
        self.version = nvcc_version(self.nvcc)
        self.archs = named or self.default_archs()
        for arch in named:
            if not self.knows(arch):
                raise NotBuiltError(f"nvcc {self.version} ({self.nvcc}) does not know sm_{arch.name}", A_LATER_TOOLKIT)

    def default_archs(self) -> list[Arch]:
        wanted = parse_archs(DEFAULT_ARCHS)
        known = [arch for arch in wanted if self.knows(arch)]
        unknown = [f"sm_{arch.name}" for arch in wanted if arch not in known]
        if unknown:
            print(f"fused_tp: nvcc {self.version} does not know {', '.join(unknown)}: left out of the device kernels.")
        if not known:
            raise NotBuiltError(f"nvcc {self.version} knows none of the architectures {DEFAULT_ARCHS}", A_TOOLKIT)
        return [*known[:-1], Arch(known[-1].name, ptx=True)]

    def knows(self, arch: Arch) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cu")
            source.touch()
            command = [str(self.nvcc), "--dryrun", *arch.flags, "-c", str(source)]
            return subprocess.run(command, capture_output=True, check=False, cwd=folder).returncode == 0

    @property
    def built_for(self) -> str:
        """Description that is compiled into the library; `fused_tp.backends.cuda.native_kernels` reads it."""
        names = [f"sm_{arch.name}" for arch in self.archs]
        names += [f"compute_{arch.number}" for arch in self.archs if arch.ptx]
        return f"{' '.join(names)}, nvcc {self.version}"

    @property
    def host_compiler(self) -> list[str]:
        """Flags that set nvcc's host compiler to $CXX, if that is one program. By default nvcc looks for one itself."""
        chosen = os.environ.get("CXX") and not os.environ.get("NVCC_CCBIN") and len(self.compiler) == 1
        return ["-ccbin", self.compiler[0]] if chosen else []

    def logs(self, folder: Path) -> list[Path]:
        """Logs of nvcc and ptxas for each source, once `run` has compiled it into `folder`."""
        return [folder / f"{source.stem}.o.log" for source in self.sources]

    def run(self, output: Path, folder: Path, threads: int | None = None) -> None:
        """Compile changed sources into `folder` and link `output`.

        Args:
            threads: number of architectures for which a source is compiled at once. None: one, unless there are more
                processors than sources. It does not affect the results, so a new value recompiles nothing.
        """
        codes = [flag for arch in self.archs for flag in arch.flags]
        if threads is None:
            threads = max(1, min(len(codes) // 2, jobs() // len(self.sources)))
        csrc = os.path.relpath(CSRC, folder)
        # A sixth of the size. Drivers of CUDA 13 can unpack it, and code of that toolkit needs these anyway.
        small = ["--compress-mode=size"] if int(self.version.split(".")[0]) >= 13 else []
        command = [str(self.nvcc), *self.host_compiler, *NVCC_FLAGS, *small, f"-I{csrc}", *codes]
        steps = []
        for source, log in zip(self.sources, self.logs(folder), strict=True):
            steps.append(compile_step(log.stem, os.path.relpath(source, folder), command, log.name))
        says = [f'-DFUSED_TP_BUILT_FOR="{self.built_for}"', *COMPILE_FLAGS]
        steps.append(compile_step("built_for.o", f"{csrc}/cuda/built_for.cpp", [*self.compiler, *says]))
        objects = [step.output for step in steps]
        exports = f"{csrc}/cuda/exports.map"
        command = [str(self.nvcc), *self.host_compiler, "-shared", "--cudart", "static", *objects]
        command += ["-Xlinker", f"--version-script={exports}", "-o", output.name]
        in_front = f"--threads {threads} {os.environ.get('NVCC_PREPEND_FLAGS', '')}".strip()
        run_steps([*steps, Step(output.name, [*objects, exports], command)], folder, {"NVCC_PREPEND_FLAGS": in_front})
        replace(folder / output.name, output)


def find_compiler() -> list[str]:
    """The C++ compiler: $CXX, else c++, g++ or clang++. One that cannot compile a trivial file is skipped."""
    candidates = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        if shutil.which(command[0]) and compiles(command, []):
            return command
    tried = ", ".join(shlex.join(command) for command in candidates)
    raise NotBuiltError(f"no working C++17 compiler was found (tried {tried})", A_COMPILER)


def compiles(compiler: list[str], flags: list[str]) -> bool:
    """True if the compiler accepts these flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <cstddef>\nint main() { return 0; }\n")
        command = [*compiler, "-std=c++17", *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def target_is_x86_64(compiler: list[str]) -> bool:
    """True if the compiler's target is x86-64; asks the compiler, since it may be a cross compiler."""
    answer = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=False)
    machine = answer.stdout.split("-")[0] if answer.returncode == 0 else platform.machine()
    return machine in ("x86_64", "amd64", "AMD64")


def isa_of(source: Path) -> str:
    return next((isa for isa in X86_FLAGS if source.stem.endswith(isa)), "")


def find_nvcc() -> Path:
    """nvcc of $CUDA_HOME or $CUDA_PATH if one is set, and then no other; else of PATH, else of TOOLKIT."""
    named = next((name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)), None)
    home = os.environ[named] if named is not None else TOOLKIT
    in_path = shutil.which("nvcc") if named is None else None
    for nvcc in ([Path(in_path)] if in_path else []) + [Path(home, "bin", "nvcc")]:
        version = nvcc_version(nvcc)
        if version and int(version.split(".")[0]) < OLDEST_TOOLKIT:
            raise NotBuiltError(f"nvcc {version} ({nvcc}) is too old", A_TOOLKIT)
        if version:
            return nvcc
    if named is not None:
        why = f"no nvcc that runs was found in {Path(home, 'bin')}: {named} is {home!r}"
        raise NotBuiltError(why, f"{A_TOOLKIT} there, or correct {named},")
    raise NotBuiltError(f"no nvcc was found (looked in CUDA_HOME, CUDA_PATH, PATH and {TOOLKIT})", A_TOOLKIT)


def nvcc_version(nvcc: Path) -> str:
    """Version of nvcc, such as 13.0.88; empty if it does not run or is no nvcc."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    found = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
    return found[1] if found else ""


def visible_archs() -> str:
    """Architectures of the GPUs that this process sees, as FUSED_TP_CUDA_ARCHS names them; empty if there are none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    count, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ""
    found = set()
    for device in range(count.value):
        capability = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        found.add(tuple(capability))
    return ";".join(f"{major}{minor}" + "a" * (major >= 9) for major, minor in sorted(found))


def parse_archs(text: str) -> list[Arch]:
    """Parse architectures in the format of FUSED_TP_CUDA_ARCHS: `80;90a;100a+PTX`."""
    words = [word for word in re.split(r"[;,\s]+", text.lower()) if word]
    found = [re.fullmatch(r"(?:sm_)?(\d+)\.?(\d[af]?)(\+ptx)?", word) for word in words]
    archs = [Arch(one[1] + one[2], ptx=bool(one[3])) for one in found if one is not None]
    if not archs or len(archs) < len(words):
        raise SettingError(
            f"FUSED_TP_CUDA_ARCHS is {text!r}; set it to architectures like {DEFAULT_ARCHS}, +PTX at those that "
            "later GPUs shall be able to use."
        )
    return list(dict.fromkeys(archs))


def jobs() -> int:
    """Number of commands that may run at once."""
    text = os.environ.get("MAX_JOBS", "").strip()
    if not text:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdecimal() or int(text) == 0:
        raise SettingError(f"MAX_JOBS is {text!r}; set it to how many files may compile at once, 1 or more.")
    return int(text)


def run_steps(steps: Sequence[Step], folder: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run in `folder` the steps whose inputs or commands have changed; all steps if there is no ninja.

    Args:
        environment: additional variables for the commands; a change of them reruns nothing.
    """
    import fcntl  # imported here, since Windows has none: setup.py explains that in one sentence

    limit = ["-j", str(jobs())] if os.environ.get("MAX_JOBS") else []
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # another build may be running in the same folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        ninja = find_ninja()
        if ninja is None:
            for step in steps:
                check_run(["sh", "-c", step.shell], folder, environment)
            return
        (folder / "build.ninja").write_text(ninja_file(steps))
        check_run([*ninja, *limit], folder, environment)


def ninja_file(steps: Sequence[Step]) -> str:
    def names(paths: Sequence[str]) -> str:
        return " ".join(re.sub(r"([$ :])", r"$\1", path) for path in paths)

    lines = ["rule run", "  command = $run", "rule compile", "  command = $run", "  depfile = $out.d", "  deps = gcc"]
    for step in steps:
        outputs = step.output + (f" | {step.log}" if step.log else "")
        rule = "compile" if step.headers_too else "run"
        lines += [f"build {outputs}: {rule} {names(step.inputs)}", f"  run = {step.shell.replace('$', '$$')}"]
    return "\n".join(lines) + "\n"


def find_ninja() -> list[str] | None:
    """The `ninja` program, or the PyPI package of that name, which an isolated build environment has."""
    try:
        from ninja import BIN_DIR
    except ImportError:
        found = shutil.which("ninja")
        return [found] if found else None
    return [str(Path(BIN_DIR, "ninja"))]


def check_run(command: list[str], folder: Path, environment: Mapping[str, str] | None) -> None:
    env = {**os.environ, **(environment or {})}
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, cwd=folder, env=env, stdout=pipe, stderr=out, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode != 0:
        raise NotBuiltError(f"`{shlex.join(command)}` failed in {folder}:\n{done.stdout[-4000:]}")


def replace(source: Path, destination: Path) -> None:
    """Replace a file atomically by a copy of `source`: a process that has mapped the old one keeps it."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(destination.name + ".new")
    shutil.copy2(source, temporary)
    temporary.replace(destination)
