"""Compile csrc for setup.py: the native core with the C++ compiler, the device kernels with nvcc.

A build is a list of commands. Ninja runs the commands whose inputs, headers or flags have changed; without ninja all
commands run. Commands run in their output folder and use relative paths, so that nothing is recompiled after the tree
and its build folder have been copied elsewhere.
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

# -ffp-contract=off: the compiler must not fuse a multiplication and an addition on its own, because only some
# instruction sets have fma, and results would differ between CPUs.
COMPILE_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-g0", "-Wall", "-Wextra"]
# The bindings only convert arguments, so -O3 would take longer to compile without making calls faster.
FOLDER_FLAGS = {"bindings": ["-O1"]}
X86_FLAGS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")] + ["-mavx2", "-mfma", "-mf16c"],
}

# -Xptxas -v prints registers and spills to the log beside each object, which tests/compile parses.
NVCC_FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v"]
NVCC_FLAGS += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
DEFAULT_ARCHS = "80;90a;100a+PTX"
DEFAULT_TOOLKIT = "/usr/local/cuda"  # default folder of NVIDIA's installers
MIN_TOOLKIT_MAJOR = 12

COMPILER_HINT = "a C++17 compiler (Debian, Ubuntu: apt-get install g++)"
TOOLKIT_HINT = "the CUDA toolkit (12.0 or later, nvcc)"
NEWER_TOOLKIT_HINT = "a CUDA toolkit that does (or name other GPUs in FUSED_TP_CUDA_ARCHS)"


class NotBuiltError(Exception):
    """Raised with the reason if a part cannot be built. `missing_software` names what to install; empty if unknown."""

    def __init__(self, why: str, missing_software: str = "") -> None:
        super().__init__(why)
        self.missing_software = missing_software


class SettingError(ValueError):
    """Raised for an invalid environment variable. It always fails the build, also of optional parts."""


def parse_switch(name: str) -> bool | None:
    """Parse an on/off environment variable, with the words of `fused_tp.core.settings`; None if it is not set."""
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
    """Build folder of the core for this Python version. Later builds reuse its objects, also for editable installs."""
    return CSRC.parent / "build" / f"native-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def cuda_folder(archs: str = "") -> Path:
    """Build folder of the device kernels for `archs` (empty: the default architectures)."""
    return CSRC.parent / "build" / "-".join(["cuda", sysconfig.get_platform(), *re.findall(r"\w+", archs)])


@dataclass(frozen=True)
class Step:
    """One command of a build, which writes `output`. Paths are relative to the build folder, where it runs."""

    output: str
    inputs: Sequence[str]
    command: Sequence[str]
    lists_headers: bool = False  # the command writes its list of headers to `output`.d
    log: str = ""  # file for the output of the command, printed if it fails; empty: print it directly

    @property
    def shell_command(self) -> str:
        line = shlex.join(self.command)
        return f"{line} > {self.log} 2>&1 || {{ cat {self.log}; exit 1; }}" if self.log else line


def compile_step(output: str, source: str, command: Sequence[str], log: str = "") -> Step:
    files = ["-MMD", "-MF", f"{output}.d", "-c", source, "-o", output]
    return Step(output, [source], [*command, *files], lists_headers=True, log=log)


class CoreBuild:
    """The compile and link commands of the core."""

    def __init__(self, include_dirs: list[str]) -> None:
        self.compiler = find_compiler()
        x86_flags = [flag for flags in X86_FLAGS.values() for flag in flags]
        self.targets_x86 = target_is_x86_64(self.compiler) and can_compile(self.compiler, x86_flags)
        if target_is_x86_64(self.compiler) and not self.targets_x86:
            print("fused_tp: this compiler lacks AVX-512 BF16 (GCC 10 and Clang 9 have it): building portable kernels.")
        user_flags = shlex.split(os.environ.get("CXXFLAGS", ""))
        includes = [flag for path in include_dirs for flag in ("-isystem", path)]
        self.flags = [*COMPILE_FLAGS, f"-DFUSED_TP_X86={int(self.targets_x86)}", *includes, *user_flags]
        self.link_flags = ["-shared", "-pthread", "-ldl", *shlex.split(os.environ.get("LDFLAGS", ""))]

    def sources(self) -> list[Path]:
        sources = [source for folder in CORE_FOLDERS for source in sorted(CSRC.glob(f"{folder}/*.cpp"))]
        return [source for source in sources if self.targets_x86 or not isa_suffix(source)]

    def run(self, output: Path, folder: Path) -> None:
        """Compile changed sources into `folder` and link `output`."""
        steps = []
        for source in self.sources():
            file_flags = [*FOLDER_FLAGS.get(source.parent.name, []), *X86_FLAGS.get(isa_suffix(source), [])]
            command = [*self.compiler, f"-I{os.path.relpath(CSRC, folder)}", *self.flags, *file_flags]
            name = f"{source.parent.name}_{source.stem}.o"
            steps.append(compile_step(name, os.path.relpath(source, folder), command))
        objects = [step.output for step in steps]
        command = [*self.compiler, *objects, *self.link_flags, "-o", output.name]
        run_steps([*steps, Step(output.name, objects, command)], folder)
        replace_atomically(folder / output.name, output)


@dataclass(frozen=True)
class Arch:
    """A GPU architecture by its name in nvcc, such as 80 or 90a. `ptx`: also embed PTX, which later GPUs can run."""

    name: str
    embeds_ptx: bool = False

    @property
    def number(self) -> int:
        return int(self.name.rstrip("af"))

    @property
    def flags(self) -> list[str]:
        real = f"arch=compute_{self.name},code=sm_{self.name}"
        if not self.embeds_ptx:
            return ["-gencode", real]
        # PTX for 90a runs on no other architecture, and PTX for 100f only within its family, so embed PTX without the
        # letter.
        return ["-gencode", real, "-gencode", f"arch=compute_{self.number},code=compute_{self.number}"]


class CudaBuild:
    """The compile and link commands of the library of device kernels.

    Args:
        archs: architectures in the format of `FUSED_TP_CUDA_ARCHS`; empty: the default ones that this nvcc supports.

    Raises:
        NotBuiltError: sources or tools are missing, or nvcc does not support one of `archs`.
        SettingError: `archs` cannot be parsed.
    """

    def __init__(self, archs: str = "") -> None:
        requested_archs = parse_archs(archs) if archs else []
        self.sources = sorted(CSRC.glob("cuda/*.cu"))
        if not self.sources:
            raise NotBuiltError(f"there are no sources in {CSRC / 'cuda'}")
        self.nvcc = find_nvcc()
        self.compiler = find_compiler()
        self.version = nvcc_version(self.nvcc)
        self.archs = requested_archs or self.default_archs()
        for arch in requested_archs:
            if not self.supports(arch):
                raise NotBuiltError(
                    f"nvcc {self.version} ({self.nvcc}) does not support sm_{arch.name}", NEWER_TOOLKIT_HINT
                )

    def default_archs(self) -> list[Arch]:
        requested = parse_archs(DEFAULT_ARCHS)
        supported = [arch for arch in requested if self.supports(arch)]
        unsupported = [f"sm_{arch.name}" for arch in requested if arch not in supported]
        if unsupported:
            print(
                f"fused_tp: nvcc {self.version} does not support {', '.join(unsupported)}, so the device kernels are "
                "built without it."
            )
        if not supported:
            raise NotBuiltError(f"nvcc {self.version} supports none of the architectures {DEFAULT_ARCHS}", TOOLKIT_HINT)
        return [*supported[:-1], Arch(supported[-1].name, embeds_ptx=True)]

    def supports(self, arch: Arch) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cu")
            source.touch()
            command = [str(self.nvcc), "--dryrun", *arch.flags, "-c", str(source)]
            return subprocess.run(command, capture_output=True, check=False, cwd=folder).returncode == 0

    @property
    def built_for(self) -> str:
        """Architectures and nvcc version, a text that native_kernels.py reads from the compiled library."""
        names = [f"sm_{arch.name}" for arch in self.archs]
        names += [f"compute_{arch.number}" for arch in self.archs if arch.embeds_ptx]
        return f"{' '.join(names)}, nvcc {self.version}"

    @property
    def host_compiler(self) -> list[str]:
        """nvcc flags that select $CXX as the host compiler if it is one word; otherwise nvcc chooses one itself."""
        is_chosen = os.environ.get("CXX") and not os.environ.get("NVCC_CCBIN") and len(self.compiler) == 1
        return ["-ccbin", self.compiler[0]] if is_chosen else []

    def logs(self, folder: Path) -> list[Path]:
        """Logs of nvcc and ptxas, one per source, which `run` writes to `folder`."""
        return [folder / f"{source.stem}.o.log" for source in self.sources]

    def run(self, output: Path, folder: Path, threads: int | None = None) -> None:
        """Compile changed sources into `folder` and link `output`.

        Args:
            threads: number of architectures for which nvcc compiles a source at once. None: one, unless there are more
                processors than sources. It does not affect the output, so another value recompiles nothing.
        """
        arch_flags = [flag for arch in self.archs for flag in arch.flags]
        if threads is None:
            threads = max(1, min(len(arch_flags) // 2, max_jobs() // len(self.sources)))
        csrc = os.path.relpath(CSRC, folder)
        # Reduces the size to a sixth. Only drivers of CUDA 13 or later can decompress it, but code that this toolkit
        # compiles needs such a driver anyway.
        compression_flags = ["--compress-mode=size"] if int(self.version.split(".")[0]) >= 13 else []
        command = [str(self.nvcc), *self.host_compiler, *NVCC_FLAGS, *compression_flags, f"-I{csrc}", *arch_flags]
        steps = []
        for source, log in zip(self.sources, self.logs(folder), strict=True):
            steps.append(compile_step(log.stem, os.path.relpath(source, folder), command, log.name))
        built_for_flags = [f'-DFUSED_TP_BUILT_FOR="{self.built_for}"', *COMPILE_FLAGS]
        steps.append(compile_step("built_for.o", f"{csrc}/cuda/built_for.cpp", [*self.compiler, *built_for_flags]))
        objects = [step.output for step in steps]
        exports = f"{csrc}/cuda/exports.map"
        command = [str(self.nvcc), *self.host_compiler, "-shared", "--cudart", "static", *objects]
        command += ["-Xlinker", f"--version-script={exports}", "-o", output.name]
        prepended_flags = f"--threads {threads} {os.environ.get('NVCC_PREPEND_FLAGS', '')}".strip()
        run_steps(
            [*steps, Step(output.name, [*objects, exports], command)], folder, {"NVCC_PREPEND_FLAGS": prepended_flags}
        )
        replace_atomically(folder / output.name, output)


def find_compiler() -> list[str]:
    """Return the C++ compiler: $CXX, else the first of c++, g++ and clang++ that compiles a trivial file."""
    candidates = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        if shutil.which(command[0]) and can_compile(command, []):
            return command
    tried = ", ".join(shlex.join(command) for command in candidates)
    raise NotBuiltError(f"no working C++17 compiler was found (tried {tried})", COMPILER_HINT)


def can_compile(compiler: list[str], flags: list[str]) -> bool:
    """True if the compiler accepts these flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <cstddef>\nint main() { return 0; }\n")
        command = [*compiler, "-std=c++17", *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def target_is_x86_64(compiler: list[str]) -> bool:
    """True if the compiler's target is x86-64. Asks the compiler, because it may be a cross compiler."""
    answer = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=False)
    machine = answer.stdout.split("-")[0] if answer.returncode == 0 else platform.machine()
    return machine in ("x86_64", "amd64", "AMD64")


def isa_suffix(source: Path) -> str:
    return next((isa for isa in X86_FLAGS if source.stem.endswith(isa)), "")


def find_nvcc() -> Path:
    """Return nvcc of $CUDA_HOME or $CUDA_PATH if one of them is set; else of PATH, else of DEFAULT_TOOLKIT."""
    variable = next((name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)), None)
    home = os.environ[variable] if variable is not None else DEFAULT_TOOLKIT
    in_path = shutil.which("nvcc") if variable is None else None
    for nvcc in ([Path(in_path)] if in_path else []) + [Path(home, "bin", "nvcc")]:
        version = nvcc_version(nvcc)
        if version and int(version.split(".")[0]) < MIN_TOOLKIT_MAJOR:
            raise NotBuiltError(f"nvcc {version} ({nvcc}) is too old", TOOLKIT_HINT)
        if version:
            return nvcc
    if variable is not None:
        why = f"no nvcc that runs was found in {Path(home, 'bin')}: {variable} is {home!r}"
        raise NotBuiltError(why, f"{TOOLKIT_HINT} there, or correct {variable},")
    raise NotBuiltError(f"no nvcc was found (looked in CUDA_HOME, CUDA_PATH, PATH and {DEFAULT_TOOLKIT})", TOOLKIT_HINT)


def nvcc_version(nvcc: Path) -> str:
    """Return the version of nvcc, such as 13.0.88; empty if the program does not run or is not nvcc."""
    try:
        process = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    match = re.search(r"release [\d.]+, V([\d.]+)", process.stdout)
    return match[1] if match else ""


def visible_archs() -> str:
    """Return the architectures of the visible GPUs in the format of FUSED_TP_CUDA_ARCHS; empty if there are none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    count, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ""
    capabilities = set()
    for device in range(count.value):
        capability = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        capabilities.add(tuple(capability))
    return ";".join(f"{major}{minor}" + "a" * (major >= 9) for major, minor in sorted(capabilities))


def parse_archs(text: str) -> list[Arch]:
    """Parse architectures in the format of FUSED_TP_CUDA_ARCHS: `80;90a;100a+PTX`."""
    words = [word for word in re.split(r"[;,\s]+", text.lower()) if word]
    matches = [re.fullmatch(r"(?:sm_)?(\d+)\.?(\d[af]?)(\+ptx)?", word) for word in words]
    archs = [Arch(match[1] + match[2], embeds_ptx=bool(match[3])) for match in matches if match is not None]
    if not archs or len(archs) < len(words):
        raise SettingError(
            f"FUSED_TP_CUDA_ARCHS is {text!r}; set it to architectures like {DEFAULT_ARCHS}. +PTX embeds code "
            "that later GPUs can run."
        )
    return list(dict.fromkeys(archs))


def max_jobs() -> int:
    """Return the number of commands that may run in parallel: $MAX_JOBS, else the number of processors."""
    text = os.environ.get("MAX_JOBS", "").strip()
    if not text:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdecimal() or int(text) == 0:
        raise SettingError(f"MAX_JOBS is {text!r}; set it to the number of files to compile at once, 1 or more.")
    return int(text)


def run_steps(steps: Sequence[Step], folder: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run the steps whose inputs or commands have changed in `folder`; without ninja, run all steps.

    Args:
        environment: additional environment variables for the commands. A changed value reruns nothing.
    """
    import fcntl  # not available on Windows, where setup.py must still print its message

    job_flags = ["-j", str(max_jobs())] if os.environ.get("MAX_JOBS") else []
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # another build may be running in the same folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        ninja_command = find_ninja()
        if ninja_command is None:
            for step in steps:
                check_run(["sh", "-c", step.shell_command], folder, environment)
            return
        (folder / "build.ninja").write_text(ninja_file(steps))
        check_run([*ninja_command, *job_flags], folder, environment)


def ninja_file(steps: Sequence[Step]) -> str:
    def names(paths: Sequence[str]) -> str:
        return " ".join(re.sub(r"([$ :])", r"$\1", path) for path in paths)

    lines = ["rule run", "  command = $run", "rule compile", "  command = $run", "  depfile = $out.d", "  deps = gcc"]
    for step in steps:
        outputs = step.output + (f" | {step.log}" if step.log else "")
        rule = "compile" if step.lists_headers else "run"
        lines += [f"build {outputs}: {rule} {names(step.inputs)}", f"  run = {step.shell_command.replace('$', '$$')}"]
    return "\n".join(lines) + "\n"


def find_ninja() -> list[str] | None:
    """Return the command of ninja: from the PyPI package, which isolated builds install, else from PATH."""
    try:
        from ninja import BIN_DIR
    except ImportError:
        path = shutil.which("ninja")
        return [path] if path else None
    return [str(Path(BIN_DIR, "ninja"))]


def check_run(command: list[str], folder: Path, environment: Mapping[str, str] | None) -> None:
    env = {**os.environ, **(environment or {})}
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    process = subprocess.run(command, cwd=folder, env=env, stdout=pipe, stderr=out, text=True, check=False)
    print(process.stdout, end="")
    if process.returncode != 0:
        raise NotBuiltError(f"`{shlex.join(command)}` failed in {folder}:\n{process.stdout[-4000:]}")


def replace_atomically(source: Path, destination: Path) -> None:
    """Copy `source` over `destination` atomically, so that a process that has loaded the old file can keep using it."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(destination.name + ".new")
    shutil.copy2(source, temporary)
    temporary.replace(destination)
